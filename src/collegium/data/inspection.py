"""Looks at all the data of a federation before anybody trains, and lists all that is wrong."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from collegium.data.federation import FederationConfig, list_cases
from collegium.data.recipe import RawCase, decode
from collegium.data.site import Case
from collegium.data.splits import SPLITS, Finding, check_across_sites, draw_splits
from collegium.errors import CollegiumError


@dataclass(frozen=True)
class SiteInspection:
    """What one site holds. Counts are of usable cases.

    Attributes:
        name: The site's name.
        inside: Whether it takes part in training.
        cases: Number of cases found with all their files.
        readable: Number of these that could be read.
        patients: Number of patients.
        splits: Number of cases per split.
        patients_per_split: Number of patients per split.
        shapes: Number of cases per spatial shape.
        spacings: Number of cases per spacing in mm; the key "unknown" where files do not say.
        channels: Number of cases per channel count.
        intensity: Least and greatest stored intensity; None where nothing could be read.
        labels: Number of cases in which each label value occurs.
        foreground: Share of the pixels (inside the field of view) that are not background.
        with_fov: Number of cases with a field of view.
        notes: What was noticed and mended while reading.
        problems: One sentence for each problem, with its remedy.
    """

    name: str
    inside: bool
    cases: int
    readable: int
    patients: int
    splits: dict[str, int]
    patients_per_split: dict[str, int]
    shapes: dict[str, int]
    spacings: dict[str, int]
    channels: dict[str, int]
    intensity: tuple[float, float] | None
    labels: dict[str, int]
    foreground: float | None
    with_fov: int
    notes: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """What a federation holds.

    Attributes:
        name: The federation's name.
        sites: One entry per site, inside and outside, sorted by name.
        shared_patients: Number of patients who are at several sites.
        findings: Shared patients and byte-identical images, across and within sites.
        problems: Problems of the federation as a whole.
    """

    name: str
    sites: tuple[SiteInspection, ...]
    shared_patients: int
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether nothing stands in the way of training; findings are for a person to judge."""
        return not (self.problems or any(site.problems for site in self.sites))

    def to_dict(self) -> dict[str, Any]:
        """Give it all as what JSON can hold."""
        findings = [
            {**asdict(finding), "files": [str(path) for path in finding.files]}
            for finding in self.findings
        ]
        return {**asdict(self), "findings": findings, "good": self.good}


def inspect_federation(config: FederationConfig, seed: int = 0) -> Inspection:
    """Read every case of every site and say what is there and what is wrong.

    Args:
        config: The federation.
        seed: Draws the splits that are counted.

    Raises:
        ConfigError: If the root names an unset variable; all else is listed in the answer.
    """
    found = {name: list_cases(config, name) for name in sorted(config.sites)}
    sites = tuple(
        _inspect_site(config, name, cases, problems, seed)
        for name, (cases, problems) in found.items()
    )
    findings = tuple(check_across_sites({name: cases for name, (cases, _) in found.items()}))
    channels = {count for site in sites for count in site.channels}
    problems = []
    if len(channels) > 1:
        listed = ", ".join(f"{site.name}: {'/'.join(site.channels)}" for site in sites)
        problems.append(
            f"the images of the federation have different numbers of channels ({listed}): "
            "set image.channels to grey, rgb or green"
        )
    shared = sum(finding.kind == "shared_patient" for finding in findings)
    return Inspection(config.name, sites, shared, findings, tuple(problems))


def _inspect_site(
    config: FederationConfig, name: str, cases: Sequence[Case], problems: Sequence[str], seed: int
) -> SiteInspection:
    tally, problems = _Tally(), list(problems)
    for case in cases:
        try:
            tally.add(decode(case, config.image, config.task))
        except CollegiumError as error:
            problems.append(str(error))
    splits: dict[str, str] = {}
    try:
        splits = draw_splits(cases, config.splits, seed)
    except CollegiumError as error:
        problems.append(str(error))
    per_split = {case.patient: splits[case.case] for case in cases if splits}
    return SiteInspection(
        name=name,
        inside=name not in config.outside,
        cases=len(cases),
        readable=tally.count,
        patients=len({case.patient for case in cases}),
        splits={split: list(splits.values()).count(split) for split in SPLITS},
        patients_per_split={split: list(per_split.values()).count(split) for split in SPLITS},
        shapes=dict(tally.shapes),
        spacings=dict(tally.spacings),
        channels=dict(tally.channels),
        intensity=tally.intensity,
        labels={str(label): count for label, count in sorted(tally.labels.items())},
        foreground=tally.foreground / tally.counted if tally.counted else None,
        with_fov=sum(case.fov is not None for case in cases),
        notes=_summed_up(tally.notes),
        problems=tuple(problems + _one_shape_problems(config, name, tally)),
    )


def _one_shape_problems(config: FederationConfig, name: str, tally: "_Tally") -> list[str]:
    problems = []
    if len(tally.channels) > 1:
        problems.append(
            f"site {name}: its images have {' and '.join(tally.channels)} channels: "
            "set image.channels to grey, rgb or green"
        )
    exact = isinstance(config.image.size, tuple)
    if len(tally.shapes) > 1 and config.sampling.crop is None and not exact:
        problems.append(
            f"site {name}: its images have {len(tally.shapes)} shapes and do not fit into one "
            "batch: set sampling.crop or an exact image.size"
        )
    return problems


def _summed_up(notes: Sequence[str]) -> tuple[str, ...]:
    """Say once what was noticed of many files; notes read `<file>: <text>`."""
    files: dict[str, list[str]] = {}
    for note in notes:
        file, _, text = note.partition(": ")
        files.setdefault(text, []).append(file)
    return tuple(
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}"
        for text, names in files.items()
    )


class _Tally:
    """Counts what the cases of a site hold."""

    def __init__(self) -> None:
        self.count = 0
        self.shapes: Counter[str] = Counter()
        self.spacings: Counter[str] = Counter()
        self.channels: Counter[str] = Counter()
        self.labels: Counter[int] = Counter()
        self.intensity: tuple[float, float] | None = None
        self.foreground = 0
        self.counted = 0
        self.notes: list[str] = []

    def add(self, raw: RawCase) -> None:
        image, label, mask = raw.arrays.image, raw.arrays.label, raw.arrays.mask
        self.count += 1
        self.shapes["x".join(map(str, label.shape))] += 1
        self.channels[str(len(image))] += 1
        spacing = raw.spacing
        self.spacings["x".join(f"{mm:g}" for mm in spacing) if spacing else "unknown"] += 1
        low, high = float(image.min()), float(image.max())
        before = self.intensity or (low, high)
        self.intensity = min(low, before[0]), max(high, before[1])
        self.labels.update(np.unique(label).tolist())
        inside = label if mask is None else label[mask]
        self.foreground += int(np.count_nonzero(inside))
        self.counted += inside.size
        self.notes += raw.notes
