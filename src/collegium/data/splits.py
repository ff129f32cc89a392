"""Who is trained on and who is scored: splits by patient, and checks for leaks between sites."""

import hashlib
import json
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from collegium.core.randomness import generator
from collegium.data.site import Case
from collegium.errors import ConfigError, DataError, StorageError

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
"""The three splits, in order."""


@dataclass(frozen=True)
class SplitConfig:
    """Which shares of the patients are held out where the manifest does not name the splits.

    Attributes:
        validation: Share of the patients for validation; of the manifest's training patients where
            the manifest names a split but no validation.
        test: Share of the patients for the test; not used where the manifest names splits.
    """

    validation: float = 0.2
    test: float = 0.2

    def __post_init__(self) -> None:
        shares = {"splits.validation": self.validation, "splits.test": self.test}
        for key, share in shares.items():
            if not 0 <= share < 1:
                raise ConfigError(f"{key} is {share}: give a share from 0 up to, not including, 1")
        if self.validation + self.test >= 1:
            raise ConfigError(
                f"splits.validation {self.validation} and splits.test {self.test} leave nobody to "
                "train on: lower one so that their sum is below 1"
            )


def draw_splits(cases: Sequence[Case], config: SplitConfig, seed: int) -> dict[str, str]:
    """Give every case of one site its split; a patient is never in two.

    The manifest's splits are kept. Where it names none, patients are shuffled and shared out by the
    config; where it names some but no validation, validation is carved from its training patients.
    """
    if not cases:
        return {}
    site = cases[0].site
    by_patient = _named_splits(cases)
    named = {split for split in by_patient.values() if split is not None}
    rng = generator(seed, "splits", site)
    if not named:
        by_patient = dict(_share_out(sorted(by_patient), config, rng))
    elif "val" not in named:
        training = sorted(patient for patient, split in by_patient.items() if split == "train")
        carve = SplitConfig(config.validation, test=0)
        by_patient |= dict(_share_out(training, carve, rng))
    counts = Counter(by_patient.values())
    if counts["train"] == 1 and not counts["val"]:
        logger.info(
            "site %s has one patient to train on: train 1, val 0, test %d", site, counts["test"]
        )
    return {case.case: str(by_patient[case.patient]) for case in cases}


def splits_of(
    cases: Sequence[Case], config: SplitConfig, seed: int, splits_file: Path | None = None
) -> dict[str, str]:
    """Read the stored splits where there are any, else draw and store them.

    Raises:
        DataError: If the stored splits do not fit the cases.
        StorageError: If the splits cannot be stored.
    """
    if splits_file is None:
        return draw_splits(cases, config, seed)
    if splits_file.exists():
        return _read(splits_file, cases)
    splits = draw_splits(cases, config, seed)
    _write(splits_file, {"format": 1, "seed": seed, "splits": splits})
    return splits


@dataclass(frozen=True)
class Finding:
    """Something that makes scores look better than they are.

    Attributes:
        kind: "shared_patient" (by the ids that were stated), "identical_files", "identical_pixels"
            or "equal_channels" (of one case).
        sites: The sites concerned, sorted.
        patients: The patients concerned, sorted.
        files: The files concerned, sorted.
        text: One sentence that says what was found and what to do.
    """

    kind: str
    sites: tuple[str, ...]
    patients: tuple[str, ...]
    files: tuple[Path, ...]
    text: str


def check_across_sites(sites: Mapping[str, Sequence[Case]]) -> list[Finding]:
    """Find patients at two sites, and byte-identical images across and within sites.

    Patients are compared by their ids, and only where these were stated: files that are named alike
    at every site are not of one patient. What is found names patients, so that it stays where it is
    computed.
    """
    cases = [case for name in sorted(sites) for case in sites[name]]
    return [*_shared_patients(cases), *_identical_images(cases)]


def count_shared(sites: Mapping[str, Sequence[Case]], findings: Sequence[Finding]) -> int | None:
    """Count the patients that were found at several sites; None where no patient was stated."""
    if not any(case.stated for cases in sites.values() for case in cases):
        return None
    shared = [finding for finding in findings if finding.kind == "shared_patient"]
    return len({patient for finding in shared for patient in finding.patients})


def _named_splits(cases: Sequence[Case]) -> dict[str, str | None]:
    named: dict[str, str | None] = {}
    some = any(case.split for case in cases)
    for case in cases:
        if some and case.split is None:
            raise DataError(
                f"{case}: the manifest names no split for it but does for others: "
                "fill in the column split (train, val or test) for every case or for none"
            )
        before = named.setdefault(case.patient, case.split)
        if before != case.split:
            raise DataError(
                f"{case}: its patient {case.patient} is in the splits {before} and {case.split}: "
                "put all cases of a patient into one split in the manifest"
            )
    return named


