"""nnU-Net's raw data: `dataset.json`, `imagesTr`, `labelsTr` and, optionally, `imagesTs`.

Both versions of `dataset.json` are understood, and the Decathlon's, whose images hold all of their
channels in one file. Labelled test images (`labelsTs`) are the split "test". The case of the
folders' names does not matter.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collegium.data.decoded_image import listed
from collegium.data.discovery import complete_channels, split_channels
from collegium.data.formats import SUFFIXES
from collegium.data.importers.common import (
    DatasetDescription,
    FoundCases,
    parse_channels,
    parse_labels,
    read_json,
    visible_entries,
)
from collegium.data.site import Case
from collegium.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetJson:
    """The content of `dataset.json`.

    Attributes:
        channels: The names of the channels, in order.
        labels: The stored values of each label; several make a region.
        ending: The ending of the files' names.
        training: The ids of the training cases, if they are listed.
        count: The number of training cases, if it is given.
    """

    channels: tuple[str, ...]
    labels: dict[str, tuple[int, ...]]
    ending: str
    training: tuple[str, ...] | None
    count: int | None


def matches(folder: Path) -> bool:
    """Return whether a folder has this layout."""
    return (folder / "dataset.json").is_file() and _sub(folder, "imagesTr").is_dir()


def from_nnunet(site: str, folder: Path) -> FoundCases:
    """Return the usable cases of a raw data set and one sentence for each problem.

    Args:
        site: The site's name.
        folder: The data set.

    Raises:
        DataError: `dataset.json` is unusable.
    """
    dataset = read_dataset_json(site, folder)
    named = ", ".join(f"{name} {'+'.join(map(str, values))}" for name, values in
                      dataset.labels.items())  # fmt: skip
    logger.info("site %s: dataset.json names the channels %s and the labels %s",
                site, ", ".join(dataset.channels), named)  # fmt: skip
    split = "train" if visible_entries(_sub(folder, "labelsTs")) else None
    cases, problems = _part(site, folder, dataset, part="Tr", split=split)
    if split is not None:
        tests, more = _part(site, folder, dataset, part="Ts", split="test")
        cases, problems = cases + tests, problems + more
    elif visible_entries(_sub(folder, "imagesTs")):
        logger.info("site %s: imagesTs has no labelsTs and is left out", site)
    return cases, problems


def describe(site: str, folder: Path) -> DatasetDescription:
    """Return the names of labels and channels in `dataset.json`.

    Args:
        site: The site's name.
        folder: The data set.

    Raises:
        DataError: It is unusable.
    """
    found = read_dataset_json(site, folder)
    return DatasetDescription("dataset.json", found.labels, found.channels)


def read_dataset_json(site: str, folder: Path) -> DatasetJson:
    """Read `dataset.json`.

    Args:
        site: The site's name, for errors.
        folder: The data set.

    Raises:
        DataError: It lacks a necessary key.
    """
    path = folder / "dataset.json"
    content = read_json(site, path)
    channels = content.get("channel_names", content.get("modality"))
    if not isinstance(channels, dict | list) or not channels:
        raise DataError(
            f"site {site}: {path} names no channel_names (in version 1: modality): add them"
        )
    if isinstance(channels, list):
        channels = dict(enumerate(channels))
    try:
        count, training = content.get("numTraining"), content.get("training")
        ending = str(content.get("file_ending", ".nii.gz"))
        return DatasetJson(
            parse_channels(channels),
            parse_labels(content.get("labels", {})),
            ending,
            None if training is None else tuple(_listed(entry, ending) for entry in training),
            None if count is None else int(count),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"site {site}: {path} is not as nnU-Net writes it ({type(error).__name__}: {error}): "
            "correct it after its documentation"
        ) from error


def _sub(folder: Path, name: str) -> Path:
    """Return the subfolder of a name in any case; if there is none, the path it should have."""
    alike = [path for path in visible_entries(folder) if path.name.lower() == name.lower()]
    return alike[0] if alike and folder / name not in alike else folder / name


def _listed(entry: Any, ending: str) -> str:
    """Return the id of an entry of the training list of version 1."""
    file = entry["label"] if isinstance(entry, dict) else entry
    return Path(str(file).replace("\\", "/")).name.removesuffix(ending)


def _part(
    site: str, folder: Path, dataset: DatasetJson, *, part: str, split: str | None
) -> FoundCases:
    """Return the cases of the training part (Tr) or the test part (Ts)."""
    images, ending = _sub(folder, f"images{part}"), dataset.ending
    labels = _by_stem(_sub(folder, f"labels{part}"), ending)
    files = _by_stem(images, ending)
    unlabelled = ((stem, path) for stem, path in files.items() if stem not in labels)
    single, groups = split_channels(unlabelled, lambda _: True)
    whole = {stem: path for stem, path in files.items() if stem in labels} | dict(single)
    wanted = [f"{index:04d}" for index in range(len(dataset.channels))]
    complete, problems = complete_channels(
        site, groups, wanted, place=lambda case, channel: images / f"{case}_{channel}{ending}"
    )
    problems += [
        f"site {site}: {place} holds {listed(other)}, whose names do not end in {ending}, the "
        "file_ending of dataset.json: convert them, take them out or correct it"
        for place in (images, _sub(folder, f"labels{part}"))
        if (other := _of_other_endings(place, ending))
    ]
    surplus = sorted({channel for group in groups.values() for channel in group} - set(wanted))
    if surplus:
        problems.append(
            f"site {site}: {images} holds files of channel {', '.join(surplus)}, and dataset.json "
            f"names {len(wanted)} channels: name them all or take the files out"
        )
    found = {**complete, **{case: (path,) for case, path in whole.items()}}
    there = whole.keys() | groups.keys()
    problems += _unpaired(site, folder, dataset, part=part, images=there, labels=set(labels))
    cases = [
        Case(site, case, case, files, labels[case], split=split)
        for case, files in sorted(found.items())
        if case in labels
    ]
    return cases, problems


def _of_other_endings(folder: Path, ending: str) -> list[str]:
    """Return the names of the images in a folder that are not of the data set's kind."""
    names = [path.name for path in visible_entries(folder) if not path.name.endswith(ending)]
    return [name for name in names if name.lower().endswith(SUFFIXES)]


