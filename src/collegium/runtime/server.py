"""The two runtimes that every engine drives.

One for the server half of an algorithm, one per client.

An engine is a `Transport`: it carries requests to clients and brings back what they answered, in
any order. Nothing else differs between engines, so a run has the same bits in all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from collegium.compression.session import (
    AGAIN,
    KEY,
    NO_CODECS,
    Coding,
    Exchange,
    Form,
    ServerSession,
)
from collegium.core.algorithm import Algorithm, Replies, State
from collegium.core.message import Message, pack, unpack
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Expected, recorded
from collegium.core.tensors import Tensors
from collegium.errors import (
    KINDS,
    ClientError,
    ProtocolError,
)
from collegium.runtime.state import Store

logger = logging.getLogger(__name__)

Stage = Literal["train", "evaluate"]


@dataclass(frozen=True)
class Request:
    """What a transport carries to a client.

    Attributes:
        client: who is asked.
        round: the round in which the server asks.
        exchange: position of this exchange within its round.
        stage: "train" may change the client's state; "evaluate" may not.
        method: name of the handler to run.
        payload: the packed parts of the message.
        floor: client states older than the last one before this round are no longer needed.
    """

    client: str
    round: int
    exchange: int
    stage: Stage
    method: str
    payload: bytes
    floor: int = 0


@dataclass(frozen=True)
class Answer:
    """What a transport brings back: the client's packed envelope and the seconds that it took."""

    client: str
    data: bytes
    seconds: float


class Transport(Protocol):
    """All that an engine must provide."""

    def exchange(self, requests: Iterable[Request]) -> Iterator[Answer]:
        """Deliver the requests, which are made as they are taken; yield answers in any order."""

    def close(self) -> None:
        """Let go of whatever the engine holds."""


