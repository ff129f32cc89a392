"""What an algorithm is: hyper-parameters, a server half and a client half in one frozen dataclass.

The server half is ordinary code that asks: ``replies = server.ask(self.train, model=...)``, as
often as it likes. It may read and write ``server.state``, ask, and nothing else, so that a round
can be run again from the stored state. The client half are the methods marked `handler`: pure
functions of the request, of ``client.state`` and of random generators named by their purpose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from collegium.core.dataset import Dataset, SampleTransform, unchanged
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, Numbers, Part, Scores
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ProtocolError

if TYPE_CHECKING:  # the local loop stands above the core
    from collegium.training.objectives import Objective

State = dict[str, Any]
"""Tensors, plain values, and lists or dictionaries of these.

What `collegium.core.message.pack` can write.
"""

Handler = TypeVar("Handler", bound=Callable[..., Message])


def handler(method: Handler) -> Handler:
    """Mark a method as one that the server may ask a client to run."""
    method.__collegium_handler__ = True  # type: ignore[attr-defined]
    return method


class Replies:
    """The replies to one `Server.ask`, in sorted order of the clients.

    They arrive as they are looked at: `mean` holds one sum and a handful of models, whatever the
    number of clients, and lets the replies go. An algorithm that needs them all at once says so by
    `values`, `items` or `hold`, which keep them.

    Args:
        source: pairs of client and reply, as they come.
        factors: by client, what its weight in a `mean` is multiplied by; 1 where it has none.
    """

    def __init__(
        self, source: Iterator[tuple[str, Message]], factors: Mapping[str, float] | None = None
    ) -> None:
        self._source = source
        self._factors = factors or {}
        self._held: dict[str, Message] | None = None
        self._spent = False
        self.clients: list[str] = []
        """The clients that have answered so far."""
        self.averaged = False
        """Whether `mean` was taken."""

    def __iter__(self) -> Iterator[tuple[str, Message]]:
        if self._held is not None:
            yield from self._held.items()
            return
        if self._spent:
            raise ProtocolError(
                "these replies were let go as they came; call .hold() before their first "
                "use to use them twice"
            )
        self._spent = True
        for client, message in self._source:
            self.clients.append(client)
            yield client, message

    def hold(self) -> Replies:
        """Wait for all replies, keep them, and return them."""
        if self._held is None:
            self._held = dict(self)
        return self

    def finish(self) -> None:
        """Let every request be answered even where the algorithm does not look at the replies."""
        if not self._spent:
            self.hold()

    def items(self) -> list[tuple[str, Message]]:
        """Return all pairs of client and reply."""
        return list(self.hold())

    def values(self) -> list[Message]:
        """Return all replies."""
        return [message for _, message in self.hold()]

    def mean(self, key: str, weight: str | None = "num_examples") -> Tensors:
        """Return the mean of one part over the clients, summed in sorted order in float64.

        Args:
            key: the part to average.
            weight: the part that holds each client's weight; None: all weigh the same.

        Raises:
            ProtocolError: no reply came, the names differ between clients, or all weights are zero.
        """
        self.averaged = True
        running = Mean()
        for client, message in self:
            own = message[weight] if weight else 1.0
            running.add(
                message[key],
                own * self._factors.get(client, 1.0),
                source=f"client {client!r}, part {key!r}",
            )
        return running.result()


class Server(Protocol):
    """What the server half sees."""

    state: State
    round: int
    clients: list[str]
    parts: ModelParts

    @property
    def initial_model(self) -> Tensors:
        """The common initial model."""

    def fresh_model(self, k: int) -> Tensors:
        """Return the ``k``-th initial model; 0 is the common one."""

    def ask(
        self,
        method: Callable[..., Message],
        *,
        to: Collection[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **items: Any,
    ) -> Replies:
        """Ask clients to run a handler.

        Args:
            method: a method of this algorithm marked `handler`.
            to: the clients asked; all by default, or those of ``each``.
            each: further parts for single clients.
            **items: the parts that all of them receive.
        """


class Client(Protocol):
    """What the client half sees."""

    id: str
    state: State
    round: int
    parts: ModelParts

    @property
    def num_examples(self) -> int:
        """Number of training examples at this site."""

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps that one `fit` takes."""

    @property
    def lr(self) -> float:
        """Learning rate of this round."""

    @property
    def local_steps(self) -> int | None:
        """Optimiser steps per round where the recipe counts in steps.

        None where it counts in epochs.
        """

    @property
    def examples(self) -> Dataset:
        """The site's training examples."""

    @property
    def pool(self) -> Dataset:
        """The training data of all sites together.

        Exists in a simulation only, at the first client.
        """

    def may_send(self, part: str) -> bool:
        """Return whether the site's policy lets this part of a message out."""

    def rng(self, purpose: str) -> torch.Generator:
        """Return the generator for ``purpose``; a purpose may be used once in a handler."""

    def fit(
        self,
        model: Tensors,
        *,
        penalty: Callable[[Tensors], Tensor] | None = None,
        correct: Callable[[Tensors, Tensors], Tensors] | None = None,
        objective: Objective | None = None,
        trainable: Collection[str] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        data: Dataset | None = None,
        stream: str = "fit",
    ) -> Tensors:
        """Train ``model`` on the site's data; see `collegium.training.loop.LocalTraining.fit`."""

    def loss(self, model: Tensors) -> float:
        """Return the mean loss of ``model`` on the site's training data, in evaluation mode."""

    def fisher(
        self,
        model: Tensors,
        *,
        views: Sequence[SampleTransform] = (unchanged,),
        limit: int | None = None,
        stream: str = "fisher",
    ) -> list[Tensors]:
        """Return the diagonal Fisher information of ``model`` on the site's training data.

        One for each of ``views``; see `collegium.training.fisher.diagonal_fisher`.
        """

    def score(self, model: Tensors, split: str, *, headline: bool = False) -> list[dict[str, Any]]:
        """Score ``model`` on every case of a split, under pseudonyms.

        ``headline``: only the metric that selects models.
        """

    def keep_best(self, model: Tensors, scores: Sequence[Mapping[str, Any]]) -> None:
        """Keep ``model`` at the site if no personal model had better validation scores so far."""

    def best(self) -> Tensors | None:
        """Return the best personal model kept so far."""