def _share_out(
    patients: Sequence[str], config: SplitConfig, rng: torch.Generator
) -> Iterator[tuple[str, str]]:
    count = len(patients)
    val = _share(count, config.validation, leave=1)
    test = _share(count, config.test, leave=1 + val)
    for place, index in enumerate(torch.randperm(count, generator=rng).tolist()):
        split = "test" if place < test else "val" if place < test + val else "train"
        yield patients[index], split


def _share(count: int, fraction: float, leave: int) -> int:
    """Give round(fraction * count), at least 1, but never fewer than `leave` for the others."""
    if fraction == 0:
        return 0
    return max(0, min(max(1, round(fraction * count)), count - leave))


def _read(path: Path, cases: Sequence[Case]) -> dict[str, str]:
    try:
        splits = json.loads(path.read_text("utf-8"))["splits"]
        named = {str(case): str(split) for case, split in splits.items()}
    except OSError as error:
        raise StorageError(f"the splits {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} does not hold splits: delete it to draw them anew") from error
    site = cases[0].site if cases else ""
    ids = {case.case for case in cases}
    problems = {
        "lacks": sorted(ids - named.keys()),
        "has unknown": sorted(named.keys() - ids),
        "has no train, val or test for": sorted(c for c, s in named.items() if s not in SPLITS),
    }
    for problem, which in problems.items():
        if which:
            raise DataError(
                f"site {site}: the stored splits {path} {problem} {_few(which)}: "
                "restore the site's cases, or delete the file to draw the splits anew"
            )
    by_patient: dict[str, str] = {}
    for case in cases:
        if by_patient.setdefault(case.patient, named[case.case]) != named[case.case]:
            raise DataError(
                f"{case}: the stored splits {path} have its patient {case.patient} in two splits: "
                "delete the file to draw the splits anew"
            )
    return named


def _write(path: Path, content: Mapping[str, object]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise StorageError(
            f"the splits {path} cannot be written ({error.strerror}): "
            "free space there or choose a folder that is writable"
        ) from error


def _shared_patients(cases: Sequence[Case]) -> Iterator[Finding]:
    """Yield one finding for each pair of sites, of all patients whose stated ids are at both."""
    stated: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        if case.stated:
            stated[case.site].add(case.patient)
    for one, other in combinations(sorted(stated), 2):
        patients = sorted(stated[one] & stated[other])
        if patients:
            count = "1 patient is" if len(patients) == 1 else f"{len(patients)} patients are"
            text = (
                f"by identifier, {count} at both sites {one} and {other} ({_few(patients)}): keep "
                "each at one site, or give different ids if they are different people"
            )
            yield Finding("shared_patient", (one, other), tuple(patients), (), text)


def _identical_images(cases: Sequence[Case]) -> Iterator[Finding]:
    by_size: dict[int, list[tuple[Path, Case]]] = defaultdict(list)
    for case in cases:
        for path in case.images:
            if path.is_file():
                by_size[path.stat().st_size].append((path, case))
    same: dict[str, dict[Path, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for group in by_size.values():
        if len(group) > 1:
            for path, case in group:
                same[_sha256(path)][path].append(case)
    equal = [files for files in same.values() if sum(map(len, files.values())) > 1]
    for owners_of in sorted(equal, key=min):
        files = tuple(sorted(owners_of))
        counts = Counter(case for several in owners_of.values() for case in several)
        owners = sorted(counts, key=str)
        for case in owners:
            if counts[case] > 1:
                yield equal_channels(case, [path for path in files if case in owners_of[path]])
        if len(owners) == 1:
            continue
        text = (
            f"{' and '.join(map(str, owners))} have byte-identical images "
            f"({_few([str(path) for path in files])}): keep one of them, or name one patient for "
            "them so that they stay in one split"
        )
        yield Finding(
            "identical_files",
            tuple(sorted({case.site for case in owners})),
            tuple(sorted({case.patient for case in owners})),
            files,
            text,
        )


def equal_channels(case: Case, files: Sequence[Path]) -> Finding:
    """Say that channels of one case are the same image."""
    text = (
        f"{case}: two of its channels are the same image ({_few([str(path) for path in files])}): "
        "give each channel its own file, or leave one of them out"
    )
    return Finding("equal_channels", (case.site,), (case.patient,), tuple(files), text)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _few(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
