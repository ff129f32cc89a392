"""Shared by several layouts: names and content of files, and a data set's own description."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collegium.core.foreign_json import read_foreign_json
from collegium.data.pairing import case_id, is_beside
from collegium.data.placeholders import missing_content
from collegium.data.site import Case
from collegium.errors import DataError

IGNORE = "ignore"
"""By this name of a label nnU-Net means pixels that nobody annotated."""

FoundCases = tuple[list[Case], list[str]]
"""The usable cases, and one sentence for each problem."""


@dataclass(frozen=True)
class DatasetDescription:
    """A data set's own description, beside its cases: names of labels and channels, and notes.

    Attributes:
        source: The source of the description, in words that name no file of the site's own.
        labels: The stored values of each label by its name; several make a region. What it calls
            `IGNORE` is not among them.
        channels: The names of the channels, in the order of the files.
        notes: One sentence for each file that is present and not used.
        ignore: The stored values of what it calls `IGNORE`.
    """

    source: str = ""
    labels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    channels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignore: tuple[int, ...] = ()


def parse_labels(labels: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the values of each label, from values by name (nnU-Net) or names by value (Decathlon).

    Raises:
        ValueError: A value is not a whole number; or TypeError.
    """
    found: dict[str, tuple[int, ...]] = {}
    for key, value in labels.items():
        if isinstance(value, str) and not value.strip().isdecimal():
            found[value] = (*found.get(value, ()), int(key))
        else:
            found[key] = tuple(map(int, value)) if isinstance(value, list) else (int(value),)
    return found


def parse_channels(channels: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the channels in the order of their numbers.

    Raises:
        ValueError: A key is not a whole number.
    """
    return tuple(str(channels[key]) for key in sorted(channels, key=int))


def read_json(site: str, path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        site: The site's name, for errors.
        path: The file.

    Raises:
        DataError: It is missing, cannot be read or holds something else.
    """
    try:
        content = read_foreign_json(path)
    except FileNotFoundError as error:
        raise DataError(
            f"site {site}: there is no {path}: restore it, or name another layout"
        ) from error
    except OSError as error:
        raise DataError(
            f"site {site}: {path} cannot be read ({error.strerror}): check its permissions"
        ) from error
    except ValueError as error:
        raise DataError(f"site {site}: {path} is not JSON ({error}): correct it") from error
    if not isinstance(content, dict):
        raise DataError(
            f"site {site}: {path} holds no JSON object with keys, which would describe a data set: "
            "correct the path, or name another layout"
        )
    return content


def visible_entries(folder: Path) -> list[Path]:
    """List a folder without hidden files, sorted; a folder that does not exist is empty."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def unplaced(site: str, paths: Iterable[Path]) -> list[str]:
    """Return a sentence for each file or folder that may be a case and has no place in a layout.

    Args:
        site: The site's name.
        paths: The files and folders; those that are plainly no images are passed over.
    """
    return [
        f"site {site}, case {case_id(path)}: {path} "
        + (
            missing_content(path)
            or "has no place in the layout of its folder, or is no image of a kind that is read: "
            "move or convert it, take it out, or list the cases in a manifest"
        )
        for path in paths
        if not is_beside(path)
    ]


def unique_ids(images: Sequence[Path]) -> list[str]:
    """Return an id for each image: its file's name, with its folders if that is not unique."""
    ids = [case_id(path) for path in images]
    if len(set(ids)) < len(ids):
        ids = [f"{path.parent.name}_{case_id(path)}" for path in images]
    if len(set(ids)) < len(ids):
        base = os.path.commonpath([path.parent for path in images])
        ids = ["_".join((*path.parent.relative_to(base).parts, case_id(path))) for path in images]
    return ids
