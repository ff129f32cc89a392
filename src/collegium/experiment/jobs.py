"""One job of an experiment: its training, the test of its models, and its sites outside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from collegium.adaptation import outside
from collegium.adaptation.base import Sources
from collegium.core.algorithm import Extended
from collegium.core.dataset import ConcatDataset, Dataset
from collegium.core.files import write_atomically
from collegium.data.federation import open_federation, open_site, sites_of
from collegium.data.site import Site
from collegium.evaluation.results import ROWS_FILE, Row
from collegium.experiment.config.building import (
    adapters_of,
    build_adapter,
    build_algorithm,
    build_coding,
    network_of,
    task_of,
)
from collegium.experiment.config.experiment import AdapterConfig, ExperimentConfig, parse_config
from collegium.experiment.grid import Job, JobKey, holders, jobs_of
from collegium.experiment.job_results import (
    ACCOUNT_FILE,
    DEPLOYED,
    SCORES_FILE,
    Kept,
    job_rows,
    outside_rows,
    write_models,
    write_outside_overlays,
    write_overlays,
)
from collegium.experiment.model_settings import settings_of
from collegium.experiment.scaling import FILE, Scaled, scale_together, write_scaling
from collegium.runtime import process
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.run import RoundRecord, Run
from collegium.runtime.simulation import build_clients, build_run


@dataclass(frozen=True)
class Event:
    """Something that happened in an experiment.

    Attributes:
        kind: "job" (a job begins), "round", "adapt" (an adaptation begins), "done" (a job ends)
            or "note".
        algorithm: label of the job's algorithm.
        seed: the job's seed.
        variation: name of the job's variation, or empty.
        left_out: the site that is outside in the job's fold, or empty.
        round: round just finished.
        rounds: rounds in all.
        metric: what the scores are.
        losses: mean training loss by site.
        scores: mean validation score by site, of the personal model where there is one; empty where
            it was not evaluated.
        bytes_up: bytes that left the sites in this round.
        bytes_down: bytes that were sent to them.
        seconds: seconds of work in this round, all sites together.
        text: anything else.
    """

    kind: str
    algorithm: str = ""
    seed: int = 0
    variation: str = ""
    left_out: str = ""
    round: int = 0
    rounds: int = 0
    metric: str = ""
    losses: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    text: str = ""


Observer = Callable[[Event], None]


def cache_folder() -> Path:
    """Return where decoded cases are kept: ``$COLLEGIUM_CACHE`` or the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "collegium"
    return Path(os.environ.get("COLLEGIUM_CACHE", default)).expanduser()


def open_sites(config: ExperimentConfig, base: Path) -> dict[str, Site]:
    """Open the inside sites, with the splits stored in the folder ``base``."""
    return open_federation(config.federation, cache_folder(), 0, base / "splits")


def job_clients(data: Mapping[str, Any], key: JobKey) -> dict[str, ClientRuntime]:
    """Build a job's clients from the configuration as plain data, as a worker process does."""
    jobs = jobs_of(parse_config(data))
    job = next(job for job in jobs if job.key == tuple(key))
    holder = holders(jobs)[job.key]
    config = holder.config
    return build_clients(
        build_algorithm(holder.algorithm),
        open_sites(config, holder.base),
        trained_network(holder),
        task_of(config),
        config.training,
        seed=holder.seed,
        root=holder.folder,
        device=config.engine.device,
        coding=build_coding(config, holder.algorithm),
    )


def trained_network(job: Job) -> Callable[[], nn.Module]:
    """Return what makes the network that a job trains, its scaling filled in where it has one.

    The sites are asked for what the scaling needs where nobody has asked them yet.
    """
    config, network = job.config, network_of(job.config)
    table = config.federation.table
    if table is None or table.scale != "federation":
        return network
    sites, folder = open_sites(config, job.base), job.folder.parents[1]
    scaling = scale_together(sites, table, network, task_of(config), folder=folder)
    return Scaled(network, table, scaling)


def run_job(data: Mapping[str, Any], key: JobKey, observe: Observer) -> None:
    """Run one job from where it stands, and write its rows and overlays."""
    jobs = jobs_of(parse_config(data))
    job = next(job for job in jobs if job.key == tuple(key))
    if (job.folder / ROWS_FILE).exists():
        return
    config, metric = job.config, task_of(job.config).metric
    process.prepare(config.engine.threads)
    about: dict[str, Any] = {
        "algorithm": job.algorithm.label,
        "seed": job.seed,
        "variation": job.variation,
        "left_out": job.left_out,
        "rounds": config.rounds,
        "metric": metric,
    }
    observe(Event("job", **about))
    holder = holders(jobs)[job.key]
    build = partial(job_clients, data, key)
    run, scores = _train(holder, build, lambda record: observe(_round_event(record, about)))
    table = config.federation.table
    for name, client in build().items() if table and table.scale == "site" else ():
        if client.site.scaling is not None:
            write_scaling(holder.folder / "clients" / name / FILE, client.site.scaling)
    if job.seed == config.seeds[0]:
        write_overlays(build(), run, scores, metric, job.folder / "overlays")
    rows = [*job_rows(job, run, scores), *_adapt(job, holder, about, observe)]
    text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    write_atomically(job.folder / ROWS_FILE, text.encode())
    observe(Event("done", **about))


