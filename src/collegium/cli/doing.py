"""Commands that run something, and that write what comes of it."""

import json
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collegium.cli.base import (
    INTERRUPTED,
    ConfigPath,
    Output,
    Overrides,
    app,
    fail,
    guarded,
    table,
)
from collegium.errors import ClientError, StorageError

if TYPE_CHECKING:
    from collegium.experiment.config.experiment import ExperimentConfig
    from collegium.experiment.jobs import Event, Observer


Config = Annotated[
    Path | None,
    typer.Option(help="For models without a run: the experiment that they were trained with."),
]
OfRun = Annotated[str | None, typer.Option(help="Which algorithm of a run.")]
Seed = Annotated[int | None, typer.Option(help="Which seed of a run.")]
Fold = Annotated[str | None, typer.Option(help="Which fold of a run: the site that was left out.")]
Variation = Annotated[str | None, typer.Option(help="Which variation of a run.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A finished run, or a .safetensors file.")
]
OfSite = Annotated[
    str | None, typer.Option(help="Whose personal model of a run; else the global one.")
]


def trained_with(config: Path | None) -> "ExperimentConfig | None":
    """Read the experiment that files of models were trained with; its data need not be here."""
    from collegium.experiment.config.experiment import load_config

    return load_config(config, ["federation.root=."]) if config else None


def follow(
    output: Path, jobs: int | None, run: "Callable[[Callable[[Event], None]], Path]"
) -> Path:
    """Run something under the eyes of the progress display, and say how to go on if stopped."""
    from rich.console import Console

    from collegium.experiment.progress import show_progress

    try:
        with show_progress(Console(stderr=True), jobs) as observe:
            return run(observe)
    except KeyboardInterrupt:
        again = f"collegium resume {shlex.quote(str(output))}"
        fail(f"stopped; finished rounds are kept, go on with: {again}", INTERRUPTED)


def run_and_report(config_path: Path, overrides: Iterable[str]) -> None:
    """Run an experiment file to its end and write where the report is."""
    from collegium.experiment.config.experiment import load_config
    from collegium.experiment.grid import jobs_of

    config = load_config(config_path, list(overrides))
    jobs = len(jobs_of(config))
    output = follow(Path(config.output), jobs, lambda observe: run_tracked(config, observe))
    typer.echo(output / "report.html")


def run_tracked(config: "ExperimentConfig", observe: "Observer") -> Path:
    """Run an experiment; where it is tracked, tell its tracker what happens."""
    from collegium.experiment.runner import run_experiment

    if config.tracking is None:
        return run_experiment(config, observe)
    from collegium.experiment.tracking import Tracker

    tracker = Tracker(config, uri=config.tracking.uri, experiment=config.tracking.experiment)

    def tell(event: "Event") -> None:
        observe(event)
        tracker(event)

    try:
        output = run_experiment(config, tell)
    except ClientError:
        with suppress(StorageError):  # the failure of the run says more
            tracker.finish(Path(config.output))
        raise
    tracker.finish(output)
    return output


