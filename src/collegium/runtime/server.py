"""The server runtime: runs the server half of an algorithm over any engine.

An engine is a `Transport`: it carries requests to clients and brings back their responses, in any
order. Nothing else differs between engines, so a run has the same bits in all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from collegium.compression.session.groups import CODEC_KEY, NO_CODECS, RESEND_REQUEST, Codecs
from collegium.compression.session.layout import ModelLayout
from collegium.compression.session.server_session import Exchange, ServerSession
from collegium.core.algorithm import HOME, Algorithm, Replies, State, check_needs
from collegium.core.message import HELD_KEY, Held, Message, pack, unpack
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Expected, recorded_numbers
from collegium.core.randomness import claim, generator
from collegium.core.tensors import Tensors
from collegium.errors import KINDS, ClientError, MissingReply, ProtocolError
from collegium.runtime.local_work import LocalWork
from collegium.runtime.participation import EVERYBODY, Participation
from collegium.runtime.state import Store

logger = logging.getLogger(__name__)

Stage = Literal["train", "evaluate"]

ACCEPTED_KEY = "$accepted"
"""The key of a stored state under which the newest client states are named that count."""

RETRY_PAUSE = 1.0
"""Seconds between two requests to a client that did not answer."""


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
    """

    client: str
    data: bytes
    seconds: float
    missing: str = ""
    again: bool = False


class Transport(Protocol):
    """The interface of an engine."""

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Deliver the requests, which are built as they are taken; yield responses in any order."""

    def close(self) -> None:
        """Release all that the engine holds."""


class RequestHandler(Protocol):
    """The interface of a client to an engine."""

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
    return Response(request.client, data, time.perf_counter() - start)


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


@dataclass
class ClientStats:
    """Measurements of one client in one round.

    Attributes:
        bytes_up: bytes that left the client.
        bytes_down: bytes sent to it.
        seconds: time that it worked.
        loss: its mean training loss.
        numbers: other numbers that it reported; see `collegium.core.payloads.Numbers`.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    loss: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)


