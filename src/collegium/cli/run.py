"""The commands about an experiment and its run: `run`, `resume`, `report`, `tables` and so on."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collegium.cli.base import INTERRUPTED, ConfigPath, Overrides, RunFolder, app, fail, guarded
from collegium.errors import ClientError, StorageError

if TYPE_CHECKING:
    from collegium.experiment.config.experiment import ExperimentConfig
    from collegium.experiment.jobs import Event, Observer

config_app = typer.Typer(help="Show configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def run_and_report(config: "ExperimentConfig", jobs: int | None) -> None:
    """Run an experiment, show its progress, and print its answers and the path of its report.

    Args:
        config: the experiment.
        jobs: the number of jobs; None if it is unknown.
    """
    from rich.console import Console

    from collegium.experiment.progress import show_progress

    try:
        with show_progress(Console(stderr=True), jobs) as observe:
            output = run_tracked(config, observe)
    except KeyboardInterrupt:
        command = f"collegium resume {shlex.quote(config.output)}"
        fail(f"stopped; finished rounds are kept, continue with: {command}", INTERRUPTED)
    from collegium.evaluation.writing import run_answers  # imported late: training starts before

    for line in run_answers(output):
        typer.echo(line)
    typer.echo(output / "report.html")


def run_tracked(config: "ExperimentConfig", observe: "Observer") -> Path:
    """Run an experiment, and report its events to its tracker if it has one.

    Args:
        config: the experiment.
        observe: called with every event.

    Returns:
        The run's folder.
    """
    if config.tracking is None:
        return _run(config, observe)
    from collegium.experiment.tracking import Tracker

    tracker = Tracker(config, uri=config.tracking.uri, experiment=config.tracking.experiment)

    def observe_and_track(event: "Event") -> None:
        observe(event)
        tracker(event)

    try:
        output = _run(config, observe_and_track)
    except ClientError:
        with suppress(StorageError):  # the failure of the run is more informative
            tracker.finish(Path(config.output))
        raise
    tracker.finish(output)
    return output


def _run(config: "ExperimentConfig", observe: "Observer") -> Path:
    """Run an experiment by its engine."""
    from collegium.experiment.runner import decided, run_experiment

    if config.engine.name == "inprocess":
        return run_experiment(config, observe)
    from collegium.distributed.experiment import RemoteExperiment

    config = decided(config)  # the sites are told what was decided
    with RemoteExperiment(config) as remote:

        def observe_and_note(event: "Event") -> None:
            observe(event)
            remote.note(event)

        return run_experiment(config, observe_and_note, remote)


@app.command()
@guarded
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run an experiment, or continue an unfinished run of the same configuration."""
    from collegium.experiment.config.experiment import load_config
    from collegium.experiment.grid import jobs_of

    experiment = load_config(config, overrides or ())
    run_and_report(experiment, len(jobs_of(experiment)))


@app.command()
@guarded
def resume(output: RunFolder) -> None:
    """Continue the run in a folder with its own configuration."""
    from collegium.experiment.runner import read_run_config

    run_and_report(read_run_config(output), None)


@app.command()
@guarded
def report(output: RunFolder) -> None:
    """Write the report of a run again, finished or not."""
    from collegium.evaluation.report.html import write_report

    typer.echo(write_report(output))


@app.command()
@guarded
def tables(
    output: RunFolder,
    select: Annotated[
        bool, typer.Option("--select", help="Print what validation cases choose, and its score.")
    ] = False,
) -> None:
    """Write the tables and verdicts of a run, print the tables as text, and then its answers.

    With --select, print of each method the setting that validation cases choose, with the test
    score of that setting alone.
    """
    from collegium.evaluation.writing import run_answers, selected_texts, write_tables

    files = write_tables(output)
    if select:
        for text in selected_texts(files):
            typer.echo(text)
        return
    for file in files:
        if file.suffix == ".txt":
            typer.echo(file.read_text(encoding="utf-8"))
    for line in run_answers(output):
        typer.echo(line)
    typer.echo(files[0].parent)


@app.command()
@guarded
def figures(
    output: RunFolder,
    formats: Annotated[
        str, typer.Option("--format", metavar="FORMATS", help="svg, pdf or both: svg,pdf.")
    ] = "svg,pdf",
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where to write; by default OUTPUT/figures."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Draw this figure alone; may be repeated."),
    ] = None,
) -> None:
    """Draw the figures of a run for a paper, and print the names of their files."""
    from collegium.evaluation.figures.writing import write_figures

    words = [word.strip() for word in formats.split(",") if word.strip()]
    for path in write_figures(output, formats=words, folder=folder, only=only or ()):
        typer.echo(path)


@app.command("cross-site")
@guarded
def cross_site(output: RunFolder) -> None:
    """Score each site's personal model at every site of a finished run, and print the matrix.

    The sites whose policies share their personal model take part. The scores are stored, and stand
    in the tables and the report of the run from then on.
    """
    from collegium.evaluation.report.html import write_report
    from collegium.evaluation.writing import cross_site_texts, write_tables
    from collegium.experiment.cross_site import score_across_sites

    score_across_sites(output)
    for text in cross_site_texts(output, write_tables(output)):
        typer.echo(text)
    typer.echo(write_report(output))


@config_app.command("show")
@guarded
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print a configuration with every default filled in."""
    from collegium.experiment.config.experiment import load_config, to_yaml

    typer.echo(to_yaml(load_config(config, overrides or ())), nl=False)