def handler_of(algorithm: Algorithm, name: str) -> Callable[..., Message]:
    """Return the handler ``name``.

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
class Traffic:
    """What one client did in one round."""

    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    loss: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)


class ServerRuntime:
    """Runs the server half: asks clients, checks what they reply, commits every round.

    Args:
        algorithm: the algorithm.
        clients: the clients' names.
        make_model: returns the k-th initial model.
        parts: the roles of the model's tensors.
        transport: the engine.
        root: folder of the server's state.
        on_failure: "fail" ends the run at the first client that fails or sends something unusable;
            "skip" leaves it out of that exchange and records it.
        checkpoint_every: rounds between two commits; resuming repeats at most that many.
        coding: the codecs of training exchanges.
        seed: of the run, for codecs that draw.
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
        on_failure: Literal["fail", "skip"] = "fail",
        checkpoint_every: int = 1,
        coding: Coding = NO_CODECS,
        seed: int = 0,
    ) -> None:
        self.algorithm, self.transport, self.parts = algorithm, transport, parts
        self.clients = sorted(clients)
        self.on_failure, self.checkpoint_every = on_failure, checkpoint_every
        self.store = Store(root)
        self.state: State = {}
        self.round = 0
        self.stage: Stage = "train"
        self.traffic: dict[str, Traffic] = {}
        self.left_out: list[dict[str, str]] = []
        self._make_model = make_model
        self._initial = make_model(0)
        self._expected = Expected(self._initial, parts, algorithm.hyperparameters())
        self._sends = algorithm.all_sends()
        form = Form(self._initial, parts.trainable) if coding else None
        self._wire = ServerSession(coding, form, seed=seed) if form else None
        self._exchange = 0
        self._committed = 0
        self._open: Replies | None = None

    @property
    def initial_model(self) -> Tensors:
        """The common initial model."""
        return self._initial

    def fresh_model(self, k: int) -> Tensors:
        """Return the ``k``-th initial model; 0 is the common one."""
        return self._initial if k == 0 else self._make_model(k)

    def ask(
        self,
        method: Callable[..., Message],
        *,
        to: Collection[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **items: Any,
    ) -> Replies:
        """Ask clients to run a handler; see `collegium.core.algorithm.Server.ask`.

        Raises:
            ProtocolError: the method is not a handler, or a client is not in the federation.
        """
        self._settle()
        name = method.__name__
        handler_of(self.algorithm, name)
        names = sorted(each if each is not None else self.clients if to is None else to)
        strangers = set(names) - set(self.clients)
        if strangers:
            raise ProtocolError(
                f"asked {', '.join(sorted(strangers))}, which is not in the federation"
            )
        exchange, self._exchange = self._exchange, self._exchange + 1
        coded = None
        if self._wire is not None and self.stage == "train":
            coded = self._wire.exchange(items, each, names, place=(self.round, exchange))
        common = pack(items) if each is None and coded is None else b""

        def request(client: str) -> Request:
            if coded is not None:
                payload = coded.payload(client)
            else:
                payload = common if each is None else pack({**items, **each[client]})
            self.traffic.setdefault(client, Traffic()).bytes_down += len(payload)
            floor = max(self._committed - 1, 0)
            return Request(client, self.round, exchange, self.stage, name, payload, floor)

        self._open = Replies(self._receive(names, name, request, coded))
        return self._open

    def _settle(self) -> None:
        """See the last exchange through before the next one begins."""
        if self._open is not None:
            self._open.finish()
            self._open = None

    def _receive(
        self,
        names: list[str],
        method: str,
        request: Callable[[str], Request],
        coded: Exchange | None,
    ) -> Iterator[tuple[str, Message]]:
        """Yield checked replies in sorted order, holding back those that come before their turn."""
        waiting: dict[str, Answer] = {}
        turn = iter(names)
        expected = next(turn, None)
        for answer in self._deliver(names, request):
            waiting[answer.client] = answer
            while expected in waiting:
                message = self._open_answer(waiting.pop(expected), method, coded)
                if message is not None:
                    yield expected, message
                expected = next(turn, None)
        if expected is not None:
            raise ProtocolError(
                f"client {expected!r}, round {self.round}, {method}: the engine brought no answer"
            )

    def _deliver(self, names: list[str], request: Callable[[str], Request]) -> Iterator[Answer]:
        """Yield answers; a client that lost what it held is asked again, and sent everything."""
        lost: list[Answer] = []
        for answer in self.transport.exchange(map(request, names)):
            if self._wire is not None and answer.data == AGAIN:
                lost.append(answer)
            else:
                yield answer
        for answer in lost:
            logger.warning("client %r lost what it held; sending all again", answer.client)
            assert self._wire is not None
            self._wire.forget(answer.client)
            self._count(answer)
        if lost:
            yield from self.transport.exchange(request(answer.client) for answer in lost)

    def _count(self, answer: Answer) -> Traffic:
        traffic = self.traffic.setdefault(answer.client, Traffic())
        traffic.bytes_up += len(answer.data)
        traffic.seconds += answer.seconds
        return traffic

    def _open_answer(
        self, answer: Answer, method: str, coded: Exchange | None = None
    ) -> Message | None:
        """Return the checked reply, or None where a failed client is left out."""
        traffic = self._count(answer)
        where = f"client {answer.client!r}, round {self.round}, {method}"
        try:
            reply = self._check(unpack(answer.data), where, answer.client, coded)
        except ClientError as error:
            if coded is not None:
                coded.failed(answer.client)
            if self.on_failure == "fail":
                raise
            logger.warning("%s; left out of this exchange", error)
            self.left_out.append({"client": answer.client, "method": method, "why": str(error)})
            return None
        if coded is not None:
            coded.done(answer.client, reply)
        if "progress" in reply and "loss" in reply["progress"]:
            traffic.loss = reply["progress"]["loss"]
        traffic.numbers |= recorded(self._sends, reply)
        return reply

    def _check(self, envelope: Any, where: str, client: str, coded: Exchange | None) -> Message:
        """Return the message in ``envelope`` if every part is what the algorithm declares."""
        if isinstance(envelope, dict) and isinstance(envelope.get("error"), dict):
            kind = KINDS.get(str(envelope["error"].get("kind")), ClientError)
            text = f"{where}: {envelope['error'].get('text')}"
            raise (kind if issubclass(kind, ClientError) else ClientError)(text)
        if not isinstance(envelope, dict) or not isinstance(envelope.get("reply"), dict):
            raise ProtocolError(f"{where}: the answer is not a reply")
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
            return coded.reply(client, reply, entries)
        except ProtocolError as error:
            raise ProtocolError(f"{where}: {error}") from error

    def begin(self, committing: Callable[[], None] = lambda: None) -> None:
        """Load the newest whole state, or run and commit the algorithm's set-up.

        Raises:
            CheckpointError: every stored state is damaged.
        """
        self.store.clean()
        found = self.store.load_newest()
        if found is not None:
            name, self.state = found
            self.round = self._committed = int(name)
            memory = self.state.pop(KEY, {})
            if self._wire is not None:
                self._wire.memory = memory
            self.store.prune(name)
            return
        self.algorithm.check_setup(self.clients, self.parts)
        self._commit(self.algorithm.setup, 0, committing)

    def advance(self, committing: Callable[[], None] = lambda: None) -> None:
        """Run the next round, call ``committing``, and commit the round.

        What ``committing`` writes is thus never behind the committed state.
        """
        self._commit(self.algorithm.round, self.round + 1, committing)

    def conclude(self, committing: Callable[[], None] = lambda: None) -> None:
        """Run, and commit like a round, what the algorithm does after the last round."""
        self._commit(self.algorithm.finish, self.round + 1, committing, force=True)

    def _commit(
        self,
        step: Callable[[Any], None],
        number: int,
        committing: Callable[[], None] = lambda: None,
        *,
        force: bool = False,
    ) -> None:
        self.round, self.stage, self._exchange = number, "train", 0
        self.traffic, self.left_out = {}, []
        step(self)
        self._settle()
        committing()
        if force or number % self.checkpoint_every == 0:
            memory = self._wire.stored() if self._wire is not None else {}
            state = self.state | ({KEY: memory} if memory else {})
            self.store.save(f"{number:06d}", state)  # the rename inside is the commit point
            self._committed = number
            self.store.prune(f"{number:06d}")

    def shared(self) -> dict[str, Any]:
        """Return what clients receive to form their personal model and to be evaluated."""
        return dict(self.algorithm.shared(self))

    def shared_with_each(self) -> dict[str, Mapping[str, Any]] | None:
        """Return what single clients receive beside it; None where all receive the same."""
        each = {client: self.algorithm.shared_with(self, client) for client in self.clients}
        return each if any(each.values()) else None

    def evaluate(self, method: Callable[..., Message], **items: Any) -> dict[str, Message]:
        """Ask all clients to run a read-only handler and return the replies by client."""
        self.stage, self._exchange = "evaluate", 0
        self.traffic = {}
        replies = dict(self.ask(method, **items).items())
        self._open, self.stage = None, "train"
        return replies

    def deploy(self) -> dict[str, Tensors]:
        """Return the algorithm's models for a client outside and those that sites hand out."""
        self.stage, self._exchange = "evaluate", 0
        models = self.algorithm.deploy(self)
        if "personal" in self._sends:
            for client, reply in self.ask(self.algorithm.share_personal).items():
                if "personal" in reply:
                    models[client] = reply["personal"]
        self._settle()
        self.stage = "train"
        return models


class Handles(Protocol):
    """What an engine needs from a client: to answer a request."""

    def handle(self, request: Request) -> bytes:
        """Return the packed envelope that answers ``request``."""


def answer(client: Handles, request: Request) -> Answer:
    """Let ``client`` answer and take the time."""
    start = time.perf_counter()
    data = client.handle(request)
    return Answer(request.client, data, time.perf_counter() - start)
