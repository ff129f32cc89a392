"""The command `export`."""

from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import (
    Algorithm,
    Fold,
    ModelPath,
    Seed,
    Site,
    TrainedWith,
    Variation,
    app,
    guarded,
    trained_with,
)


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

    trained = trained_with(config)
    choice = Choice(algorithm, seed, fold, variation)
    typer.echo(export_bundle(open_model(model, choice, trained, site=site), output))
