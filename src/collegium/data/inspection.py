"""Inspects all the data of a federation before training, and lists all problems."""

import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from collegium.data.federation import (
    federation_notes,
    label_and_channel_names,
    labelled_values,
    labels_problem,
    list_cases,
    list_unlabelled,
    names_note,
    site_notes,
    task_of_site,
)
from collegium.data.federation_config import FederationConfig
from collegium.data.fingerprints import find_copies
from collegium.data.image_statistics import (
    IgnoredPixels,
    ImageStatistics,
    LabelSize,
    MissingChannel,
)
from collegium.data.mask_consistency import MaskCounts, mask_notes
from collegium.data.name_consistency import SiteNames, channel_names, name_problems
from collegium.data.patient_ids import similar_ids
from collegium.data.preprocessing import decode_case, preprocess_decoded, vanishing_notes
from collegium.data.sampling import SamplingConfig, check_crop
from collegium.data.site import Case
from collegium.data.splits import (
    SPLITS,
    LeakageFinding,
    check_across_sites,
    count_shared_patients,
    draw_splits,
    equal_channels_finding,
    split_unlabelled,
)
from collegium.errors import CollegiumError


@dataclass(frozen=True)
class SiteInspection:
    """The data of one site; counts are of usable cases.

    Attributes:
        name: The site's name.
        inside: Whether it takes part in training.
        cases: Number of cases found with all their files.
        readable: Number of these that could be read.
        patients: Number of patients.
        splits: Number of cases per split.
        patients_per_split: Number of patients per split.
        shapes: Number of cases per spatial shape.
        spacings: Number of cases per spacing in mm; the key "unknown" if files do not state it.
        orientations: Number of cases per directions of the stored axes, such as "LPS"; the key
            "none" counts pictures.
        channels: Number of cases per channel count.
        missing_channels: The network's channels that cases lack.
        intensity: Lowest and highest stored intensity; None if nothing could be read.
        labels: Number of cases in which each label value occurs.
        sizes: The size of each label except the background, followed by each region.
        targets: Number of cases of each class as written, if cases are classified.
        foreground: Share of the pixels (annotated, inside the field of view) that are not
            background.
        with_fov: Number of cases with a field of view.
        notes: What was noticed and corrected while reading, and files that are not used.
        problems: One sentence for each problem, with its remedy.
        labelled: Names of the classes that the masks annotate; None: all.
        unlabelled: Number of cases without a label per split of their patients; they are not among
            the cases that are counted elsewhere.
        ignored: Pixels of the masks that nobody annotated, which neither `labels` nor `sizes`
            count; None without any.
        patients_by_name: Number of patients that names suggest, if these are fewer than the cases
            and nobody has said who the patients are; otherwise None.
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
    labelled: tuple[str, ...] | None = None
    unlabelled: dict[str, int] = field(default_factory=dict)
    ignored: IgnoredPixels | None = None
    patients_by_name: int | None = None


@dataclass(frozen=True)
class FederationInspection:
    """The data of a federation, of images or of tables.

    Attributes:
        name: The federation's name.
        classes: Names of the classes by value.
        sites: One entry per site, inside and outside, sorted by name; each has its `problems`.
        shared_patients: Number of patients whose stated ids are at several sites; None if no
            patient is stated.
        findings: Shared patients and, for images, copies across and within sites.
        problems: Problems of the federation as a whole.
        notes: What looks different between the sites.
    """

    name: str
    classes: tuple[str, ...]
    sites: tuple[Any, ...]
    shared_patients: int | None
    findings: tuple[LeakageFinding, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def good(self) -> bool:
        """Whether nothing prevents training; findings are for a person to judge."""
        return not (self.problems or any(site.problems for site in self.sites))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as values that JSON can hold."""
        findings = [
            {**asdict(finding), "files": [str(path) for path in finding.files]}
            for finding in self.findings
        ]
        return {**asdict(self), "findings": findings, "good": self.good}


@dataclass(frozen=True)
class Inspection(FederationInspection):
    """The data of a federation of images; copies are found byte by byte and pixel by pixel."""

    sites: tuple[SiteInspection, ...]


