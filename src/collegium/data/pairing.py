"""Pairs masks with images by their names, never by their positions."""

import re
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from collegium.data.formats import SUFFIXES
from collegium.data.placeholders import NO_IMAGE
from collegium.errors import DataError

Key = tuple[Hashable, ...]

_SYSTEM_FILES = {
    "thumbs.db", "desktop.ini", "icon\r", "readme", "license", "licence", "changes", "copying",
}  # fmt: skip
_MASK_TOKEN = re.compile(
    r"segmentations?|segs?|masks?|labels?|lbl|gt|groundtruth|ground|truth|annotations?|anno?|"
    r"manual\d*|annotator\d*|expert\d*|observer\d*|rater\d*|(1st|2nd)ho|rois?|fov"
)
_ROLE_TOKEN = re.compile(
    rf"{_MASK_TOKEN.pattern}|images?|imgs?|im|scans?|original|orig|raw|training|train|testing|test"
)


class PairedCase(NamedTuple):
    """The files of one case.

    Attributes:
        case: The image's stem as it is.
        image: The image's file.
        mask: The mask's file; None if no masks were given.
        fov: The file of the field of view, if there is one.
    """

    case: str
    image: Path
    mask: Path | None
    fov: Path | None


@dataclass(frozen=True)
class Pairing:
    """Images paired with their masks and fields of view, and the files left over.

    Attributes:
        cases: Every image that has a mask (every image, if no masks were given), sorted by case
            with numbers compared as numbers.
        unpaired_images: Case ids of the images without a mask.
        unpaired_masks: File names of the masks without an image.
        notes: One sentence for each fact about the pairing that a person should know.
    """

    cases: tuple[PairedCase, ...]
    unpaired_images: tuple[str, ...] = ()
    unpaired_masks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def pair_cases(images: Sequence[Path], masks: Sequence[Path], fovs: Sequence[Path] = ()) -> Pairing:
    """Pair images with masks, and with fields of view, by their names.

    The rules of `RULES` are tried from the strictest to the loosest. The first one whose keys are
    unique in both folders and which finds an image for every mask is used; if there is none, the
    one that finds the most, and the files left over are reported by name. Hidden files, files of
    operating systems and files that are plainly not images (text, tables, archives) are ignored.

    Args:
        images: The images' files.
        masks: The masks' files; without any, every image becomes a case without a mask.
        fovs: The files of the fields of view.

    Raises:
        DataError: Two images have one case id, two files could belong to the same case, or nothing
            can be paired.
    """
    kept = sorted(_relevant(images), key=lambda path: (_natural(case_id(path)), str(path)))
    if not kept:
        raise DataError(f"{_folder(images)}: there is no image among the files: add images")
    _refuse_duplicates(kept)
    notes: list[str] = []
    mask_of = _pair(kept, masks, "mask", notes)
    fov_of = _pair(kept, fovs, "field of view", notes)
    cases = tuple(
        PairedCase(case_id(image), image, mask_of.get(image), fov_of.get(image))
        for image in kept
        if not masks or image in mask_of
    )
    without = tuple(case_id(image) for image in kept if masks and image not in mask_of)
    left = set(_relevant(masks)) - set(mask_of.values())
    if fovs:
        notes += [f"case {case.case} has no field of view" for case in cases if case.fov is None]
    notes += [f"case {case} has no mask and is left out" for case in without]
    return Pairing(cases, without, tuple(sorted(path.name for path in left)), tuple(notes))


def case_id(path: Path) -> str:
    """Return the file's name without its extension (`.nii.gz` is one), otherwise unchanged."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.lower().endswith(suffix) and len(path.name) > len(suffix):
            return path.name[: -len(suffix)]
    return path.stem


# --- the rules


def _exact(stem: str) -> Key:
    return (unicodedata.normalize("NFC", stem),)


def _numbered(stem: str) -> Key:
    return _parts(_tokens(stem))


def _without_role_words(stem: str) -> Key:
    return _strip(_tokens(stem), _ROLE_TOKEN)


def _leading(stem: str) -> Key:
    return _parts(_tokens(stem)[:1])


RULES: dict[str, Callable[[str], Key]] = {
    "equal names": _exact,
    "equal names, with numbers compared as numbers": _numbered,
    "names without words such as seg, mask and manual1": (
        lambda stem: _strip(_tokens(stem), _MASK_TOKEN)
    ),
    "names without words such as seg, mask, image and training": _without_role_words,
    "names without the channel suffix _0000": (
        lambda stem: _without_role_words(stem.removesuffix("_0000"))
    ),
    "the first part of the name": _leading,
}
"""The rules from the strictest to the loosest: the key of a case from a file's stem."""


def _tokens(stem: str) -> list[str]:
    folded = unicodedata.normalize("NFC", stem).casefold()
    return [token for token in re.split(r"[\W_]+", folded) if token]


