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
from contextlib import suppress
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
        with suppress(OSError):
            turns.line = Line.connect(os.environ[SITE_SOCKET], seconds)
            turns.line.begin(json.loads(header), size)
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
        with turns.turn(index), suppress(OSError, AttributeError):
            turns.line.write(piece)  # type: ignore[union-attr]
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
            if turns.line is None:
                raise EOFError("nobody listens")
            header, turns.left = turns.line.header()
            first = turns.line.read(turns.left) if turns.left <= PIECE else b""
        except TimeoutError:
            return self._end(key, {"late": f"did not answer within {turns.seconds:g} s"})
        except (OSError, EOFError, ValueError):
            return self._end(key, {"absent": "its site process does not answer"})
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
        if turns is None or turns.line is None:
            return b""
        try:
            with turns.turn(index):
                piece = turns.line.read(min(PIECE, turns.left))
                turns.left -= len(piece)
        except (OSError, EOFError):
            piece, turns.left = b"", 0
        if not turns.left:
            self._lines.pop(key, None)
            turns.line.close()
        return piece


class _Turns:
    """A connection to the site process, and the number of the piece whose turn it is.

    Args:
        seconds: how long anything may wait.
    """

    def __init__(self, seconds: float) -> None:
        self.line: Line | None = None
        self.seconds, self.next, self.left = seconds, 0, 0
        self._condition = Condition()

    def turn(self, index: int) -> _Turn:
        """Return a context in which piece ``index`` is carried, after those before it."""
        return _Turn(self, self._condition, index)


class _Turn:
    def __init__(self, turns: _Turns, condition: Condition, index: int) -> None:
        self._turns, self._condition, self._index = turns, condition, index

    def __enter__(self) -> None:
        with self._condition:
            mine = self._condition.wait_for(
                lambda: self._turns.next == self._index, timeout=self._turns.seconds
            )
        if not mine:
            raise TimeoutError

    def __exit__(self, *error: object) -> None:
        with self._condition:
            self._turns.next += 1
            self._condition.notify_all()


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