def count_splits(
    config: FederationConfig, cases: Sequence[Case], seed: int, problems: list[str]
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Draw the splits of a site's cases and count them.

    Args:
        config: The federation.
        cases: The cases of the site.
        seed: Draws the splits.
        problems: If splits cannot be drawn, the reason is appended here.

    Returns:
        The split of every case; and, as fields of a site's entry, the number of cases and the
        number of patients in each split.
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
    """Read every case of every site, and report its content and its problems.

    Args:
        config: The federation.
        seed: Draws the splits that are counted.

    Raises:
        ConfigError: The root names an unset variable; all other problems are in the result.
    """
    found = {name: list_cases(config, name) for name in sorted(config.sites)}
    salt = secrets.token_hex(32)  # fingerprints are compared here and shown to nobody
    names = [label_and_channel_names(config, name) for name in found]
    inspected = [
        _inspect_site(config, own, names, *found[own.site], seed=seed, salt=salt) for own in names
    ]
    counts = {
        site.name: MaskCounts(
            statistics.count,
            statistics.labels,
            site.foreground,
            labelled_values(config, site.name),
        )
        for site, _, statistics in inspected
        if config.task.name == "segmentation"
    }
    notes = mask_notes(counts, config.task)
    sites = tuple(
        replace(site, notes=(*site.notes, *notes.get(site.name, ()))) for site, _, _ in inspected
    )
    problems = name_problems(names, config.task, config.image.inputs)
    problems += [missing] if (missing := labels_problem(config)) else []
    channels = {count for site in sites for count in site.channels}
    if len(channels) > 1 and config.image.inputs is None:
        listed = ", ".join(f"{site.name}: {'/'.join(site.channels)}" for site in sites)
        problems.append(
            f"the images of the federation have different numbers of channels ({listed}): "
            "set image.channels to grey, rgb or green"
        )
    listed_cases = {name: cases for name, (cases, _) in found.items()}
    findings = _find_leakage(listed_cases, inspected)
    shared = count_shared_patients(listed_cases, findings)
    return Inspection(
        config.name,
        config.task.classes,
        sites,
        shared,
        findings,
        tuple(problems),
        notes=tuple(federation_notes(config)),
    )


def _find_leakage(
    cases: Mapping[str, Sequence[Case]],
    inspected: Sequence[tuple[SiteInspection, dict[str, str], ImageStatistics]],
) -> tuple[LeakageFinding, ...]:
    """Find shared patients and copies, and add the splits that the copies are in."""
    fingerprints: dict[Case, str] = {}
    equal_channels: dict[Case, tuple[Path, ...]] = {}
    splits_of: dict[Path, set[str]] = defaultdict(set)
    for site, splits, statistics in inspected:
        fingerprints |= statistics.fingerprints
        equal_channels |= statistics.equal_channels
        for case in cases[site.name]:
            for path in case.images:
                splits_of[path].add(splits.get(case.case, ""))
    findings = check_across_sites(cases) + similar_ids(cases)
    findings += find_copies(fingerprints, [known for known in findings if known.files])
    known_files = {finding.files for finding in findings if finding.kind == "equal_channels"}
    findings += [
        equal_channels_finding(case, paths)
        for case, paths in equal_channels.items()
        if paths not in known_files
    ]
    return tuple(_with_splits(finding, splits_of) for finding in findings)


def _with_splits(finding: LeakageFinding, splits_of: Mapping[Path, set[str]]) -> LeakageFinding:
    """Append the splits of a finding's files to its text if there are several."""
    found = set[str]().union(*(splits_of[path] for path in finding.files))
    splits = [split for split in SPLITS if split in found]
    if len(splits) < 2:
        return finding
    return replace(finding, text=f"{finding.text} (they are in {', '.join(splits)})")


def _inspect_site(
    config: FederationConfig,
    own: SiteNames,
    names: Sequence[SiteNames],
    cases: Sequence[Case],
    problems: Sequence[str],
    *,
    seed: int,
    salt: str,
) -> tuple[SiteInspection, dict[str, str], ImageStatistics]:
    """Return the inspection of a site, the split of each case, and what is compared with others."""
    name, problems = own.site, list(problems)
    found = ImageStatistics(task_of_site(config, name), config.image, salt)
    problems += _read_cases(cases, found, config.sampling)
    splits, counts = count_splits(config, cases, seed, problems)
    apart, lacking = count_unlabelled(config, name, cases, splits)
    apart_from = ImageStatistics(found.task, config.image, salt)
    problems += _read_cases(lacking, apart_from, config.sampling, labels=False)
    alike = names_note(config, name, cases)
    site = SiteInspection(
        name=name,
        inside=name not in config.outside,
        cases=len(cases),
        readable=found.count,
        patients=len({case.patient for case in cases}),
        **counts,
        shapes=dict(found.shapes),
        spacings=dict(found.spacings),
        orientations=dict(found.orientations),
        channels=dict(found.channels),
        missing_channels=found.missing(
            channel_names(names, config.image.inputs)
            | dict(enumerate(config.image.modalities or ()))
        ),
        intensity=found.intensity,
        labels={str(label): count for label, count in sorted(found.labels.items())},
        sizes=found.sizes(),
        targets=dict(sorted(found.targets.items())),
        foreground=found.foreground / found.counted if found.counted else None,
        with_fov=sum(case.fov is not None for case in cases),
        notes=(
            *own.description.notes,
            *([alike[0]] if alike else []),
            *_merge(found.notes),
            *_slicing_notes(config, found),
            *vanishing_notes(config.task.classes, found.vanished),
            *_labelled_notes(config, name),
            *site_notes(config, name, cases),
            *_ignored_notes(found),
            *unlabelled_notes(apart),
        ),
        problems=tuple(problems + _shape_problems(config, name, found)),
        labelled=config.sites[name].labelled,
        unlabelled=apart,
        ignored=found.ignored(),
        patients_by_name=alike[1] if alike else None,
    )
    return site, splits, found


def count_unlabelled(
    config: FederationConfig, name: str, cases: Sequence[Case], splits: Mapping[str, str]
) -> tuple[dict[str, int], list[Case]]:
    """Return the number of a site's cases without a label per split, and these cases.

    Args:
        config: The federation.
        name: The site.
        cases: The cases with a label.
        splits: The split of each of these, by its id; empty if there is none.
    """
    lacking = list_unlabelled(config, name)
    labelled = {case: splits[case.case] for case in cases if splits}
    found = [*split_unlabelled(lacking, labelled).values()]
    return {split: found.count(split) for split in SPLITS if split in found}, lacking


def unlabelled_notes(counts: Mapping[str, int]) -> list[str]:
    """Return a note on the cases without a label, given their number per split."""
    if not counts:
        return []
    by_split = ", ".join(f"{split} {count}" for split, count in counts.items())
    return [
        f"{sum(counts.values())} cases have no label ({by_split}): they are kept apart, and "
        f"nothing is trained or scored on them"
    ]


def _read_cases(
    cases: Sequence[Case],
    statistics: ImageStatistics,
    sampling: SamplingConfig,
    *,
    labels: bool = True,
) -> list[str]:
    """Add cases to statistics; return one sentence for each that a run would refuse.

    Each is prepared as for a run, and what comes of it is dropped. Without labels cases are not
    added.
    """
    problems = []
    for case in cases:
        try:
            raw = decode_case(case, statistics.image, statistics.task)
            if labels:
                statistics.add(case, raw)
            made = preprocess_decoded(case, raw, statistics.image)
            check_crop(sampling, made.arrays.shape, str(case))
        except CollegiumError as error:
            problems.append(str(error))
    return problems


def _shape_problems(config: FederationConfig, name: str, found: ImageStatistics) -> list[str]:
    problems = []
    if len(found.channels) > 1:
        problems.append(
            f"site {name}: its images have {' and '.join(found.channels)} channels: "
            "set image.channels to grey, rgb or green"
        )
    exact = isinstance(config.image.size, tuple)
    if len(found.shapes) > 1 and config.sampling.crop is None and not exact:
        problems.append(
            f"site {name}: its images have {len(found.shapes)} shapes and do not fit into one "
            "batch: set sampling.crop or an exact image.size"
        )
    return problems


def _slicing_notes(config: FederationConfig, found: ImageStatistics) -> list[str]:
    """Return a note on the volumes whose slices are not taken as they were acquired."""
    crop, along = config.sampling.crop, config.image.slices_along
    if crop is None or len(crop) != 2:
        return []
    return [
        f"{count} of {found.count} cases: their voxels are longest along {'xyz'[axis]}, but slices "
        f"are taken along {along}: set image.slices_along to acquisition"
        for axis, count in sorted(found.thick.items())
    ]


def _labelled_notes(config: FederationConfig, name: str) -> list[str]:
    """Return a note on the classes that a site's masks do not annotate."""
    labelled = config.sites[name].labelled
    others = [word for word in config.task.classes[1:] if word not in (labelled or ())]
    if labelled is None or not others:
        return []
    return [
        f"its masks annotate {', '.join(labelled)} only; {', '.join(others)} may be anywhere in "
        f"their background"
    ]


def _ignored_notes(found: ImageStatistics) -> list[str]:
    """Return a note on the amount of what nobody annotated."""
    ignored = found.ignored()
    if ignored is None:
        return []
    counts = dict.fromkeys((ignored.least, ignored.greatest))
    return [
        f"the masks of {ignored.cases} of {found.count} cases hold pixels that nobody annotated, "
        f"{' to '.join(map(str, counts))} each ({ignored.share:.1%} of all): no loss, score or "
        f"size counts them"
    ]


def _merge(notes: Sequence[str]) -> tuple[str, ...]:
    """Merge equal notes on several files; notes read `<file>: <text>`."""
    files: dict[str, list[str]] = {}
    for note in notes:
        file, _, text = note.partition(": ")
        files.setdefault(text, []).append(file)
    return tuple(
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}"
        for text, names in files.items()
    )
