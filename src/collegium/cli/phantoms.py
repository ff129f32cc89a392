"""The commands that draw phantom images: `demo` and `phantoms`."""

import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import app, guarded
from collegium.cli.run import run


@app.command()
@guarded
def demo(
    output: Annotated[
        Path, typer.Option("--output", help="The folder of the synthetic scans and of the run.")
    ] = Path("collegium-demo"),
) -> None:
    """Run five algorithms on synthetic scans of four hospitals, and write the report."""
    from collegium.data.phantoms import make_federation

    federation = make_federation(output / "data", cases=24)
    paths = {"federation": federation, "output": output / "run"}
    with as_file(files("collegium") / "demo.yaml") as config:
        run(config, [f"{key}={json.dumps(str(path))}" for key, path in paths.items()])


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
