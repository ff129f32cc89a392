"""Redistributes the cases of a federation to new sites by a partition."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from collegium.core.settings import settings
from collegium.data.discovery import case_of_row, rows_of_site
from collegium.data.federation import check_names, find_cases, task_of_site
from collegium.data.federation_config import FederationConfig, expand_root
from collegium.data.partition import (
    PartitionCase,
    SiteAssignment,
    by_column,
    by_dirichlet,
    by_ratio,
    by_value,
    lack_channels,
    write_manifest,
)
from collegium.data.pooled_tables import PooledTables, pool_tables, write_tables
from collegium.data.preprocessing import decode_case
from collegium.data.site import Case
from collegium.errors import ConfigError, DataError


@settings
class PartitionRule:
    """A partition and its parameters; see `collegium.data.partition`.

    Attributes:
        by: "volume", "ratio", "dirichlet" or "column"; tables have no volume.
        sites: The number of sites, for "volume" and "dirichlet".
        ratios: For "ratio", negatives per positive by site.
        alpha: For "dirichlet", the concentration.
        column: For "column", the manifest's or the tables' column.
        seed: Seed of the draws.
        lack: Whether each site is to lack one channel of the images, in turn.
        sizes: For "volume", the number of patients of each site; empty: equal sizes.
    """

    by: Literal["volume", "ratio", "dirichlet", "column"]
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


def repartition(config: FederationConfig, rule: PartitionRule, output: Path) -> dict[str, int]:
    """Divide all cases of a federation and write them as one manifest, or a table for each site.

    Args:
        config: The federation; the present site of a case does not matter.
        rule: The partition.
        output: The manifest to write, whose paths are relative to the federation's root; for tables
            the folder of the files `<site>.csv`.

    Returns:
        The number of cases of every new site.

    Raises:
        ConfigError: The rule cannot be satisfied, the output is one of the federation's own files,
            or sites are to lack a channel and ``image.inputs`` is not set.
        DataError: A case cannot be used, two cases of different sites have one id, or the column
            would separate the cases of a patient.
    """
    divide = _divide_images if config.table is None else _divide_tables
    return dict(sorted(Counter(divide(config, rule, output).values()).items()))


def _divide_images(config: FederationConfig, rule: PartitionRule, output: Path) -> SiteAssignment:
    root = expand_root(config.root)
    check_names(config, sorted(config.sites))
    for name, site in config.sites.items():
        if site.label_map is not None:
            raise ConfigError(
                f"site {name} has a label_map, which a manifest cannot carry; write its masks with "
                "the classes of the task first"
            )
        if task_of_site(config, name) != config.task:
            raise ConfigError(
                f"the data set of site {name} calls a label ignore, which a manifest cannot carry; "
                f"write it with a value that is no class, at all sites the same, and set "
                f"task.ignore to it"
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
    if rule.by == "column":
        patients = {case.case: case.patient for case in cases}
        sites = _by_column(dict(_words(config, rule.column)), patients)
    else:
        sites = _by_value(
            [PartitionCase(case.case, case.patient, _value(config, rule, case)) for case in cases],
            rule,
        )
    if rule.lack:
        cases = _lacking(cases, sites, config.image.inputs)
    write_manifest(output, cases, sites, root)
    return sites


def _divide_tables(config: FederationConfig, rule: PartitionRule, folder: Path) -> SiteAssignment:
    if rule.by == "volume" or rule.lack:
        raise ConfigError(
            "tables have neither volumes nor channels; divide them by ratio, dirichlet or column"
        )
    pool = pool_tables(config)
    if rule.by == "column":
        patients = {where: row.patient for where, row in pool.rows.items()}
        sites = _by_column(_cells(pool, rule.column), patients)
    else:
        classes = {w: config.task.class_of(row.target, w, row=True) for w, row in pool.rows.items()}
        cases = [PartitionCase(w, row.patient, classes[w]) for w, row in pool.rows.items()]
        sites = _by_value(cases, rule)
    write_tables(config, pool, sites, folder)
    return sites


def _by_value(cases: Sequence[PartitionCase], rule: PartitionRule) -> SiteAssignment:
    if rule.by == "volume":
        return by_value(cases, rule.sizes or rule.sites)
    if rule.by == "ratio":
        return by_ratio(cases, rule.ratios, rule.seed)
    return by_dirichlet(cases, rule.sites, rule.alpha, rule.seed)


def _by_column(words: Mapping[str, str], patients: Mapping[str, str]) -> SiteAssignment:
    """Make each word a site, unless a patient would be at two."""
    sites = by_column(words)
    places = {(patient, sites[case]) for case, patient in patients.items()}
    cut = sum(count > 1 for count in Counter(patient for patient, _ in places).values())
    if cut:
        raise DataError(
            f"{cut} of the patients have cases with different words in this column; write one word "
            f"for all cases of a patient"
        )
    return sites


def _lacking(cases: Sequence[Case], sites: SiteAssignment, channels: int | None) -> list[Case]:
    """Remove one channel from the cases of every site, a different one at each."""
    if channels is None:
        raise ConfigError("set image.inputs to the number of channels, of which sites lack one")
    kept = lack_channels(sorted(set(sites.values())), channels)
    return [replace(case, channels=kept[sites[case.case]]) for case in cases if case.case in sites]


def _value(config: FederationConfig, rule: PartitionRule, case: Case) -> float:
    """Return a case's class, or the size of its foreground: in mm3 or mm2 if spacing is known."""
    if case.target is not None:
        return float(config.task.class_of(case.target, str(case)))
    raw = decode_case(case, config.image, config.task)
    label = raw.arrays.label
    count = 0 if label is None else np.count_nonzero(label)
    if rule.by == "dirichlet":  # the class of a segmented case: its most frequent structure
        values = np.bincount(label[label > 0]) if count and label is not None else np.zeros(1)
        return float(values.argmax())
    return count * (1.0 if raw.spacing is None else prod(raw.spacing))


def _words(config: FederationConfig, column: str) -> Iterator[tuple[str, str]]:
    """Yield the case and the word in a manifest's column."""
    root = expand_root(config.root)
    for name, site in sorted(config.sites.items()):
        if site.manifest is None:
            raise ConfigError(f"site {name} has no manifest, whose columns could divide its cases")
        for row in rows_of_site(name, root / site.manifest).values():
            if column.lower() not in row:
                raise ConfigError(
                    f"the manifest of site {name} has no column {column!r}; choose one of "
                    f"{', '.join(row)}"
                )
            yield case_of_row(row), row[column.lower()]


def _cells(pool: PooledTables, column: str) -> dict[str, str]:
    """Return the cells of a column, by the location of the row."""
    if column not in pool.columns:
        raise ConfigError(
            f"the tables have no column {column!r}; choose one of {', '.join(pool.columns)}"
        )
    return {where: row.cells.get(column, "") for where, row in pool.rows.items()}
