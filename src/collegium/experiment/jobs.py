"""One job of an experiment: its training, the test of its models, and its sites outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from collegium.evaluation.results import ROWS_FILE, ResultRow, results_frame, write_rows
from collegium.experiment.adaptations import is_adapted
from collegium.experiment.config.building import (
    adapters_of,
    build_algorithm,
    build_codecs,
    task_of,
)
from collegium.experiment.federation import OpenedExperiment
from collegium.experiment.grid import Job, JobKey, fold_key, fold_words
from collegium.experiment.job_results import job_rows, outside_rows, write_models
from collegium.runtime import process
from collegium.runtime.records import RoundRecord
from collegium.runtime.run import Run


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
        part: the fold of the patients that is the test, or 0.
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
    part: int = 0
    round: int = 0
    rounds: int = 0
    metric: str = ""
    losses: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    text: str = ""

    @property
    def fold(self) -> str:
        """The job's fold in words, or empty."""
        return fold_words(self.left_out, self.part)

    @property
    def job(self) -> JobKey:
        """The key of its job; without an algorithm for an event of the whole run."""
        return self.variation, fold_key(self.left_out, self.part), self.algorithm, self.seed


Observer = Callable[[Event], None]


def run_job(opened: OpenedExperiment, key: JobKey, observe: Observer) -> None:
    """Run one job from where it stands, and write its rows and overlays.

    Args:
        opened: the experiment.
        key: the job's key.
        observe: called with every event.

    Raises:
        CollegiumError: in one sentence, whatever cannot work; finished rounds are kept.
    """
    job = opened.job(key)
    if (job.folder / ROWS_FILE).exists():
        return
    config, holder = job.config, opened.holder(job)
    process.prepare(config.engine.threads)
    about: dict[str, Any] = {
        "algorithm": job.algorithm.label,
        "seed": job.seed,
        "variation": job.variation,
        "left_out": job.left_out,
        "part": job.part,
        "rounds": config.rounds,
        "metric": task_of(config).metric,
    }
    observe(Event("job", **about))
    run, scores = _train(
        opened, holder, lambda record, last: observe(_round_event(record, about | {"rounds": last}))
    )
    opened.finish(job, run, scores)
    rows = [*job_rows(job, run.records(), scores), *_adapt(opened, job, about, observe)]
    write_rows(job.folder / ROWS_FILE, results_frame(rows))
    observe(Event("done", **about))


def _train(
    opened: OpenedExperiment, job: Job, observe: Callable[[RoundRecord, int], None]
) -> tuple[Run, dict[str, Any]]:
    """Train and test; return the run and its test scores. Does nothing twice.

    The observer is called with every round, and with the last round as it is known then.
    """
    config, federation = job.config, opened.federation(job)
    transport = opened.transport(job)
    run = federation.run(
        build_algorithm(job.algorithm),
        transport,
        rounds=config.rounds,
        seed=job.seed,
        root=job.folder,
        evaluate_every=config.evaluation.every,
        home_rounds=config.home_rounds,
        participation=config.participation.among(federation.names),
        codecs=build_codecs(config, job.algorithm),
        selection=config.selection,
        early_stopping=config.early_stopping,
        diagnostics=config.diagnostics,
        secure=config.secure_mean,
    )
    try:
        scores = run.execute(lambda record: observe(record, run.last))
        write_models(run, job, federation.names)
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
        text="stopped early" if record.stopped else "",
    )


def _adapt(
    opened: OpenedExperiment, job: Job, about: Mapping[str, Any], observe: Observer
) -> Iterator[ResultRow]:
    """Yield the scores of every adapter at every site outside; what is stored is not done again."""
    adapters = adapters_of(job.config, job.algorithm)
    sites = [job.left_out] if job.left_out else job.config.federation.outside
    for site in sites if adapters else ():
        for adapter in adapters:
            folder = job.folder / "outside" / site / adapter.label
            if not is_adapted(folder, adapter):
                observe(Event("adapt", **about, text=f"{adapter.label} at {site}"))
                opened.adapt(job, adapter, site, folder)
            yield from outside_rows(job, site, adapter.label, folder)
