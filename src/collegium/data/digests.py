"""Digests of data files: a file is hashed once for as long as it stays the same."""

import hashlib
import json
import logging
import os
import time
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

RECORD = "digests.jsonl"
"""The file in a cache's folder that keeps digests for other processes, one per line.

Each line ends with a digest of itself, without which it is skipped.
"""

_SETTLED = 2_000_000_000  # nanoseconds; no file system counts modification times more coarsely


class _FileState(NamedTuple):
    """A file as it was hashed: its absolute path with links resolved, size and mtime."""

    path: str
    size: int
    mtime_ns: int


def file_digest(path: Path, record_in: Path | None = None) -> bytes:
    """Return the BLAKE2b digest (20 bytes) of a file's content.

    The digest is remembered by the file's absolute path, size and modification time in nanoseconds:
    in this process and, if a folder is given, in the file `RECORD` there, so that other processes
    need not hash the file either. If any of the three changes, the file is hashed again.

    Known limit: content that is replaced while size and modification time stay the same, as by a
    copy of equal length that preserves times, is not noticed. So that two writes in quick
    succession cannot look alike, a file that was modified less than two seconds ago, or in the
    future by this machine's clock, is always hashed.

    Args:
        path: The file.
        record_in: The folder of the record, usually that of the cache; created if absent.

    Raises:
        OSError: The file cannot be read. A record that cannot be read or written is done without.
    """
    stat = path.stat()
    if time.time_ns() - stat.st_mtime_ns < _SETTLED:
        return _hash(path)
    return _remembered(
        _FileState(os.path.realpath(path), stat.st_size, stat.st_mtime_ns), record_in
    )


@lru_cache(maxsize=1 << 16)
def _remembered(state: _FileState, record_in: Path | None) -> bytes:
    if record_in is None:
        return _hash(Path(state.path))
    recorded = _read_record(record_in)
    if state not in recorded:
        recorded[state] = _hash(Path(state.path))
        _append(record_in, state, recorded[state])
    return recorded[state]


def _hash(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).digest()


@cache
def _read_record(folder: Path) -> dict[_FileState, bytes]:
    """Read a record, once per process; lines that were cut short are skipped."""
    recorded: dict[_FileState, bytes] = {}
    try:
        lines = (folder / RECORD).read_text("ascii", errors="replace").splitlines()
    except FileNotFoundError:
        return recorded
    except OSError as error:
        logger.debug("%s cannot be read (%s): files are hashed again", folder / RECORD, error)
        return recorded
    for line in lines:
        try:
            path, size, mtime_ns, digest, check = json.loads(line)
            if check == _check(path, size, mtime_ns, digest):
                recorded[_FileState(path, size, mtime_ns)] = bytes.fromhex(digest)
        except (ValueError, TypeError):
            continue
    return recorded


def _check(*entries: object) -> str:
    return hashlib.blake2b(json.dumps(entries).encode(), digest_size=8).hexdigest()


def _append(folder: Path, state: _FileState, digest: bytes) -> None:
    """Add a line to a record; one write to the end of a file is not torn by another process's."""
    line = json.dumps([*state, digest.hex(), _check(*state, digest.hex())])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / RECORD).open("a", encoding="ascii") as file:
            file.write(f"{line}\n")
    except OSError as error:
        logger.debug("%s cannot be written (%s): digests are not kept", folder / RECORD, error)
