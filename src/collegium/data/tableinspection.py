"""Looks at all the tables of a federation before anybody trains, and lists all that is wrong."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from collegium.data.decoded import listed
from collegium.data.federation import FederationConfig, list_cases, sites_of, table_of
from collegium.data.inspection import Inspected, counted_splits
from collegium.data.site import Case
from collegium.data.splits import check_across_sites, count_shared
from collegium.errors import DataError


@dataclass(frozen=True)
class TableSite:
    """What the table of one site holds.

    Attributes:
        name: The site's name.
        inside: Whether it takes part in training.
        cases: Number of rows.
        patients: Number of patients.
        splits: Number of cases per split.
        patients_per_split: Number of patients per split.
        targets: Number of cases of each class, by its name.
        missing: By column, in how many rows a value is missing.
        unknown: By column, the words that are not in the vocabulary, and how often they stand.
        notes: What was noticed while reading.
        problems: One sentence for each problem, with its remedy.
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


@dataclass(frozen=True)
class TableInspection(Inspected):
    """What a federation of tables holds.

    Attributes:
        columns: The columns that are learnt from, in order.
    """

    sites: tuple[TableSite, ...]
    columns: tuple[str, ...]


def inspect_tables(config: FederationConfig, seed: int = 0) -> TableInspection:
    """Read the table of every site and say what is there and what is wrong.

    Args:
        config: The federation; its sites have tables.
        seed: Draws the splits that are counted.

    Raises:
        ConfigError: If the root names an unset variable; all else is listed in the answer.
    """
    assert config.table is not None, "the federation has no tables"
    found = {name: list_cases(config, name) for name in sorted(config.sites)}
    sites = tuple(_inspect(config, name, *found[name], seed=seed) for name in found)
    cases = {name: cases for name, (cases, _) in found.items()}
    findings = tuple(check_across_sites(cases))
    return TableInspection(
        config.name,
        config.task.classes,
        sites,
        count_shared(cases, findings),
        findings,
        tuple(_problems(config, sites)),
        config.table.columns,
    )


def _inspect(
    config: FederationConfig,
    name: str,
    cases: Sequence[Case],
    problems: Sequence[str],
    *,
    seed: int,
) -> TableSite:
    problems, targets = list(problems), Counter[str]()
    for place, case in enumerate(_in_order(config, name, cases), 1):
        try:
            where = f"site {name}, row {place}"
            found = config.task.class_of(str(case.target), where, row=True)
            targets[config.task.classes[found]] += 1
        except DataError as error:
            problems.append(str(error))
    _, counts = counted_splits(config, cases, seed, problems)
    table = table_of(config, name) if cases else None
    return TableSite(
        name=name,
        inside=name not in config.outside,
        cases=len(cases),
        patients=len({case.patient for case in cases}),
        **counts,
        targets={word: targets[word] for word in config.task.classes},
        missing=dict(table.missing) if table else {},
        unknown={column: dict(words) for column, words in table.unknown.items()} if table else {},
        notes=table.notes if table else (),
        problems=tuple(problems),
    )


def _in_order(config: FederationConfig, name: str, cases: Sequence[Case]) -> list[Case]:
    """Give the cases in the order of their rows."""
    if not cases:
        return []
    by_id = {case.case: case for case in cases}
    return [by_id[case] for case in table_of(config, name).cases if case in by_id]


def _problems(config: FederationConfig, sites: Sequence[TableSite]) -> list[str]:
    """Say which classes nobody has, and which columns nobody has filled in."""
    inside = [site for site in sites if site.name in sites_of(config) and site.cases]
    problems = []
    if inside:
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
