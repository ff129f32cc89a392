"""The command `phantoms`."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import app, guarded


@app.command()
@guarded
def phantoms(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The output folder.")],
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 4,
    cases: Annotated[int, typer.Option(help="Number of images of each site.")] = 16,
    size: Annotated[int, typer.Option(help="Pixels along each side of an image.")] = 96,
    seed: Annotated[int, typer.Option(help="The random seed.")] = 0,
) -> None:
    """Generate a federation of phantom images, and an experiment over it."""
    from collegium.core.files import write_atomically
    from collegium.data.phantoms import make_federation

    typer.echo(make_federation(folder, sites, cases=cases, size=size, seed=seed))
    experiment = folder / "experiment.yaml"
    write_atomically(experiment, (files("collegium") / "demo.yaml").read_bytes())
    typer.echo(experiment)
