"""Requests to clients and their responses, and the interface of the engines that carry them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from collegium.core.algorithm import Algorithm
from collegium.core.message import Message
from collegium.errors import ProtocolError
from collegium.runtime.ledger import SignOff

Stage = Literal["train", "evaluate"]


@dataclass(frozen=True)
class Request:
    """A request to one client to run a handler.

    Attributes:
        client: the client's name.
        round: the round of the request.
        exchange: position of this exchange within its round.
        stage: "train" may change the client's state; "evaluate" may not.
        method: name of the handler to run.
        payload: the packed parts of the message.
        floor: client states older than the last one before this round are no longer needed.
        accepted: name of the last of the client's states whose reply the server has used, empty for
            none; None: every state counts. See `Algorithm.commit_on_acknowledgement`.
    """

    client: str
    round: int
    exchange: int
    stage: Stage
    method: str
    payload: bytes
    floor: int = 0
    accepted: str | None = None


def state_name(number: int, exchange: int) -> str:
    """Return the name under which a client stores the state that a request leads to.

    Args:
        number: the round.
        exchange: the position of the exchange within it.
    """
    return f"{number:06d}-{exchange:04d}"


@dataclass(frozen=True)
class Response:
    """The response of one client to a request.

    Attributes:
        client: the client's name.
        data: the packed envelope: a reply or an error.
        seconds: time that the client took.
        missing: why the client did not answer; empty if it did. The data are empty then.
        again: whether the request got lost by no fault of the client, and has to be made again.
        signed: what the client's ledger holds after this message; None: it is not recorded.
    """

    client: str
    data: bytes
    seconds: float
    missing: str = ""
    again: bool = False
    signed: SignOff | None = None


class Transport(Protocol):
    """The interface of an engine."""

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Deliver the requests, which are built as they are taken; yield responses in any order."""

    def close(self) -> None:
        """Release all that the engine holds."""


def answered(
    transport: Transport, requests: Iterable[Request]
) -> Iterator[tuple[Request, Response]]:
    """Deliver requests, and yield each response with the request that it answers, as they come.

    Args:
        transport: carries them.
        requests: the requests, one for a client, which are built as they are taken.
    """
    asked: dict[str, Request] = {}

    def noted() -> Iterator[Request]:
        for request in requests:
            asked[request.client] = request
            yield request

    for response in transport.exchange(noted()):
        yield asked.pop(response.client), response


class RequestHandler(Protocol):
    """The interface of a client to an engine."""

    @property
    def signed(self) -> SignOff | None:
        """The statement on the client's ledger when the last response left; None: not recorded."""

    def handle(self, request: Request) -> bytes:
        """Return the packed envelope that responds to ``request``."""


def respond(client: RequestHandler, request: Request) -> Response:
    """Return the response of a client to a request, with the time that it took.

    Args:
        client: the client that the request is for.
        request: the request.
    """
    start = time.perf_counter()
    data = client.handle(request)
    return Response(request.client, data, time.perf_counter() - start, signed=client.signed)


def origin_of(request: Request) -> list[Any]:
    """Return what a reply says of the request that it answers, so that no other passes for it."""
    return [request.client, request.round, request.exchange, request.method]


def handler_of(algorithm: Algorithm, name: str) -> Callable[..., Message]:
    """Return a handler of an algorithm by name.

    Args:
        algorithm: the algorithm.
        name: name of the method.

    Raises:
        ProtocolError: the method does not exist or is not marked as a handler, so that a server
            cannot call anything else.
    """
    method = getattr(algorithm, name, None)
    if not getattr(method, "__collegium_handler__", False):
        raise ProtocolError(f"{name!r} is not a handler of {type(algorithm).__name__}")
    found: Callable[..., Message] = method  # type: ignore[assignment]
    return found
