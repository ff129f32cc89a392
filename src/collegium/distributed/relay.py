"""The relays in FLARE's job processes: they carry bytes between sockets and hold nothing else.

FLARE ends the whole job for everybody when a job process dies, so nothing that can run out of
memory lives in one: no data, no network, no state. FLARE sends a traceback of whatever is raised at
a site to the server, so a relay's methods raise nothing.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Condition, Thread
from typing import Any, TypeVar

from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted

from collegium.distributed.frames import PIECE, Line

SITE_SOCKET = "COLLEGIUM_SITE_SOCKET"
"""The environment variable that names the socket of the site process."""

SERVER_SOCKET = "COLLEGIUM_SERVER_SOCKET"
"""The environment variable that names the socket on which `collegium run` listens."""

WINDOW = 3
"""Pieces of one message that are on their way at once."""

CALL_SECONDS = 120.0
"""How long one piece may take between server and site."""

STALL_SECONDS = 60.0
"""How long a site process may take to read one piece; longer, and it is stopped."""

T = TypeVar("T")

if {SITE_SOCKET, SERVER_SOCKET} & os.environ.keys():
    # FLARE's executor imports torch where it is installed: 300 MB that a relay has no use for
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]

# two lines for every piece, in three files, would push all others out of FLARE's logs
logging.getLogger("nvflare.collab.runtime.cell_dispatcher").setLevel(logging.WARNING)


class SiteRelay:
    """Carries requests from FLARE to the site process, and replies back."""

    def __init__(self) -> None:
        self._lines: dict[str, _Turns] = {}

    @collab.publish
    def whole(self, key: str, header: str, payload: bytes) -> list[Any]:
        """Carry a request of one piece; return what `reply` returns.

        Args:
            key: names the request among those on their way.
            header: JSON.
            payload: the request.
        """
        self.begin(key, header, len(payload))
        if payload:
            self.push(key, 0, payload)
        found: list[Any] = self.reply(key)
        return found

    @collab.publish
    def begin(self, key: str, header: str, size: int) -> str:
        """Open a request, whose pieces follow.

        Args:
            key: names the request among those on their way.
            header: JSON.
            size: bytes of the payload.
        """
        seconds = json.loads(header)["deadline"]
        turns = self._lines[key] = _Turns(seconds)
        try:
            turns.line = Line.connect(os.environ[SITE_SOCKET], min(seconds, STALL_SECONDS))
            turns.line.begin(json.loads(header), size)
        except OSError as error:
            turns.fail(error)
        return ""

    @collab.publish
    def push(self, key: str, index: int, piece: bytes) -> str:
        """Carry one piece of a request; a site process that is gone shows in `reply`.

        Args:
            key: the request's.
            index: number of the piece, from 0.
            piece: its bytes.
        """
        turns = self._lines[key]
        try:
            with turns.turn(index) as line:
                line.write(piece)
        except OSError as error:
            turns.fail(error)
        return ""

    @collab.publish
    def reply(self, key: str) -> list[Any]:
        """Wait for the reply; return its header (JSON), its size, and its bytes if in one piece.

        Args:
            key: the request's.
        """
        turns = self._lines[key]
        turns.next = 0
        try:
            line = turns.open_line()
            line.wait_at_most(turns.seconds)
            header, turns.left = line.header()
            line.wait_at_most(min(turns.seconds, STALL_SECONDS))
            first = line.read(turns.left) if turns.left <= PIECE else b""
        except (OSError, EOFError, ValueError) as error:
            return self._end(key, turns.why(error))
        if turns.left <= PIECE:
            return self._end(key, header, first)
        return [json.dumps(header), turns.left, b""]

    def _end(self, key: str, header: dict[str, Any], data: bytes = b"") -> list[Any]:
        line = self._lines.pop(key).line
        if line is not None:
            line.close()
        return [json.dumps(header), len(data), data]

    @collab.publish
    def pull(self, key: str, index: int) -> bytes:
        """Return one piece of a reply; empty if the site process is gone.

        Args:
            key: the request's.
            index: number of the piece, from 0.
        """
        turns = self._lines.get(key)
        if turns is None:
            return b""
        try:
            with turns.turn(index) as line:
                piece = line.read(min(PIECE, turns.left))
                turns.left -= len(piece)
        except (OSError, EOFError, ValueError) as error:
            turns.fail(error)
            piece, turns.left = b"", 0
        if not turns.left and self._lines.pop(key, None) is not None and turns.line is not None:
            turns.line.close()
        return piece


class _Turns:
    """A connection to the site process, and the number of the piece whose turn it is.

    Args:
        seconds: how long the site process may work.
    """

    def __init__(self, seconds: float) -> None:
        self.line: Line | None = None
        self.seconds, self.next, self.left = seconds, 0, 0
        self._failure: Exception | None = None
        self._condition = Condition()

    @contextmanager
    def turn(self, index: int) -> Iterator[Line]:
        """Yield the connection for piece ``index``, after the pieces before it.

        Raises:
            OSError: one before it failed, or it was not its turn in time.
        """
        with self._condition:
            mine = self._condition.wait_for(
                lambda: self._failure is not None or self.next == index, timeout=CALL_SECONDS
            )
        if not mine:
            raise TimeoutError
        yield self.open_line()
        with self._condition:
            self.next += 1
            self._condition.notify_all()

    def open_line(self) -> Line:
        """Return the connection.

        Raises:
            OSError: something failed on it; whatever came after would be out of place.
        """
        if self._failure is not None or self.line is None:
            raise ConnectionError("the connection failed before")
        return self.line

    def fail(self, error: Exception) -> None:
        """Note the first thing that went wrong; no piece is carried after it."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()
        if self.line is not None:
            self.line.close()

    def why(self, error: Exception) -> dict[str, Any]:
        """Return what to tell the server of the first thing that went wrong."""
        if isinstance(self._failure or error, TimeoutError):
            return {"late": f"did not answer within {self.seconds:g} s"}
        return {"absent": "its site process does not answer"}


