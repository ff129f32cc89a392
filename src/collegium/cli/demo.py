"""The command `demo`."""

import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import app, guarded
from collegium.cli.run import run_and_report


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
        run_and_report(config, [f"{key}={json.dumps(str(path))}" for key, path in paths.items()])
