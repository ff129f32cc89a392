"""Commands that look at something: what there is, data, configurations, algorithms."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collegium.cli.base import (
    AsJson,
    ConfigPath,
    Overrides,
    app,
    cell,
    config_app,
    fail,
    guarded,
    table,
)
from collegium.errors import CollegiumError

if TYPE_CHECKING:
    from collegium.data.inspection import Inspection


@app.command()
@guarded
def phantoms(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")],
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 4,
    cases: Annotated[int, typer.Option(help="Number of images of each site.")] = 16,
    size: Annotated[int, typer.Option(help="Pixels along each side of an image.")] = 96,
    seed: Annotated[int, typer.Option(help="Which federation is drawn.")] = 0,
) -> None:
    """Draw a phantom federation and write its files."""
    from collegium.phantoms import make_federation

    typer.echo(make_federation(folder, sites, cases=cases, size=size, seed=seed))


@app.command("list")
@guarded
def list_(
    what: Annotated[
        str, typer.Argument(metavar="[adapters|algorithms|codecs|models]", help="What to list.")
    ] = "algorithms",
    *,
    as_json: AsJson = False,
) -> None:
    """List the adapters, the algorithms, the codecs or the models."""
    if what == "algorithms":
        from collegium.registry import list_algorithms

        rows = [{**row._asdict(), "sends": list(row.sends)} for row in list_algorithms()]
    elif what == "adapters":
        from collegium.registry import list_adapters

        rows = [row._asdict() for row in list_adapters()]
    elif what == "codecs":
        from collegium.registry import list_codecs

        rows = [row._asdict() for row in list_codecs()]
    elif what == "models":
        from collegium.models import MODELS

        rows = [{"name": name, "summary": summary} for name, summary in MODELS.items()]
    else:
        fail(f"there is no list of {what!r}; ask for adapters, algorithms, codecs or models", 2)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        table([[cell(value) for value in row.values()] for row in rows], list(rows[0]))


@app.command()
@guarded
def check(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name from the list, file.py:Class or module:Class."),
    ],
    hyperparameters: Overrides = None,
) -> None:
    """Hold an algorithm to the rules that every algorithm has to keep."""
    from collegium import process
    from collegium.building import build_algorithm, read_settings
    from collegium.config import AlgorithmConfig
    from collegium.testing import ConformanceError, check_algorithm

    algorithm = build_algorithm(AlgorithmConfig(name, read_settings(hyperparameters or ())))
    process.prepare()
    try:
        check_algorithm(algorithm, lambda passed: typer.echo(f"ok  {passed}"))
    except (ConformanceError, CollegiumError) as error:
        fail(str(error), 1)
    typer.echo(f"{name} keeps every rule")


@app.command()
@guarded
def inspect(
    config: Annotated[
        Path, typer.Argument(metavar="FILE", help="A federation's or an experiment's YAML file.")
    ],
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Look at all the data of a federation; ends with 3 if something is wrong with it."""
    from collegium.config import load_federation
    from collegium.data.inspection import inspect_federation

    inspection = inspect_federation(load_federation(config, overrides or ()))
    if as_json:
        typer.echo(json.dumps(inspection.to_dict(), indent=2))
    else:
        show_inspection(inspection)
    if not inspection.good:
        raise typer.Exit(3)


@config_app.command("show")
@guarded
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Write a configuration with every default filled in."""
    from collegium.config import load_config, to_yaml

    typer.echo(to_yaml(load_config(config, overrides or ())), nl=False)


def show_inspection(inspection: "Inspection") -> None:
    """Write a table of the sites, then notes, what a person should check, and problems."""
    columns = ["site", "cases", "patients", "train", "val", "test", "shapes", "channels", "range"]
    rows = []
    for site in inspection.sites:
        shapes = list(site.shapes)[:3] + ["..."] * (len(site.shapes) > 3)
        rows.append([
            site.name if site.inside else f"{site.name} (outside)",
            *map(str, (site.cases, site.patients)),
            *(str(site.splits.get(split, 0)) for split in ("train", "val", "test")),
            ", ".join(shapes),
            ", ".join(site.channels),
            "" if site.intensity is None else "{:g} to {:g}".format(*site.intensity),
        ])  # fmt: skip
    table(rows, columns)
    for site in inspection.sites:
        for note in site.notes:
            typer.echo(f"note: site {site.name}: {note}")
    for finding in inspection.findings:
        typer.echo(f"to check: {finding.text}")
    problems = [p for site in inspection.sites for p in site.problems]
    for problem in [*problems, *inspection.problems]:
        typer.echo(f"problem: {problem}")
