"""What several layouts share: names of files and their content."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collegium.data.pairing import case_id
from collegium.data.site import Case
from collegium.errors import DataError

Found = tuple[list[Case], list[str]]
"""The usable cases, and one sentence for each problem."""


def read_json(site: str, path: Path) -> dict[str, Any]:
    """Read a JSON file that holds keys and values.

    Raises:
        DataError: If it is not there, cannot be read or holds something else.
    """
    try:
        content = json.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError as error:
        raise DataError(
            f"site {site}: there is no {path}: restore it, or name another layout"
        ) from error
    except OSError as error:
        raise DataError(
            f"site {site}: {path} cannot be read ({error.strerror}): check its permissions"
        ) from error
    except ValueError as error:
        raise DataError(f"site {site}: {path} is no JSON text ({error}): correct it") from error
    if not isinstance(content, dict):
        raise DataError(f"site {site}: {path} holds no keys and values: it describes no data set")
    return content


def visible(folder: Path) -> list[Path]:
    """List a folder without hidden files, sorted; nothing where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def unique_ids(images: Sequence[Path]) -> list[str]:
    """Name each image by its file, with its folders before it where that is not unique."""
    rules: tuple[Callable[[Path], str], ...] = (
        case_id,
        lambda path: f"{path.parent.name}_{case_id(path)}",
    )
    for rule in rules:
        ids = [rule(path) for path in images]
        if len(set(ids)) == len(ids):
            return ids
    base = os.path.commonpath([path.parent for path in images])
    return ["_".join((*path.parent.relative_to(base).parts, case_id(path))) for path in images]
