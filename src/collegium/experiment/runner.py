"""An experiment: a grid of algorithms, seeds, folds and variations over one federation.

It can be stopped at any moment and resumed, and ends in tables and a report.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collegium import __version__
from collegium.core.files import lock, write_atomically
from collegium.errors import CheckpointError, ClientError
from collegium.evaluation.results import ROWS_FILE, read_rows, write_results
from collegium.experiment.compilation import decide_compilation
from collegium.experiment.config.building import adapters_of
from collegium.experiment.config.experiment import (
    ExperimentConfig,
    difference,
    digest,
    parse_config,
    to_dict,
)
from collegium.experiment.federation import OpenedExperiment
from collegium.experiment.grid import Job, JobKey, holders, jobs_of
from collegium.experiment.jobs import Event, Observer, run_job
from collegium.runtime import process

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

LISTENING_SECONDS = 3.0
"""How long a stopped experiment waits for its processes and for their last words."""

RUN_FILE = "run.json"
"""The file of what a run was made with: configuration, versions, machine."""


def run_experiment(
    config: ExperimentConfig,
    observe: Observer = lambda event: None,
    opened: OpenedExperiment | None = None,
) -> Path:
    """Run every job that is not finished, then write the results, the tables and the report.

    Args:
        config: the experiment.
        observe: called with every event.
        opened: the experiment opened otherwise than on this machine.

    Returns:
        The output folder.

    Raises:
        CollegiumError: in one sentence, whatever cannot work; finished rounds are kept.
    """
    config, output = decided(config), Path(config.output)
    with lock(output):
        write_run_file(config, output)
        process.prepare(config.engine.threads)
        opened = opened or OpenedExperiment(config)
        opened.check()
        for variation, settings in opened.variations.items():
            _warn_of_idle_adapters(settings, variation)
        _run_jobs(opened, observe)
        write_outcome(config)
        opened.conclude()
    return output


def decided(config: ExperimentConfig) -> ExperimentConfig:
    """Return an experiment with what its run has decided, or decides now; see `decide_compilation`.

    Raises:
        ConfigError: this machine cannot do what was decided.
    """
    output = Path(config.output)
    begun = read_run_config(output) if (output / RUN_FILE).exists() else None
    return decide_compilation(config, begun)


def _warn_of_idle_adapters(config: ExperimentConfig, variation: str) -> None:
    """Warn if adapters are configured and there is no site to adapt to."""
    chosen = [adapters_of(config, algorithm) for algorithm in config.algorithms]
    labels = dict.fromkeys(adapter.label for adapters in chosen for adapter in adapters)
    if labels and config.protocol == "inside" and not config.federation.outside:
        logger.warning(
            "%sno site is outside, so nothing is adapted and the adapters (%s) do nothing; name a "
            "site in federation.outside, or write protocol: leave-one-site-out",
            f"variation {variation!r}: " if variation else "",
            ", ".join(labels),
        )


def write_outcome(config: ExperimentConfig) -> None:
    """Write what a run ends with: its rows, the tables of its test cases, and the report."""
    from collegium.evaluation.report.html import write_report
    from collegium.evaluation.writing import write_tables

    results, output = collect_rows(config), Path(config.output)
    write_results(results, output)
    if (results["case"] != "").any():
        write_tables(output)
    write_report(output)


def collect_rows(config: ExperimentConfig) -> pd.DataFrame:
    """Return the rows of all finished jobs as a table of results."""
    files = [job.folder / ROWS_FILE for job in jobs_of(config)]
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
            f"{path} is damaged; remove it and continue with 'collegium run' and the same file"
        ) from error
    return parse_config({**stored, "output": str(output)}, where=str(path))


def write_run_file(config: ExperimentConfig, output: Path) -> None:
    """Write what a run is made with.

    A run may be extended: by algorithms, seeds, variations or adapters. One that would train what
    has begun otherwise is refused.

    Args:
        config: the experiment.
        output: its folder.

    Raises:
        CheckpointError: the folder holds a run made with other settings.
    """
    path = output / RUN_FILE
    if path.exists():
        stored = read_run_config(output)
        if digest(stored) == digest(config):
            return
        _extend(stored, config, output)
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


def _extend(stored: ExperimentConfig, config: ExperimentConfig, output: Path) -> None:
    """Check that all jobs that have begun are still wanted, and drop the rows that are not.

    Rows are written again from what is stored; trainings and adaptations are kept.
    """
    planned = {job.key: job for job in jobs_of(config)}
    begun = [job for job in jobs_of(stored) if job.folder.exists()]
    for job in begun:
        if job.key not in planned or planned[job.key].training != job.training:
            changes = sorted(difference(stored, config), key=lambda text: "adapters." in text)
            raise CheckpointError(
                f"{output} holds a run made with other settings ({'; '.join(changes[:5])}); "
                f"choose another output folder"
            )
    for job in begun:
        now = planned[job.key]
        before = adapters_of(job.config, job.algorithm)
        if before != adapters_of(now.config, now.algorithm) or stored.name != config.name:
            (job.folder / ROWS_FILE).unlink(missing_ok=True)
    if not begun and stored.federation.splits != config.federation.splits:
        shutil.rmtree(output / "splits", ignore_errors=True)


def _run_jobs(opened: OpenedExperiment, observe: Observer) -> None:
    """Run all jobs; where a client fails, the others still run before the error is raised.

    Jobs that use the training of another run after all those that train.
    """
    config, held = opened.config, holders(opened.jobs)
    training = [job for job in opened.jobs if held[job.key] is job]
    using = [job for job in opened.jobs if held[job.key] is not job]
    failures: list[ClientError] = []
    for batch in (training, using):
        if config.engine.jobs == 1:
            for job in batch:
                with _noting_failure(job, failures, observe):
                    run_job(opened, job.key, observe)
        elif batch:
            _run_jobs_at_once(opened, batch, failures, observe)
    if failures:
        raise failures[0]


@contextmanager
def _noting_failure(job: Job, failures: list[ClientError], observe: Observer) -> Iterator[None]:
    """Note the failure of a client inside the block, and continue after the block."""
    try:
        yield
    except ClientError as error:
        where = type(error)(f"{job.name}: {error}")
        failures.append(where)
        text = f"{where}; its finished rounds are kept"
        observe(Event("note", algorithm=job.algorithm.label, seed=job.seed, text=text))


_worker: tuple[OpenedExperiment, Any]
"""In a process that runs jobs: the experiment, and the queue to which events go."""


def _start_worker(data: Mapping[str, Any], queue: Any) -> None:
    global _worker
    _worker = OpenedExperiment(parse_config(data)), queue


def _run_job(key: JobKey) -> None:
    opened, queue = _worker
    run_job(opened, key, queue.put)


def _run_jobs_at_once(
    opened: OpenedExperiment, jobs: Sequence[Job], failures: list[ClientError], observe: Observer
) -> None:
    """Run jobs in a few processes of their own."""
    from threading import Thread

    engine, context = opened.config.engine, multiprocessing.get_context("spawn")
    queue = context.Queue()
    listener = Thread(target=_listen, args=(queue, observe), daemon=True)
    listener.start()
    try:
        with (
            process.environment_of_workers(engine.threads),
            ProcessPoolExecutor(engine.jobs, context, _start_worker, (opened.data, queue)) as pool,
        ):
            futures = {pool.submit(_run_job, job.key): job for job in jobs}
            try:
                for future in as_completed(futures):
                    with _noting_failure(futures[future], failures, observe):
                        future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _end_jobs()
                raise
    finally:
        queue.put(None)
        queue.cancel_join_thread()  # a process that was ended may have held the queue's lock
        listener.join(LISTENING_SECONDS)


def _end_jobs() -> None:
    """Wait until the processes that run jobs have ended by Ctrl-C; end those that do not.

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
