"""Handlers of several sites in turns, so that their local training can be done together.

Every handler has a thread, and only one runs at a time: it has its turn until it ends or waits for
local training. Once all have ended or wait, what they wait for is done together, and they continue
in their order. Nothing depends on when a thread is scheduled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Semaphore, Thread

from collegium.core.tensors import Tensors
from collegium.runtime.engines.inprocess import respond_here
from collegium.runtime.requests import Request, RequestHandler, Response
from collegium.training.loop import WAITING, Fit, Progress
from collegium.training.together import Outcome, fit_all


def respond_together(
    clients: Mapping[str, RequestHandler], requests: Sequence[Request]
) -> Iterator[Response]:
    """Yield the response to every request, in their order.

    Args:
        clients: the clients by name.
        requests: the requests, to different clients.
    """
    turns = [
        _Turns(partial(respond_here, clients[request.client], request)) for request in requests
    ]
    try:
        for turn in turns:
            turn.go_on()
        while waiting := [(turn, turn.fit) for turn in turns if turn.fit is not None]:
            start = time.perf_counter()
            outcomes = fit_all([fit for _, fit in waiting])
            share = (time.perf_counter() - start) / len(waiting)
            for (turn, _), outcome in zip(waiting, outcomes, strict=True):
                turn.seconds += share
                turn.go_on(outcome)
    finally:
        for turn in turns:
            turn.stop()
    for turn in turns:
        yield turn.response()


class _Stopped(BaseException):
    """Ends a handler that waits; no handler catches it."""


class _Turns:
    """A handler in a thread of its own, which runs only inside `go_on`."""

    def __init__(self, work: Callable[[], Response]) -> None:
        self._work = work
        self._thread = Thread(target=self._run, daemon=True)
        self._turn, self._over = Semaphore(0), Semaphore(0)
        self._running = False
        self._outcome: Outcome | _Stopped | None = None
        self._response: Response | None = None
        self._error: BaseException | None = None
        self.fit: Fit | None = None
        self.seconds = 0.0

    def go_on(self, outcome: Outcome | _Stopped | None = None) -> None:
        """Run the handler until it ends or waits, with the outcome of what it waited for."""
        self._outcome, self.fit = outcome, None
        start, self._running = time.perf_counter(), True
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._await_end_of_turn()
        self.seconds += time.perf_counter() - start
        if self._error is not None and not isinstance(self._error, _Stopped):
            raise self._error

    def stop(self) -> None:
        """End the handler if it waits or, after an interruption, still runs."""
        if self._running:
            self._await_end_of_turn()
        if self.fit is not None:
            self.go_on(_Stopped())

    def response(self) -> Response:
        """Return the response, with the seconds that the handler worked."""
        assert self._response is not None
        return replace(self._response, seconds=self.seconds)

    def _await_end_of_turn(self) -> None:
        self._over.acquire()
        self._running = False

    def _run(self) -> None:
        WAITING.set(self._wait)
        try:
            self._response = self._work()
        except BaseException as error:  # raised by `go_on`
            self._error = error
        finally:
            self._over.release()

    def _wait(self, fit: Fit) -> tuple[Tensors, Progress]:
        """Wait for a fit; called by the handler."""
        self.fit = fit
        self._over.release()
        self._turn.acquire()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome
