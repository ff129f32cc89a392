"""An algorithm: hyper-parameters, a server half and a client half in one frozen dataclass.

The server half is ordinary code that asks: ``replies = server.ask(self.train, model=...)``, as
often as it likes. It may read and write ``server.state``, ask, and nothing else, so that a round
can be run again from the stored state. The client half consists of the methods marked `handler`:
pure functions of the request, of ``client.state`` and of random generators named by their purpose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from collegium.core.dataset import Batch, Dataset, SampleTransform, unchanged
from collegium.core.lazy import nn, torch
from collegium.core.message import Message
from collegium.core.model_parts import (
    MemoryFormat,
    ModelParts,
    fix_roles,
    freeze,
    set_memory_format,
)
from collegium.core.payloads import GLOBAL, PERSONAL, ModelPart, Numbers, PartSchema, Scores
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ConfigError, ProtocolError

if TYPE_CHECKING:  # the local loop stands above the core
    from torch import Tensor

    from collegium.training.objectives import Objective, Output

State = dict[str, Any]
"""Tensors, plain values, and lists or dictionaries of these: all that `pack` can write.

See `collegium.core.message.pack`.
"""

TASKS = ("segmentation", "classification", "table")
"""The tasks that a method may name: images with masks, images with classes, rows with classes."""

Handler = TypeVar("Handler", bound=Callable[..., Message])
Seen = TypeVar("Seen")


HOME = "home"
"""Where the server's state lists the clients that hold a home model, and a client's holds it."""


def handler(method: Handler) -> Handler:
    """Mark a method as one that the server may ask a client to run."""
    method.__collegium_handler__ = True  # type: ignore[attr-defined]
    return method


def scoring(method: Handler) -> Handler:
    """Mark a handler as one whose reply always holds scores."""
    method.__collegium_needs__ = ("scores",)  # type: ignore[attr-defined]
    return handler(method)


class Replies:
    """The replies to one `Server.ask`, in sorted order of the clients.

    They arrive while they are read: `mean` needs the memory of one sum and a handful of models,
    whatever the number of clients, and drops each reply after use. An algorithm that needs all
    replies at once calls `values`, `items` or `collect`, which keep them.

    Args:
        source: pairs of client and reply, as they arrive.
        factors: by client, a factor on its weight in a `mean`; 1 for a client that is missing.
    """

    def __init__(
        self, source: Iterator[tuple[str, Message]], factors: Mapping[str, float] | None = None
    ) -> None:
        self._source = source
        self._factors = factors or {}
        self._collected: dict[str, Message] | None = None
        self._spent = False
        self.clients: list[str] = []
        """The clients whose reply was read so far."""
        self.averaged = False
        """Whether `mean` or `weights` was called."""

    def __iter__(self) -> Iterator[tuple[str, Message]]:
        if self._collected is not None:
            yield from self._collected.items()
            return
        if self._spent:
            raise ProtocolError(
                "these replies were dropped as they arrived; call .collect() before their first "
                "use to use them twice"
            )
        self._spent = True
        for client, message in self._source:
            self.clients.append(client)
            yield client, message

    def collect(self) -> Replies:
        """Wait for all replies, keep them, and return this object."""
        if self._collected is None:
            self._collected = dict(self)
        return self

    def drain(self) -> None:
        """Wait for all replies even if the algorithm has not read them."""
        if not self._spent:
            self.collect()

    def discard(self) -> None:
        """Wait for the replies that have not been read, and drop them."""
        with suppress(ProtocolError):
            for _ in self._source:
                pass

    def items(self) -> list[tuple[str, Message]]:
        """Return all pairs of client and reply."""
        return list(self.collect())

    def values(self) -> list[Message]:
        """Return all replies."""
        return [message for _, message in self.collect()]

    def weights(self, weight: str | None = "num_examples") -> dict[str, float]:
        """Return by client the weight that it has in a `mean`; all replies are kept.

        Args:
            weight: see `mean`.
        """
        self.averaged = True
        return {client: self._weight(client, reply, weight) for client, reply in self.collect()}

    def _weight(self, client: str, reply: Message, weight: str | None) -> float:
        own = reply[weight] if weight else 1.0
        return float(own * self._factors.get(client, 1.0))

    def mean(self, key: str, weight: str | None = "num_examples") -> Tensors:
        """Return the mean of one part over the clients, summed in sorted order in float64.

        Args:
            key: the part to average.
            weight: the part that holds each client's weight; None: all weigh the same.

        Raises:
            ProtocolError: no reply arrived, the names differ between clients, or all weights are
                zero.
        """
        self.averaged = True
        running, problem = Mean(), None
        for client, message in self:
            source = f"client {client!r}, part {key!r}"
            try:
                running.add(message[key], self._weight(client, message, weight), source=source)
            except ProtocolError as error:  # which client differs is known once all have answered
                problem = problem or error
        if problem is not None:
            raise problem
        return running.result()

    def means(
        self, keys: Collection[str], weight: str | None = "num_examples"
    ) -> dict[str, Tensors]:
        """Return the means of several parts over the same clients; all replies are kept.

        Args:
            keys: the parts to average.
            weight: see `mean`.

        Raises:
            ProtocolError: see `mean`.
        """
        self.collect()
        return {key: self.mean(key, weight) for key in keys}


class Server(Protocol):
    """The server as the server half of an algorithm sees it.

    Attributes:
        state: what is stored after every round, and nothing else is.
        round: the number of this round, from 1; 0 during the set-up.
        rounds: how many rounds the run has, those at home included.
        clients: the clients' names, sorted.
        parts: the roles of the model's tensors.
    """

    state: State
    round: int
    rounds: int
    clients: list[str]
    parts: ModelParts

    def rng(self, purpose: str) -> torch.Generator:
        """Return the generator for ``purpose``; a purpose may be used once in a round or set-up.

        The same run draws the same numbers when a round is run again, and another seed others.

        Args:
            purpose: a name.
        """

    def record(self, name: str, value: float) -> None:
        """Record a number of this round, which the results hold as a row of the server.

        Nothing reads it during the run. Of a name that is recorded twice in a round the last number
        counts.

        Args:
            name: what it is, such as "consistency/after".
            value: the number.
        """

    @property
    def public(self) -> LocalWork:
        """The work of the server with public data; exists where `Algorithm.needs_public` is set.

        Its generators, its examples and the rounds of its learning rate are its own.
        """

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
            to: the clients asked; by default all, or those of ``each``.
            each: further parts for single clients.
            **items: the parts that all clients asked receive.
        """


