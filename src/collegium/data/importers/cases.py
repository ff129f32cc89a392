"""A folder for each case, with one image or several channels, and one mask recognised by its name.

KiTS has `case_00000/imaging.nii.gz` and `segmentation.nii.gz`, BraTS `X/X_flair.nii.gz`,
`X/X_t1.nii.gz`, .. and `X/X_seg.nii.gz`. The mask has one of the words segmentation, seg, mask,
label or labels in its name beside the case's; any other words there name a channel.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from collegium.data.decoded_image import listed
from collegium.data.formats import FILE_SUFFIXES, is_readable
from collegium.data.importers.common import (
    DatasetDescription,
    FoundCases,
    unplaced,
    visible_entries,
)
from collegium.data.pairing import case_id
from collegium.data.site import Case
from collegium.errors import DataError

_MASK_WORDS = ("segmentation", "seg", "mask", "label", "labels")


@dataclass(frozen=True)
class CaseFolder:
    """The content of a case's folder.

    Attributes:
        images: The images in the order of their channels' names; a DICOM series is a folder.
        channels: The names of the channels, sorted.
        masks: The files whose names mark them as masks.
    """

    images: tuple[Path, ...]
    channels: tuple[str, ...]
    masks: tuple[Path, ...]


def matches(folder: Path) -> bool:
    """Return whether most subfolders hold one mask beside an image."""
    contents = _contents(folder).values()
    fitting = [content for content in contents if content.images and len(content.masks) == 1]
    return 2 * len(fitting) > len(contents)


def from_cases(site: str, folder: Path) -> FoundCases:
    """Return the usable cases of a folder of folders and one sentence for each problem.

    A case has the name of its folder, and is a patient of its own.

    Args:
        site: The site's name.
        folder: The folder that holds a folder for each case.
    """
    contents = _contents(folder)
    if not contents:
        return [], [
            f"site {site}: {folder} holds no subfolders, one for each case: correct the path, or "
            "name another layout"
        ]
    wanted = _channels(contents)
    cases, problems = [], unplaced(site, (p for p in visible_entries(folder) if not p.is_dir()))
    for name, content in contents.items():
        try:
            _check(content, wanted, f"site {site}, case {name}: its folder {folder / name}")
            cases.append(Case(site, name, name, content.images, content.masks[0]))
        except DataError as error:
            problems.append(str(error))
    return cases, problems


def describe(site: str, folder: Path) -> DatasetDescription:
    """Return the names of the channels, as most cases have them.

    Args:
        site: The site's name.
        folder: The folder that holds a folder for each case.
    """
    return DatasetDescription("the names of the files", channels=_channels(_contents(folder)))


def _contents(folder: Path) -> dict[str, CaseFolder]:
    return {path.name: _content(path) for path in visible_entries(folder) if path.is_dir()}


def _content(folder: Path) -> CaseFolder:
    """Separate masks from images by the words in their names beside the case's."""
    images, masks = [], []
    for path in visible_entries(folder):
        if not is_readable(path):
            continue
        words = _words(case_id(path), folder.name)
        if any(word in _MASK_WORDS for word in words):
            masks += [] if path.is_dir() else [path]
        elif path.is_dir() or path.name.lower().endswith(FILE_SUFFIXES):  # no slice of a series
            images.append(("_".join(words) or "image", path))
    images.sort()
    return CaseFolder(
        tuple(path for _, path in images), tuple(name for name, _ in images), tuple(masks)
    )


def _words(stem: str, case: str) -> list[str]:
    """Return the words of a file's name in lower case, without the case's name."""
    own = re.compile(rf"(?<![^\W_]){re.escape(case)}(?![^\W_])", re.IGNORECASE)
    return re.findall(r"[^\W_]+", own.sub("", stem).casefold())


def _channels(contents: Mapping[str, CaseFolder]) -> tuple[str, ...]:
    """Return the channel names that most cases share; on a tie, the longest tuple of names."""
    counts = Counter(content.channels for content in contents.values() if content.images)
    return max(counts, key=lambda names: (counts[names], len(names), names), default=())


def _check(content: CaseFolder, wanted: tuple[str, ...], where: str) -> None:
    """Refuse a case without exactly one mask, or without the channels of the other cases."""
    if not content.masks:
        raise DataError(
            f"{where} holds no mask, a file with one of the words {listed(_MASK_WORDS)} in its "
            "name: add it or take the folder out"
        )
    if len(content.masks) > 1:
        names = listed([path.name for path in content.masks])
        raise DataError(
            f"{where} holds the masks {names}: leave one there, or list the cases in a manifest"
        )
    if not content.images:
        raise DataError(f"{where} holds no image beside the mask: add it or take the folder out")
    if content.channels != wanted:
        raise DataError(
            f"{where} holds the channels {listed(content.channels)}, and other cases have "
            f"{listed(wanted)}: add what is missing, name the files as there, or take the folder "
            "out"
        )
