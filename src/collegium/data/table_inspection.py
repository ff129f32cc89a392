"""Inspects all the tables of a federation before training, and lists all problems."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collegium.data.decoded_image import listed
from collegium.data.federation import federation_notes, list_cases, names_note, read_site_table
from collegium.data.federation_config import FederationConfig, sites_of
from collegium.data.inspection import (
    FederationInspection,
    count_splits,
    count_unlabelled,
    unlabelled_notes,
)
from collegium.data.patient_ids import similar_ids
from collegium.data.site import Case
from collegium.data.splits import check_across_sites, count_shared_patients
from collegium.data.table_site import check_training_rows
from collegium.data.tables import Table, TableConfig
from collegium.errors import DataError


@dataclass(frozen=True)
class NumberRange:
    """The known values of a numeric column at one site.

    Attributes:
        known: Their number.
        least: The lowest; None if none is known, as the others.
        median: The median.
        greatest: The highest.
    """

    known: int
    least: float | None
    median: float | None
    greatest: float | None


@dataclass(frozen=True)
class TableSiteInspection:
    """The table of one site.

    Attributes:
        name: The site's name.
        inside: Whether it takes part in training.
        cases: Number of rows.
        patients: Number of patients.
        splits: Number of cases per split.
        patients_per_split: Number of patients per split.
        targets: Number of cases of each class, by its name.
        missing: By column, the number of rows in which the value is missing.
        unknown: By column, the words that are not in the vocabulary, and their counts.
        notes: What was noticed while reading.
        problems: One sentence for each problem, with its remedy.
        unlabelled: Number of rows without a class per split of their patients; they are not among
            the cases that are counted elsewhere.
        numbers: By numeric column, its known values in all rows.
        patients_by_name: Number of patients that the rows' ids suggest, if these are fewer than the
            rows and no column states the patients; otherwise None.
    """

    name: str
    inside: bool
    cases: int
    patients: int
    splits: dict[str, int]
    patients_per_split: dict[str, int]
    targets: dict[str, int]
    missing: dict[str, int]
    unknown: dict[str, dict[str, int]]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    unlabelled: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, NumberRange] = field(default_factory=dict)
    patients_by_name: int | None = None


@dataclass(frozen=True)
class TableInspection(FederationInspection):
    """The data of a federation of tables.

    Attributes:
        columns: The feature columns, in order.
    """

    sites: tuple[TableSiteInspection, ...]
    columns: tuple[str, ...]


def inspect_tables(config: FederationConfig, seed: int = 0) -> TableInspection:
    """Read the table of every site, and report its content and its problems.

    Args:
        config: The federation; its sites have tables.
        seed: Draws the splits that are counted.

    Raises:
        ConfigError: The root names an unset variable; all other problems are in the result.
    """
    assert config.table is not None, "the federation has no tables"
    found = {name: list_cases(config, name) for name in sorted(config.sites)}
    sites = tuple(_inspect(config, name, *found[name], seed=seed) for name in found)
    cases = {name: cases for name, (cases, _) in found.items()}
    findings = (*check_across_sites(cases), *similar_ids(cases))
    return TableInspection(
        config.name,
        config.task.classes,
        sites,
        count_shared_patients(cases, findings),
        findings,
        tuple(_problems(config, sites)),
        config.table.columns,
        notes=tuple(federation_notes(config)),
    )


def _inspect(
    config: FederationConfig,
    name: str,
    cases: Sequence[Case],
    problems: Sequence[str],
    *,
    seed: int,
) -> TableSiteInspection:
    problems, targets = list(problems), Counter[str]()
    table, known = read_site_table(config, name) if cases else None, {case.case for case in cases}
    for row, word in enumerate(table.targets if table else (), 1):
        if table is None or table.cases[row - 1] not in known:
            continue
        try:
            found = config.task.class_of(word, f"site {name}, row {row}", row=True)
            targets[config.task.classes[found]] += 1
        except DataError as error:
            problems.append(str(error))
    splits, counts = count_splits(config, cases, seed, problems)
    if splits and config.table is not None:
        try:
            check_training_rows(name, splits.values(), config.table)
        except DataError as error:
            problems.append(str(error))
    apart, _ = count_unlabelled(config, name, cases, splits)
    alike = names_note(config, name, cases)
    return TableSiteInspection(
        name=name,
        inside=name not in config.outside,
        cases=len(cases),
        patients=len({case.patient for case in cases}),
        **counts,
        targets={word: targets[word] for word in config.task.classes},
        missing=dict(table.missing) if table else {},
        unknown={column: dict(words) for column, words in table.unknown.items()} if table else {},
        notes=(
            *(table.notes if table else ()),
            *([alike[0]] if alike else []),
            *unlabelled_notes(apart),
        ),
        problems=tuple(problems),
        unlabelled=apart,
        numbers=_ranges(table, config.table) if table and config.table else {},
        patients_by_name=alike[1] if alike else None,
    )


def _ranges(table: Table, config: TableConfig) -> dict[str, NumberRange]:
    """Return the range and the median of each numeric column."""
    ranges = {}
    for column, values in zip(config.numeric, table.numbers.T, strict=True):
        known = values[~np.isnan(values)]
        found = (known.min(), np.median(known), known.max()) if len(known) else (None,) * 3
        ranges[column] = NumberRange(len(known), *(v if v is None else float(v) for v in found))
    return ranges


def _problems(config: FederationConfig, sites: Sequence[TableSiteInspection]) -> list[str]:
    """Report classes without a case and columns without a value at all sites that train."""
    inside = [site for site in sites if site.name in sites_of(config) and site.cases]
    if not inside:
        return []
    problems = []
    empty = [word for word in config.task.classes if not any(s.targets[word] for s in inside)]
    if empty:
        problems.append(
            f"no site that trains has a case of the class {listed(empty)}: take it out of "
            f"task.classes, or correct task.coding"
        )
    columns = {column for site in inside for column in site.missing}
    void = [c for c in columns if all(s.missing.get(c) == s.cases for s in inside)]
    if void:
        problems.append(
            f"no site that trains has a value in the column {listed(sorted(void))}: take it "
            f"out of federation.table, or correct its name"
        )
    return problems
