"""Non-IID federations from pooled data: which case belongs to which site.

The cases of a patient always stay together, and equal arguments give equal sites. `write_manifest`
stores the result as a manifest, which is then a federation like any other.
"""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from collegium.data.decoded_image import listed
from collegium.data.discovery import FILE_SEPARATOR
from collegium.data.site import Case
from collegium.errors import ConfigError, DataError, StorageError

COLUMNS = (
    "site", "case", "patient", "image", "label", "fov", "class", "series", "split", "channels",
)  # fmt: skip
"""The columns of a manifest that is written."""

SiteAssignment = dict[str, str]
"""The site of every case, by its id."""


@dataclass(frozen=True)
class PartitionCase:
    """A case as a partition sees it.

    Attributes:
        case: Its id.
        patient: The id of its patient.
        value: The value that the partition is by: a label's volume, or the number of its class.
    """

    case: str
    patient: str
    value: float


def by_value(cases: Sequence[PartitionCase], sizes: Sequence[int] | int) -> SiteAssignment:
    """Sort patients by value and assign contiguous blocks of them to sites.

    Distance-aware averaging (appendix D) does this with the volumes of the labels.

    Args:
        cases: The cases; the value of a patient is the mean over cases.
        sizes: The number of sites of equal size, or the number of patients of each site.

    Raises:
        ConfigError: There are fewer patients than sites, or the sizes do not add up.
    """
    groups = _patients(cases)
    means = {patient: fmean(case.value for case in group) for patient, group in groups.items()}
    ordered = sorted(means, key=lambda patient: (means[patient], patient))
    if isinstance(sizes, int) and not 1 <= sizes <= len(ordered):
        raise ConfigError(f"{len(ordered)} patients do not make {sizes} sites; use fewer sites")
    if not isinstance(sizes, int) and (min(sizes, default=0) < 1 or sum(sizes) != len(ordered)):
        raise ConfigError(
            f"the sites' sizes {listed(sizes)} do not add up to {len(ordered)} patients; correct "
            f"them"
        )
    cuts = sizes if isinstance(sizes, int) else np.cumsum(sizes)[:-1]
    site_of = _numbered(np.array_split(ordered, cuts))
    return {case.case: site_of[case.patient] for case in cases}


