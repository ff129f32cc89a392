"""Divides the cases of a federation anew: measures them, and hands them out by a rule."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from collegium.data.discovery import case_of_row, read_manifest
from collegium.data.federation import FederationConfig, check_names, expand_root, find_cases
from collegium.data.partition import (
    Member,
    Sites,
    by_column,
    by_dirichlet,
    by_ratio,
    by_value,
    lack_channels,
    write_manifest,
)
from collegium.data.recipe import decode
from collegium.data.site import Case
from collegium.data.tablepooling import Pool, pool_tables, write_tables
from collegium.errors import ConfigError, DataError


@dataclass(frozen=True)
class Division:
    """How cases are divided; see `collegium.data.partition`.

    Attributes:
        by: "volume", "ratio", "dirichlet" or "column"; tables have no volume.
        sites: How many sites, for "volume" and "dirichlet".
        ratios: For "ratio", negatives for one positive by site.
        alpha: For "dirichlet", the concentration.
        column: For "column", the manifest's or the tables' column.
        seed: Of what is drawn.
        lack: Whether each site is to lack one channel of the images, in turn.
        sizes: For "volume", how many patients each site gets; none: equally many.
    """

    by: str
    sites: int = 4
    ratios: tuple[float, ...] = ()
    alpha: float = 0.5
    column: str = ""
    seed: int = 0
    lack: bool = False
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.sizes and self.by != "volume":
            raise ConfigError(f"sizes are for a division by volume, not by {self.by}; leave them")


def divide(config: FederationConfig, division: Division, output: Path) -> dict[str, int]:
    """Divide all cases of a federation and write them as one manifest, or a table for each site.

    Args:
        config: The federation; which site a case is at now does not matter.
        division: The rule.
        output: The manifest to write, whose paths are relative to the federation's root; of tables
            the folder that gets `<site>.csv`.

    Returns:
        The number of cases of every new site.

    Raises:
        ConfigError: The rule cannot be kept, the output is one of the federation's own files, or
            sites are to lack a channel and ``image.inputs`` is not said.
        DataError: A case cannot be used, two cases of different sites have one id, or the column
            cuts through a patient.
    """
    rule = _divide_images if config.table is None else _divide_tables
    return dict(sorted(Counter(rule(config, division, output).values()).items()))


def _divide_images(config: FederationConfig, division: Division, output: Path) -> Sites:
    root = expand_root(config.root)
    check_names(config, sorted(config.sites))
    for name, site in config.sites.items():
        if site.label_map is not None:
            raise ConfigError(
                f"site {name} has a label_map, which a manifest cannot carry; write its masks with "
                "the classes of the task first"
            )
        if site.manifest is not None and (root / site.manifest).resolve() == output.resolve():
            raise ConfigError(
                f"{output} is the manifest of site {name}, which is kept; choose another --output"
            )
    cases = [case for name in sorted(config.sites) for case in find_cases(config, name)]
    twice = [name for name, count in Counter(case.case for case in cases).items() if count > 1]
    if twice:
        raise DataError(
            f"case {twice[0]} is at two sites; give cases ids of their own to pool them"
        )
    if division.by == "column":
        patients = {case.case: case.patient for case in cases}
        sites = _by_column(dict(_words(config, division.column)), patients)
    else:
        sites = _by_value(
            [Member(case.case, case.patient, _value(config, division, case)) for case in cases],
            division,
        )
    if division.lack:
        cases = _lacking(cases, sites, config.image.inputs)
    write_manifest(output, cases, sites, root)
    return sites


def _divide_tables(config: FederationConfig, division: Division, folder: Path) -> Sites:
    if division.by == "volume" or division.lack:
        raise ConfigError(
            "tables have neither volumes nor channels; divide them by ratio, dirichlet or column"
        )
    pool = pool_tables(config)
    if division.by == "column":
        patients = {where: row.patient for where, row in pool.rows.items()}
        sites = _by_column(_cells(pool, division.column), patients)
    else:
        classes = {w: config.task.class_of(row.target, w, row=True) for w, row in pool.rows.items()}
        members = [Member(w, row.patient, classes[w]) for w, row in pool.rows.items()]
        sites = _by_value(members, division)
    write_tables(config, pool, sites, folder)
    return sites


def _by_value(members: Sequence[Member], division: Division) -> Sites:
    if division.by == "volume":
        return by_value(members, division.sizes or division.sites)
    if division.by == "ratio":
        return by_ratio(members, division.ratios, division.seed)
    return by_dirichlet(members, division.sites, division.alpha, division.seed)


def _by_column(words: Mapping[str, str], patients: Mapping[str, str]) -> Sites:
    """Make a site of each word, unless a patient would be at two."""
    sites = by_column(words)
    there: dict[str, set[str]] = defaultdict(set)
    for case, patient in patients.items():
        there[patient].add(sites[case])
    cut = sum(len(names) > 1 for names in there.values())
    if cut:
        raise DataError(
            f"{cut} of the patients have cases with different words in this column; write one word "
            f"for all cases of a patient"
        )
    return sites


def _lacking(cases: Sequence[Case], sites: Sites, channels: int | None) -> list[Case]:
    """Take one channel from the cases of every site, another at each."""
    if channels is None:
        raise ConfigError("set image.inputs to the number of channels, of which sites lack one")
    kept = lack_channels(sorted(set(sites.values())), channels)
    return [replace(case, channels=kept[sites[case.case]]) for case in cases if case.case in sites]


def _value(config: FederationConfig, division: Division, case: Case) -> float:
    """Return a case's class, or the volume of its foreground: in mm where that is known."""
    if case.target is not None:
        return float(config.task.class_of(case.target, str(case)))
    raw = decode(case, config.image, config.task)
    label = raw.arrays.label
    count = 0 if label is None else np.count_nonzero(label)
    if division.by == "dirichlet":  # the class of a segmented case: its most frequent structure
        values = np.bincount(label[label > 0]) if count and label is not None else np.zeros(1)
        return float(values.argmax())
    return count * (1.0 if raw.spacing is None else prod(raw.spacing))


def _words(config: FederationConfig, column: str) -> Iterator[tuple[str, str]]:
    """Yield case and word of a manifest's column."""
    root = expand_root(config.root)
    for name, site in sorted(config.sites.items()):
        if site.manifest is None:
            raise ConfigError(f"site {name} has no manifest, whose columns could divide its cases")
        for _, row in read_manifest(name, root / site.manifest):
            if column.lower() not in row:
                raise ConfigError(
                    f"the manifest of site {name} has no column {column!r}; choose one of "
                    f"{', '.join(row)}"
                )
            if row.get("site", name) == name:
                yield case_of_row(row), row[column.lower()]


def _cells(pool: Pool, column: str) -> dict[str, str]:
    """Return what stands in a column, by the place of the row."""
    if column not in pool.columns:
        raise ConfigError(
            f"the tables have no column {column!r}; choose one of {', '.join(pool.columns)}"
        )
    return {where: row.cells.get(column, "") for where, row in pool.rows.items()}
