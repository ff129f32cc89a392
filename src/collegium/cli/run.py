"""The commands that run an experiment: `run` and `resume`."""

import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from collegium.cli.base import INTERRUPTED, ConfigPath, Overrides, RunFolder, app, fail, guarded
from collegium.errors import ClientError, StorageError

if TYPE_CHECKING:
    from collegium.experiment.config.experiment import ExperimentConfig
    from collegium.experiment.jobs import Event, Observer


def follow(
    output: Path, jobs: int | None, run: "Callable[[Callable[[Event], None]], Path]"
) -> Path:
    """Show progress during a run, and print how to continue it if it is interrupted.

    Args:
        output: the run's folder.
        jobs: the number of jobs; None if it is unknown.
        run: the run, which is given the observer of events and returns the folder.
    """
    from rich.console import Console

    from collegium.experiment.progress import show_progress

    try:
        with show_progress(Console(stderr=True), jobs) as observe:
            return run(observe)
    except KeyboardInterrupt:
        command = f"collegium resume {shlex.quote(str(output))}"
        fail(f"stopped; finished rounds are kept, continue with: {command}", INTERRUPTED)


def run_and_report(config_path: Path, overrides: Iterable[str]) -> None:
    """Run an experiment and print the path of its report.

    Args:
        config_path: the experiment's file.
        overrides: values to override, as ``key=value``.
    """
    from collegium.experiment.config.experiment import load_config
    from collegium.experiment.grid import jobs_of

    config = load_config(config_path, list(overrides))
    jobs = len(jobs_of(config))
    output = follow(Path(config.output), jobs, lambda observe: run_tracked(config, observe))
    typer.echo(output / "report.html")


def run_tracked(config: "ExperimentConfig", observe: "Observer") -> Path:
    """Run an experiment, and report its events to its tracker if it has one.

    Args:
        config: the experiment.
        observe: called with every event.

    Returns:
        The run's folder.
    """
    from collegium.experiment.runner import run_experiment

    if config.tracking is None:
        return run_experiment(config, observe)
    from collegium.experiment.tracking import Tracker

    tracker = Tracker(config, uri=config.tracking.uri, experiment=config.tracking.experiment)

    def observe_and_track(event: "Event") -> None:
        observe(event)
        tracker(event)

    try:
        output = run_experiment(config, observe_and_track)
    except ClientError:
        with suppress(StorageError):  # the failure of the run is more informative
            tracker.finish(Path(config.output))
        raise
    tracker.finish(output)
    return output


@app.command()
@guarded
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run an experiment, or continue an unfinished run of the same configuration."""
    run_and_report(config, overrides or ())


@app.command()
@guarded
def resume(output: RunFolder) -> None:
    """Continue the run in a folder with its own configuration."""
    from collegium.experiment.runner import read_run_config

    config = read_run_config(output)
    folder = follow(output, None, lambda observe: run_tracked(config, observe))
    typer.echo(folder / "report.html")