class LocalWork(Protocol):
    """Training and examining models on the data of one place: a site, or public data at the server.

    Attributes:
        round: the number of this round, from 1; 0 during the set-up.
        rounds: how many rounds the run has, those at home included.
        examples: the training examples.
    """

    round: int
    rounds: int
    examples: Dataset

    @property
    def parts(self) -> ModelParts:
        """The roles of the model's tensors."""

    @property
    def num_examples(self) -> int:
        """Number of training examples."""

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps that one `fit` takes."""

    @property
    def lr(self) -> float:
        """Learning rate of this round."""

    @property
    def local_steps(self) -> int | None:
        """Optimiser steps per round; None if the recipe counts in epochs."""

    def rng(self, purpose: str) -> torch.Generator:
        """Return the generator for ``purpose``; it may be used once in a handler, or in a round."""

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
        recipe: Mapping[str, Any] | None = None,
        stream: str = "fit",
    ) -> Tensors:
        """Train ``model`` on the data; return it as it is if nothing is to be trained.

        See `collegium.training.loop.LocalTraining.fit`. By default ``data`` are the training
        examples. ``recipe`` holds settings of `collegium.training.loop.TrainingConfig` that differ
        in this call, and ``stream`` names the random generators, and the optimiser's moments if
        they are kept.
        """

    def collect(
        self,
        model: Tensors,
        look: Callable[[Batch, Output], Seen],
        *,
        data: Dataset | None = None,
        whole: bool = False,
        stream: str = "collect",
    ) -> list[Seen]:
        """Return what a function makes of every batch of one pass over the data.

        Args:
            model: a whole model, in evaluation mode.
            look: receives a batch and the network's prediction and features on it, without
                gradients; see `collegium.training.objectives.Output`.
            data: the examples; by default those of training.
            whole: whether batches are windows of whole cases in their order, as they are predicted,
                without augmentation: "image", and "mask", where pixels count.
            stream: the name of the random generators of order and crops.
        """

    def loss(self, model: Tensors) -> float:
        """Return the mean loss of ``model`` on the training data, in evaluation mode."""

    def fisher(
        self,
        model: Tensors,
        *,
        views: Sequence[SampleTransform] = (unchanged,),
        limit: int | None = None,
        stream: str = "fisher",
    ) -> list[Tensors]:
        """Return the diagonal Fisher information of ``model`` on the training data.

        See `collegium.training.fisher.diagonal_fisher`.
        """


class Client(LocalWork, Protocol):
    """The client as the client half of an algorithm sees it.

    Attributes:
        id: the client's name.
        state: what is stored after every exchange of training, and never leaves.
    """

    id: str
    state: State

    @property
    def initial_model(self) -> Tensors:
        """The common initial model, with what the method adds at this site as initialised."""

    @property
    def validation_examples(self) -> Dataset:
        """The site's validation examples, for methods that say what they look at them for."""

    @property
    def pool(self) -> Dataset:
        """The training data of all sites together; exists in a simulation only."""

    def may_send(self, part: str) -> bool:
        """Return whether the site's policy lets this part of a message out."""

    def score(self, model: Tensors, split: str, *, headline: bool = False) -> list[dict[str, Any]]:
        """Return the scores of ``model`` on every case of a split, under pseudonyms.

        Args:
            model: a whole model.
            split: "train", "val" or "test".
            headline: only the metric that selects models.
        """

    def validate(self, model: Tensors) -> float | None:
        """Return the mean score of ``model`` on the validation cases; None if it is undefined.

        The metric is the one that selects models, of which more is better.

        Args:
            model: a whole model.
        """

    def keep(self, personal: Tensors | None, chosen: int | None) -> None:
        """Keep a personal model at the site, and of those kept before only the chosen one.

        Args:
            personal: a whole personal model, of this round; None if there is none.
            chosen: the round chosen before; None in the first that is evaluated.
        """

    def kept(self) -> Tensors | None:
        """Return the newest personal model that is kept; None without one."""


