"""Runs the jobs of an experiment that are not finished, in this process or in several."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from threading import Thread
from typing import Any

from collegium.errors import ClientError, MissingReply
from collegium.experiment.config.building import adapters_of
from collegium.experiment.config.experiment import (
    LEAVE_ONE_SITE_OUT,
    ExperimentConfig,
    parse_config,
)
from collegium.experiment.federation import OpenedExperiment
from collegium.experiment.grid import Job, JobKey, holders
from collegium.experiment.jobs import Event, Observer, run_job
from collegium.runtime import process

logger = logging.getLogger(__name__)

_ENDED = (
    "a process that ran jobs was ended from outside (often for a lack of memory); the finished "
    "rounds are kept, use fewer engine.jobs or a smaller batch_size and resume"
)

LISTENING_SECONDS = 3.0
"""How long a stopped experiment waits for its processes and for their last words."""


def execute(
    config: ExperimentConfig, observe: Observer, opened: OpenedExperiment | None = None
) -> OpenedExperiment:
    """Check what can be known to fail, then run every job that is not finished.

    Args:
        config: the experiment.
        observe: called with every event.
        opened: the experiment opened otherwise than on this machine.

    Returns:
        The opened experiment.

    Raises:
        CollegiumError: in one sentence, whatever cannot work; finished rounds are kept.
    """
    process.prepare(config.engine.threads)
    opened = opened or OpenedExperiment(config)
    opened.check()
    for variation, settings in opened.variations.items():
        _warn_of_idle_adapters(settings, variation)
    _run_jobs(opened, observe)
    return opened


def _warn_of_idle_adapters(config: ExperimentConfig, variation: str) -> None:
    """Warn if adapters are configured and there is no site to adapt to."""
    chosen = [adapters_of(config, algorithm) for algorithm in config.algorithms]
    labels = dict.fromkeys(adapter.label for adapters in chosen for adapter in adapters)
    folds = config.protocol.startswith(LEAVE_ONE_SITE_OUT)
    if labels and not folds and not config.federation.outside:
        logger.warning(
            "%sno site is outside, so nothing is adapted and the adapters (%s) do nothing; name a "
            "site in federation.outside, or write protocol: leave-one-site-out",
            f"variation {variation!r}: " if variation else "",
            ", ".join(labels),
        )


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


def _start_worker(data: Mapping[str, Any], queue: Any, shares: Any) -> None:
    global _worker
    process.end_with_parent()
    if gpus := shares.get():
        os.environ[process.VISIBLE] = ",".join(gpus)
    _worker = OpenedExperiment(parse_config(data)), queue


def _run_job(key: JobKey) -> None:
    opened, queue = _worker
    run_job(opened, key, queue.put)


def _run_jobs_at_once(
    opened: OpenedExperiment, jobs: Sequence[Job], failures: list[ClientError], observe: Observer
) -> None:
    """Run jobs in a few processes of their own."""
    engine, context = opened.config.engine, multiprocessing.get_context("spawn")
    queue, shares = context.Queue(), context.SimpleQueue()
    gpus = process.shared_gpus(engine.device)
    for slot in range(engine.jobs):  # each process takes one as it starts
        shares.put(process.share_of(gpus, slot, engine.jobs))
    initial = opened.data, queue, shares
    listener = Thread(target=_listen, args=(queue, observe), daemon=True)
    listener.start()
    try:
        with (
            process.environment_of_workers(engine.threads),
            ProcessPoolExecutor(engine.jobs, context, _start_worker, initial) as pool,
        ):
            futures = {pool.submit(_run_job, job.key): job for job in jobs}
            try:
                for future in as_completed(futures):
                    with _noting_failure(futures[future], failures, observe):
                        future.result()
            except BaseException as error:
                pool.shutdown(wait=False, cancel_futures=True)
                _end_jobs()
                if isinstance(error, BrokenProcessPool):
                    raise MissingReply(_ENDED) from error
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
