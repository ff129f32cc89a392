"""Divides the cases of a federation anew: measures them, and hands them out by a rule."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from collegium.data.discovery import case_of_row, read_manifest
from collegium.data.federation import FederationConfig, expand_root, find_cases
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
from collegium.errors import ConfigError, DataError


@dataclass(frozen=True)
class Division:
    """How cases are divided; see `collegium.data.partition`.

    Attributes:
        by: "volume", "ratio", "dirichlet" or "column".
        sites: How many sites, for "volume" and "dirichlet".
        ratios: For "ratio", negatives for one positive by site.
        alpha: For "dirichlet", the concentration.
        column: For "column", the manifest's column.
        seed: Of what is drawn.
        lack: Whether each site is to lack one channel of the images, in turn.
    """

    by: str
    sites: int = 4
    ratios: tuple[float, ...] = ()
    alpha: float = 0.5
    column: str = ""
    seed: int = 0
    lack: bool = False


def divide(config: FederationConfig, division: Division, manifest: Path) -> dict[str, int]:
    """Divide all cases of a federation, and write them as one manifest.

    Args:
        config: The federation; which site a case is at now does not matter.
        division: The rule.
        manifest: The file to write; its paths are relative to the federation's root.

    Returns:
        The number of cases of every new site.

    Raises:
        ConfigError: The rule cannot be kept, the federation learns from tables, the manifest is
            one of its own, or sites are to lack a channel and ``image.inputs`` is not said.
        DataError: A case cannot be used, or two cases of different sites have one id.
    """
    if config.table is not None:
        raise ConfigError("tables are not divided; write a column and a file for each site")
    root = expand_root(config.root)
    for name, site in config.sites.items():
        if site.manifest is not None and (root / site.manifest).resolve() == manifest.resolve():
            raise ConfigError(
                f"{manifest} is the manifest of site {name}, which is kept; choose another --output"
            )
    cases = [case for name in sorted(config.sites) for case in find_cases(config, name)]
    twice = [name for name, count in Counter(case.case for case in cases).items() if count > 1]
    if twice:
        raise DataError(
            f"case {twice[0]} is at two sites; give cases ids of their own to pool them"
        )
    sites = _sites(config, division, cases)
    if division.lack:
        cases = _lacking(cases, sites, config.image.inputs)
    write_manifest(manifest, cases, sites, root)
    return dict(sorted(Counter(sites.values()).items()))


def _sites(config: FederationConfig, division: Division, cases: list[Case]) -> Sites:
    if division.by == "column":
        return by_column(dict(_words(config, division.column)))
    members = [Member(case.case, case.patient, _value(config, division, case)) for case in cases]
    if division.by == "volume":
        return by_value(members, division.sites)
    if division.by == "ratio":
        return by_ratio(members, division.ratios, division.seed)
    return by_dirichlet(members, division.sites, division.alpha, division.seed)


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
