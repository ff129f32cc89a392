"""The command `check`."""

from typing import Annotated

import typer

from collegium.cli.base import Overrides, app, fail, guarded
from collegium.errors import CollegiumError


@app.command()
@guarded
def check(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name from the list, file.py:Class or module:Class."),
    ],
    hyperparameters: Overrides = None,
) -> None:
    """Check that an algorithm keeps the rules that every algorithm has to keep."""
    from collegium.experiment.config.building import build_algorithm, read_settings
    from collegium.experiment.config.experiment import AlgorithmConfig
    from collegium.runtime import process
    from collegium.testing.conformance import check_algorithm
    from collegium.testing.statements import ConformanceError, kinds_of

    algorithm = build_algorithm(AlgorithmConfig(name, read_settings(hyperparameters or ())))
    process.prepare()
    try:
        check_algorithm(algorithm, lambda passed: typer.echo(f"ok  {passed}"))
    except (ConformanceError, CollegiumError) as error:
        fail(str(error), 1)
    for kind, why in kinds_of(algorithm).items():
        if why:
            typer.echo(f"not checked with {kind}: {why}")
    typer.echo(f"{name} keeps every rule")
