"""The command `inspect`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from collegium.cli.base import AsJson, Overrides, app, guarded, print_table

if TYPE_CHECKING:
    from collegium.data.image_statistics import LabelSize
    from collegium.data.inspection import Inspection, SiteInspection
    from collegium.data.table_inspection import TableInspection

MAX_PROBLEMS = 12
"""The number of problems of a site that `inspect` prints; JSON has them all."""


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
    """Inspect all the data of a federation; exits with 3 if something is wrong with it."""
    from collegium.data.inspection import Inspection, inspect_federation
    from collegium.data.table_inspection import TableInspection, inspect_tables
    from collegium.experiment.config.experiment import load_federation

    federation = load_federation(config, overrides or ())
    look = inspect_federation if federation.table is None else inspect_tables
    inspection: Inspection | TableInspection = look(federation)
    if as_json:
        typer.echo(json.dumps(inspection.to_dict(), indent=2))
    elif isinstance(inspection, Inspection):
        show_inspection(inspection)
    else:
        show_tables(inspection)
    if not inspection.good:
        raise typer.Exit(3)


def show_inspection(inspection: "Inspection") -> None:
    """Print tables of the sites and their labels, then notes, findings to check and problems."""
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
            "\n".join([_lines(site.channels), *_missing_channels(site)]),
            "" if site.intensity is None else " to ".join(map(_short, site.intensity)),
        ])  # fmt: skip
    print_table(rows, [*columns, "ch", "range"])
    _show_labels(inspection)
    _show_remarks(inspection)


def show_tables(inspection: "TableInspection") -> None:
    """Print the sites, their classes, numbers and missing values, then notes and problems."""
    rows = [
        [
            site.name if site.inside else f"{site.name} (outside)",
            *map(str, (site.cases, site.patients)),
            *(str(site.splits.get(split, 0)) for split in ("train", "val", "test")),
            *(str(site.targets.get(word, 0)) for word in inspection.classes),
        ]
        for site in inspection.sites
    ]
    print_table(rows, ["site", "cases", "patients", "train", "val", "test", *inspection.classes])
    _show_numbers(inspection)
    missing = [
        [column, *(_share(site.missing.get(column, 0), site.cases) for site in inspection.sites)]
        for column in inspection.columns
        if any(site.missing.get(column) for site in inspection.sites)
    ]
    if missing:
        typer.echo()
        print_table(missing, ["missing", *(site.name for site in inspection.sites)])
    _show_remarks(inspection)


def _show_numbers(inspection: "TableInspection") -> None:
    """Print the known values of each numeric column, site by site."""
    rows = [
        [column, site.name, str(found.known),
         *("" if n is None else _short(n) for n in (found.least, found.median, found.greatest))]
        for column in inspection.columns
        for site in inspection.sites
        for found in [site.numbers.get(column)]
        if found is not None
    ]  # fmt: skip
    if rows:
        typer.echo()
        print_table(rows, ["numbers", "site", "known", "least", "median", "greatest"])


def _show_remarks(inspection: "Inspection | TableInspection") -> None:
    """Print notes, findings to check, and problems, at most `MAX_PROBLEMS` of a site."""
    for site in inspection.sites:
        for note in site.notes:
            typer.echo(f"note: site {site.name}: {note}")
    for note in inspection.notes:
        typer.echo(f"note: {note}")
    for finding in inspection.findings:
        typer.echo(f"to check: {finding.text}")
    for site in inspection.sites:
        for problem in site.problems[:MAX_PROBLEMS]:
            typer.echo(f"problem: {problem}")
        if len(site.problems) > MAX_PROBLEMS:
            more = len(site.problems) - MAX_PROBLEMS
            typer.echo(f"problem: site {site.name}: {more} more, which --json lists")
    for problem in inspection.problems:
        typer.echo(f"problem: {problem}")


def _show_labels(inspection: "Inspection") -> None:
    """Print the size of each structure, or the number of cases of each class, site by site."""
    sizes = [
        [_structure_name(inspection, size), site.name, str(size.cases), size.unit,
         *map(_short, (size.least, size.middle, size.greatest))]
        for site in inspection.sites
        for size in site.sizes
    ]  # fmt: skip
    if sizes:
        typer.echo("sizes of the labels, over the cases that show them:")
        print_table(
            sorted(sizes), ["label", "site", "cases", "unit", "least", "median", "greatest"]
        )
    targets = [
        [target, site.name, str(count)]
        for site in inspection.sites
        for target, count in site.targets.items()
    ]
    if targets:
        typer.echo("cases of each class:")
        print_table(sorted(targets), ["class", "site", "cases"])


def _structure_name(inspection: "Inspection", size: "LabelSize") -> str:
    """Return the value and name of a class, or the name of a region."""
    label = size.label
    return label if isinstance(label, str) else f"{label} {inspection.classes[label]}"


def _missing_channels(site: "SiteInspection") -> list[str]:
    """Return a line for each channel that a site lacks, with the cases if only some lack it."""
    return [
        f"no {missing.channel}{f' {missing.name}' if missing.name else ''}"
        + (f" ({missing.cases})" if missing.cases < site.readable else "")
        for missing in site.missing_channels
    ]


def _lines(values: Iterable[str], most: int = 3) -> str:
    """Return each value once, on a separate line, the first few of many."""
    shown = [value for value in dict.fromkeys(values) if value]
    return "\n".join([*shown[:most], *([f"+ {len(shown) - most}"] if len(shown) > most else [])])


def _share(count: int, of: int) -> str:
    """Return a count with its percentage, or nothing for 0."""
    return f"{count} ({count / of:.0%})" if count else ""


def _short(number: str | float) -> str:
    """Return a number with three significant digits, and a word unchanged."""
    try:
        value = float(number)
    except ValueError:
        return str(number)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
