"""The command `adapt`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import (
    Algorithm,
    Device,
    Fold,
    Seed,
    TrainedWith,
    Variation,
    app,
    guarded,
    trained_with,
)


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
    trained = trained_with(config)
    opened = open_models(models, Choice(algorithm, seed, fold, variation), trained)
    typer.echo(adapt_folder(opened, images, complete, output, labels=labels, device=device))
