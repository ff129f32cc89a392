"""A folder for each case: one image or several channels, and one mask that its name tells.

KiTS has `case_00000/imaging.nii.gz` and `segmentation.nii.gz`, BraTS `X/X_flair.nii.gz`,
`X/X_t1.nii.gz`, .. and `X/X_seg.nii.gz`. The mask has one of the words segmentation, seg, mask,
label or labels in its name beside the case's; what else stands there names a channel.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from collegium.data.decoded import listed
from collegium.data.formats import FILES, is_readable
from collegium.data.importers.about import About
from collegium.data.importers.files import Found, visible
from collegium.data.pairing import case_id
from collegium.data.site import Case
from collegium.errors import DataError

_MASK_WORDS = ("segmentation", "seg", "mask", "label", "labels")


@dataclass(frozen=True)
class Content:
    """What the folder of a case holds.

    Attributes:
        images: The images in the order of their channels' names; a DICOM series is a folder.
        channels: The names of the channels, sorted.
        masks: The files that their names tell to be masks.
    """

    images: tuple[Path, ...]
    channels: tuple[str, ...]
    masks: tuple[Path, ...]


def looks_like(folder: Path) -> bool:
    """Whether most subfolders hold one mask beside an image."""
    contents = _contents(folder).values()
    fitting = [content for content in contents if content.images and len(content.masks) == 1]
    return 2 * len(fitting) > len(contents)


def from_cases(site: str, folder: Path) -> Found:
    """Give the usable cases of a folder of folders and one sentence for each problem.

    A case is called as its folder, and is a patient of its own.
    """
    contents = _contents(folder)
    if not contents:
        return [], [
            f"site {site}: {folder} holds no subfolder, which would be a case: correct the path, "
            "or name another layout"
        ]
    wanted = _channels(contents)
    cases, problems = [], []
    for name, content in contents.items():
        try:
            _check(content, wanted, f"site {site}, case {name}: its folder {folder / name}")
            cases.append(Case(site, name, name, content.images, content.masks[0]))
        except DataError as error:
            problems.append(str(error))
    return cases, problems


def about_of(site: str, folder: Path) -> About:
    """Give the names of the channels, as most cases have them."""
    return About("the names of the files", channels=_channels(_contents(folder)))


def _contents(folder: Path) -> dict[str, Content]:
    return {path.name: _content(path) for path in visible(folder) if path.is_dir()}


def _content(folder: Path) -> Content:
    """Tell masks from images by what stands in their names beside the case's."""
    images, masks = [], []
    for path in visible(folder):
        if not is_readable(path):
            continue
        words = _words(case_id(path), folder.name)
        if any(word in _MASK_WORDS for word in words):
            masks += [path] if path.is_file() else []
        elif path.is_dir() or path.name.lower().endswith(FILES):  # no single slices of a series
            images.append(("_".join(words) or "image", path))
    images.sort()
    return Content(
        tuple(path for _, path in images), tuple(name for name, _ in images), tuple(masks)
    )


def _words(stem: str, case: str) -> list[str]:
    """Give the words of a file's name in lower case, without the case's name."""
    own = re.compile(rf"(?<![^\W_]){re.escape(case)}(?![^\W_])", re.IGNORECASE)
    return re.findall(r"[^\W_]+", own.sub("", stem).casefold())


def _channels(contents: Mapping[str, Content]) -> tuple[str, ...]:
    """Give the names of the channels that most cases have; where as many have others, of most."""
    counts = Counter(content.channels for content in contents.values() if content.images)
    return max(counts, key=lambda names: (counts[names], len(names), names), default=())


def _check(content: Content, wanted: tuple[str, ...], where: str) -> None:
    """Refuse a case without one mask and the channels of the others.

    Raises:
        DataError: It says what is wrong.
    """
    if not content.masks:
        raise DataError(
            f"{where} holds no mask, whose name would have one of the words "
            f"{listed(_MASK_WORDS)}: add it or take the folder out"
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
            f"{listed(wanted)}: add what is missing, call the files as there, or take the folder "
            "out"
        )
