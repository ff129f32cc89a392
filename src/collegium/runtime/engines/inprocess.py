"""The default engine: all clients on one machine, in this process or in worker processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any

from collegium.core.failures import describe, reported_error
from collegium.core.message import pack
from collegium.core.userfile import on_one_machine
from collegium.errors import CollegiumError
from collegium.runtime import process
from collegium.runtime.ledger import SignOff
from collegium.runtime.requests import Request, RequestHandler, Response, respond

logger = logging.getLogger(__name__)

ClientFactory = Callable[[], Mapping[str, RequestHandler]]
"""Builds the clients.

With several workers it is pickled to them, so it must be importable: a function or a
`functools.partial`.
"""


def respond_here(client: RequestHandler, request: Request) -> Response:
    """Return the response of a client on the server's machine, to which it may name user's files.

    Args:
        client: the client that the request is for.
        request: the request.
    """
    with on_one_machine():
        return respond(client, request)


class InProcess:
    """Carries requests to clients on this machine.

    Requests and responses cross as bytes even within one process, so the two halves never share a
    tensor. A client's state is on disk, so any worker can respond for any client.

    Args:
        build: builds all clients; called once in every process that runs them, when it is needed.
        workers: client processes; with 1 the clients run in this process.
        threads: torch threads of each worker. Results depend on it, never on ``workers``.
        together: whether sites train together where they can; see `collegium.training.together`.
            It needs one worker, and takes all requests of an exchange at once.
        gpus: the GPUs that the workers share; see `collegium.runtime.process.shared_gpus`.
    """

    def __init__(
        self,
        build: ClientFactory,
        workers: int = 1,
        threads: int = 1,
        *,
        together: bool = False,
        gpus: Sequence[str] = (),
    ) -> None:
        self._build, self._size, self._threads = build, workers, threads
        self._together, self._gpus = together, gpus
        self._clients: Mapping[str, RequestHandler] | None = None
        self._workers: list[_Worker] = []

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Deliver the requests and yield the responses as they are ready."""
        if self._size > 1:
            yield from self._exchange_with_workers(iter(requests))
            return
        if self._clients is None:
            self._clients = self._build()
        if self._together:
            from collegium.runtime.engines.turns import respond_together

            yield from respond_together(self._clients, [*requests])
            return
        for request in requests:
            yield respond_here(self._clients[request.client], request)

    def _exchange_with_workers(self, requests: Iterator[Request]) -> Iterator[Response]:
        idle = list(self._workers)
        busy: dict[Any, _Worker] = {}
        more = True
        while more or busy:
            while more and len(busy) < self._size:
                request = next(requests, None)
                if request is None:
                    more = False
                else:
                    worker = idle.pop(0) if idle else self._start_another()
                    worker.send(request)
                    busy[worker.connection] = worker
            for connection in wait(list(busy)) if busy else ():
                worker = busy.pop(connection)
                response = worker.receive()
                if response.missing:
                    worker = self._replace(worker)
                idle.append(worker)
                yield response

    def _replace(self, ended: _Worker) -> _Worker:
        """Return a new worker in place of one whose process has ended."""
        ended.close()
        slot = self._workers.index(ended)
        self._workers[slot] = self._start(slot)
        return self._workers[slot]

    def _start_another(self) -> _Worker:
        """Return one worker more; they start when there is a request for them."""
        self._workers.append(self._start(len(self._workers)))
        return self._workers[-1]

    def _start(self, slot: int) -> _Worker:
        """Return a new worker, with its share of the GPUs."""
        gpus = process.share_of(self._gpus, slot, self._size)
        with process.environment_of_workers(self._threads, gpus):
            return _Worker(self._build, self._threads)

    def close(self) -> None:
        """End the worker processes."""
        for worker in self._workers:
            worker.close()
        self._workers, self._clients = [], None


class _Worker:
    """A process that handles one request at a time."""

    def __init__(self, build: ClientFactory, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, build, threads), daemon=True)
        self._process.start()
        theirs.close()
        self._request: Request | None = None

    def send(self, request: Request) -> None:
        """Send a request: one frame of JSON, one with the payload; `receive` reports a failure."""
        header = {key: value for key, value in asdict(request).items() if key != "payload"}
        self._request = request
        with suppress(ConnectionError):
            self.connection.send_bytes(json.dumps(header).encode())
            self.connection.send_bytes(request.payload)

    def receive(self) -> Response:
        """Return the response, which says so if the process ended before it responded."""
        try:
            header = json.loads(self.connection.recv_bytes())
            data, signed = self.connection.recv_bytes(), header["signed"]
            return Response(
                header["client"],
                data,
                header["seconds"],
                signed=None if signed is None else SignOff.parse(signed),
            )
        except (EOFError, ConnectionError):
            self._process.join(5)
            assert self._request is not None
            return Response(
                self._request.client,
                b"",
                0.0,
                missing=f"its process ended with code {self._process.exitcode} (-9 is often a lack "
                f"of memory); the finished rounds are kept, use fewer workers or a smaller "
                f"batch_size and resume",
            )

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


def _work(connection: Connection, build: ClientFactory, threads: int) -> None:
    """Handle requests until the other end closes."""
    # Ctrl-C is for the process that has the terminal; it closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.end_with_parent()
    process.prepare(threads)
    clients = _built(build)
    while True:
        try:
            header = json.loads(connection.recv_bytes())
            request = Request(**header, payload=connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        response = respond_here(clients[request.client], request)
        signed = response.signed and response.signed.to_dict()
        header = {"client": response.client, "seconds": response.seconds, "signed": signed}
        connection.send_bytes(json.dumps(header).encode())
        connection.send_bytes(response.data)


def _built(build: ClientFactory) -> Mapping[str, RequestHandler]:
    """Return the clients; if they cannot be built, clients that respond with the reason."""
    try:
        return build()
    except Exception as error:
        reported = reported_error(error)
        unforeseen = not isinstance(reported, CollegiumError)
        logger.warning("the clients cannot be built: %s", reported, exc_info=unforeseen)
        with on_one_machine():
            failed: RequestHandler = _Failed(pack({"error": describe(reported)}))
        return defaultdict(lambda: failed)


class _Failed:
    """A client that responds to every request with the same error."""

    signed = None

    def __init__(self, envelope: bytes) -> None:
        self._envelope = envelope

    def handle(self, request: Request) -> bytes:
        """See `RequestHandler.handle`."""
        return self._envelope
