"""Looks at all the data of a federation before anybody trains, and lists all that is wrong."""

import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from collegium.data.federation import FederationConfig, list_cases, names_of, task_at
from collegium.data.fingerprints import find_copies
from collegium.data.naming import Names, channel_names, name_problems
from collegium.data.recipe import decode
from collegium.data.site import Case
from collegium.data.splits import (
    SPLITS,
    Finding,
    check_across_sites,
    count_shared,
    draw_splits,
    equal_channels,
)
from collegium.data.tally import LabelSize, MissingChannel, Tally
from collegium.errors import CollegiumError

__all__ = ["Inspected", "Inspection", "LabelSize", "MissingChannel", "SiteInspection"]
__all__ += ["counted_splits", "inspect_federation"]


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
        orientations: Number of cases per directions of the stored axes, such as "LPS"; the key
            "none" counts pictures.
        channels: Number of cases per channel count.
        missing_channels: Which of the network's channels are lacking.
        intensity: Least and greatest stored intensity; None where nothing could be read.
        labels: Number of cases in which each label value occurs.
        sizes: How large each label but the background is and, behind these, each region.
        targets: Number of cases of each class as it is written, where cases are classified.
        foreground: Share of the pixels (inside the field of view) that are not background.
        with_fov: Number of cases with a field of view.
        notes: What was noticed and mended while reading, and files that are not used.
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
    orientations: dict[str, int]
    channels: dict[str, int]
    missing_channels: tuple[MissingChannel, ...]
    intensity: tuple[float, float] | None
    labels: dict[str, int]
    sizes: tuple[LabelSize, ...]
    targets: dict[str, int]
    foreground: float | None
    with_fov: int
    notes: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Inspected:
    """What a federation holds, whatever its data are.

    Attributes:
        name: The federation's name.
        classes: Names of the classes by value.
        sites: One entry per site, inside and outside, sorted by name; each has its `problems`.
        shared_patients: Number of patients whose stated ids are at several sites; None where no
            patient is stated.
        findings: Shared patients and, of images, copies across and within sites.
        problems: Problems of the federation as a whole.
    """

    name: str
    classes: tuple[str, ...]
    sites: tuple[Any, ...]
    shared_patients: int | None
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


@dataclass(frozen=True)
class Inspection(Inspected):
    """What a federation of images holds; copies are told byte by byte and pixel by pixel."""

    sites: tuple[SiteInspection, ...]