@dataclass(frozen=True)
class NetworkBuilder:
    """Builds the network that an algorithm trains; every path that needs one calls it.

    Attributes:
        network: builds the network as configured.
        algorithm: extends it; see `Algorithm.extend`.
        memory_format: the order of the weights in memory; see `set_memory_format`.
        freeze: the parts of the configured network that are not trained; see
            `collegium.core.model_parts.freeze`. Copies that an algorithm adds have them too.
    """

    network: Callable[[], nn.Module]
    algorithm: Algorithm
    memory_format: MemoryFormat = "auto"
    freeze: Sequence[str] = ()

    def __call__(self) -> nn.Module:
        """Return a new network, whose roles are those that it has before it is extended."""
        from collegium.core.quick_layers import use_quick_layers

        module = self.network()
        fix_roles(module)
        freeze(module, self.freeze)
        self.algorithm.extend(module)
        set_memory_format(module, self.memory_format)
        use_quick_layers(module)
        return module


def check_needs(algorithm: Algorithm, clients: Sequence[str], parts: ModelParts) -> None:
    """Check that the clients suffice, and that the network has every part that is needed or sent.

    Args:
        algorithm: the algorithm.
        clients: the clients' names.
        parts: the roles of the network's tensors.

    Raises:
        ConfigError: they do not.
    """
    for name, part in algorithm.all_sends().items():
        if isinstance(part, ModelPart):
            try:
                part.names(parts)
            except ConfigError as error:
                raise ConfigError(f"the part {name!r} cannot be sent: {error}") from error
    algorithm.check_setup(clients, parts)


