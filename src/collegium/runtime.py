"""The two runtimes that every engine drives.

One for the server half of an algorithm, one per client.

An engine is a `Transport`: it carries requests to clients and brings back what they answered, in
any order. Nothing else differs between engines, so a run has the same bits in all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from collegium.algorithm import Algorithm, Replies, State
from collegium.border import Expected
from collegium.errors import (
    KINDS,
    CheckpointError,
    ClientError,
    CollegiumError,
    ConfigError,
    EgressError,
    ProtocolError,
)
from collegium.message import Message, pack, unpack
from collegium.models.parts import ModelParts
from collegium.state import Store
from collegium.tensors import Tensors

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
        """Ask clients to run a handler; see `collegium.algorithm.Server.ask`.

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
        common = pack(items) if each is None else b""

        def requests() -> Iterator[Request]:
            for client in names:
                payload = common if each is None else pack({**items, **each[client]})
                self.traffic.setdefault(client, Traffic()).bytes_down += len(payload)
                yield Request(
                    client,
                    self.round,
                    exchange,
                    self.stage,
                    name,
                    payload,
                    max(self._committed - 1, 0),
                )

        self._open = Replies(self._receive(names, name, requests()))
        return self._open

    def _settle(self) -> None:
        """See the last exchange through before the next one begins."""
        if self._open is not None:
            self._open.finish()
            self._open = None

    def _receive(
        self, names: list[str], method: str, requests: Iterator[Request]
    ) -> Iterator[tuple[str, Message]]:
        """Yield checked replies in sorted order, holding back those that come before their turn."""
        waiting: dict[str, Answer] = {}
        turn = iter(names)
        expected = next(turn, None)
        for answer in self.transport.exchange(requests):
            waiting[answer.client] = answer
            while expected in waiting:
                message = self._open_answer(waiting.pop(expected), method)
                if message is not None:
                    yield expected, message
                expected = next(turn, None)
        if expected is not None:
            raise ProtocolError(
                f"client {expected!r}, round {self.round}, {method}: the engine brought no answer"
            )

    def _open_answer(self, answer: Answer, method: str) -> Message | None:
        """Return the checked reply, or None where a failed client is left out."""
        traffic = self.traffic.setdefault(answer.client, Traffic())
        traffic.bytes_up += len(answer.data)
        traffic.seconds += answer.seconds
        where = f"client {answer.client!r}, round {self.round}, {method}"
        try:
            reply = self._check(unpack(answer.data), where)
        except ClientError as error:
            if self.on_failure == "fail":
                raise
            logger.warning("%s; left out of this exchange", error)
            self.left_out.append({"client": answer.client, "method": method, "why": str(error)})
            return None
        if "progress" in reply and "loss" in reply["progress"]:
            traffic.loss = reply["progress"]["loss"]
        return reply

    def _check(self, envelope: Any, where: str) -> Message:
        """Return the message in ``envelope`` if every part is what the algorithm declares."""
        if isinstance(envelope, dict) and isinstance(envelope.get("error"), dict):
            kind = KINDS.get(str(envelope["error"].get("kind")), ClientError)
            text = f"{where}: {envelope['error'].get('text')}"
            raise (kind if issubclass(kind, ClientError) else ClientError)(text)
        if not isinstance(envelope, dict) or not isinstance(envelope.get("reply"), dict):
            raise ProtocolError(f"{where}: the answer is not a reply")
        reply: dict[str, Any] = envelope["reply"]
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

    def begin(self, committing: Callable[[], None] = lambda: None) -> None:
        """Load the newest whole state, or run and commit the algorithm's set-up.

        A damaged state is named, removed, and the one before it used.

        Raises:
            CheckpointError: every stored state is damaged.
        """
        self.store.clean()
        names = [name for name in self.store.names() if name.isdigit()]
        for name in reversed(names):
            try:
                self.state = self.store.load(name)
            except CheckpointError as error:
                logger.warning("%s; going on from the state before it", error)
                self.store.remove(name)
                continue
            self.round = self._committed = int(name)
            self.store.prune(name)
            return
        if names:
            raise CheckpointError(
                f"no whole state is left in {self.store.root}; start the run again in a "
                f"new output folder"
            )
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
            self.store.save(f"{number:06d}", self.state)  # the rename inside is the commit point
            self._committed = number
            self.store.prune(f"{number:06d}")

    def shared(self) -> dict[str, Any]:
        """Return what clients receive to form their personal model and to be evaluated."""
        return dict(self.algorithm.shared(self))

    def evaluate(self, method: Callable[..., Message], **items: Any) -> dict[str, Message]:
        """Ask all clients to run a read-only handler and return the replies by client."""
        self.stage, self._exchange = "evaluate", 0
        self.traffic = {}
        replies = dict(self.ask(method, **items).items())
        self._open, self.stage = None, "train"
        return replies

    def deploy(self) -> dict[str, Tensors]:
        """Return the models for a client outside, by name; no client's state changes."""
        self.stage, self._exchange = "evaluate", 0
        models = self.algorithm.deploy(self)
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


def refuse_forbidden(
    algorithm: Algorithm, site: str, allow: Collection[str] | None, forbid: Collection[str]
) -> None:
    """Check before round 0 that a site's policy lets out what the algorithm sends in training.

    Raises:
        EgressError: it does not; the sentence names algorithm, part and site.
    """
    for name, part in algorithm.all_sends().items():
        if not part.opt_in and not may_leave(name, opt_in=False, allow=allow, forbid=forbid):
            raise EgressError(
                f"{type(algorithm).__name__} sends {name!r} ({part.says}), which the "
                f"policy of site {site!r} forbids; "
                f"allow it there or choose another algorithm"
            )


def may_leave(
    name: str, *, opt_in: bool, allow: Collection[str] | None, forbid: Collection[str]
) -> bool:
    """Return whether a policy lets the part ``name`` out."""
    if name in forbid:
        return False
    return name in allow if allow is not None else not opt_in


def describe_failure(error: Exception) -> dict[str, str]:
    """Return what a server may learn of a failure at a client.

    The text of errors about files, disks and the unforeseen may hold paths or patient identifiers:
    it stays in the site's log.
    """
    kind = type(error).__name__
    if isinstance(error, ClientError | ConfigError):
        return {"kind": kind, "text": str(error)}
    known = kind if isinstance(error, CollegiumError) else ClientError.__name__
    return {"kind": known, "text": f"{kind}; the details are in the log of this site"}