class ServerRelay:
    """Carries requests from `collegium run` to the sites' relays, over one connection a site.

    The job ends when `collegium run` closes its connections, or ends.
    """

    @collab.main
    def run(self) -> str:
        """Carry until the other end closes."""
        threads = [Thread(target=_serve, args=(site,), daemon=True) for site in collab.clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ""


def _serve(site: Any) -> None:
    """Carry the requests to one site."""
    keys = (f"{os.getpid()}-{number}" for number in itertools.count())
    with ThreadPoolExecutor(WINDOW) as pool, suppress(OSError, RunAborted):
        while True:
            line = Line.connect(os.environ[SERVER_SOCKET], None)
            line.send({"site": site.name})
            try:
                while True:
                    header, size = line.header()
                    _carry(line, site, next(keys), header, size, pool)
            except EOFError:
                return
            except _BrokenError:
                continue  # the reply cannot be finished: the closed connection says so
            finally:
                line.close()


class _BrokenError(Exception):
    """A reply ended in the middle."""


def _carry(
    line: Line,
    site: Any,
    key: str,
    header: dict[str, Any],
    size: int,
    pool: ThreadPoolExecutor,
) -> None:
    """Carry one request to a site and its reply back."""
    deadline, text = float(header["deadline"]), json.dumps(header)
    quick, patient = site(timeout=CALL_SECONDS), site(timeout=deadline + CALL_SECONDS)
    unread = iter(line.pieces(size))
    began, limit = time.monotonic(), deadline + CALL_SECONDS
    try:
        if size <= PIECE:
            head, length, data = patient.whole(key, text, line.read(size))
        else:
            quick.begin(key, text, size)
            for _ in _ahead(pool, lambda i, piece: quick.push(key, i, piece), enumerate(unread)):
                pass
            head, length, data = patient.reply(key)
    except RunAborted:
        raise
    except (OSError, EOFError):
        raise
    except Exception as error:
        if time.monotonic() - began < limit:  # FLARE calls it so too where a process has ended
            raise _BrokenError from error
        for _ in unread if size > PIECE else ():
            pass  # what the other end still sends
        line.send({"gone": f"did not answer within {deadline:g} s"})
        return
    line.begin(json.loads(head), length)
    if length <= PIECE:
        line.write(data)
        return
    line.header()  # the other end has room for it
    count = -(-length // PIECE)
    try:
        pieces = _ahead(pool, lambda i: quick.pull(key, i), ((i,) for i in range(count)))
        for index, piece in enumerate(pieces):
            if len(piece) != min(PIECE, length - index * PIECE):
                raise _BrokenError
            line.write(piece)
    except (RunAborted, OSError, _BrokenError):
        raise
    except Exception as error:
        raise _BrokenError from error


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[..., T], calls: Iterable[tuple[Any, ...]]
) -> Iterator[T]:
    """Yield the results of calls in their order, a few of which run ahead."""
    running: list[Future[T]] = []
    for arguments in calls:
        running.append(pool.submit(work, *arguments))
        if len(running) == WINDOW:
            yield running.pop(0).result()
    for future in running:
        yield future.result()
