"""The command `predict`."""

from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import (
    Algorithm,
    CasesPath,
    Device,
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
def predict(
    model: ModelPath,
    cases: CasesPath,
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
    trained = trained_with(config)
    choice = Choice(algorithm, seed, fold, variation)
    opened = open_model(model, choice, trained, site=site)
    typer.echo(predict_folder(opened, cases, output, labels=labels, device=device))
