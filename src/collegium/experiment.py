"""An experiment: every algorithm with every seed over one federation.

It can be stopped at any moment and resumed, and ends in a table and a report.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from collegium import __version__, process
from collegium.client import ClientRuntime
from collegium.config import (
    AlgorithmConfig,
    ExperimentConfig,
    build_algorithm,
    build_coding,
    difference,
    digest,
    parse_config,
    to_dict,
)  # fmt: skip
from collegium.data.federation import open_federation, sites_of
from collegium.data.site import Site
from collegium.engines.inprocess import InProcess
from collegium.errors import CheckpointError, ClientError
from collegium.models.factory import build_model
from collegium.outcome import cell_rows, task_of, write_models, write_overlays
from collegium.preflight import check_engine, check_network
from collegium.results import ROWS_FILE, Row, read_rows, write_table
from collegium.run import RoundRecord
from collegium.simulation import build_clients, build_run, check_method
from collegium.state import lock, write_atomically

logger = logging.getLogger(__name__)

LISTENING_SECONDS = 3.0
"""How long a stopped experiment waits for its processes and for their last words."""

RUN_FILE = "run.json"
"""What a run was made with: configuration, versions, machine."""


@dataclass(frozen=True)
class Event:
    """Something that happened in an experiment.

    Attributes:
        kind: "cell" (a cell begins), "round", "done" (a cell ends) or "note".
        algorithm: label of the cell's algorithm.
        seed: the cell's seed.
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


def open_sites(config: ExperimentConfig) -> dict[str, Site]:
    """Open the inside sites, with the splits stored in the output folder."""
    return open_federation(config.federation, cache_folder(), 0, Path(config.output) / "splits")


def cell_folder(config: ExperimentConfig, algorithm: AlgorithmConfig, seed: int) -> Path:
    """Return the folder of one (algorithm, seed) cell."""
    return Path(config.output) / algorithm.label / f"seed-{seed}"


def cell_clients(data: Mapping[str, Any], label: str, seed: int) -> dict[str, ClientRuntime]:
    """Build a cell's clients from the configuration as plain data, as a worker process does."""
    config = parse_config(data)
    algorithm = next(a for a in config.algorithms if a.label == label)
    return build_clients(
        build_algorithm(algorithm),
        open_sites(config),
        partial(build_model, config.model.name, **config.model.params),
        task_of(config),
        config.training,
        seed=seed,
        root=cell_folder(config, algorithm, seed),
        device=config.engine.device,
        coding=build_coding(config, algorithm),
    )


def run_cell(data: Mapping[str, Any], label: str, seed: int, observe: Observer) -> None:
    """Run one (algorithm, seed) cell from where it stands, and write its rows and overlays."""
    config = parse_config(data)
    process.prepare(config.engine.threads)
    algorithm = next(a for a in config.algorithms if a.label == label)
    root = cell_folder(config, algorithm, seed)
    if (root / ROWS_FILE).exists():
        return
    metric = task_of(config).metric
    about: dict[str, Any] = {
        "algorithm": label,
        "seed": seed,
        "rounds": config.rounds,
        "metric": metric,
    }
    observe(Event("cell", **about))
    build = partial(cell_clients, data, label, seed)
    transport = InProcess(build, config.engine.workers, config.engine.threads)
    run = build_run(
        build_algorithm(algorithm),
        sites_of(config.federation),
        partial(build_model, config.model.name, **config.model.params),
        transport,
        rounds=config.rounds,
        metric=metric,
        seed=seed,
        root=root,
        evaluate_every=config.evaluation.every,
        on_failure=config.on_failure,
        coding=build_coding(config, algorithm),
    )
    try:
        scores = run.execute(lambda record: observe(_round_event(record, about)))
    finally:
        transport.close()
    write_models(run, root, sites_of(config.federation))
    if seed == config.seeds[0]:
        write_overlays(build(), run, scores, metric, root / "overlays")
    rows = cell_rows(config, label, seed, run, scores)
    text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    write_atomically(root / ROWS_FILE, text.encode())
    observe(Event("done", **about))


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


def run_experiment(config: ExperimentConfig, observe: Observer = lambda event: None) -> Path:
    """Run every cell that is not finished, then write the table and the report.

    Args:
        config: the experiment.
        observe: told what happens.

    Returns:
        The output folder.

    Raises:
        CollegiumError: in one sentence, whatever cannot work; finished rounds are kept.
    """
    output = Path(config.output)
    with lock(output):
        _write_run_file(config, output)
        process.prepare(config.engine.threads)
        check_engine(config)
        sites = open_sites(config)
        check_network(config, sites)
        for algorithm in config.algorithms:
            check_method(build_algorithm(algorithm), config.training, sites)
        _run_cells(config, observe)
        write_table(collect_rows(config), output)
        write_report(output)
    return output