def counted_splits(
    config: FederationConfig, cases: Sequence[Case], seed: int, problems: list[str]
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Draw the splits of a site's cases; what keeps it from being done is added to the problems.

    Returns:
        The split of every case; and, as fields of a site's entry, how many cases and how many
        patients each split has.
    """
    splits: dict[str, str] = {}
    try:
        splits = draw_splits(cases, config.splits, seed)
    except CollegiumError as error:
        problems.append(str(error))
    per_split = {case.patient: splits[case.case] for case in cases if splits}
    counts = {
        field: {split: [*found.values()].count(split) for split in SPLITS}
        for field, found in {"splits": splits, "patients_per_split": per_split}.items()
    }
    return splits, counts


def inspect_federation(config: FederationConfig, seed: int = 0) -> Inspection:
    """Read every case of every site and say what is there and what is wrong.

    Args:
        config: The federation.
        seed: Draws the splits that are counted.

    Raises:
        ConfigError: If the root names an unset variable; all else is listed in the answer.
    """
    found = {name: list_cases(config, name) for name in sorted(config.sites)}
    salt = secrets.token_hex(32)  # fingerprints are compared here and shown to nobody
    names = [names_of(config, name) for name in found]
    looks = [
        _inspect_site(config, said, names, *found[said.site], seed=seed, salt=salt)
        for said in names
    ]
    sites = tuple(look.site for look in looks)
    problems = name_problems(names, config.task, config.image.inputs)
    channels = {count for site in sites for count in site.channels}
    if len(channels) > 1 and config.image.inputs is None:
        listed = ", ".join(f"{site.name}: {'/'.join(site.channels)}" for site in sites)
        problems.append(
            f"the images of the federation have different numbers of channels ({listed}): "
            "set image.channels to grey, rgb or green"
        )
    listed_cases = {name: cases for name, (cases, _) in found.items()}
    findings = _find(listed_cases, looks)
    shared = count_shared(listed_cases, findings)
    return Inspection(config.name, config.task.classes, sites, shared, findings, tuple(problems))


@dataclass(frozen=True)
class _Look:
    """What a site holds, and by case what is compared with other sites."""

    site: SiteInspection
    splits: dict[str, str]
    fingerprints: dict[Case, str]
    equal: dict[Case, tuple[Path, ...]]


def _find(sites: Mapping[str, Sequence[Case]], looks: Sequence["_Look"]) -> tuple[Finding, ...]:
    """Find shared patients and copies, and say in which splits the copies are."""
    prints = {case: print_ for look in looks for case, print_ in look.fingerprints.items()}
    splits = {look.site.name: look.splits for look in looks}
    split_of: dict[str, set[str]] = defaultdict(set)
    for name, cases in sites.items():
        for case in cases:
            for path in case.images:
                split_of[str(path)].add(splits[name].get(case.case, ""))
    findings = check_across_sites(sites)
    findings += find_copies(prints, [known for known in findings if known.files])
    told = {finding.files for finding in findings if finding.kind == "equal_channels"}
    equal = {case: files for look in looks for case, files in look.equal.items()}
    findings += [equal_channels(case, paths) for case, paths in equal.items() if paths not in told]
    said = []
    for finding in findings:
        there = set[str]().union(*(split_of[str(path)] for path in finding.files)) - {""}
        across = ", ".join(split for split in SPLITS if split in there)
        text = f"{finding.text} (they are in {across})" if len(there) > 1 else finding.text
        said.append(replace(finding, text=text))
    return tuple(said)


def _inspect_site(
    config: FederationConfig,
    said: Names,
    names: Sequence[Names],
    cases: Sequence[Case],
    problems: Sequence[str],
    *,
    seed: int,
    salt: str,
) -> _Look:
    name, task, problems = said.site, task_at(config, said.site), list(problems)
    tally = Tally(task, config.image, salt)
    for case in cases:
        try:
            if case.images:
                tally.add(case, decode(case, config.image, task))
            else:
                tally.add_row(case)
        except CollegiumError as error:
            problems.append(str(error))
    splits, counts = counted_splits(config, cases, seed, problems)
    site = SiteInspection(
        name=name,
        inside=name not in config.outside,
        cases=len(cases),
        readable=tally.count,
        patients=len({case.patient for case in cases}),
        **counts,
        shapes=dict(tally.shapes),
        spacings=dict(tally.spacings),
        orientations=dict(tally.orientations),
        channels=dict(tally.channels),
        missing_channels=tally.missing(channel_names(names, config.image.inputs)),
        intensity=tally.intensity,
        labels={str(label): count for label, count in sorted(tally.labels.items())},
        sizes=tally.sizes(),
        targets=dict(sorted(tally.targets.items())),
        foreground=tally.foreground / tally.counted if tally.counted else None,
        with_fov=sum(case.fov is not None for case in cases),
        notes=(*said.about.notes, *_summed_up(tally.notes), *_cut_across(config, tally)),
        problems=tuple(problems + _one_shape_problems(config, name, tally)),
    )
    return _Look(site, splits, tally.fingerprints, tally.equal)


def _one_shape_problems(config: FederationConfig, name: str, tally: Tally) -> list[str]:
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


def _cut_across(config: FederationConfig, tally: Tally) -> list[str]:
    """Say how many volumes are cut across the slices that they were acquired in."""
    crop, along = config.sampling.crop, config.image.slices_along
    if crop is None or len(crop) != 2:
        return []
    return [
        f"{count} of {tally.count} cases: their voxels are longest along {'xyz'[axis]}, but slices "
        f"are taken along {along}: set image.slices_along to acquisition"
        for axis, count in sorted(tally.thick.items())
    ]


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
