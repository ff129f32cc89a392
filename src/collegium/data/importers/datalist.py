"""A datalist as MONAI and the Decathlon write it: JSON with lists of images and labels.

`{"training": [{"image": "a.nii.gz", "label": "b.nii.gz"}], "validation": [..], "test": [..]}`;
paths are relative to the file. An image may be a list of files, its channels; a label that is a
number or a word is a class. `patient` or `subject` name the patient.
"""

import logging
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from collegium.core.foreign_json import read_foreign_json
from collegium.data.discovery import SPLIT_NAMES, find_file, find_path
from collegium.data.importers.common import (
    DatasetDescription,
    FoundCases,
    parse_channels,
    parse_labels,
    read_json,
    unique_ids,
    visible_entries,
)
from collegium.data.pairing import case_id
from collegium.data.site import Case
from collegium.errors import DataError

logger = logging.getLogger(__name__)

_PATIENT = ("patient", "patient_id", "subject", "subject_id")
_CASE = ("case", "case_id", "id")


def matches(place: Path) -> bool:
    """Return whether a path is a datalist, or a folder with one."""
    return bool(_candidates(place))


def from_datalist(site: str, place: Path) -> FoundCases:
    """Return the usable cases of a datalist and one sentence for each problem.

    Args:
        site: The site's name.
        place: The JSON file, or a folder that holds one.

    Raises:
        DataError: There is no datalist, or several.
    """
    file = _only(site, place)
    content = read_json(site, file)
    entries = [
        (SPLIT_NAMES[key.lower()], f"{key}[{index}]", entry)
        for key, values in content.items()
        if key.lower() in SPLIT_NAMES and isinstance(values, list)
        for index, entry in enumerate(values)
    ]
    if any(isinstance(entry, dict) and "fold" in entry for _, _, entry in entries):
        logger.info("site %s: the folds of %s are not used: splits are drawn by patient",
                    site, file)  # fmt: skip
    named = any(split != "train" for split, _, entry in entries if _has_label(entry))
    cases, problems = [], []
    for split, where, entry in entries:
        try:
            case = _case(site, file, entry, where, split if named else None)
            cases += [case] if case is not None else []
        except DataError as error:
            problems.append(str(error))
    unlabelled = len(entries) - len(cases) - len(problems)
    if unlabelled:
        logger.info("site %s: %d images of %s have no label and are left out",
                    site, unlabelled, file)  # fmt: skip
    return _named(cases), problems


def describe(site: str, place: Path) -> DatasetDescription:
    """Return the names of labels and channels in the Decathlon's form, or none.

    Args:
        site: The site's name.
        place: The JSON file, or a folder that holds one.

    Raises:
        DataError: There is no datalist, or several.
    """
    content = read_json(site, _only(site, place))
    labels, channels = content.get("labels"), content.get("channel_names", content.get("modality"))
    try:
        return DatasetDescription(
            "the datalist",
            parse_labels(labels) if isinstance(labels, dict) else {},
            parse_channels(channels) if isinstance(channels, dict) else (),
        )
    except (ValueError, TypeError):  # other things under these keys, which nobody promised
        return DatasetDescription()


def _candidates(place: Path) -> list[Path]:
    """Return the JSON files that hold a list of training images."""
    there = [place] if place.is_file() else visible_entries(place)
    found = []
    for path in there:
        if path.suffix.lower() == ".json" and path.is_file():
            try:
                content = read_foreign_json(path)
            except (OSError, ValueError):
                continue
            keys = content if isinstance(content, dict) else {}
            if any(isinstance(keys.get(key), list) for key in ("training", "train")):
                found.append(path)
    return found


def _only(site: str, place: Path) -> Path:
    if place.is_file():
        return place
    found = _candidates(place)
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise DataError(
            f"site {site}: {place} should hold one JSON file with a list training, and holds "
            f"{names}: name the file as the site's folder"
        )
    return found[0]


def _has_label(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("label") not in (None, "", [])


def _case(site: str, file: Path, entry: Any, where: str, split: str | None) -> Case | None:
    """Return one case; None for an unlabelled image that is only to be predicted."""
    place = f"site {site}, {where} of {file}"
    if isinstance(entry, str) or (isinstance(entry, dict) and not _has_label(entry)):
        if where.startswith("train"):
            raise DataError(f"{place} has no label: add it or take the entry out")
        return None
    if not isinstance(entry, dict) or not entry.get("image"):
        raise DataError(f"{place} names no image: write {{image: .., label: ..}}")
    image, label = entry["image"], entry["label"]
    names = image if isinstance(image, list) else [image]
    images = tuple(_file(file, name, "image", place) for name in names)
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    if isinstance(label, list | dict):
        raise DataError(f"{place} names {len(label)} labels: give one label map or one class")
    is_file = isinstance(label, str) and (
        bool(Path(label).suffix) or find_path(label, (file.parent,)) is not None
    )
    case, patient = (
        next((str(entry[key]) for key in keys if entry.get(key) is not None), "")
        for keys in (_CASE, _PATIENT)
    )
    return Case(
        site,
        case,
        patient,
        images,
        _file(file, label, "label", place) if is_file else None,
        split=split,
        target=None if is_file else str(label),
        stated=bool(patient),
    )


def _file(file: Path, name: Any, what: str, place: str) -> Path:
    remedy = "correct the datalist (paths are relative to its folder)"
    return find_file(str(name), (file.parent,), f"{place}: {what}", remedy)


def _named(cases: list[Case]) -> list[Case]:
    """Name cases without an id by their files; a case without a patient is a patient of its own."""
    names = iter(unique_ids([_common(case) for case in cases if not case.case]))
    named = [replace(case, case=case.case or next(names)) for case in cases]
    return [replace(case, patient=case.patient or case.case) for case in named]


def _common(case: Case) -> Path:
    """Return the common part of the channels' names: x for x_t1 and x_flair."""
    words = [case_id(path).split("_") for path in case.images]
    alike = takewhile(lambda same: len(set(same)) == 1, zip(*words, strict=False))
    name = "_".join(word for word, *_ in alike)
    first = case.images[0]
    return first.with_name(name) if name and len(words) > 1 else first
