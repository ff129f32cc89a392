"""A site's own record of every message that left it: parts, time, size and hash, not the content.

Each line holds the hash of the line before it, which reveals changed and removed lines. With every
message the site signs off what its ledger holds, by which the server can tell that lines at the end
were removed or written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collegium.core.failures import FAILURE, describe
from collegium.core.files import storage_error
from collegium.core.message import tensors_in
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError, StorageError

logger = logging.getLogger(__name__)

START = "0" * 64
"""The hash before the first line."""


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(line, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def describe_part(part: Any) -> dict[str, Any]:
    """Return names, shapes, dtypes and bytes of the tensors of a part, or the bytes of its JSON."""
    tensors = [(name, t) for name, t in tensors_in(part)]
    if isinstance(part, Tensors) and not part:
        return {"tensors": [], "bytes": 0}
    if not tensors:
        return {"tensors": [], "bytes": len(json.dumps(part))}
    listed = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors]
    return {"tensors": listed, "bytes": sum(t.numel() * t.element_size() for _, t in tensors)}


@dataclass(frozen=True)
class SignOff:
    """A statement on what a ledger holds after the line of a message.

    Attributes:
        lines: how many lines.
        last: the hash of the last one, that of the message.
        previous: the hash of the line before it.
        sha256: of the message's bytes.
    """

    lines: int
    last: str
    previous: str
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)

    @classmethod
    def parse(cls, found: Any) -> SignOff:
        """Return what a site signed off.

        Args:
            found: what `to_dict` returned, not trusted.

        Raises:
            ProtocolError: it is something else.
        """
        names = {"last", "previous", "sha256"}
        fits = isinstance(found, Mapping) and found.keys() == {"lines", *names}
        lines = found["lines"] if fits else 0
        if not fits or type(lines) is not int or not 1 <= lines <= MOST_LINES:
            raise ProtocolError("it does not say what its ledger holds")
        if not all(isinstance(found[n], str) and _HASH.fullmatch(found[n]) for n in names):
            raise ProtocolError("it does not say what its ledger holds")
        return cls(**found)

    def check_follows(self, before: SignOff | None, data: bytes) -> None:
        """Check that a message was recorded, after what was signed off before it.

        Args:
            before: what the site signed off last; None: nothing yet.
            data: the bytes of the message.

        Raises:
            ProtocolError: it was not, or lines are missing or others.
        """
        if self.sha256 != hashlib.sha256(data).hexdigest():
            raise ProtocolError("its ledger records another message than the one that arrived")
        if before is None:
            return
        if self.lines <= before.lines:
            raise ProtocolError(
                f"its ledger has {self.lines} lines, and {before.lines} were signed off before "
                f"this message: lines were removed; compare it with a backup"
            )
        if self.lines == before.lines + 1 and self.previous != before.last:
            raise ProtocolError(
                f"line {before.lines} of its ledger is not the one that was signed off: the ledger "
                f"was changed; compare it with a backup"
            )


MOST_LINES = 1 << 40
"""More lines than any ledger has."""

_HASH = re.compile(r"[0-9a-f]{64}")


class Ledger:
    """An append-only file with one line per message that left a site.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = START
        self._size = -1
        self._lines = 0

    def append(
        self,
        parts: Mapping[str, Any],
        data: bytes,
        *,
        coded: Mapping[str, Mapping[str, Any]] | None = None,
        **about: Any,
    ) -> SignOff:
        """Record a message before it leaves, and return what the ledger holds then.

        Args:
            parts: the parts of the message by name.
            data: the bytes that leave.
            coded: for parts that leave through a codec, its name and the bytes that leave.
            **about: round, exchange, stage and method.

        Raises:
            StorageError: the line could not be written; the message must not leave then.
        """
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **about,
            "parts": {
                name: describe_part(part) | dict(coded.get(name, {}) if coded else {})
                for name, part in parts.items()
            },
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists() or self.path.stat().st_size != self._size:
                self._repair()  # another process wrote for this site meanwhile
            line["previous"] = self._last
            line["hash"] = _digest(line)
            with self.path.open("ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._size = file.tell()
        except OSError as error:
            self._size = -1
            raise storage_error(error, self.path) from error
        previous, self._last = self._last, line["hash"]
        self._lines += 1
        return SignOff(self._lines, self._last, previous, line["sha256"])

    def append_failure(
        self,
        error: Exception,
        encode: Callable[[dict[str, Any]], bytes],
        *,
        withhold: bool,
        **about: Any,
    ) -> tuple[dict[str, Any], bytes, SignOff | None]:
        """Record a failure before it leaves; return what leaves of it, its bytes and the sign-off.

        If the ledger cannot be written, only that leaves, which is no data, and no sign-off.

        Args:
            error: the failure.
            encode: returns the bytes in which it leaves.
            withhold: see `collegium.core.failures.describe`.
            **about: see `append`.
        """
        failure = describe(error, withhold=withhold)
        data = encode(failure)
        try:
            return failure, data, self.append({FAILURE: failure}, data, **about)
        except StorageError as problem:
            logger.warning("%s", problem)
            failure = describe(problem)
            return failure, encode(failure), None

    def _repair(self) -> None:
        """Count the lines, and remove an unfinished one, whose message never left."""
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        lines = whole.splitlines()
        self._lines = len(lines)
        self._last = str(_parse(lines[-1]).get("hash")) if lines else START


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger without an unfinished last one.

    A line that is not JSON becomes an empty dictionary, at which the chain breaks.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    return [_parse(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def first_break(lines: list[dict[str, Any]]) -> int | None:
    """Return the index of the first line that was changed or whose predecessor is missing, or None.

    None means that the chain is intact.
    """
    previous = START
    for index, line in enumerate(lines):
        content = {key: value for key, value in line.items() if key != "hash"}
        if line.get("previous") != previous or line.get("hash") != _digest(content):
            return index
        previous = line["hash"]
    return None


def summarise(path: Path) -> dict[str, Any]:
    """Return messages and bytes that left a site, in total and by part; is the chain intact?"""
    lines = read_ledger(path)
    parts: dict[str, dict[str, int]] = {}
    for line in lines:
        found = line.get("parts")
        for name, part in found.items() if isinstance(found, Mapping) else ():
            total = parts.setdefault(name, {"messages": 0, "bytes": 0})
            total["messages"] += 1
            total["bytes"] += _bytes(part)
    return {
        "messages": len(lines),
        "bytes": sum(map(_bytes, lines)),
        "parts": parts,
        "intact": first_break(lines) is None,
    }


def _bytes(entry: Any) -> int:
    """Return the bytes that an entry states; 0 where somebody changed it into something else."""
    stated = entry.get("bytes") if isinstance(entry, Mapping) else None
    return stated if isinstance(stated, int) else 0
