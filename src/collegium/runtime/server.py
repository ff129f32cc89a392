"""The server runtime: runs the server half of an algorithm over any engine.

An engine is a `Transport`: it carries requests to clients and brings back their responses, in any
order. Nothing else differs between engines, so a run has the same bits in all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from collegium.compression.session.groups import CODEC_KEY, NO_CODECS, RESEND_REQUEST, Codecs
from collegium.compression.session.layout import ModelLayout
from collegium.compression.session.server_session import Exchange, ServerSession, decode_reply
from collegium.core.algorithm import HOME, Algorithm, Replies, State, check_needs
from collegium.core.failures import LONGEST
from collegium.core.message import HELD_KEY, FaultyReply, Held, Message, pack
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import Expected, Metric, recorded_numbers
from collegium.core.randomness import claim, generator
from collegium.core.tensors import Tensors
from collegium.core.text import printable
from collegium.errors import ClientError, MissingReply, ProtocolError
from collegium.runtime.border import Border
from collegium.runtime.distances import Diagnostic, layer_distances
from collegium.runtime.local_work import LocalWork
from collegium.runtime.participation import EVERYBODY, Participation
from collegium.runtime.records import ClientStats
from collegium.runtime.requests import Request, Response, Stage, Transport, handler_of, state_name
from collegium.runtime.secure.config import SecureMean
from collegium.runtime.secure.identity import Identity
from collegium.runtime.secure.parts import KEY, MASKED, PARTS
from collegium.runtime.secure.server import replies_maker
from collegium.runtime.state import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")


ACCEPTED_KEY = "$accepted"
"""The key of a stored state under which the newest client states are named that count."""

RETRY_PAUSE = 1.0
"""Seconds between two requests to a client that did not answer."""


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
        metrics: the scores that the task can give a case; see `collegium.tasks.metrics_of`. None:
            unknown.
        headline: the metric that selects models; empty: unknown.
        cases: by client, how many cases it has in all; one that is missing may have any number.
        diagnostics: what is recorded beside what the run needs.
        secure: how sites mask what is averaged; None: replies come as they are.
        identity: by which signatures of the sites' keys are checked; None: nobody signs.

    Raises:
        ConfigError: the server has to see single replies, and ``secure`` hides them.
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
        metrics: Mapping[str, Metric] | None = None,
        headline: str = "",
        cases: Mapping[str, int | None] | None = None,
        diagnostics: Collection[Diagnostic] = (),
        secure: SecureMean | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.algorithm, self.transport, self.parts = algorithm, transport, parts
        self.clients = sorted(clients)
        self.participation = participation
        self.seed, self.rounds, self.diagnostics = seed, rounds, frozenset(diagnostics)
        self.store = Store(root)
        self.state: State = {}
        self.round = 0
        self.stage: Stage = "train"
        self.client_stats: dict[str, ClientStats] = {}
        self.left_out: list[dict[str, str]] = []
        self.recorded: dict[str, float] = {}
        """What the algorithm has recorded in this round; see `record`."""
        self._make_model, self._public = make_model, public
        self._initial = make_model(0)
        self._acknowledges = algorithm.commit_on_acknowledgement
        self._accepted: dict[str, str] = {}
        layout = ModelLayout(self._initial, parts.trainable) if codecs else None
        self._new_session = (
            partial(ServerSession, codecs, layout, seed=seed) if layout else lambda: None
        )
        self._session = self._new_session()
        self.held = Held(self._initial.select(parts.frozen)) if parts.frozen else None
        expected = Expected(
            self._initial, parts, algorithm.hyperparameters(), metrics=metrics, headline=headline
        )
        also = PARTS if secure else {}
        self.border = Border(algorithm, expected, cases or {}, self.held, also, identity)
        self._make_replies = replies_maker(
            secure, algorithm, expected, len(self.clients), bool(codecs), participation, diagnostics
        )
        self._lacking: set[str] = set()
        self._resent: set[str] = set()
        self._barred: dict[str, dict[str, str]] = {}
        self._exchange = self._committed = 0
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

    def record(self, name: str, value: float) -> None:
        """Record a number of this round. See `collegium.core.algorithm.Server.record`."""
        self.recorded[name] = float(value)

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
        names = [c for c in self._participants if c in wanted and c not in self._barred]
        exchange, self._exchange = self._exchange, self._exchange + 1
        coded = None
        if self._session is not None and self.stage == "train":
            position = self.round, exchange
            coded = Exchange(self._session, items, each, names, position=position, held=self.held)
        common = pack(items, self.held) if each is None and coded is None else b""

        def sent_to(client: str) -> dict[str, Any]:
            return items if each is None else {**items, **each[client]}

        def request(client: str) -> Request:
            lacking = client in self._lacking
            if coded is not None:
                payload = coded.payload(client, whole=lacking)
            elif lacking and self.held is not None:
                payload = pack({**sent_to(client), HELD_KEY: self.held.tensors})
            else:
                payload = common if each is None else pack(sent_to(client), self.held)
            self._lacking.discard(client)
            self.client_stats.setdefault(client, ClientStats()).bytes_down += len(payload)
            floor = max(self._committed - 1, 0)
            accepted = self._accepted.get(client, "") if self._acknowledges else None
            return Request(client, self.round, exchange, self.stage, name, payload, floor, accepted)

        source = self._received(names, name, exchange, request, coded, sent_to)
        gather, accept = partial(self._gather, exchange), partial(self._accept, exchange)
        where = self.round, exchange, name
        self._pending = self._make_replies(source, gather, accept, where, self.stage)
        return self._pending

    def _gather(
        self, exchange: int, names: list[str], items: Mapping[str, Any]
    ) -> Iterator[tuple[str, Message]]:
        """Yield the masked parts of clients; nobody trains for them."""
        payload = pack(dict(items))

        def request(client: str) -> Request:
            self.client_stats[client].bytes_down += len(payload)
            return Request(client, self.round, exchange, "evaluate", MASKED, payload)

        return self._receive(names, MASKED, exchange, request, None)

    def _finish_exchange(self) -> None:
        """Wait for the replies to the last exchange that the algorithm has not read."""
        if self._pending is not None:
            self._pending.drain()
            self._pending = None

    def _received(
        self,
        names: list[str],
        method: str,
        exchange: int,
        request: Callable[[str], Request],
        coded: Exchange | None,
        sent_to: Callable[[str], Mapping[str, Any]],
    ) -> Iterator[tuple[str, Message]]:
        """Yield checked replies in sorted order, and record what is to be recorded of them."""
        for client, reply in self._receive(names, method, exchange, request, coded):
            if "layer_distance" in self.diagnostics and self.stage == "train":
                found = layer_distances(sent_to(client), reply, self.parts.trainable)
                self.client_stats[client].numbers |= found
            yield client, reply

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
        comparison = self.border.comparison(all_shapes=self.participation.on_failure == "skip")
        self._resent.clear()
        remaining = iter(names)
        expected = next(remaining, None)
        for response in self._deliver(names, request):
            early[response.client] = response
            while expected in early:
                message = self._open_response(early.pop(expected), method, exchange, coded)
                if message is not None:
                    answered += 1
                    comparison.add(expected, message)
                    if self.stage == "train" and KEY not in message:
                        self._accept(exchange, [expected])
                    yield expected, message
                expected = next(remaining, None)
        if expected is not None:
            raise ProtocolError(
                f"client {expected!r}, round {self.round}, {method}: the engine brought no response"
            )
        if odd := comparison.odd_one():
            raise FaultyReply(f"{self._where(odd.client, method)}: {odd}", odd.client)
        if answered < min(self.participation.min_clients, len(names) + len(self._barred)):
            raise MissingReply(
                f"round {self.round}, {method}: {answered} of {len(names)} clients answered, and "
                f"min_clients is {self.participation.min_clients}; the finished rounds are kept, "
                f"resume when more of them are back"
            )

    def _accept(self, exchange: int, clients: list[str]) -> None:
        """Note that the replies of clients have been used."""
        for client in clients:
            self._accepted[client] = state_name(self.round, exchange)

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
        asks = (self._session or self.held) and response.data == RESEND_REQUEST
        if asks and client not in self._resent:
            self._resent.add(client)
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

    def _where(self, client: str, method: str) -> str:
        return f"client {client!r}, round {self.round}, {method}"

    def _open_response(
        self, response: Response, method: str, exchange: int, coded: Exchange | None = None
    ) -> Message | None:
        """Return the checked reply, or None if the client failed and is left out."""
        stats, client = self._count(response), response.client
        where = self._where(client, method)
        try:
            if response.missing:
                raise MissingReply(response.missing)
            self.border.check_ledger(client, response.signed, response.data)
            origin = [client, self.round, exchange, method]
            needs = getattr(getattr(self.algorithm, method, None), "__collegium_needs__", ())
            decode = partial(decode_reply, coded, client)
            reply = self.border.open(response.data, client, origin, decode, needs)
        except ClientError as error:
            if coded is not None:
                coded.record_failure(client)
            failure = type(error)(f"{where}: {printable(str(error), LONGEST)}")
            if self.participation.on_failure != "skip":
                raise failure from error
            self._leave_out(client, method, str(failure))
            return None
        if coded is not None:
            coded.record_reply(client, reply)
        if "progress" in reply and "loss" in reply["progress"]:
            stats.loss = reply["progress"]["loss"]
        if "epsilon" in reply.get("progress", {}):
            stats.numbers["epsilon"] = float(reply["progress"]["epsilon"])
        stats.numbers |= recorded_numbers(self.border.sends, reply)
        return Message(reply, where, client)

    def _leave_out(self, client: str, method: str, why: str) -> None:
        logger.warning("%s; left out of this exchange", why)
        self.left_out.append({"client": client, "method": method, "why": why})

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
            name, state = found
            self._restore(state)
            self.round = self._committed = int(name)
            self.store.prune(name)
            return
        self.participation.check(self.clients)
        check_needs(self.algorithm, self.clients, self.parts)
        self._run_and_commit(self.algorithm.setup, 0, before_commit)

    def _restore(self, state: State) -> None:
        """Continue from a stored state."""
        self.state = state
        self._accepted = state.pop(ACCEPTED_KEY, {})
        self._session = self._new_session()
        codec_state = state.pop(CODEC_KEY, {})
        if self._session is not None:
            self._session.state = codec_state

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
        self.client_stats, self.left_out = {}, []

        def work() -> None:
            self.round, self.stage, self._exchange = number, "train", 0
            self._purposes.clear()
            self.recorded = {}
            for stats in self.client_stats.values():  # of those left out as the work began again
                stats.numbers = {}
            if self._public is not None:
                self._public.begin_work("public", number)
                self._public.round, self._public.state = number, self.state
            step(self)
            self._finish_exchange()

        def begin_again() -> None:
            self._restore(self.store.load(f"{self._committed:06d}") if number else {})

        self._without_faulty(work, begin_again)
        self._participants = self.clients
        before_commit()
        codec_state = self._session.pruned_state() if self._session is not None else {}
        state = self.state | ({CODEC_KEY: codec_state} if codec_state else {})
        if self._acknowledges:
            state[ACCEPTED_KEY] = dict(self._accepted)
        self.store.save(f"{number:06d}", state)  # the rename inside is the commit point
        self._committed = number
        self.store.prune(f"{number:06d}")

    def _without_faulty(
        self, work: Callable[[], T], begin_again: Callable[[], None] = lambda: None
    ) -> T:
        """Return what some work returns, done again without a client whose reply is of no use.

        The others receive the same requests again, and so have the bits of a run without it.

        Raises:
            FaultyReply: the policy is not to skip.
        """
        self._barred.clear()
        while True:
            try:
                return work()
            except FaultyReply as error:
                if self._pending is not None:
                    self._pending.discard()
                    self._pending = None
                if not error.client or self.participation.on_failure != "skip":
                    raise
                barred = {"client": error.client, "method": "round", "why": str(error)}
                self._barred[error.client] = barred
                logger.warning("%s; the round is made again without it", error)
                self.left_out = [*self._barred.values()]
                begin_again()

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
        self.client_stats = {}
        if method.__name__ == Algorithm.evaluate.__name__:
            self._participants = self.participation.present(self.clients, self.round)

        def work() -> dict[str, Message]:
            self.stage, self._exchange = "evaluate", 0
            return dict(self.ask(method, each=each, **items).items())

        replies = self._without_faulty(work)
        self._pending, self.stage, self._participants = None, "train", self.clients
        return replies

    def deploy(self) -> dict[str, Tensors]:
        """Return the models for a client outside: the algorithm's and those that sites share."""
        return self._without_faulty(self._models_to_deploy)

    def _models_to_deploy(self) -> dict[str, Tensors]:
        self.stage, self._exchange = "evaluate", 0
        models = self.algorithm.deploy(self)
        if self.algorithm.has_personal or HOME in self.state:
            for client, reply in self.ask(self.algorithm.share_personal).items():
                if "personal" in reply:
                    models[client] = reply["personal"]
        self._finish_exchange()
        self.stage = "train"
        return models
