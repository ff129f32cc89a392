"""Commands that look at something: what there is, data, configurations, algorithms."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from collegium.data.inspection import Inspection, LabelSize, SiteInspection
    from collegium.data.tableinspection import TableInspection
    from collegium.experiment.config.registry import Entry


def _described(row: "Entry") -> dict[str, Any]:
    return {"name": row.name, "summary": row.summary, "paper": row.paper}


MOST_PROBLEMS = 12
"""How many problems of a site `inspect` writes."""


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
    from collegium.data.phantoms import make_federation

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
        from collegium.experiment.config.registry import ALGORITHMS

        rows = [
            {**_described(row), "sends": sorted(row.kind.all_sends()) if row.kind else []}
            for row in ALGORITHMS.list()
        ]
    elif what == "adapters":
        from collegium.experiment.config.registry import ADAPTERS

        rows = [_described(row) for row in ADAPTERS.list()]
    elif what == "codecs":
        from collegium.experiment.config.registry import CODECS

        rows = [_described(row) for row in CODECS.list()]
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
    from collegium.experiment.config.building import build_algorithm, read_settings
    from collegium.experiment.config.experiment import AlgorithmConfig
    from collegium.runtime import process
    from collegium.testing.conformance import ConformanceError, check_algorithm

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
    from collegium.data.inspection import Inspection, inspect_federation
    from collegium.data.tableinspection import TableInspection, inspect_tables
    from collegium.experiment.config.experiment import load_federation

    federation = load_federation(config, overrides or ())
    inspection: Inspection | TableInspection
    if federation.table is None:
        inspection = inspect_federation(federation)
    else:
        inspection = inspect_tables(federation)
    if as_json:
        typer.echo(json.dumps(inspection.to_dict(), indent=2))
    elif isinstance(inspection, Inspection):
        show_inspection(inspection)
    else:
        show_tables(inspection)
    if not inspection.good:
        raise typer.Exit(3)


@config_app.command("show")
@guarded
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Write a configuration with every default filled in."""
    from collegium.experiment.config.experiment import load_config, to_yaml

    typer.echo(to_yaml(load_config(config, overrides or ())), nl=False)


def show_inspection(inspection: "Inspection") -> None:
    """Write tables of the sites and their labels, then notes, what to check, and problems.

    Of a site with many problems the first are written; JSON has them all.
    """
    columns = ["site", "cases", "patients", "train", "val", "test", "shape", "spacing", "axes"]
    rows = []
    for site in inspection.sites:
        spacings = ["x".join(map(_short, spacing.split("x"))) for spacing in site.spacings]
        rows.append([
            site.name if site.inside else f"{site.name}\n(outside)",
            *map(str, (site.cases, site.patients)),
            *(str(site.splits.get(split, 0)) for split in ("train", "val", "test")),
            _lines(site.shapes),
            _lines("" if spacing == "unknown" else spacing for spacing in spacings),
            _lines("" if axes == "none" else axes for axes in site.orientations),
            "\n".join([_lines(site.channels), *_lacking(site)]),
            "" if site.intensity is None else " to ".join(map(_short, site.intensity)),
        ])  # fmt: skip
    table(rows, [*columns, "ch", "range"])
    _show_labels(inspection)
    _show_remarks(inspection)


def show_tables(inspection: "TableInspection") -> None:
    """Write tables of the sites, their classes and what is missing, then notes and problems."""
    rows = [
        [
            site.name if site.inside else f"{site.name} (outside)",
            *map(str, (site.cases, site.patients)),
            *(str(site.splits.get(split, 0)) for split in ("train", "val", "test")),
            *(str(site.targets.get(word, 0)) for word in inspection.classes),
        ]
        for site in inspection.sites
    ]
    table(rows, ["site", "cases", "patients", "train", "val", "test", *inspection.classes])
    gaps = [
        [column, *(_share(site.missing.get(column, 0), site.cases) for site in inspection.sites)]
        for column in inspection.columns
        if any(site.missing.get(column) for site in inspection.sites)
    ]
    if gaps:
        typer.echo()
        table(gaps, ["missing", *(site.name for site in inspection.sites)])
    _show_remarks(inspection)


def _show_remarks(inspection: "Inspection | TableInspection") -> None:
    """Write notes, what to check, and problems; of a site with many problems the first."""
    for site in inspection.sites:
        for note in site.notes:
            typer.echo(f"note: site {site.name}: {note}")
    for finding in inspection.findings:
        typer.echo(f"to check: {finding.text}")
    for site in inspection.sites:
        for problem in site.problems[:MOST_PROBLEMS]:
            typer.echo(f"problem: {problem}")
        if len(site.problems) > MOST_PROBLEMS:
            more = len(site.problems) - MOST_PROBLEMS
            typer.echo(f"problem: site {site.name}: {more} more, which --json lists")
    for problem in inspection.problems:
        typer.echo(f"problem: {problem}")


def _show_labels(inspection: "Inspection") -> None:
    """Write how large each structure is, or how many cases have each class, site by site."""
    sizes = [
        [_structure(inspection, size), site.name, str(size.cases), size.unit,
         *map(_short, (size.least, size.middle, size.greatest))]
        for site in inspection.sites
        for size in site.sizes
    ]  # fmt: skip
    if sizes:
        typer.echo("sizes of the labels, over the cases that show them:")
        table(sorted(sizes), ["label", "site", "cases", "unit", "least", "median", "greatest"])
    targets = [
        [target, site.name, str(count)]
        for site in inspection.sites
        for target, count in site.targets.items()
    ]
    if targets:
        typer.echo("cases of each class:")
        table(sorted(targets), ["class", "site", "cases"])


def _structure(inspection: "Inspection", size: "LabelSize") -> str:
    """Write a class with its value before it, and a region by its name."""
    label = size.label
    return label if isinstance(label, str) else f"{label} {inspection.classes[label]}"


def _lacking(site: "SiteInspection") -> list[str]:
    """Write which channels a site lacks, the cases of how many where others have it."""
    return [
        f"no {one.channel}{f' {one.name}' if one.name else ''}"
        + (f" ({one.cases})" if one.cases < site.readable else "")
        for one in site.missing_channels
    ]


def _lines(values: Iterable[str], most: int = 3) -> str:
    """Write each value once, on a line of its own, the first few of many."""
    shown = [value for value in dict.fromkeys(values) if value]
    return "\n".join([*shown[:most], *([f"+ {len(shown) - most}"] if len(shown) > most else [])])


def _share(count: int, of: int) -> str:
    """Write how many and which share; nothing for none."""
    return f"{count} ({count / of:.0%})" if count else ""


def _short(number: str | float) -> str:
    """Write a number with three digits that count, and a word as it is."""
    try:
        value = float(number)
    except ValueError:
        return str(number)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


@app.command()
@guarded
def certificate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A root certificate, as PEM.")],
) -> None:
    """Say whom a root certificate is for, and whether it is good today."""
    from collegium.runtime.engines.certificates import check_certificates

    found = check_certificates(file)
    rows = [[one.subject, f"{one.begins:%Y-%m-%d}", f"{one.ends:%Y-%m-%d}"] for one in found]
    table(rows, ["subject", "valid from", "until"])