def by_ratio(
    cases: Sequence[PartitionCase], ratios: Sequence[float], seed: int = 0
) -> SiteAssignment:
    """Assign patients so that each site has its own ratio of negative to positive (pFedNet, delta).

    Positive patients are divided evenly, then each site gets ratio times as many negative ones. If
    there are too few of a kind, all sites get fewer in proportion; the patients left over belong to
    no site.

    Args:
        cases: The cases; a patient is positive if any case has a value above 0.
        ratios: Negatives per positive, by site.
        seed: Shuffles the patients.

    Raises:
        ConfigError: A ratio is not above 0, or a site would get no patient of a kind.
    """
    if not ratios or min(ratios) <= 0:
        raise ConfigError(f"the ratios are {listed(ratios)}; give a number above 0 for each site")
    groups = _patients(cases)
    positive = {p: any(case.value > 0 for case in group) for p, group in groups.items()}
    rng = np.random.default_rng(seed)
    positives, negatives = (
        rng.permutation(sorted(p for p in groups if positive[p] == kind)) for kind in (True, False)
    )
    needs = {n: [round(n * r) for r in ratios] for n in range(len(positives) // len(ratios) + 1)}
    each = max(n for n, counts in needs.items() if sum(counts) <= len(negatives))
    if each < 1 or min(needs[each]) < 1:
        raise ConfigError(
            f"{len(positives)} positive and {len(negatives)} negative patients are too few for "
            f"the ratios {listed(ratios)}; use fewer sites or smaller ratios"
        )
    used = np.split(positives[: each * len(ratios)], len(ratios))
    cuts = np.cumsum(needs[each])
    site_of = _numbered(used) | _numbered(np.split(negatives[: cuts[-1]], cuts[:-1]))
    return {case.case: site_of[case.patient] for case in cases if case.patient in site_of}


def by_dirichlet(
    cases: Sequence[PartitionCase], sites: int, alpha: float, seed: int = 0, least: int = 1
) -> SiteAssignment:
    """Divide the patients of each class by proportions drawn from a Dirichlet distribution.

    After Hsu et al. 2019 (https://arxiv.org/abs/1909.06335): a small alpha gives sites with few
    classes, a large one equal sites. Proportions are redrawn until each site has enough patients.

    Args:
        cases: The cases; a patient belongs to the class of most of the cases, on a tie the lower.
        sites: The number of sites.
        alpha: The concentration.
        seed: Seed of the draws.
        least: The minimum number of patients of a site.

    Raises:
        ConfigError: The parameters cannot be satisfied.
    """
    groups = _patients(cases)
    if sites < 1 or alpha <= 0 or len(groups) < sites * least:
        raise ConfigError(
            f"{len(groups)} patients, {sites} sites of {least} at least and alpha {alpha}: give a "
            f"positive alpha and fewer sites"
        )
    classes: dict[float, list[str]] = defaultdict(list)
    for patient, group in sorted(groups.items()):
        counts = Counter(case.value for case in group)
        classes[min(counts, key=lambda value: (-counts[value], value))].append(patient)
    rng = np.random.default_rng(seed)
    for _ in range(1000):
        site_of: dict[str, str] = {}
        for _, patients in sorted(classes.items()):
            shares = rng.dirichlet([alpha] * sites)
            order = [patients[index] for index in rng.permutation(len(patients))]
            cuts = np.round(np.cumsum(shares) * len(order)).astype(int)
            site_of |= _numbered(np.array_split(order, cuts[:-1]))
        sizes = Counter(site_of.values())
        if len(sizes) == sites and min(sizes.values()) >= least:
            return {case.case: site_of[case.patient] for case in cases}
    raise ConfigError(f"alpha {alpha} leaves a site with fewer than {least} patients; raise alpha")


def by_column(cases: Mapping[str, str]) -> SiteAssignment:
    """Make each word of a column a site, such as the scanner or the hospital.

    Args:
        cases: The word of each case.

    Raises:
        DataError: A case has none.
    """
    empty = [case for case, word in cases.items() if not word.strip()]
    if empty:
        raise DataError(f"{len(empty)} cases have no word in this column; fill it in or leave them")
    return {case: word.strip() for case, word in cases.items()}


def lack_channels(sites: Sequence[str], channels: int) -> dict[str, tuple[int, ...]]:
    """Return the channels of each site if each lacks one, in turn ("lack #k" of pFedNet).

    Args:
        sites: The sites.
        channels: The number of channels.

    Returns:
        By site the channels that it has, for the key ``channels`` of a site or the column of a
        manifest.

    Raises:
        ConfigError: There is only one channel.
    """
    if channels < 2:
        raise ConfigError(f"a site with {channels} channel can lack none; use images with several")
    return {
        site: tuple(k for k in range(channels) if k != number % channels)
        for number, site in enumerate(sites)
    }


def write_manifest(path: Path, cases: Sequence[Case], sites: SiteAssignment, root: Path) -> None:
    """Write cases with their sites as a manifest, except those without a site.

    Args:
        path: The file.
        cases: The cases.
        sites: The site of each.
        root: The folder that the manifest's paths are relative to.

    Raises:
        ConfigError: A file's name holds the separator of files, which a manifest cannot hold.
        StorageError: The manifest cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for case in cases:
        if case.case not in sites:
            continue
        images = [_relative(file, root) for file in case.images]
        barred = next((name for name in images if FILE_SEPARATOR in name), None)
        if barred is not None:
            raise ConfigError(
                f"case {case.case}: {barred} has a {FILE_SEPARATOR!r} in its name, which separates "
                f"files in a manifest; rename it"
            )
        files = [file and _relative(file, root) for file in (case.label, case.fov)]
        channels = " ".join(map(str, case.channels or ()))
        described = (*files, case.target, case.series, case.split, channels)
        joined = FILE_SEPARATOR.join(images)
        writer.writerow((sites[case.case], case.case, case.patient, joined, *described))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.getvalue(), "utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror})") from error


def _relative(file: Path, root: Path) -> str:
    return str(file.relative_to(root) if file.is_relative_to(root) else file.resolve())


def _patients(cases: Sequence[PartitionCase]) -> dict[str, list[PartitionCase]]:
    groups: dict[str, list[PartitionCase]] = defaultdict(list)
    for case in cases:
        groups[case.patient].append(case)
    return groups


def _numbered(blocks: Iterable[Iterable[str]]) -> SiteAssignment:
    """Assign the first block of patients to site_1, and so on."""
    return {
        str(patient): f"site_{number}"
        for number, block in enumerate(blocks, 1)
        for patient in block
    }