def _train(
    job: Job,
    build: Callable[[], dict[str, ClientRuntime]],
    observe: Callable[[RoundRecord], None],
) -> tuple[Run, dict[str, Any]]:
    """Train and test; return the run and its test scores. Does nothing twice."""
    config, names = job.config, sites_of(job.config.federation)
    transport = InProcess(build, config.engine.workers, config.engine.threads)
    run = build_run(
        build_algorithm(job.algorithm),
        names,
        trained_network(job),
        transport,
        rounds=config.rounds,
        metric=task_of(config).metric,
        seed=job.seed,
        root=job.folder,
        evaluate_every=config.evaluation.every,
        on_failure=config.on_failure,
        coding=build_coding(config, job.algorithm),
    )
    try:
        scores = run.execute(observe)
        write_models(run, job.folder, names, settings_of(config, job.seed))
    finally:
        transport.close()
    return run, scores


def _round_event(record: RoundRecord, about: Mapping[str, Any]) -> Event:
    kind = "personal" if "personal" in record.scores else "global"
    return Event(
        "round",
        **about,
        round=record.round,
        losses={site: loss for site, loss in record.losses.items() if loss is not None},
        scores={
            site: score for site, score in record.scores.get(kind, {}).items() if score is not None
        },
        bytes_up=sum(record.bytes_up.values()),
        bytes_down=sum(record.bytes_down.values()),
        seconds=sum(record.seconds.values()),
    )


def _adapt(job: Job, holder: Job, about: Mapping[str, Any], observe: Observer) -> Iterator[Row]:
    """Yield the scores of every adapter at every site outside; what is stored is not done again."""
    adapters = adapters_of(job.config, job.algorithm)
    sites = [job.left_out] if job.left_out else job.config.federation.outside
    for site in sites if adapters else ():
        data = open_outside(job.config, site, job.base)
        for adapter in adapters:
            folder = job.folder / "outside" / site / adapter.label
            if not _is_done(folder, adapter):
                observe(Event("adapt", **about, text=f"{adapter.label} at {site}"))
                _adapt_once(job, holder, adapter, site, data, folder)
            yield from outside_rows(job, site, adapter.label, folder)


def _is_done(folder: Path, adapter: AdapterConfig) -> bool:
    """Whether an adaptation with these settings is stored."""
    if not (folder / SCORES_FILE).exists():
        return False
    stored = json.loads((folder / ACCOUNT_FILE).read_text(encoding="utf-8"))["adapter"]
    return bool(stored == json.loads(json.dumps(_settings(adapter))))


def _settings(adapter: AdapterConfig) -> dict[str, Any]:
    return {"name": adapter.name, "label": adapter.label, **adapter.params}


def open_outside(config: ExperimentConfig, site: str, base: Path) -> Dataset:
    """Return all cases of a site outside: none of them has trained a model that it receives."""
    splits = base / "splits" / f"{site}.json"
    opened = open_site(config.federation, site, cache_folder(), 0, splits)
    return ConcatDataset([opened.train, opened.val, opened.test])


def _adapt_once(
    job: Job, holder: Job, config: AdapterConfig, site: str, data: Dataset, folder: Path
) -> None:
    """Adapt to one site, and store what came of it: the account first, the scores last."""
    models = outside.ModelFiles(holder.folder / DEPLOYED)
    sources = Sources(
        models,
        Extended(network_of(job.config), build_algorithm(job.algorithm)),
        task_of(job.config),
        job.config.engine.device,
        job.seed,
        models.server,
    )
    kept = Kept() if job.seed == job.config.seeds[0] else None
    found = outside.adapt_and_score(build_adapter(config), sources, data, see=kept)
    account = {
        "adapter": _settings(config),
        "algorithm": job.algorithm.label,
        "seed": job.seed,
        "site": site,
        "cases": len(data),
        "seconds": found.seconds,
        **outside.describe(found.adapted.account),
    }
    (folder / SCORES_FILE).unlink(missing_ok=True)  # of an adaptation with other settings
    write_atomically(folder / ACCOUNT_FILE, json.dumps(account, indent=1).encode())
    if kept is not None:
        about = {"site": site, "model": config.label}
        write_outside_overlays(
            kept, data, found.scores, about, sources.task.metric, folder / "overlays"
        )
    scores = {"seconds": found.seconds, "cases": found.scores}
    write_atomically(folder / SCORES_FILE, json.dumps(scores).encode())
