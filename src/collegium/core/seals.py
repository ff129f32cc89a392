"""Seals: a SHA-256 inside a stored file, by which a later read notices that a bit has changed.

A sealed file stays what it was for other readers: in JSON the seal is the first key of the object,
in JSON lines a line at the end, in safetensors the first entry of the metadata. It covers every
other byte of the file. A file that was written before there were seals is read without one. A seal
protects against damage, and not against a person, who can compute a new one.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from collegium.errors import CheckpointError

START_AGAIN = "restore it from a copy, or start the run again in a new output folder"
"""The remedy for a damaged file that a run cannot recreate."""

KEY = "sha256"
"""The key of the seal."""

_REACH = 128
"""A seal lies within so many bytes of the start of a file."""

_SEAL = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')
_REST = re.compile(rb"sha256|[0-9a-f]{64}")
"""Matches a damaged seal: its key or its value, of which the other has a changed bit."""

_CHANGED = "it is not as it was written: its SHA-256 is another one"

_METADATA = b'{"__metadata__":{'
"""What a safetensors header with metadata begins with."""


def seal_json(text: str) -> bytes:
    """Return a JSON object, encoded, with a seal as its first key.

    Args:
        text: the object, as `json.dumps` writes it.
    """
    end = '"' if text == "{}" else '", '
    before, after = f'{{"{KEY}": "'.encode(), f"{end}{text[1:]}".encode()
    return before + _digest(before, after) + after


def open_json(data: bytes) -> dict[str, Any]:
    """Return the object that `seal_json` wrote, without the seal.

    Args:
        data: the stored bytes.

    Raises:
        ValueError: they are damaged, or no JSON object.
    """
    check_seal(data)
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - the content is wrong, not its type
    found.pop(KEY, None)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file that `seal_json` wrote. See `open_json`.

    Raises:
        OSError: the file cannot be read.
    """
    return open_json(path.read_bytes())


def seal_lines(lines: str) -> bytes:
    """Return JSON lines, encoded, with a seal as their last line.

    Args:
        lines: the lines.
    """
    data = lines.encode()
    return data + _last_line(data)


def open_lines(data: bytes) -> list[bytes]:
    """Return the lines that `seal_lines` wrote, without the seal.

    A seal that is damaged beyond recognition counts as a line.

    Args:
        data: the stored bytes.

    Raises:
        ValueError: they are damaged.
    """
    size = len(_last_line(b""))
    before, last = data[:-size], data[-size:]
    if _SEAL.search(last) is None:
        return data.splitlines()
    if last != _last_line(before):
        raise ValueError(_CHANGED)
    return before.splitlines()


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of a file that holds no seal, in hexadecimal digits.

    Args:
        data: the file.
    """
    return _digest(data).decode()


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a file that `seal_json` wrote.

    Args:
        path: the file.
        remedy: what a user can do if it is damaged.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged (cut short or changed); {remedy}") from error


def seal_tensors(data: bytes) -> tuple[bytes, memoryview]:
    """Return the header with a seal, and the rest, of a safetensors file that has metadata.

    The rest is not copied, as it may be large.

    Args:
        data: the file.
    """
    size = 8 + int.from_bytes(data[:8], "little")
    entries = data[8 + len(_METADATA) : size].rstrip(b" ")
    start, after = _METADATA + f'"{KEY}":"'.encode(), b'",' + entries
    after += b" " * (-(len(start) + 64 + len(after)) % 8)
    before = (len(start) + 64 + len(after)).to_bytes(8, "little") + start
    rest = memoryview(data)[size:]
    return before + _digest(before, after, rest) + after, rest


def check_seal(data: bytes) -> None:
    """Check that a file is as it was sealed; one without a seal passes.

    Args:
        data: the file.

    Raises:
        ValueError: a byte has changed.
    """
    found = _SEAL.search(data, 0, _REACH)
    if found is None:
        intact = _REST.search(data, 0, _REACH) is None
    else:
        start, end = found.span(1)
        intact = _digest(data[:start], memoryview(data)[end:]) == found[1]
    if not intact:
        raise ValueError(_CHANGED)


def _last_line(lines: bytes) -> bytes:
    return f'{{"{KEY}": "{digest_of(lines)}"}}\n'.encode()


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()
