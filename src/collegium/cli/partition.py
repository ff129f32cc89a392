"""The command `partition`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from collegium.cli.base import Overrides, app, guarded, print_table, read_numbers


@app.command()
@guarded
def partition(
    federation: Annotated[
        Path, typer.Argument(metavar="FEDERATION", help="The pooled data: a federation's file.")
    ],
    overrides: Overrides = None,
    *,
    by: Annotated[
        Literal["volume", "ratio", "dirichlet", "column"],
        typer.Option(
            help="By label volume from small to large; by a ratio of negatives to positives; by a "
            "Dirichlet distribution; or by a column of the manifest or the tables."
        ),
    ] = "volume",
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
    proportions = read_numbers(ratios, float, "ratios", "1,2,4,7")
    patients = read_numbers(sizes, int, "sizes", "34,35")
    rule = PartitionRule(by, sites, proportions, alpha, column, seed, lack, patients)
    output = output or Path("manifest.csv" if config.table is None else "sites")
    counts = repartition(config, rule, output)
    print_table(([site, str(count)] for site, count in counts.items()), ["site", "cases"])
    typer.echo(output)