def resume_experiment(output: Path, observe: Observer = lambda event: None) -> Path:
    """Go on with the experiment in ``output``.

    Raises:
        CheckpointError: there is none.
    """
    return run_experiment(read_run_config(output), observe)


def write_report(output: Path) -> Path:
    """Write the HTML report of what is in ``output`` and return its path."""
    from collegium.report.html import write_report as write

    return write(output)


def collect_rows(config: ExperimentConfig) -> list[Row]:
    """Return the rows of all finished cells."""
    files = [
        cell_folder(config, a, seed) / ROWS_FILE for a in config.algorithms for seed in config.seeds
    ]
    return read_rows([file for file in files if file.exists()])


def read_run_config(output: Path) -> ExperimentConfig:
    """Return the configuration of the run in ``output``, which may have been moved since."""
    path = output / RUN_FILE
    if not path.exists():
        raise CheckpointError(
            f"{output} holds no run (there is no {RUN_FILE}); start one with 'collegium run'"
        )
    try:
        stored = {**json.loads(path.read_text(encoding="utf-8"))["config"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged; remove it and go on with 'collegium run' and the same file"
        ) from error
    return parse_config({**stored, "output": str(output)}, where=str(path))


def _write_run_file(config: ExperimentConfig, output: Path) -> None:
    """Write what the run is made with.

    A run of another configuration is refused, unless it ended before any cell began, as with a
    mistake in its settings.
    """
    path = output / RUN_FILE
    if path.exists():
        stored = read_run_config(output)
        if digest(stored) == digest(config):
            return
        if any(cell_folder(stored, a, s).exists() for a in stored.algorithms for s in stored.seeds):
            changes = "; ".join(difference(stored, config)[:5])
            raise CheckpointError(
                f"{output} holds a run made with other settings ({changes}); choose "
                f"another output folder"
            )
        if stored.federation.splits != config.federation.splits:
            shutil.rmtree(output / "splits", ignore_errors=True)
    packages = ("torch", "monai", "numpy", "safetensors")
    about = {
        "config": to_dict(config),
        "digest": digest(config),
        "versions": {"collegium": __version__, "python": platform.python_version()}
        | {name: metadata.version(name) for name in packages},
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
    }
    write_atomically(path, json.dumps(about, indent=2).encode())


def _run_cells(config: ExperimentConfig, observe: Observer) -> None:
    """Run all cells; where a client fails, the others still run before the error is raised."""
    data = to_dict(config)
    cells = [(a.label, seed) for seed in config.seeds for a in config.algorithms]
    failures: list[ClientError] = []
    if config.engine.jobs == 1:
        for label, seed in cells:
            try:
                run_cell(data, label, seed, observe)
            except ClientError as error:
                _note_failure(error, label, seed, failures, observe)
    else:
        _run_cells_at_once(data, cells, config.engine.jobs, failures, observe)
    if failures:
        raise failures[0]


def _note_failure(
    error: ClientError, label: str, seed: int, failures: list[ClientError], observe: Observer
) -> None:
    where = type(error)(f"{label}, seed {seed}: {error}")
    failures.append(where)
    observe(
        Event("note", algorithm=label, seed=seed, text=f"{where}; its finished rounds are kept")
    )


_events: Any = None
"""In a process that runs cells: where their events go."""


def _begin_job(queue: Any) -> None:
    global _events
    _events = queue


def _run_job(data: Mapping[str, Any], label: str, seed: int) -> None:
    run_cell(data, label, seed, _events.put)


def _run_cells_at_once(
    data: Mapping[str, Any],
    cells: Sequence[tuple[str, int]],
    jobs: int,
    failures: list[ClientError],
    observe: Observer,
) -> None:
    """Run cells in a few processes of their own."""
    from threading import Thread

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    listener = Thread(target=_listen, args=(queue, observe), daemon=True)
    listener.start()
    try:
        with (
            process.environment_of_workers(data["engine"]["threads"]),
            ProcessPoolExecutor(jobs, context, _begin_job, (queue,)) as pool,
        ):
            futures = {
                pool.submit(_run_job, data, label, seed): (label, seed) for label, seed in cells
            }
            try:
                for future in as_completed(futures):
                    try:
                        future.result()
                    except ClientError as error:
                        _note_failure(error, *futures[future], failures, observe)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _end_jobs()
                raise
    finally:
        queue.put(None)
        queue.cancel_join_thread()  # a process that was ended may have held the queue's lock
        listener.join(LISTENING_SECONDS)


def _end_jobs() -> None:
    """Let the processes that run cells end as Ctrl-C makes them; end those that do not.

    What is stored stays whole, whenever a process ends.
    """
    children = multiprocessing.active_children()
    until = time.monotonic() + LISTENING_SECONDS
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
    for child in children:
        if child.is_alive():
            child.terminate()


def _listen(queue: Any, observe: Observer) -> None:
    while (event := queue.get()) is not None:
        observe(event)
