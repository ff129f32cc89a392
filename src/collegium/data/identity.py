"""The content of a site's cases, by which a run notices that its data are no longer the same.

A digest of every file or row is stored beside the splits when training begins, in the site's own
state, and compared whenever the run opens its data again. Nothing is decoded for it, and nothing of
it leaves the site.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from collegium.core.files import storage_error, write_atomically
from collegium.core.seals import read_sealed, seal_json
from collegium.data.cache import digests_of_files
from collegium.data.decoded_image import listed
from collegium.data.site import Case, Site
from collegium.data.tables import Table
from collegium.errors import DataError

CONTENTS = "contents"
"""The key of the digests in a file of splits."""

Contents = Mapping[str, Mapping[str, str]]
"""By case, the digest of each thing that it consists of, such as "image" and "mask"."""

_WORDS = {"image": "image", "label": "mask", "fov": "field of view"}
_OTHER = {"values": "other"}
_NEW_FOLDER = "or start the run in a new output folder"


def contents_of_cases(cases: Iterable[Case], cache: Path) -> dict[str, dict[str, str]]:
    """Return the digests of cases of images: of the files' bytes, and of the class as written.

    Args:
        cases: The cases of a site.
        cache: The folder in which the files' digests are recorded.

    Raises:
        DataError: A file cannot be read.
    """
    return {case.case: _contents_of(case, cache) for case in cases}


def _contents_of(case: Case, cache: Path) -> dict[str, str]:
    parts: dict[str, list[bytes]] = defaultdict(list)
    for role, _, digest in digests_of_files(case, cache):
        parts[_WORDS[role]].append(digest)
    if case.target is not None:
        parts["class"].append(case.target.encode())
    return {what: _digest(*found) for what, found in parts.items()}


def contents_of_rows(table: Table, cases: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the digests of rows of a table: of the columns that are learnt from, and of the class.

    Args:
        table: The rows of a site.
        cases: The ids of those that the run uses.
    """
    used, rows = {*cases}, zip(table.cases, table.numbers, table.codes, table.targets, strict=True)
    return {
        case: {
            "values": _digest(numbers.tobytes(), codes.tobytes()),
            "class": _digest(target.encode()),
        }
        for case, numbers, codes, target in rows
        if case in used
    }


def check_contents(site: str, found: Contents, splits_file: Path) -> None:
    """Check that a site's data are those with which a run began to train, if it has begun.

    Args:
        site: The site.
        found: Its data.
        splits_file: The run's splits of the site.

    Raises:
        DataError: They are not; with the cases, and what of them is another one.
        CheckpointError: The splits are damaged.
    """
    stored = _read(splits_file).get(CONTENTS)
    if stored is None or stored == found:
        return
    changed: dict[str, list[str]] = defaultdict(list)
    for case in sorted(stored.keys() | found.keys()):
        then, now = stored.get(case), found.get(case)
        if then is None or now is None:
            changed["one case more," if then is None else "one case less,"].append(case)
            continue
        for what in sorted(then.keys() | now.keys()):
            if then.get(what) != now.get(what):
                changed[f"{_OTHER.get(what, 'another')} {what} of"].append(case)
    differences = "; ".join(f"{what} {listed(cases)}" for what, cases in sorted(changed.items()))
    raise DataError(
        f"site {site}: its data have changed since this run began to train ({differences}): put "
        f"the old data back, {_NEW_FOLDER}"
    )


def record_contents(site: Site, splits_file: Path) -> None:
    """Store the content of a site's data with a run's splits, unless it is stored already.

    Args:
        site: The site.
        splits_file: The run's splits of the site.

    Raises:
        StorageError: The file cannot be read or written.
    """
    stored = _read(splits_file)
    if CONTENTS not in stored:
        text = json.dumps({**stored, CONTENTS: site.contents}, indent=1, ensure_ascii=False)
        write_atomically(splits_file, seal_json(f"{text}\n"))


def _read(splits_file: Path) -> dict[str, Any]:
    try:
        return read_sealed(splits_file, f"restore it from a copy, {_NEW_FOLDER}")
    except OSError as error:
        raise storage_error(error, splits_file) from error


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
