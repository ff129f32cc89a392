"""The commands that draw phantom images: `demo` and `phantoms`."""

import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import app, guarded
from collegium.cli.run import run
from collegium.errors import ConfigError


@app.command()
@guarded
def demo(
    output: Annotated[
        Path, typer.Option("--output", help="The folder of the synthetic scans and of the run.")
    ] = Path("collegium-demo"),
) -> None:
    """Train on synthetic scans of four hospitals, alone and together, and write the report."""
    from collegium.data.phantoms import UNEQUAL, make_federation

    federation = make_federation(output / "data", UNEQUAL, size=64)
    paths = {"federation": federation, "output": output / "run"}
    with as_file(files("collegium") / "demo.yaml") as config:
        run(config, [f"{key}={json.dumps(str(path))}" for key, path in paths.items()])


@app.command()
@guarded
def phantoms(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The output folder.")],
    sites: Annotated[int | None, typer.Option(help="Number of sites; 4 by default.")] = None,
    cases: Annotated[
        int | None, typer.Option(help="Number of images of each site; 16 by default.")
    ] = None,
    unequal: Annotated[
        bool, typer.Option("--unequal", help="The four sites of the demo, of unequal sizes.")
    ] = False,
    organs: Annotated[
        bool, typer.Option("--organs", help="The sites annotate different structures.")
    ] = False,
    size: Annotated[int, typer.Option(help="Pixels along each side of an image.")] = 96,
    seed: Annotated[int, typer.Option(help="The random seed.")] = 0,
) -> None:
    """Generate a federation of phantom images, and an experiment over it."""
    from collegium.core.files import write_atomically
    from collegium.data.phantoms import UNEQUAL, make_federation

    if unequal and (sites, cases) != (None, None):
        raise ConfigError(
            "phantoms: --unequal states the sites and their patients; leave out --sites and --cases"
        )
    chosen = UNEQUAL if unequal else 4 if sites is None else sites
    number = 16 if cases is None else cases
    typer.echo(make_federation(folder, chosen, cases=number, size=size, seed=seed, organs=organs))
    experiment = folder / "experiment.yaml"
    name = "organs.yaml" if organs else "demo.yaml"
    write_atomically(experiment, (files("collegium") / name).read_bytes())
    typer.echo(experiment)
