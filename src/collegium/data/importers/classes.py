"""A folder for each class: `<class>/<image>`, optionally below folders train, val and test."""

from collections.abc import Collection, Iterator
from pathlib import Path

from collegium.data.discovery import SPLIT_NAMES, subfolders
from collegium.data.formats import is_readable
from collegium.data.importers.common import FoundCases, unique_ids, unplaced, visible_entries
from collegium.data.site import Case


def matches(folder: Path, names: Collection[str] = ()) -> bool:
    """Return whether a folder has this layout: two classes or more, each with an image.

    Subfolders named images, labels or fov are not classes.

    Args:
        folder: The folder.
        names: The names of the classes; a single class is enough if its folder has one of these.
    """
    if any(subfolders(folder)):
        return False
    classes = {name for _, name, path in _walk(folder) if is_readable(path)}
    return len(classes) > 1 or (bool(classes) and classes <= set(names))


def from_classes(site: str, folder: Path) -> FoundCases:
    """Return the images of a folder, each with the name of its subfolder as its class.

    An image file, or a folder with a DICOM series, is a case and a patient of its own.

    Args:
        site: The site's name.
        folder: The folder that holds a folder for each class.
    """
    entries = [*_walk(folder)]
    found = [entry for entry in entries if is_readable(entry[2])]
    if not found:
        return [], [
            f"site {site}: {folder} holds no images in subfolders named by their classes: correct "
            "the path, or name another layout"
        ]
    ids = unique_ids([path for _, _, path in found])
    cases = [
        Case(site, case, case, (path,), None, split=split, target=name)
        for case, (split, name, path) in zip(ids, found, strict=True)
    ]
    placed = {path for _, _, path in found}
    above = sorted({folder, *(path.parent.parent for _, _, path in entries)})
    beside = [path for place in above for path in visible_entries(place) if not path.is_dir()]
    others = [path for _, _, path in entries if path not in placed]
    return cases, unplaced(site, [*beside, *others])


def _walk(folder: Path) -> Iterator[tuple[str | None, str, Path]]:
    """Yield the split, the class and the path of every entry of a class's folder."""
    below = [path for path in visible_entries(folder) if path.is_dir()]
    parts: list[tuple[str | None, Path]] = [(None, path) for path in below]
    if below and all(path.name.lower() in SPLIT_NAMES for path in below):
        parts = [
            (SPLIT_NAMES[part.name.lower()], path)
            for part in below
            for path in visible_entries(part)
            if path.is_dir()
        ]
    return ((split, path.name, file) for split, path in parts for file in visible_entries(path))
