"""The command `partition`."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from collegium.cli.base import Overrides, app, guarded, print_table
from collegium.errors import ConfigError

T = TypeVar("T")


class Rule(StrEnum):
    """The rules by which a pool is partitioned."""

    volume = "volume"
    ratio = "ratio"
    dirichlet = "dirichlet"
    column = "column"


def read_ratios(text: str) -> tuple[float, ...]:
    """Parse numbers separated by commas.

    Raises:
        ConfigError: One of them is no number.
    """
    return _parse_list(text, float, "ratios", "numbers", "1,2,4,7")


def read_sizes(text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas.

    Raises:
        ConfigError: One of them is no whole number.
    """
    return _parse_list(text, int, "sizes", "whole numbers", "34,35")


def _parse_list(
    text: str, kind: Callable[[str], T], name: str, expected: str, example: str
) -> tuple[T, ...]:
    try:
        return tuple(kind(number) for number in text.split(",") if number.strip())
    except ValueError as error:
        raise ConfigError(
            f"the {name} are {text!r}; write {expected} with commas between them, as in {example}"
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
            help="By label volume from small to large; by a ratio of negatives to positives; by a "
            "Dirichlet distribution; or by a column of the manifest or the tables."
        ),
    ] = Rule.volume,
    sites: Annotated[int, typer.Option(help="The number of sites.")] = 4,
    sizes: Annotated[
        str, typer.Option(help="For volume: patients of each site, as 34,35, instead of --sites.")
    ] = "",
    ratios: Annotated[
        str, typer.Option(help="For ratio: one ratio for each site, as 1,2,4,7.")
    ] = "",
    alpha: Annotated[
        float, typer.Option(help="For dirichlet: the smaller, the more unequal the sites.")
    ] = 0.5,
    column: Annotated[str, typer.Option(help="For column: its name.")] = "",
    lack: Annotated[
        bool,
        typer.Option(
            "--lack-channel", help="Remove one channel at each site, another one in turn."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="The random seed.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The manifest to write (manifest.csv); for tables, the folder of the sites' "
            "tables (sites)."
        ),
    ] = None,
) -> None:
    """Partition pooled cases into unequal sites: write one manifest, or a table for each site."""
    from collegium.data.repartition import PartitionRule, repartition
    from collegium.experiment.config.experiment import load_federation

    config = load_federation(federation, overrides or ())
    rule = PartitionRule(
        by.value, sites, read_ratios(ratios), alpha, column, seed, lack, read_sizes(sizes)
    )
    output = output or Path("manifest.csv" if config.table is None else "sites")
    counts = repartition(config, rule, output)
    print_table(([site, str(count)] for site, count in counts.items()), ["site", "cases"])
    typer.echo(output)
