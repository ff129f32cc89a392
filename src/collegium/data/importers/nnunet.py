"""nnU-Net's raw data: `dataset.json`, `imagesTr`, `labelsTr` and, of choice, `imagesTs`.

Both versions of `dataset.json` are understood, and the Decathlon's, whose images hold all of their
channels in one file. Labelled test images (`labelsTs`) are the split "test". Upper and lower case
of the folders' names do not count.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collegium.data.discovery import complete_channels
from collegium.data.importers.about import About, channels_of, labels_of
from collegium.data.importers.files import Found, read_json, visible
from collegium.data.site import Case
from collegium.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """What `dataset.json` says.

    Attributes:
        channels: The names of the channels, in order.
        labels: The stored values of each label; several make a region.
        ending: How the names of the files end.
        training: The ids of the training cases, where they are listed.
        count: The number of training cases, where it is given.
    """

    channels: tuple[str, ...]
    labels: dict[str, tuple[int, ...]]
    ending: str
    training: tuple[str, ...] | None
    count: int | None


def looks_like(folder: Path) -> bool:
    """Whether a folder has this layout."""
    return (folder / "dataset.json").is_file() and _sub(folder, "imagesTr").is_dir()


def from_nnunet(site: str, folder: Path) -> Found:
    """Give the usable cases of a raw data set and one sentence for each problem.

    Raises:
        DataError: If `dataset.json` is unusable.
    """
    about = describe(site, folder)
    named = ", ".join(f"{name} {'+'.join(map(str, values))}" for name, values in
                      about.labels.items())  # fmt: skip
    logger.info("site %s: dataset.json names the channels %s and the labels %s",
                site, ", ".join(about.channels), named)  # fmt: skip
    split = "train" if visible(_sub(folder, "labelsTs")) else None
    cases, problems = _part(site, folder, about, part="Tr", split=split)
    if split is not None:
        tests, more = _part(site, folder, about, part="Ts", split="test")
        cases, problems = [*cases, *tests], [*problems, *more]
    elif visible(_sub(folder, "imagesTs")):
        logger.info("site %s: imagesTs has no labelsTs and is left out", site)
    return cases, problems


def about_of(site: str, folder: Path) -> About:
    """Give the names of labels and channels in `dataset.json`.

    Raises:
        DataError: If it is unusable.
    """
    found = describe(site, folder)
    return About("dataset.json", found.labels, found.channels)


def describe(site: str, folder: Path) -> Description:
    """Read `dataset.json`.

    Raises:
        DataError: If it lacks what is needed.
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
        count = content.get("numTraining")
        listed = content.get("training")
        ending = str(content.get("file_ending", ".nii.gz"))
        training = None if listed is None else tuple(_listed(entry, ending) for entry in listed)
        return Description(
            channels_of(channels),
            labels_of(content.get("labels", {})),
            ending,
            training,
            None if count is None else int(count),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"site {site}: {path} is not as nnU-Net writes it ({type(error).__name__}: {error}): "
            "correct it after its documentation"
        ) from error


def _sub(folder: Path, name: str) -> Path:
    """Give the subfolder of a name, whatever its case; where there is none, where it should be."""
    alike = [path for path in visible(folder) if path.name.lower() == name.lower()]
    return alike[0] if alike and folder / name not in alike else folder / name


def _listed(entry: Any, ending: str) -> str:
    """Give the id of an entry of the training list of version 1."""
    file = entry["label"] if isinstance(entry, dict) else entry
    return Path(str(file)).name.removesuffix(ending)


def _part(site: str, folder: Path, about: Description, *, part: str, split: str | None) -> Found:
    """Give the cases of the training part (Tr) or the test part (Ts)."""
    images, ending = _sub(folder, f"images{part}"), about.ending
    labels = {
        path.name.removesuffix(ending): path
        for path in visible(_sub(folder, f"labels{part}"))
        if path.name.endswith(ending)
    }
    whole, groups = _images(images, ending, set(labels))
    wanted = [f"{index:04d}" for index in range(len(about.channels))]
    complete, problems = complete_channels(
        site, groups, wanted, place=lambda case, channel: images / f"{case}_{channel}{ending}"
    )
    surplus = sorted({channel for group in groups.values() for channel in group} - set(wanted))
    if surplus:
        problems.append(
            f"site {site}: {images} holds files of channel {', '.join(surplus)}, and dataset.json "
            f"names {len(wanted)} channels: name them all or take the files out"
        )
    found = {**complete, **{case: (path,) for case, path in whole.items()}}
    there = whole.keys() | groups.keys()
    problems += _unpaired(site, folder, about, part=part, images=there, labels=set(labels))
    cases = [
        Case(site, case, case, files, labels[case], split=split)
        for case, files in sorted(found.items())
        if case in labels
    ]
    return cases, problems


def _images(
    folder: Path, ending: str, labelled: set[str]
) -> tuple[dict[str, Path], dict[str, dict[str, Path]]]:
    """Give the images that are one file, and the files by case and channel of the others."""
    whole: dict[str, Path] = {}
    groups: dict[str, dict[str, Path]] = {}
    for path in visible(folder):
        if not path.name.endswith(ending):
            continue
        stem = path.name.removesuffix(ending)
        match = re.fullmatch(r"(.+)_(\d{4})", stem)
        if match and stem not in labelled:
            groups.setdefault(match[1], {})[match[2]] = path
        else:
            whole[stem] = path
    return whole, groups


def _unpaired(
    site: str, folder: Path, about: Description, *, part: str, images: set[str], labels: set[str]
) -> list[str]:
    """Say what lacks its partner, and what `dataset.json` promises and is not there."""
    ending = about.ending
    place, beside = _sub(folder, f"images{part}"), _sub(folder, f"labels{part}")
    alone = sorted(images - labels)
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
    known = images | labels
    if part == "Tr" and about.training is not None:
        problems += [
            f"site {site}, case {case}: dataset.json lists it, and {folder} holds neither its "
            "image nor its label: restore them or take it off the list"
            for case in sorted(set(about.training) - known)
        ]
    elif part == "Tr" and about.count not in (None, len(known)):
        problems.append(
            f"site {site}: dataset.json says {about.count} training cases, and {folder} holds "
            f"{len(known)} with the ending {ending}: restore the others, or correct numTraining or "
            "file_ending"
        )
    return problems
