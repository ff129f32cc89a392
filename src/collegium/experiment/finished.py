"""Opens what is finished of a run on this machine, to measure its models with the sites' data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collegium.core.files import lock
from collegium.errors import ConfigError
from collegium.experiment.federation import OpenedExperiment
from collegium.experiment.grid import Job
from collegium.experiment.runner import read_run_config


@contextmanager
def finished_jobs(
    output: Path, *, keeps: str, needs: str
) -> Iterator[tuple[OpenedExperiment, list[Job]]]:
    """Open a run; no other process writes in its folder inside the block.

    Args:
        output: the output folder of the run.
        keeps: what each site keeps in a run between machines, for the error.
        needs: what the run is opened for, with its verb, for the error.

    Yields:
        The experiment, and the jobs whose training is finished.

    Raises:
        CheckpointError: there is no run.
        ConfigError: the run has trained between machines.
        StorageError: another process writes in the folder.
    """
    config = read_run_config(output)
    if config.engine.name != "inprocess":
        raise ConfigError(
            f"the run in {output} trained between machines, where each site keeps its {keeps}; "
            f"{needs} a run with engine: {{name: inprocess}}"
        )
    with lock(output):
        opened = OpenedExperiment(config)
        yield opened, [job for job in opened.jobs if opened.holder(job).trained]