@app.command()
@guarded
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run an experiment, or go on with an unfinished run of the same configuration."""
    run_and_report(config, overrides or ())


@app.command()
@guarded
def resume(output: Output) -> None:
    """Go on with the run in a folder, as it was configured."""
    from collegium.experiment.runner import read_run_config

    config = read_run_config(output)
    done = follow(output, None, lambda observe: run_tracked(config, observe))
    typer.echo(done / "report.html")


@app.command()
@guarded
def report(output: Output) -> None:
    """Write the report of a run again, finished or not."""
    from collegium.evaluation.report.html import write_report

    typer.echo(write_report(output))


@app.command()
@guarded
def tables(output: Output) -> None:
    """Write the tables of a run as text, Markdown, LaTeX and CSV, and show those of text."""
    from collegium.evaluation.writing import write_tables

    files = write_tables(output)
    for file in files:
        if file.suffix == ".txt":
            typer.echo(file.read_text(encoding="utf-8"))
    typer.echo(files[0].parent)


@app.command()
@guarded
def assess(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    summary: Annotated[
        str,
        typer.Option(help="What leaves of the cases' values: cases, histogram or quantiles."),
    ] = "cases",
    encoder: Annotated[
        str, typer.Option(help="The network that embeds images, as file.py:factory.")
    ] = "",
) -> None:
    """Ask every site about its data, before any training, and report how different they are."""
    from collegium.diagnostics.assessment.asking import Assessment
    from collegium.diagnostics.assessment.writing import assess as assess_federation
    from collegium.diagnostics.assessment.writing import overview, read
    from collegium.experiment.config.experiment import load_config

    settings = load_config(config, overrides or ())
    folder = assess_federation(settings, Assessment(summary=summary, encoder=encoder))  # type: ignore[arg-type]
    rows, sentences = overview(read(folder))
    table([list(row.values()) for row in rows], list(rows[0]))
    for sentence in sentences:
        typer.echo(sentence)
    typer.echo(folder / "assessment.html")


@app.command()
@guarded
def adapt(
    models: Annotated[
        Path,
        typer.Argument(metavar="MODELS", help="A finished run, a folder of models, or a bundle."),
    ],
    images: Annotated[
        Path,
        typer.Argument(metavar="IMAGES", help="A folder of images, a manifest (CSV), or a table."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the adapter, e.g. epochs=5."),
    ] = None,
    *,
    adapter: Annotated[
        str, typer.Option(help="One of 'collegium list adapters', or file.py:Class.")
    ] = "routing",
    output: Annotated[
        Path, typer.Option("--output", help="Where all of it goes; a new or empty folder.")
    ] = Path("adapted"),
    labels: Annotated[
        Path | None, typer.Option(help="A folder of masks, which only score the predictions.")
    ] = None,
    config: Config = None,
    algorithm: OfRun = None,
    seed: Seed = None,
    fold: Fold = None,
    variation: Variation = None,
    device: Device = "cpu",
) -> None:
    """Adapt trained models to unlabelled cases, and write predictions and an account."""
    from collegium.deploy import Choice, adapt_folder, open_models
    from collegium.experiment.config.building import build_adapter, read_settings
    from collegium.experiment.config.experiment import AdapterConfig
    from collegium.runtime import process

    process.prepare()
    asked = AdapterConfig(adapter, read_settings(settings or ()))
    chosen = replace(asked, params=build_adapter(asked).hyperparameters())
    trained = trained_with(config)
    handed = open_models(models, Choice(algorithm, seed, fold, variation), trained)
    typer.echo(adapt_folder(handed, images, chosen, output, labels=labels, device=device))


@app.command()
@guarded
def predict(
    model: Model,
    cases: Annotated[
        Path,
        typer.Argument(metavar="CASES", help="A folder of images, a manifest (CSV), or a table."),
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", help="Where masks or probabilities go; a new folder.")
    ] = Path("predictions"),
    site: OfSite = None,
    labels: Annotated[
        Path | None, typer.Option(help="A folder of masks that score the predictions.")
    ] = None,
    config: Config = None,
    algorithm: OfRun = None,
    seed: Seed = None,
    fold: Fold = None,
    variation: Variation = None,
    device: Device = "cpu",
) -> None:
    """Apply a global or personal model to new cases: masks on their grid, or probabilities."""
    from collegium.deploy import Choice, open_model, predict_folder
    from collegium.runtime import process

    process.prepare()
    trained = trained_with(config)
    choice = Choice(algorithm, seed, fold, variation)
    handed = open_model(model, choice, trained, site=site)
    typer.echo(predict_folder(handed, cases, output, labels=labels, device=device))


@app.command()
@guarded
def export(
    model: Model,
    *,
    output: Annotated[
        Path, typer.Option("--output", help="The bundle's folder, a new one.")
    ] = Path("bundle"),
    site: OfSite = None,
    config: Config = None,
    algorithm: OfRun = None,
    seed: Seed = None,
    fold: Fold = None,
    variation: Variation = None,
) -> None:
    """Write a global or personal model as a bundle that MONAI loads and runs."""
    from collegium.deploy import Choice, export_bundle, open_model

    trained = trained_with(config)
    choice = Choice(algorithm, seed, fold, variation)
    typer.echo(export_bundle(open_model(model, choice, trained, site=site), output))


@app.command()
@guarded
def demo(
    output: Annotated[
        Path, typer.Option("--output", help="Folder for the drawn scans and the run.")
    ] = Path("collegium-demo"),
) -> None:
    """Run five algorithms on drawn scans of four hospitals, and write the report."""
    from collegium.data.phantoms import make_federation

    federation = make_federation(output / "data", cases=24)
    places = {"federation": federation, "output": output / "run"}
    with as_file(files("collegium") / "demo.yaml") as config:
        run_and_report(config, [f"{key}={json.dumps(str(path))}" for key, path in places.items()])
