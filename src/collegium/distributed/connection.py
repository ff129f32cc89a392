"""The connection of `collegium run` to the sites: a FLARE job, started again where it ends.

All state is here and at the sites, none in the job. So a job that dies with a relay or with the
server is submitted again, requests that were under way are made again, and a site that comes back
enters with the next job; results stay equal bit by bit.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collegium.distributed.frames import PIECE, Line, listen
from collegium.distributed.jobs import Coordinator, ServerUnreachable
from collegium.errors import (
    ClientError,
    CollegiumError,
    MissingReply,
    ProtocolError,
    StorageError,
)

logger = logging.getLogger(__name__)

SENDING = 2
"""Requests that are sent at once; the server holds no more of them."""

AHEAD = 3
"""Replies that are held before it is their turn; others wait at their sites."""

START_SECONDS = 90.0
"""How long a job may take from its submission until it carries."""

SEEN_SECONDS = 40.0
"""A site that FLARE has not heard from for so long is taken to be gone."""

LOOK_SECONDS = 5.0
"""How often it is looked whether a site that is gone has come back."""

LARGEST = 1 << 32
"""The most bytes of a reply that are taken in; a site says first how many it sends."""

PING_SECONDS = 5.0
"""How long a site may take to say whether it is still at work."""

RESTARTS = 5
"""Jobs that end one after the other, without a single reply, before it is given up."""


@dataclass
class Call:
    """Something that one site is asked.

    Attributes:
        site: the site's name.
        header: plain values.
        payload: bytes.
    """

    site: str
    header: dict[str, Any]
    payload: bytes = b""


@dataclass
class Answer:
    """The outcome of a call.

    Attributes:
        site: the site's name.
        header: plain values that the site sent.
        data: bytes that the site sent.
        missing: why there is no answer; empty if there is.
        again: whether the call got lost by no fault of the site, and has to be made again.
    """

    site: str
    header: dict[str, Any]
    data: bytes = b""
    missing: str = ""
    again: bool = False


class Connection:
    """Carries calls to sites and answers back, by one FLARE job after the other.

    Args:
        coordinator: submits jobs.
        socket_path: where the relay in the server's job process connects to.
        sites: all sites that will be asked.
        deadline: seconds that a site may work on one call.
        patience: seconds to wait for the server, and for sites that are not connected.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        socket_path: Path,
        sites: Collection[str],
        *,
        deadline: float,
        patience: float,
    ) -> None:
        self._coordinator, self._sites = coordinator, sorted(sites)
        self._path, self._deadline, self._patience = socket_path, deadline, patience
        self._listener: socket.socket | None = None
        self._lines: dict[str, Line] = {}
        self._arrived = threading.Condition()
        self._job = ""
        self._ended = True
        self._restarts = 0
        self._losses: Counter[str] = Counter()
        self._looked = 0.0
        self.absent: dict[str, str] = {}
        """Sites that are not asked in this job, and why."""
        self._since: dict[str, float] = {}
        self._late: set[str] = set()
        self._pinged: set[str] = set()
        self._idle: set[str] = set()

    def ask(self, calls: Iterable[Call]) -> Iterator[Answer]:
        """Make calls, which are built as they are sent; yield the answers as they arrive.

        Args:
            calls: the calls; a site is asked once.

        Raises:
            ServerUnreachable: FLARE's server does not answer for as long as patience lasts.
            ClientError: no site is connected, or one job after the other ended.
        """
        self._make_ready()
        exchange = _Exchange()
        running: set[str] = set()
        try:
            for number, call in enumerate(calls):
                running.add(call.site)
                exchange.sending.acquire()
                held = [call]
                del call  # the payload is held by its thread only, until it is sent
                threading.Thread(
                    target=self._call, args=(exchange, number, held), daemon=True
                ).start()
                while not exchange.answers.empty():
                    yield self._take(exchange, running)
            while running:
                yield self._take(exchange, running)
        finally:
            if running:  # the caller has given up in the middle of it
                self._stop()

    def _take(self, exchange: _Exchange, running: set[str]) -> Answer:
        """Return the next answer, and give up sites that FLARE has not heard from for a while."""
        while True:
            try:
                answer = exchange.take(LOOK_SECONDS)
            except queue.Empty:
                self._give_up_unseen(running)
                continue
            running.discard(answer.site)
            return answer

    def _give_up_unseen(self, running: Collection[str]) -> None:
        """Close the connections of sites that vanished; FLARE itself would wait for ten minutes."""
        with suppress(ServerUnreachable):  # a job that ends with its server shows by itself
            seen = self._coordinator.connected()
            for site in sorted(set(running) & self._lines.keys()):
                if seen.get(site, 0) < time.time() - SEEN_SECONDS and site not in self.absent:
                    self.absent[site] = f"was not heard from for {SEEN_SECONDS:g} s"
                    self._since[site] = time.time()
                    logger.warning("site %s: %s", site, self.absent[site])
                    self._lines.pop(site).close()
            waiting = set(running) & self._lines.keys()
            for site in sorted(self._coordinator.left(self._job, waiting) if waiting else ()):
                logger.info("site %s was started again, outside the job", site)
                self._lines[site].close()  # its call is made again, in another job

    def _call(self, exchange: _Exchange, number: int, held: list[Call]) -> None:
        """Make one call and put what came of it into the exchange."""
        site = held[0].site
        sent = exchange.sending
        released = False
        try:
            if site in self.absent:
                exchange.put(number, Answer(site, {}, missing=self.absent[site]))
                return
            line = self._lines[site]
            call = held.pop()
            line.send({**call.header, "deadline": self._deadline}, call.payload)
            del call
            sent.release()
            released = True
            header, size = line.header()
            if size > LARGEST:
                raise ProtocolError(f"a reply of {size} bytes is over the limit of {LARGEST}")
            if size > PIECE:
                exchange.wait_for_turn(number)
                line.send({})  # there is room for it
            data = line.read(size)
            exchange.put(number, self._read(site, header, data))
        except (OSError, EOFError, ValueError, KeyError) as error:
            if site in self.absent:
                exchange.put(number, Answer(site, {}, missing=self.absent[site]))
                return
            exchange.put(number, self._lose(site, error))
        except Exception as error:  # whatever it is, somebody waits for the answer
            logger.warning("site %s: %s", site, error)
            self._ended = True
            text = str(error) if isinstance(error, CollegiumError) else type(error).__name__
            told = {"kind": type(error).__name__, "text": text}
            exchange.put(number, Answer(site, {"error": told}))
        finally:
            if not released:
                sent.release()

    def _lose(self, site: str, error: Exception) -> Answer:
        """Return what comes of a connection that broke: once more, unless it breaks each time."""
        logger.info("site %s: the job ended (%s)", site, type(error).__name__)
        self._ended = True
        self._losses[site] += 1
        if self._losses[site] <= RESTARTS:
            return Answer(site, {}, again=True)
        text = f"its connection broke {self._losses[site]} times, one after the other"
        return Answer(site, {}, missing=text)

    def _read(self, site: str, header: dict[str, Any], data: bytes) -> Answer:
        for kind in ("absent", "late", "gone"):
            if kind in header:
                text = str(header[kind])
                if kind == "late":
                    self._late.add(site)
                if kind != "absent":  # a relay without a site process says so at once, each time
                    self.absent[site], self._since[site] = text, time.time()
                logger.warning("site %s: %s", site, text)
                return Answer(site, {}, missing=text)
        self._restarts = self._losses[site] = 0
        return Answer(site, header, data)

    def _make_ready(self) -> None:
        """Start a job if none carries; and again if a site that was gone has come back."""
        if self._ended:
            self._stop()
            self._start()
            return
        self._take_back_late()
        if self.absent and time.monotonic() - self._looked > LOOK_SECONDS:
            self._look_for_late()
            back = self._came_back() if self.absent.keys() - self._late else []
            self._looked = time.monotonic()
            if back:
                logger.info("%s came back; a new job begins", ", ".join(back))
                self._stop()
                self._start()

    def _take_back_late(self) -> None:
        """Ask sites again that missed a deadline and have said since that they are idle."""
        for site in sorted(self._late & self._idle):
            logger.info("site %s has finished what it was late with", site)
            self._late.discard(site)
            del self.absent[site]
        self._idle.clear()

    def _look_for_late(self) -> None:
        """Ask sites that missed a deadline whether they have finished.

        Their relays are there, so that no new job is needed. Nobody waits for what they say: a site
        process that is stopped says nothing.
        """
        for site in sorted(self._late - self._pinged):
            self._pinged.add(site)
            line = self._lines.get(site)
            threading.Thread(target=self._ping, args=(site, line), daemon=True).start()

    def _ping(self, site: str, line: Line | None) -> None:
        """Ask a late site whether it is idle, over the connection that nobody else uses now."""
        try:
            if line is None:
                raise EOFError("the job ended")
            line.send({"do": "state", "deadline": PING_SECONDS})
            header, size = line.header()
            line.read(size)
        except (OSError, EOFError, ValueError):
            self._ended = self._ended or self._lines.get(site) is line
            return
        if self._lines.get(site) is line:
            if header.get("idle"):
                self._idle.add(site)
            self._pinged.discard(site)

    def _came_back(self) -> list[str]:
        """Return the sites whose relay was gone and that FLARE has heard from since."""
        seen = self._coordinator.connected()
        return [
            site
            for site in sorted(self.absent.keys() - self._late)
            if seen.get(site, 0) > max(self._since.get(site, 0) + 1, time.time() - SEEN_SECONDS)
        ]

    def _start(self) -> None:
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise ClientError(
                f"{RESTARTS} jobs ended one after the other before a site replied; see the log of "
                f"the server and those of the sites"
            )
        if self._listener is None:
            try:
                self._listener = listen(self._path)
            except OSError as error:
                raise StorageError(f"the relay of the server cannot connect: {error}") from error
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        there = self._coordinator.wait(self._sites, self._patience, SEEN_SECONDS)
        self.absent = {site: "is not connected" for site in self._sites if site not in there}
        self._since = dict.fromkeys(self.absent, time.time())
        self._late, self._pinged, self._idle = set(), set(), set()
        if not there:
            raise MissingReply(
                f"no site is connected ({', '.join(self._sites)}); start 'collegium site start' "
                f"there"
            )
        self._ended = False
        self._job = self._coordinator.submit(there)
        logger.info("job %s carries for %s", self._job, ", ".join(sorted(there)))
        until = time.monotonic() + START_SECONDS
        with self._arrived:
            while not there <= self._lines.keys():
                if not self._arrived.wait(timeout=1.0) and time.monotonic() > until:
                    break
                if self._coordinator.status(self._job).startswith("FINISHED"):
                    break
        for site in there - self._lines.keys():
            self.absent[site], self._since[site] = "did not enter the job", time.time()
        if not self._lines:
            self._ended = True
            self._make_ready()

    def _accept(self, listener: socket.socket) -> None:
        """Take the connections of the server's relay, one for each site."""
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            line = Line(sock)
            try:
                line.wait_at_most(10.0)
                site = str(line.header()[0]["site"])
                line.wait_at_most(None)
            except (OSError, EOFError, ValueError, KeyError):
                line.close()
                continue
            with self._arrived:
                self._lines[site] = line
                self._arrived.notify_all()

    def _stop(self) -> None:
        """End the job: its relay sees that the connections are closed."""
        for line in self._lines.values():
            line.close()
        self._lines, self._ended = {}, True

    def close(self) -> None:
        """End the job, the session, and what listens."""
        self._stop()
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # the thread that accepts ends
            self._listener.close()
            self._path.unlink(missing_ok=True)
            self._listener = None
        self._coordinator.close()


class _Exchange:
    """The calls of one exchange: which are being sent, and whose reply may be taken in."""

    def __init__(self) -> None:
        self.sending = threading.Semaphore(SENDING)
        self.answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._done: set[int] = set()
        self._head = 0
        self._moved = threading.Condition()

    def put(self, number: int, answer: Answer) -> None:
        """Hand an answer to the caller."""
        self.answers.put((number, answer))

    def take(self, seconds: float) -> Answer:
        """Return the next answer; its place is free from then on.

        Args:
            seconds: how long to wait for it.

        Raises:
            queue.Empty: none came.
        """
        number, answer = self.answers.get(timeout=seconds)
        with self._moved:
            self._done.add(number)
            while self._head in self._done:
                self._head += 1
            self._moved.notify_all()
        return answer

    def wait_for_turn(self, number: int) -> None:
        """Wait until few enough replies are ahead in the order of the calls."""
        with self._moved:
            self._moved.wait_for(lambda: number < self._head + AHEAD)
