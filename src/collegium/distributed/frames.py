"""Frames on a Unix socket: a JSON header and a payload of bytes, read and written in pieces."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SIZES = struct.Struct("!IQ")
"""Bytes of the header and of the payload, in front of both."""

PIECE = 4 << 20
"""Bytes of a payload that travel together; a relay holds a few of them, never a message."""

SOCKET_BUFFER = 4 << 20
"""Bytes that a socket may hold, where the system allows it: fewer turns between two processes."""

MAX_HEADER = 1 << 22
"""The longest header, in bytes: it holds an experiment's settings, and no tensors."""

MAX_PATH = 107
"""The longest path of a Unix socket, in bytes."""


class TooLargeError(ValueError):
    """A payload is over the limit.

    Args:
        size: its bytes.
        limit: how many it may have.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes is over the limit of {limit} bytes")
        self.size, self.limit = size, limit


class Line:
    """A connection over which frames go both ways.

    Args:
        sock: a connected socket; the line closes it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self._file = sock.makefile("rb", 1 << 16)

    @classmethod
    def connect(cls, path: str | Path, seconds: float | None) -> Line:
        """Connect to a socket.

        Args:
            path: the socket.
            seconds: how long each later read or write may wait; None: for ever.

        Raises:
            OSError: nobody listens there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def wait_at_most(self, seconds: float | None) -> None:
        """Set how long each later read or write may wait, in seconds; None: for ever."""
        self._socket.settimeout(seconds)

    def begin(self, header: Mapping[str, Any], size: int) -> None:
        """Write a header; the payload follows by `write`.

        Args:
            header: plain values.
            size: bytes of the payload.
        """
        head = json.dumps(header).encode()
        self._socket.sendall(SIZES.pack(len(head), size) + head)

    def write(self, data: bytes | memoryview) -> None:
        """Write a piece of a payload."""
        self._socket.sendall(data)

    def send(self, header: Mapping[str, Any], payload: bytes | memoryview = b"") -> None:
        """Write a whole frame.

        Args:
            header: plain values.
            payload: bytes.
        """
        self.begin(header, len(payload))
        if len(payload):
            self.write(payload)

    def header(self) -> tuple[dict[str, Any], int]:
        """Read a header, and the number of bytes of the payload that follows.

        Raises:
            EOFError: the other end closed.
            ValueError: what came is no frame.
        """
        head_size, size = SIZES.unpack(self.read(SIZES.size))
        if head_size > MAX_HEADER:
            raise ValueError(f"a header of {head_size} bytes is longer than {MAX_HEADER}")
        data = self.read(head_size)
        try:
            header = json.loads(data)
        except RecursionError as error:
            raise ValueError("a header is nested too deep") from error
        if not isinstance(header, dict):
            raise ValueError("a header is no mapping")  # noqa: TRY004  (as what is no JSON)
        return header, size

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes of a payload.

        Raises:
            EOFError: the other end closed before.
        """
        data = self._file.read(size) if size else b""
        if len(data) < size:
            raise EOFError("the other end closed the connection")
        return data

    def pieces(self, size: int) -> Iterator[bytes]:
        """Read a payload of ``size`` bytes piece by piece."""
        for start in range(0, size, PIECE):
            yield self.read(min(PIECE, size - start))

    def receive(self, limit: int) -> tuple[dict[str, Any], bytes]:
        """Read a whole frame.

        Args:
            limit: the most bytes that a payload may have.

        Raises:
            EOFError: the other end closed.
            ValueError: what came is no frame.
            TooLargeError: it is over the limit.
        """
        header, size = self.header()
        if size > limit:
            raise TooLargeError(size, limit)
        return header, self.read(size)

    def close(self) -> None:
        """Close the connection; whoever reads from it or writes to it in another thread fails."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()


def listen(path: Path, group: int | None = None) -> socket.socket:
    """Return a socket that listens at a path and that only its owner and a group may open.

    What is left of a process that ended is removed.

    Args:
        path: the path, at most 107 bytes long.
        group: the number of the group; None: the owner alone.

    Raises:
        OSError: the path is too long, another process listens there, or there is something that is
            no socket; or the owner is not in the group.
    """
    if len(os.fsencode(path)) > MAX_PATH:
        raise OSError(f"{path} is too long for a Unix socket (at most {MAX_PATH} bytes)")
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(f"{path} is not a socket")
        _check_unused(path)
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # the mode is right before anybody can connect
    try:
        server.bind(str(path))
    finally:
        os.umask(before)
    try:
        if group is not None:
            os.chown(path, -1, group)
            path.chmod(0o660)
        server.listen(64)
    except OSError:
        server.close()
        path.unlink()
        raise
    return server


def _check_unused(path: Path) -> None:
    """Check that nobody listens at a socket that is there."""
    tried = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with tried, suppress(ConnectionRefusedError):
        tried.connect(str(path))
        raise OSError(f"another process listens at {path}; end it first")