def _by_stem(folder: Path, ending: str) -> dict[str, Path]:
    """Return the files of a folder by their names without the ending."""
    files = [path for path in visible_entries(folder) if path.name.endswith(ending)]
    return {path.name.removesuffix(ending): path for path in files}


def _unpaired(
    site: str, folder: Path, dataset: DatasetJson, *, part: str, images: set[str], labels: set[str]
) -> list[str]:
    """Report images and labels without a partner, and cases of `dataset.json` that are missing."""
    ending = dataset.ending
    place, beside = _sub(folder, f"images{part}"), _sub(folder, f"labels{part}")
    alone, known = sorted(images - labels), images | labels
    if part == "Ts" and alone:
        logger.info("site %s: %d images of imagesTs have no label and are left out",
                    site, len(alone))  # fmt: skip
        alone = []
    problems = [
        f"site {site}, case {case}: its image in {place} has no label "
        f"{beside / (case + ending)}: add the label or take the image out"
        for case in alone
    ] + [
        f"site {site}, case {case}: its label in {beside} has no image "
        f"{place / f'{case}_0000{ending}'}: add the image or take the label out"
        for case in sorted(labels - images)
    ]
    if part == "Tr" and dataset.training is not None:
        problems += [
            f"site {site}, case {case}: dataset.json lists it, and {folder} holds neither its "
            "image nor its label: restore them or take it off the list"
            for case in sorted(set(dataset.training) - known)
        ]
    elif part == "Tr" and dataset.count not in (None, len(known)):
        problems.append(
            f"site {site}: dataset.json says {dataset.count} training cases, and {folder} holds "
            f"{len(known)} with the ending {ending}: restore the others, or correct numTraining or "
            "file_ending"
        )
    return problems