class ServerRuntime:
    """Runs the server half: asks clients, checks their replies, commits every round.

    Args:
        algorithm: the algorithm.
        clients: the clients' names.
        make_model: returns the k-th initial model.
        parts: the roles of the model's tensors.
        transport: the engine.
        root: folder of the server's state.
        participation: who takes part in a round, and what happens if a client fails.
        codecs: the codecs of training exchanges.
        seed: of the run, from which participants, codecs and what `rng` returns are drawn.
        rounds: how many rounds the run has.
        public: works with public data, if the algorithm needs them.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Collection[str],
        make_model: Callable[[int], Tensors],
        parts: ModelParts,
        transport: Transport,
        root: Path,
        *,
        participation: Participation = EVERYBODY,
        codecs: Codecs = NO_CODECS,
        seed: int = 0,
        rounds: int = 1,
        public: LocalWork | None = None,
    ) -> None:
        self.algorithm, self.transport, self.parts = algorithm, transport, parts
        self.clients = sorted(clients)
        self.participation = participation
        self.seed, self.rounds = seed, rounds
        self.store = Store(root)
        self.state: State = {}
        self.round = 0
        self.stage: Stage = "train"
        self.client_stats: dict[str, ClientStats] = {}
        self.left_out: list[dict[str, str]] = []
        self._make_model, self._public = make_model, public
        self._initial = make_model(0)
        self._expected = Expected(self._initial, parts, algorithm.hyperparameters())
        self._sends = algorithm.all_sends()
        self._acknowledges = algorithm.commit_on_acknowledgement
        self._accepted: dict[str, str] = {}
        layout = ModelLayout(self._initial, parts.trainable) if codecs else None
        self._session = ServerSession(codecs, layout, seed=seed) if layout else None
        self.held = Held(self._initial.select(parts.frozen)) if parts.frozen else None
        self._lacking: set[str] = set()
        self._exchange = 0
        self._committed = 0
        self._purposes: set[str] = set()
        self._participants = self.clients
        self._pending: Replies | None = None

    @property
    def initial_model(self) -> Tensors:
        """The common initial model."""
        return self._initial

    def fresh_model(self, k: int) -> Tensors:
        """Return the ``k``-th initial model; 0 is the common one."""
        return self._initial if k == 0 else self._make_model(k)

    @property
    def public(self) -> LocalWork:
        """The work of the server with public data. See `collegium.core.algorithm.Server.public`.

        Raises:
            ProtocolError: the algorithm does not say that it needs them.
        """
        if self._public is None:
            raise ProtocolError(
                f"{type(self.algorithm).__name__} works with public data at the server and does "
                f'not say so; write needs_public = "images" or "labels" in its class'
            )
        return self._public

    def rng(self, purpose: str) -> torch.Generator:
        """Return the generator for ``purpose``. See `collegium.core.algorithm.Server.rng`.

        Raises:
            ProtocolError: the purpose was used before in this round.
        """
        claim(self._purposes, purpose, "round")
        return generator(self.seed, "server", self.round, purpose)

    def ask(
        self,
        method: Callable[..., Message],
        *,
        to: Collection[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **items: Any,
    ) -> Replies:
        """Ask clients to run a handler. See `collegium.core.algorithm.Server.ask`.

        Raises:
            ProtocolError: the method is not a handler, or a client is not in the federation.
        """
        self._finish_exchange()
        name = method.__name__
        handler_of(self.algorithm, name)
        wanted = {*(each if each is not None else self.clients if to is None else to)}
        unknown = wanted - set(self.clients)
        if unknown:
            raise ProtocolError(
                f"asked {', '.join(sorted(unknown))}, which is not in the federation"
            )
        names = [client for client in self._participants if client in wanted]
        exchange, self._exchange = self._exchange, self._exchange + 1
        coded = None
        if self._session is not None and self.stage == "train":
            position = self.round, exchange
            coded = Exchange(self._session, items, each, names, position=position, held=self.held)
        common = pack(items, self.held) if each is None and coded is None else b""

        def request(client: str) -> Request:
            lacking = client in self._lacking
            if coded is not None:
                payload = coded.payload(client, whole=lacking)
            elif lacking and self.held is not None:
                own = {} if each is None else each[client]
                payload = pack({**items, **own, HELD_KEY: self.held.tensors})
            else:
                payload = common if each is None else pack({**items, **each[client]}, self.held)
            self._lacking.discard(client)
            self.client_stats.setdefault(client, ClientStats()).bytes_down += len(payload)
            floor = max(self._committed - 1, 0)
            accepted = self._accepted.get(client, "") if self._acknowledges else None
            return Request(client, self.round, exchange, self.stage, name, payload, floor, accepted)

        self._pending = Replies(self._receive(names, name, exchange, request, coded))
        return self._pending

    def _finish_exchange(self) -> None:
        """Wait for the replies to the last exchange that the algorithm has not read."""
        if self._pending is not None:
            self._pending.drain()
            self._pending = None

    def _receive(
        self,
        names: list[str],
        method: str,
        exchange: int,
        request: Callable[[str], Request],
        coded: Exchange | None,
    ) -> Iterator[tuple[str, Message]]:
        """Yield checked replies in sorted order; those that arrive early wait for their turn."""
        early: dict[str, Response] = {}
        answered = 0
        remaining = iter(names)
        expected = next(remaining, None)
        for response in self._deliver(names, request):
            early[response.client] = response
            while expected in early:
                message = self._open_response(early.pop(expected), method, coded)
                if message is not None:
                    answered += 1
                    if self.stage == "train":
                        self._accepted[expected] = state_name(self.round, exchange)
                    yield expected, message
                expected = next(remaining, None)
        if expected is not None:
            raise ProtocolError(
                f"client {expected!r}, round {self.round}, {method}: the engine brought no response"
            )
        if answered < min(self.participation.min_clients, len(names)):
            raise MissingReply(
                f"round {self.round}, {method}: {answered} of {len(names)} clients answered, and "
                f"min_clients is {self.participation.min_clients}; the finished rounds are kept, "
                f"resume when more of them are back"
            )

    def _deliver(self, names: list[str], request: Callable[[str], Request]) -> Iterator[Response]:
        """Yield responses; clients whose request was lost, or that are retried, are asked again."""
        missing_since: dict[str, float] = {}
        while names:
            again: list[str] = []
            for response in self.transport.exchange(map(request, names)):
                if self._is_asked_again(response, missing_since):
                    again.append(response.client)
                else:
                    yield response
            if set(again) & missing_since.keys():
                time.sleep(RETRY_PAUSE)
            names = sorted(again)

    def _is_asked_again(self, response: Response, missing_since: dict[str, float]) -> bool:
        """Return whether a client is asked again: its request got lost, or the policy wants it.

        One that lost the reference of its codec, or lacks what messages leave out, is sent all.
        """
        client = response.client
        if response.missing and self.participation.on_failure == "retry":
            logger.warning("client %r: %s; asking again", client, response.missing)
            began = missing_since.setdefault(client, time.monotonic())
            return time.monotonic() - began < self.participation.retry_seconds
        if (self._session or self.held) and response.data == RESEND_REQUEST:
            self._lacking.add(client)
            if self._session is not None:
                logger.warning(
                    "client %r lost its reference models; sending everything again", client
                )
                self._session.forget(client)
            self._count(response)
            return True
        return response.again

    def _count(self, response: Response) -> ClientStats:
        stats = self.client_stats.setdefault(response.client, ClientStats())
        stats.bytes_up += len(response.data)
        stats.seconds += response.seconds
        return stats

    def _open_response(
        self, response: Response, method: str, coded: Exchange | None = None
    ) -> Message | None:
        """Return the checked reply, or None if the client failed and is left out."""
        stats = self._count(response)
        where = f"client {response.client!r}, round {self.round}, {method}"
        try:
            if response.missing:
                raise MissingReply(f"{where}: {response.missing}")
            envelope = _unpacked(response.data, where, self.held)
            reply = self._check(envelope, where, response.client, coded)
        except ClientError as error:
            if coded is not None:
                coded.record_failure(response.client)
            if self.participation.on_failure != "skip":
                raise
            logger.warning("%s; left out of this exchange", error)
            self.left_out.append({"client": response.client, "method": method, "why": str(error)})
            return None
        if coded is not None:
            coded.record_reply(response.client, reply)
        if "progress" in reply and "loss" in reply["progress"]:
            stats.loss = reply["progress"]["loss"]
        stats.numbers |= recorded_numbers(self._sends, reply)
        return reply

    def _check(self, envelope: Any, where: str, client: str, coded: Exchange | None) -> Message:
        """Return the message in ``envelope`` after checking every part against its schema."""
        if isinstance(envelope, dict) and isinstance(envelope.get("error"), dict):
            kind = KINDS.get(str(envelope["error"].get("kind")), ClientError)
            text = f"{where}: {envelope['error'].get('text')}"
            raise (kind if issubclass(kind, ClientError) else ClientError)(text)
        if not isinstance(envelope, dict) or not isinstance(envelope.get("reply"), dict):
            raise ProtocolError(f"{where}: the response is not a reply")
        reply: dict[str, Any] = envelope["reply"]
        if "coded" in envelope:
            reply = self._decode(reply, envelope["coded"], where, client, coded)
        for name, value in reply.items():
            if name not in self._sends:
                raise ProtocolError(
                    f"{where}: part {name!r} is not among what "
                    f"{type(self.algorithm).__name__} declares to send"
                )
            try:
                self._sends[name].check(value, self._expected)
            except ProtocolError as error:
                raise ProtocolError(f"{where}: part {name!r}: {error}") from error
        return Message(reply, where)

    def _decode(
        self, reply: Any, entries: Any, where: str, client: str, coded: Exchange | None
    ) -> dict[str, Any]:
        try:
            if coded is None:
                raise ProtocolError("it is coded, and the server has no codec; leave it out here")
            return coded.decode_reply(client, reply, entries)
        except ProtocolError as error:
            raise ProtocolError(f"{where}: {error}") from error

    def begin(self, before_commit: Callable[[], None] = lambda: None) -> None:
        """Load the newest undamaged state, or run and commit the algorithm's set-up.

        Args:
            before_commit: called before the set-up is committed.

        Raises:
            CheckpointError: every stored state is damaged.
        """
        self.store.clean()
        found = self.store.load_newest()
        if found is not None:
            name, self.state = found
            self.round = self._committed = int(name)
            codec_state = self.state.pop(CODEC_KEY, {})
            self._accepted = self.state.pop(ACCEPTED_KEY, {})
            if self._session is not None:
                self._session.state = codec_state
            self.store.prune(name)
            return
        self.participation.check(self.clients)
        check_needs(self.algorithm, self.clients, self.parts)
        self._run_and_commit(self.algorithm.setup, 0, before_commit)

    def advance(
        self, before_commit: Callable[[], None] = lambda: None, *, at_home: bool = False
    ) -> None:
        """Run and commit the next round.

        Args:
            before_commit: called between the two, so that what it writes is never behind the
                committed state.
            at_home: whether the clients train their own models in it; see
                `Algorithm.round_at_home`.
        """
        number = self.round + 1
        self._participants = self.participation.drawn(self.clients, number, self.seed)
        step = self.algorithm.round_at_home if at_home else self.algorithm.round
        self._run_and_commit(step, number, before_commit)

    def conclude(self, before_commit: Callable[[], None] = lambda: None) -> None:
        """Run, and commit like a round, the algorithm's work after the last round.

        Args:
            before_commit: see `advance`.
        """
        self._run_and_commit(self.algorithm.finish, self.round + 1, before_commit)

    def _run_and_commit(
        self, step: Callable[[Any], None], number: int, before_commit: Callable[[], None]
    ) -> None:
        self.round, self.stage, self._exchange = number, "train", 0
        self._purposes.clear()
        if self._public is not None:
            self._public.begin_work("public", number)
            self._public.round, self._public.state = number, self.state
        self.client_stats, self.left_out = {}, []
        step(self)
        self._finish_exchange()
        self._participants = self.clients
        before_commit()
        codec_state = self._session.pruned_state() if self._session is not None else {}
        state = self.state | ({CODEC_KEY: codec_state} if codec_state else {})
        if self._acknowledges:
            state[ACCEPTED_KEY] = dict(self._accepted)
        self.store.save(f"{number:06d}", state)  # the rename inside is the commit point
        self._committed = number
        self.store.prune(f"{number:06d}")

    def evaluate_models(self, chosen: Mapping[str, int]) -> dict[str, Message]:
        """Ask all clients to score the current models, and return the replies by client.

        Args:
            chosen: by client the round chosen so far of its personal model. See
                `Algorithm.evaluate`.
        """
        each = {
            client: {**self.algorithm.shared_with(self, client), "chosen": chosen.get(client)}
            for client in self.clients
        }
        method = self.algorithm.evaluate
        return self.evaluate(method, each=each, **self.algorithm.shared(self))

    def evaluate(
        self,
        method: Callable[..., Message],
        *,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **items: Any,
    ) -> dict[str, Message]:
        """Ask all clients to run a read-only handler and return the replies by client.

        Args:
            method: a method of the algorithm marked as handler, which leaves the state alone.
            each: further parts for single clients.
            **items: the parts that all clients receive.
        """
        self.stage, self._exchange = "evaluate", 0
        self.client_stats = {}
        if method.__name__ == Algorithm.evaluate.__name__:
            self._participants = self.participation.present(self.clients, self.round)
        replies = dict(self.ask(method, each=each, **items).items())
        self._pending, self.stage, self._participants = None, "train", self.clients
        return replies

    def deploy(self) -> dict[str, Tensors]:
        """Return the models for a client outside: the algorithm's and those that sites share."""
        self.stage, self._exchange = "evaluate", 0
        models = self.algorithm.deploy(self)
        if self.algorithm.has_personal or HOME in self.state:
            for client, reply in self.ask(self.algorithm.share_personal).items():
                if "personal" in reply:
                    models[client] = reply["personal"]
        self._finish_exchange()
        self.stage = "train"
        return models


def _unpacked(data: bytes, where: str, held: Held | None) -> Any:
    """Return the envelope in a response; one that is none names who sent it."""
    try:
        return unpack(data, held=held)
    except ProtocolError as error:
        raise ProtocolError(f"{where}: {error}") from error
