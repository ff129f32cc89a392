"""A folder for each class: `<class>/<image>`, of choice below folders train, val and test."""

from collections.abc import Collection, Iterator
from pathlib import Path

from collegium.data.discovery import SPLIT_NAMES, subfolders
from collegium.data.formats import is_readable
from collegium.data.importers.files import Found, unique_ids, visible
from collegium.data.site import Case


def looks_like(folder: Path, names: Collection[str] = ()) -> bool:
    """Whether a folder has this layout: two classes or more, each with an image.

    Subfolders that are called images, labels or fov are no classes.

    Args:
        folder: The folder.
        names: What classes are called; one class alone is enough if it is called so.
    """
    if any(subfolders(folder)):
        return False
    classes = {name for _, name, path in _walk(folder) if is_readable(path)}
    return len(classes) > 1 or (bool(classes) and classes <= set(names))


def from_classes(site: str, folder: Path) -> Found:
    """Give the images of a folder, each with the name of its subfolder as its class.

    An image file, or a folder with a DICOM series, is a case and a patient of its own.
    """
    found = [entry for entry in _walk(folder) if is_readable(entry[2])]
    if not found:
        return [], [
            f"site {site}: {folder} holds no images in subfolders that are called as the classes "
            "are: correct the path, or name another layout"
        ]
    ids = unique_ids([path for _, _, path in found])
    cases = [
        Case(site, case, case, (path,), None, split=split, target=name)
        for case, (split, name, path) in zip(ids, found, strict=True)
    ]
    return cases, []


def _walk(folder: Path) -> Iterator[tuple[str | None, str, Path]]:
    """Give the split, the class and the path of whatever lies in a class's folder."""
    below = [path for path in visible(folder) if path.is_dir()]
    parts: list[tuple[str | None, Path]] = [(None, path) for path in below]
    if below and all(path.name.lower() in SPLIT_NAMES for path in below):
        parts = [
            (SPLIT_NAMES[part.name.lower()], path)
            for part in below
            for path in visible(part)
            if path.is_dir()
        ]
    return ((split, path.name, file) for split, path in parts for file in visible(path))
