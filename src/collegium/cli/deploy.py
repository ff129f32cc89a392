"""The commands that use trained models: `adapt`, `predict` and `export`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collegium.cli.base import app, guarded

if TYPE_CHECKING:
    from collegium.experiment.config.experiment import ExperimentConfig

ModelPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A finished run, or a .safetensors file.")
]
Site = Annotated[
    str | None,
    typer.Option(help="The site of a run whose personal model is used; by default the global one."),
]
TrainedWith = Annotated[
    Path | None,
    typer.Option(help="For models without a run: the experiment that they were trained with."),
]
Algorithm = Annotated[str | None, typer.Option(help="The algorithm of a run.")]
Seed = Annotated[int | None, typer.Option(help="The seed of a run.")]
Fold = Annotated[
    str | None,
    typer.Option(
        help="The fold of a run: the site left out, the number of the fold, or both (as A,2)."
    ),
]
Variation = Annotated[str | None, typer.Option(help="The variation of a run.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


def trained_with(config: Path | None) -> "ExperimentConfig | None":
    """Read the experiment that model files were trained with; its data need not exist here."""
    from collegium.experiment.config.experiment import load_config

    return load_config(config, ["federation.root=."]) if config else None


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
        str, typer.Option(help="A name from 'collegium list adapters', or file.py:Class.")
    ] = "routing",
    output: Annotated[
        Path, typer.Option("--output", help="The output folder, new or empty.")
    ] = Path("adapted"),
    labels: Annotated[
        Path | None, typer.Option(help="A folder of masks, which only score the predictions.")
    ] = None,
    config: TrainedWith = None,
    algorithm: Algorithm = None,
    seed: Seed = None,
    fold: Fold = None,
    variation: Variation = None,
    device: Device = "cpu",
) -> None:
    """Adapt trained models to unlabelled cases, and write predictions and an account of it."""
    from collegium.deploy import Choice, adapt_folder, open_models
    from collegium.experiment.config.building import build_adapter, read_settings
    from collegium.experiment.config.experiment import AdapterConfig
    from collegium.runtime import process

    process.prepare()
    given = AdapterConfig(adapter, read_settings(settings or ()))
    complete = replace(given, params=build_adapter(given).hyperparameters())
    choice = Choice(algorithm, seed, fold, variation)
    opened = open_models(models, choice, trained_with(config))
    page = adapt_folder(opened, images, complete, output, labels=labels, device=device)
    account = json.loads((page.parent / "account.json").read_text(encoding="utf-8"))
    for line in account["answer"]:
        typer.echo(line)
    typer.echo(page)


@app.command()
@guarded
def predict(
    model: ModelPath,
    cases: Annotated[
        Path,
        typer.Argument(metavar="CASES", help="A folder of images, a manifest (CSV), or a table."),
    ],
    *,
    output: Annotated[
        Path,
        typer.Option("--output", help="The output folder of masks or probabilities, a new one."),
    ] = Path("predictions"),
    site: Site = None,
    labels: Annotated[
        Path | None, typer.Option(help="A folder of masks that score the predictions.")
    ] = None,
    config: TrainedWith = None,
    algorithm: Algorithm = None,
    seed: Seed = None,
    fold: Fold = None,
    variation: Variation = None,
    device: Device = "cpu",
) -> None:
    """Predict new cases with a global or personal model: masks on their grid, or probabilities."""
    from collegium.deploy import Choice, open_model, predict_folder
    from collegium.runtime import process

    process.prepare()
    choice = Choice(algorithm, seed, fold, variation)
    opened = open_model(model, choice, trained_with(config), site=site)
    typer.echo(predict_folder(opened, cases, output, labels=labels, device=device))


@app.command()
@guarded
def export(
    model: ModelPath,
    *,
    output: Annotated[
        Path, typer.Option("--output", help="The bundle's folder, a new one.")
    ] = Path("bundle"),
    site: Site = None,
    config: TrainedWith = None,
    algorithm: Algorithm = None,
    seed: Seed = None,
    fold: Fold = None,
    variation: Variation = None,
) -> None:
    """Export a global or personal model as a bundle that MONAI loads and runs."""
    from collegium.deploy import Choice, export_bundle, open_model

    choice = Choice(algorithm, seed, fold, variation)
    opened = open_model(model, choice, trained_with(config), site=site)
    typer.echo(export_bundle(opened, output))