class Extended:
    """Makes networks that hold what an algorithm adds to them.

    Args:
        network: makes the network.
        algorithm: extends it; see `Algorithm.extend`.
    """

    def __init__(self, network: Callable[[], nn.Module], algorithm: Algorithm) -> None:
        self._network, self._algorithm = network, algorithm

    def __call__(self) -> nn.Module:
        """Make a new network."""
        module = self._network()
        self._algorithm.extend(module)
        return module


class _Declaration:
    """`Algorithm.all_sends()`: what a class and its bases declare, the class having the last word.

    It leaves out the personal model where the class has none and, asked of an instance, what the
    instance's hyper-parameters never send.
    """

    def __get__(
        self, algorithm: Algorithm | None, kind: type[Algorithm]
    ) -> Callable[[], dict[str, Part]]:
        def all_sends() -> dict[str, Part]:
            declared: dict[str, Part] = {}
            for base in reversed(kind.__mro__):
                declared |= vars(base).get("sends", {})
            unused = {*algorithm.unused_sends()} if algorithm is not None else set()
            if kind.personal_model is Algorithm.personal_model:
                unused.add("personal")
            return {name: part for name, part in declared.items() if name not in unused}

        return all_sends


@dataclass(frozen=True)
class Algorithm(ABC):
    """Subclass as a frozen dataclass whose fields are the hyper-parameters.

    Attributes:
        sends: what leaves a client, part by part; a subclass adds to or replaces what its bases
            declare.
        all_sends: gives what a class and its bases declare; of an instance, without what its
            hyper-parameters never send.
        has_global: whether there is one global model that predicts for everybody.
        simulation_only: whether the method needs the sites' data in one place.
        optimizers: the optimisers with which the method is right; None: any. SGD with momentum is
            "sgd with momentum".
        neutral: hyper-parameters at which the global model equals FedAvg's bit by bit, or None.
    """

    sends: ClassVar[Mapping[str, Part]] = {
        "progress": Numbers(says="mean training loss, steps and seconds"),
        "scores": Scores(),
        "personal": ModelPart(opt_in=True),
    }
    has_global: ClassVar[bool] = True
    simulation_only: ClassVar[bool] = False
    optimizers: ClassVar[frozenset[str] | None] = None
    neutral: ClassVar[Mapping[str, Any] | None] = None

    all_sends: ClassVar[_Declaration] = _Declaration()

    def unused_sends(self) -> Collection[str]:
        """Return the names among `sends` that these hyper-parameters never send; mostly none."""
        return ()

    def hyperparameters(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def extend(self, module: nn.Module) -> None:  # noqa: B027  (most methods add nothing)
        """Add, in place, what the method trains beside the network's own layers.

        Called on every new network, with torch's generator as the network's own initial weights
        left it, so that these are the same with and without.
        """

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:  # noqa: B027
        """Raise a `ConfigError` if these clients are too few, or a part of the network is missing.

        Called before anything is trained, for every job of an experiment.
        """

    def setup(self, server: Server) -> None:
        """Run once, before the first round; may already exchange messages."""
        server.state["model"] = server.initial_model

    @abstractmethod
    def round(self, server: Server) -> None:
        """Run one outer round: as many exchanges as the method needs, then return."""

    def finish(self, server: Server) -> None:  # noqa: B027  (most methods do nothing here)
        """Run once, after the last round."""

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return what clients receive to form their personal model and to be evaluated."""
        return {"model": server.state["model"]}

    def shared_with(self, server: Server, client: str) -> Mapping[str, Any]:
        """Return what this client alone receives beside what `shared` gives to all."""
        return {}

    def personal_model(self, client: Client, request: Message) -> Tensors | None:
        """Return the model with which ``client`` predicts; None: it has none of its own.

        The request holds what `shared` and `shared_with` gave.
        """
        return None

    def deploy(self, server: Server) -> dict[str, Tensors]:
        """Return the server's own models for a client outside the federation, by name.

        The personal models of sites that hand them out come beside them; see `share_personal`.
        """
        return {"global": server.state["model"]} if self.has_global else {}

    @handler
    def share_personal(self, client: Client, request: Message) -> Message:
        """Send the best personal model to sites outside, if the policy lets "personal" out."""
        personal = client.best() if "personal" in self.all_sends() else None
        if personal is None or not client.may_send("personal"):
            return Message.of()
        return Message.of(personal=personal)

    @handler
    def evaluate(self, client: Client, request: Message) -> Message:
        """Score the current models on the validation cases and keep the best personal one."""
        scores = {}
        if self.has_global:
            scores["global"] = client.score(request["model"], "val", headline=True)
        personal = self.personal_model(client, request)
        if personal is not None:
            scores["personal"] = client.score(personal, "val", headline=True)
            client.keep_best(personal, scores["personal"])
        return Message.of(scores=scores)

    @handler
    def test(self, client: Client, request: Message) -> Message:
        """Score the server's best global and the site's best personal model on the test cases."""
        scores = {}
        if self.has_global:
            scores["global"] = client.score(request["model"], "test")
        personal = client.best()
        if personal is not None:
            scores["personal"] = client.score(personal, "test")
        return Message.of(scores=scores)
