"""Commands before a run: making a federation out of pooled data."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from collegium.cli.base import Overrides, app, guarded, table
from collegium.errors import ConfigError

T = TypeVar("T")


class Rule(StrEnum):
    """How a pool is divided."""

    volume = "volume"
    ratio = "ratio"
    dirichlet = "dirichlet"
    column = "column"


def read_ratios(text: str) -> tuple[float, ...]:
    """Read numbers with commas between them.

    Raises:
        ConfigError: Something else stands there.
    """
    return _listed(text, float, "the ratios are", "numbers", "1,2,4,7")


def read_sizes(text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them.

    Raises:
        ConfigError: Something else stands there.
    """
    return _listed(text, int, "the sizes are", "whole numbers", "34,35")


def _listed(
    text: str, kind: Callable[[str], T], are: str, wanted: str, example: str
) -> tuple[T, ...]:
    try:
        return tuple(kind(number) for number in text.split(",") if number.strip())
    except ValueError as error:
        raise ConfigError(
            f"{are} {text!r}; write {wanted} with commas between them, as in {example}"
        ) from error


@app.command()
@guarded
def partition(
    federation: Annotated[
        Path, typer.Argument(metavar="FEDERATION", help="The pooled data: a federation's file.")
    ],
    overrides: Overrides = None,
    *,
    by: Annotated[
        Rule,
        typer.Option(
            help="Label volumes from small to large; negatives for one positive; "
            "Dirichlet; or a column of the manifest or the tables."
        ),
    ] = Rule.volume,
    sites: Annotated[int, typer.Option(help="How many sites.")] = 4,
    sizes: Annotated[
        str, typer.Option(help="For volume: patients of each site, as 34,35, in place of --sites.")
    ] = "",
    ratios: Annotated[str, typer.Option(help="For ratio: one for each site, as 1,2,4,7.")] = "",
    alpha: Annotated[float, typer.Option(help="For dirichlet: small for unequal sites.")] = 0.5,
    column: Annotated[str, typer.Option(help="For column: its name.")] = "",
    lack: Annotated[
        bool, typer.Option("--lack-channel", help="Let each site lack one channel, in turn.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The manifest to write (manifest.csv); of tables, the folder for one of each site "
            "(sites)."
        ),
    ] = None,
) -> None:
    """Divide pooled cases into unequal sites: write one manifest, or a table for each site."""
    from collegium.data.pooling import Division, divide
    from collegium.experiment.config.experiment import load_federation

    config = load_federation(federation, overrides or ())
    division = Division(
        by.value, sites, read_ratios(ratios), alpha, column, seed, lack, read_sizes(sizes)
    )
    output = output or Path("manifest.csv" if config.table is None else "sites")
    counts = divide(config, division, output)
    table([[site, str(count)] for site, count in counts.items()], ["site", "cases"])
    typer.echo(output)