def _parts(tokens: Iterable[str]) -> Key:
    """Split tokens into words and numbers: `case`, `01L` becomes `case`, 1, `l`."""
    pieces = (piece for token in tokens for piece in re.findall(r"[0-9]+|[^0-9]+", token))
    return tuple(int(piece) if piece.isascii() and piece.isdigit() else piece for piece in pieces)


def _strip(tokens: Iterable[str], role: re.Pattern[str]) -> Key:
    """Drop role words that stand alone (`manual1`) or are joined to a number (`img01`)."""
    parts = _parts(token for token in tokens if not role.fullmatch(token))
    return tuple(part for part in parts if isinstance(part, int) or not role.fullmatch(str(part)))


def _natural(stem: str) -> tuple[tuple[int, int, str], ...]:
    return tuple(
        (0, part, "") if isinstance(part, int) else (1, 0, str(part)) for part in _numbered(stem)
    )


# --- matching


def _pair(
    images: Sequence[Path], files: Sequence[Path], kind: str, notes: list[str]
) -> dict[Path, Path]:
    """Return the file that belongs to each image, if one does."""
    others = sorted(_relevant(files), key=str)
    if not others:
        if files:
            raise DataError(f"{_folder(files)}: there is no {kind} among the files: add them")
        return {}
    best: dict[Path, Path] = {}
    words = ""
    for name, rule in RULES.items():
        found = _matches(rule, images, others)
        if found is not None and len(found) > len(best):
            best, words = found, name
        if len(best) == len(others):
            break
    else:
        _refuse_ambiguity(images, others, kind)
    if not best:
        raise DataError(
            f"no {kind} in {_folder(others)} belongs to an image in {_folder(images)} by its name "
            f"(for instance {others[0].name} and {images[0].name}): give a {kind} its image's "
            "name, or list the pairs in a manifest"
        )
    notes.append(f"{len(best)} of {len(others)} files of kind {kind} were paired by {words}")
    return best


def _matches(
    rule: Callable[[str], Key], images: Sequence[Path], others: Sequence[Path]
) -> dict[Path, Path] | None:
    """Pair by one rule; None if its keys are not unique or it contradicts the numbers."""
    image_of, other_of = _groups(rule, images), _groups(rule, others)
    if any(len(group) > 1 for group in (*image_of.values(), *other_of.values())):
        return None
    found = {image_of[key][0]: other_of[key][0] for key in image_of if key in other_of}
    if rule is _leading and not all(map(_same_numbers, found, found.values())):
        return None
    return found


def _same_numbers(image: Path, other: Path) -> bool:
    """Return whether the numbers after the leading part agree, or only one side has any."""
    first, second = (
        [part for part in _without_role_words(case_id(path)) if isinstance(part, int)]
        for path in (image, other)
    )
    shorter = min(len(first), len(second))
    return first[:shorter] == second[:shorter]


def _groups(rule: Callable[[str], Key], files: Iterable[Path]) -> dict[Key, list[Path]]:
    groups: dict[Key, list[Path]] = {}
    for path in files:
        groups.setdefault(rule(case_id(path)), []).append(path)
    return groups


def _refuse_ambiguity(images: Sequence[Path], others: Sequence[Path], kind: str) -> None:
    """Raise if two files could belong to one case once the role words are removed."""
    image_of, other_of = (_groups(_without_role_words, files) for files in (images, others))
    for key in image_of.keys() & other_of.keys():
        if len(image_of[key]) > 1 or len(other_of[key]) > 1:
            raise DataError(
                f"the names do not show which {kind} of {_names(other_of[key])} in "
                f"{_folder(others)} belongs to which image of {_names(image_of[key])} in "
                f"{_folder(images)}: keep one {kind} per image, or list the pairs in a manifest"
            )


def _refuse_duplicates(images: Sequence[Path]) -> None:
    for (name,), same in _groups(_exact, images).items():
        if len(same) > 1:
            raise DataError(
                f"{_names(same)} in {_folder(same)} are all called case {name}: rename or remove "
                "all but one of them"
            )


def _relevant(files: Iterable[Path]) -> list[Path]:
    return [path for path in files if not is_beside(path)]


def is_beside(path: Path) -> bool:
    """Return whether a file is hidden, of an operating system, or plainly no image."""
    name = path.name.lower()
    if name.startswith(".") or name in _SYSTEM_FILES or path.suffix.lower() in NO_IMAGE:
        return True
    empty = path.is_file() and path.stat().st_size == 0
    return empty and not name.endswith(SUFFIXES)  # an empty image is reported when it is read


def _names(files: Sequence[Path]) -> str:
    return ", ".join(path.name for path in files)


def _folder(files: Sequence[Path]) -> str:
    return str(files[0].parent) if files else "the folder of images"
