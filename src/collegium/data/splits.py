"""Splits by patient into training, validation and test, and checks for leakage between sites."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

from collegium.core.files import write_atomically
from collegium.core.randomness import permutation
from collegium.core.seals import read_json, seal_json
from collegium.core.settings import Fraction, NonNegativeInt, rule, settings
from collegium.data.digests import file_digest
from collegium.data.site import Case
from collegium.errors import ConfigError, DataError, StorageError

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
"""The three splits, in order."""

_START_ANEW = (
    "start the run in a new output folder; new splits in this one would test its models on "
    "patients that they were trained on"
)


@settings
class SplitConfig:
    """The shares of the patients that are held out if the manifest does not name the splits.

    Attributes:
        validation: Share of the patients for validation; of the manifest's training patients if the
            manifest names splits but no validation.
        test: Share of the patients for the test; not used if the manifest names splits, nor of a
            fold.
        folds: The number of folds of a cross-validation, into which the patients of each site are
            divided.
        fold: The fold that is the test, from 1; 0: the test is drawn by its share. Of the other
            patients the share ``validation`` is for validation. `protocol: cross-validation` takes
            each fold in turn.
    """

    validation: Fraction = 0.2
    test: Fraction = 0.2
    folds: Annotated[int, rule(lambda folds: folds >= 2, "a whole number from 2 on")] = 5
    fold: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.fold > self.folds:
            raise ConfigError(
                f"splits.fold is {self.fold} and splits.folds {self.folds}: choose a fold from 1 "
                f"to {self.folds}, or 0 for none"
            )
        if self.validation + self.test >= 1:
            raise ConfigError(
                f"splits.validation {self.validation} and splits.test {self.test} leave nobody to "
                "train on: lower one so that their sum is below 1"
            )


def draw_splits(cases: Sequence[Case], config: SplitConfig, seed: int) -> dict[str, str]:
    """Assign every case of one site to a split; a patient is never in two.

    The manifest's splits are kept. If it names none, patients are shuffled and divided by the
    shares, or into folds; if it names some but no validation, validation is taken from its training
    patients. The folds of a site do not depend on which of them is the test.

    Args:
        cases: The cases of the site.
        config: The shares.
        seed: Draws the splits.

    Returns:
        The split of each case, by its id.

    Raises:
        DataError: The manifest names splits for some cases only, or two splits for a patient, or
            splits where folds are drawn; or there are fewer patients than folds.
    """
    if not cases:
        return {}
    site = cases[0].site
    by_patient = _named_splits(cases)
    named = {split for split in by_patient.values() if split is not None}
    if config.fold:
        if named:
            raise DataError(
                f"site {site}: its manifest names splits, and cross-validation draws its own: give "
                f"it a copy of the manifest without the column split to have every patient tested "
                f"once, or write protocol: inside to keep these splits"
            )
        by_patient = dict(_fold(sorted(by_patient), config, seed, site))
    elif not named:
        by_patient = dict(_divide(sorted(by_patient), config, seed, site))
    elif "val" not in named:
        training = sorted(patient for patient, split in by_patient.items() if split == "train")
        shares = SplitConfig(config.validation, test=0)
        by_patient |= dict(_divide(training, shares, seed, site))
    counts = Counter(by_patient.values())
    if counts["train"] == 1 and not counts["val"]:
        logger.info(
            "site %s has one patient to train on: train 1, val 0, test %d", site, counts["test"]
        )
    return {case.case: str(by_patient[case.patient]) for case in cases}


def load_or_draw_splits(
    cases: Sequence[Case], config: SplitConfig, seed: int, splits_file: Path | None = None
) -> dict[str, str]:
    """Read the stored splits if there are any; otherwise draw and store them.

    Args:
        cases: The cases of the site.
        config: The shares.
        seed: Draws the splits.
        splits_file: The file of the stored splits; None: they are drawn and not stored.

    Raises:
        DataError: The stored splits do not fit the cases.
        StorageError: The splits cannot be read or stored.
    """
    if splits_file is None:
        return draw_splits(cases, config, seed)
    if splits_file.exists():
        return _read(splits_file, cases)
    splits = draw_splits(cases, config, seed)
    content = {"format": 1, "seed": seed, "splits": splits}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_atomically(splits_file, seal_json(f"{text}\n"))
    return splits


def split_unlabelled(cases: Sequence[Case], labelled: Mapping[Case, str]) -> dict[Case, str]:
    """Return the split of cases without a label, so that no patient is in two.

    It is that of the patient's cases with a label; without any, the one that the manifest names, or
    else the training.

    Args:
        cases: The cases without a label.
        labelled: The split of each case with one.
    """
    by_patient = {case.patient: split for case, split in labelled.items()}
    return {case: by_patient.get(case.patient, case.split or "train") for case in cases}


@dataclass(frozen=True)
class LeakageFinding:
    """A leak between splits or sites, or a copy, that makes scores look better than they are.

    Attributes:
        kind: "shared_patient" (by stated ids), "similar_ids" or "rounded_ids" (of patients),
            "identical_files", "identical_pixels" or "equal_channels" (of one case).
        sites: The sites concerned, sorted.
        patients: The patients concerned, sorted.
        files: The files concerned, sorted.
        text: One sentence: what was found and what to do.
    """

    kind: str
    sites: tuple[str, ...]
    patients: tuple[str, ...]
    files: tuple[Path, ...]
    text: str


def check_across_sites(sites: Mapping[str, Sequence[Case]]) -> list[LeakageFinding]:
    """Find patients at two sites, and byte-identical images across and within sites.

    Patients are compared by their ids, and only if these were stated: files with the same name at
    every site do not belong to one patient. Findings name patients, so they stay where they are
    computed.
    """
    cases = [case for name in sorted(sites) for case in sites[name]]
    return [*_shared_patients(cases), *_identical_images(cases)]


def count_shared_patients(
    sites: Mapping[str, Sequence[Case]], findings: Sequence[LeakageFinding]
) -> int | None:
    """Return the number of patients found at several sites; None if no patient was stated.

    Args:
        sites: The cases of each site.
        findings: The result of `check_across_sites`.
    """
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


def _divide(
    patients: Sequence[str], config: SplitConfig, seed: int, site: str
) -> Iterator[tuple[str, str]]:
    """Yield the patients of a site in a random order, each with a split."""
    count = len(patients)
    val = _share(count, config.validation, leave=1)
    test = _share(count, config.test, leave=1 + val)
    for place, index in enumerate(permutation(count, seed, "splits", site)):
        split = "test" if place < test else "val" if place < test + val else "train"
        yield patients[index], split


def _fold(
    patients: Sequence[str], config: SplitConfig, seed: int, site: str
) -> Iterator[tuple[str, str]]:
    """Yield the patients of a site, each with a split, of which the test is one fold of them.

    Validation is taken from the folds that follow, so that over all folds every patient is about
    equally often in it.
    """
    count = len(patients)
    if count < config.folds:
        raise DataError(
            f"site {site} has {count} patients, too few for {config.folds} folds: lower "
            f"splits.folds, or take the site out"
        )
    order = [patients[index] for index in permutation(count, seed, "splits", site)]
    turn = {p: (place - config.fold + 1) % config.folds for place, p in enumerate(order)}
    test = [patient for patient in order if turn[patient] == 0]
    rest = sorted((patient for patient in order if turn[patient]), key=turn.__getitem__)
    val = _share(len(rest), config.validation, leave=1)
    yield from ((patient, "test") for patient in test)
    yield from ((patient, "val" if n < val else "train") for n, patient in enumerate(rest))


def _share(count: int, fraction: float, leave: int) -> int:
    """Return round(fraction * count), at least 1, but so that `leave` remain for the others."""
    if fraction == 0:
        return 0
    return max(0, min(max(1, round(fraction * count)), count - leave))


def _read(path: Path, cases: Sequence[Case]) -> dict[str, str]:
    try:
        splits = read_json(path)["splits"]
        named = {str(case): str(split) for case, split in splits.items()}
    except OSError as error:
        raise StorageError(f"the splits {path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} does not hold splits: restore it, or {_START_ANEW}") from error
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
                f"restore the site's cases, or {_START_ANEW}"
            )
    by_patient: dict[str, str] = {}
    for case in cases:
        if by_patient.setdefault(case.patient, named[case.case]) != named[case.case]:
            raise DataError(
                f"{case}: the stored splits {path} have its patient {case.patient} in two splits: "
                f"give it one patient as before, or {_START_ANEW}"
            )
    return named


def _shared_patients(cases: Sequence[Case]) -> Iterator[LeakageFinding]:
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
            yield LeakageFinding("shared_patient", (one, other), tuple(patients), (), text)


def _identical_images(cases: Sequence[Case]) -> Iterator[LeakageFinding]:
    by_size: dict[int, list[tuple[Path, Case]]] = defaultdict(list)
    for case in cases:
        for path in case.images:
            if path.is_file() and os.access(path, os.R_OK):  # reading reports the others
                by_size[path.stat().st_size].append((path, case))
    same: dict[bytes, dict[Path, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for group in by_size.values():
        if len(group) > 1:
            for path, case in group:
                same[file_digest(path)][path].append(case)
    equal = [files for files in same.values() if sum(map(len, files.values())) > 1]
    for owners_of in sorted(equal, key=min):
        files = tuple(sorted(owners_of))
        counts = Counter(case for several in owners_of.values() for case in several)
        owners = sorted(counts, key=str)
        for case in owners:
            if counts[case] > 1:
                yield equal_channels_finding(
                    case, [path for path in files if case in owners_of[path]]
                )
        if len(owners) > 1:
            yield copies_finding("identical_files", "byte-identical images", owners, files)


def copies_finding(
    kind: str, what: str, cases: Sequence[Case], files: Sequence[Path]
) -> LeakageFinding:
    """Return the finding that cases have copies of one image.

    Args:
        kind: See `LeakageFinding`.
        what: The kind in words.
        cases: The cases, sorted.
        files: Their files, sorted.
    """
    text = (
        f"{' and '.join(map(str, cases))} have {what} ({_few([*map(str, files)])}): keep one of "
        "them, or name one patient for them so that they stay in one split"
    )
    sites, patients = ({case.site for case in cases}, {case.patient for case in cases})
    return LeakageFinding(kind, tuple(sorted(sites)), tuple(sorted(patients)), tuple(files), text)


def equal_channels_finding(case: Case, files: Sequence[Path]) -> LeakageFinding:
    """Return the finding that channels of one case are the same image.

    Args:
        case: The case.
        files: The files of these channels.
    """
    text = (
        f"{case}: two of its channels are the same image ({_few([str(path) for path in files])}): "
        "give each channel its own file, or leave one of them out"
    )
    return LeakageFinding("equal_channels", (case.site,), (case.patient,), tuple(files), text)


def _few(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