def private_fits_of(kind: type[Algorithm]) -> int:
    """Return `Algorithm.private_fits` as a class itself declares it; otherwise 0.

    Args:
        kind: the class; one derived from a class that declares it may send more.
    """
    return int(vars(kind).get("private_fits", 0))


class _Declaration:
    """`Algorithm.all_sends()`: the parts that a class and its bases declare; the class overrides.

    Called on an instance, it leaves out the parts that the hyper-parameters never send.
    """

    def __get__(
        self, algorithm: Algorithm | None, kind: type[Algorithm]
    ) -> Callable[[], dict[str, PartSchema]]:
        def all_sends() -> dict[str, PartSchema]:
            declared: dict[str, PartSchema] = {}
            for base in reversed(kind.__mro__):
                declared |= vars(base).get("sends", {})
            unused = {*algorithm.unused_sends()} if algorithm is not None else set()
            return {name: part for name, part in declared.items() if name not in unused}

        return all_sends


_SERVER_HALF = ("setup", "round", "finish")
"""The methods that run at the server."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """The base of all algorithms; under `@settings` a subclass's fields are the hyper-parameters.

    Attributes:
        sends: schemas of the parts that leave a client; a subclass adds to or replaces those of its
            bases.
        all_sends: returns the schemas of a class and its bases; of an instance, without the parts
            that its hyper-parameters never send.
        has_global: whether there is one global model that predicts for all sites.
        simulation_only: whether the method needs the sites' data in one place.
        only_averaged: the parts of its clients' replies in training that the server reads by
            `Replies.mean` or `Replies.means` alone, the weight included, so that a robust or a
            secure mean can take its place; None: those of the base. See `averaged_parts`.
        compares_replies: whether that mean itself needs single replies, as a robust mean does.
        ranks_coordinates: whether it ranks the sites' values of each coordinate, as a median does,
            so that what most sites leave out is lost.
        needs_public: which public data the server works with, see `Server.public`: "images" (or
            rows of a table), or such with "labels"; an experiment without them
            (``federation.public``) is refused. None: it needs none.
        optimizers: the optimisers for which the method is correct; None: any. SGD with momentum is
            "sgd with momentum".
        tasks: the tasks among `TASKS` for which the method is made; None: all. An experiment of
            another task is refused.
        neutral: hyper-parameters at which the global model equals FedAvg's bit by bit, or None. A
            class that changes the training of its base declares its own.
        extension_predicts: whether what `extend` adds takes part in predictions; otherwise an
            exported model leaves it out.
        private_fits: how many models a client trains in a round by `LocalWork.fit`, if nothing that
            it sends depends on its training cases in another way, so that the noise of
            ``training.privacy`` covers it all; 0, the default, if something does. A subclass does
            not inherit it, see `private_fits_of`, but ``NAME+WRAPPER`` has it if the wrapper works
            at the server alone. What is trained beyond the rounds is `final_epochs`.
        commit_on_acknowledgement: whether a client's state counts only once the server has used
            the reply that it came with, and the state before it is taken up otherwise: for methods
            whose server adds up what its clients hold. Otherwise a client keeps what it learnt even
            if its reply is lost.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "progress": Numbers(
            description="mean training loss and number of steps; of private training epsilon",
            names=("loss", "steps", "epsilon"),
        ),
        "scores": Scores(),
        "personal": ModelPart(opt_in=True),
    }
    has_global: ClassVar[bool] = True
    simulation_only: ClassVar[bool] = False
    only_averaged: ClassVar[frozenset[str] | None] = frozenset()
    needs_public: ClassVar[Literal["images", "labels"] | None] = None
    compares_replies: ClassVar[bool] = False
    ranks_coordinates: ClassVar[bool] = False
    optimizers: ClassVar[frozenset[str] | None] = None
    tasks: ClassVar[frozenset[str] | None] = None
    neutral: ClassVar[Mapping[str, Any] | None] = None
    extension_predicts: ClassVar[bool] = True
    private_fits: ClassVar[int] = 0
    commit_on_acknowledgement: ClassVar[bool] = False

    all_sends: ClassVar[_Declaration] = _Declaration()

    def __post_init__(self) -> None:  # noqa: B027  (most methods have no such rules)
        """Check rules about several hyper-parameters; one that has some calls ``super()`` first.

        A mix-in stands before the method that it is given to, and would hide the method's rules.

        Raises:
            ConfigError: a rule is broken.
        """

    @property
    def has_personal(self) -> bool:
        """Whether sites have models of their own; after rounds at home they have in any case."""
        return type(self).personal_model is not Algorithm.personal_model

    @property
    def fewest_clients(self) -> int:
        """The fewest clients that a round of training needs for the method to do what it says."""
        return 1

    @property
    def final_epochs(self) -> int:
        """The epochs that `finish` trains a model at a client in one `LocalWork.fit`; 0: none.

        With ``training.local_steps`` it is that many times the local steps.
        """
        return 0

    def unused_sends(self) -> Collection[str]:
        """Return the names among `sends` that these hyper-parameters never send."""
        return ()

    @classmethod
    def averaged_parts(cls) -> frozenset[str]:
        """Return the parts of training replies that the server reads by `Replies.mean` alone.

        They are those of `only_averaged`, unless a class below the one that declares it changes
        ``setup``, ``round`` or ``finish`` and declares none: it may read single replies.
        """
        for kind in cls.__mro__:
            own = vars(kind)
            declared: frozenset[str] | None = own.get("only_averaged")
            if declared is not None:
                return declared
            if "only_averaged" not in own and not own.keys().isdisjoint(_SERVER_HALF):
                break
        return frozenset()

    def hyperparameters(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def extends(self) -> bool:
        """Whether the method adds layers to the network, see `extend`."""
        return type(self).extend is not Algorithm.extend

    def extend(self, module: nn.Module) -> None:  # noqa: B027  (most methods add nothing)
        """Add layers to a network, in place, beside its own.

        Called on every new network, with torch's generator as the network's own initial weights
        left it, so that these are the same with and without the addition. The roles of the network
        (`ModelParts`) are fixed before; the added layers have the role ``added``.
        """

    def at_site(self, site: str) -> Algorithm:
        """Return the method as it is at one site: what extends the network may differ there.

        A model without what is added at a site, such as the server's, can be scored there too.

        Args:
            site: the site's name.
        """
        return self

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:  # noqa: B027
        """Check that the clients suffice and that the network has the parts that are needed.

        Called before anything is trained, for every job of an experiment.

        Args:
            clients: the clients' names.
            parts: the roles of the network's tensors.

        Raises:
            ConfigError: they do not.
        """

    def same_as(self, parts: ModelParts) -> str | None:
        """Return the name of the method that this one is on a network; None if it is itself.

        It is that method with the values of the hyper-parameters that both have. With its neutral
        hyper-parameters a method is FedAvg.

        Args:
            parts: the roles of the network's tensors.
        """
        values, neutral = self.hyperparameters(), self.neutral or {}
        both = self.has_global and self.has_personal
        is_neutral = all(values[name] == value for name, value in neutral.items())
        return "fedavg" if neutral and is_neutral and not both else None

    def setup(self, server: Server) -> None:
        """Run once, before the first round; may already exchange messages."""
        server.state["model"] = server.initial_model

    @abstractmethod
    def round(self, server: Server) -> None:
        """Run one outer round: as many exchanges as the method needs, then return."""

    def finish(self, server: Server) -> None:  # noqa: B027  (most methods do nothing here)
        """Run once, after the last round; with rounds at home, at the beginning of the first."""

    def round_at_home(self, server: Server) -> None:
        """Run one of the last rounds at home, in which clients train apart and keep their models.

        A client receives what forms its personal model once, and nothing after that.
        """
        if HOME not in server.state:
            self.finish(server)
        holders = server.state.get(HOME, [])
        each = {
            client: {}
            if client in holders
            else {**self.shared(server), **self.shared_with(server, client)}
            for client in server.clients
        }
        replies = server.ask(self.train_at_home, each=each).collect()
        server.state[HOME] = sorted({*holders, *replies.clients})

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return the parts that all clients receive to form and evaluate their personal model."""
        return {"model": server.state["model"]}

    def shared_with(self, server: Server, client: str) -> Mapping[str, Any]:
        """Return the parts that one client alone receives beside those of `shared`.

        Args:
            server: the server.
            client: the client's name.
        """
        return {}

    def personal_model(self, client: Client, request: Message) -> Tensors | None:
        """Return the model with which ``client`` predicts; None if it has none of its own.

        Args:
            client: the client.
            request: the parts that `shared` and `shared_with` return.
        """
        return None

    def own_model(self, client: Client, request: Message) -> Tensors | None:
        """Return the client's home model, or before its first round at home its personal one.

        Args:
            client: the client.
            request: the parts that `shared` and `shared_with` return.
        """
        home: Tensors | None = client.state.get(HOME)
        return self.personal_model(client, request) if home is None else home

    def deploy(self, server: Server) -> dict[str, Tensors]:
        """Return the server's own models for a client outside the federation, by name.

        The personal models that sites share are added to them; see `share_personal`.
        """
        return {"global": server.state["model"]} if self.has_global else {}

    @handler
    def train_at_home(self, client: Client, request: Message) -> Message:
        """Train the client's own model, at first its personal or the global one, and keep it.

        Args:
            client: the client.
            request: empty, or the parts that `shared` and `shared_with` return if it has no home
                model yet.
        """
        own = self.own_model(client, request)
        client.state[HOME] = client.fit(request["model"] if own is None else own)
        return Message.of()

    @handler
    def share_personal(self, client: Client, request: Message) -> Message:
        """Send the selected personal model to sites outside, if the policy lets "personal" out.

        Args:
            client: the client.
            request: empty.
        """
        personal = client.kept()
        if personal is None or not client.may_send("personal"):
            return Message.of()
        return Message.of(personal=personal)

    @scoring
    def evaluate(self, client: Client, request: Message) -> Message:
        """Score the current models on the validation cases and keep them beside the chosen ones.

        Args:
            client: the client.
            request: the parts that `shared` and `shared_with` return; and ``chosen``, the round of
                the personal model chosen before this one, or None.
        """
        scores = {}
        if self.has_global:
            scores[GLOBAL] = client.score(request["model"], "val", headline=True)
        personal = self.own_model(client, request)
        client.keep(personal, request["chosen"])
        if personal is not None:
            scores[PERSONAL] = client.score(personal, "val", headline=True)
        return Message.of(scores=scores)

    @scoring
    def test(self, client: Client, request: Message) -> Message:
        """Score the selected models on the test cases.

        Args:
            client: the client.
            request: ``chosen``, the round of the personal model; ``models``, global models by
                number; and ``kinds``, which of them is which kind of model.
        """
        client.keep(None, request["chosen"])
        scored = {n: client.score(model, "test") for n, model in request["models"].items()}
        scores = {kind: scored[number] for kind, number in request["kinds"].items()}
        personal = client.kept()
        if personal is not None:
            scores[PERSONAL] = client.score(personal, "test")
        return Message.of(scores=scores)
