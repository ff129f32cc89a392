"""Algorithms that each break one rule; the conformance suite must find which.

They build on FedAvg, published as https://arxiv.org/abs/1602.05629.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedprox import FedProx
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts, head_layer
from collegium.core.payloads import Count, PartSchema
from collegium.core.settings import settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


def shifted(model: Tensors, amount: float) -> Tensors:
    """Return the model with ``amount`` added to every number that is a quantity."""
    return model.map(lambda tensor: tensor + amount if tensor.is_floating_point() else tensor)


@settings
class TorchGlobal(FedAvg):
    """FedAvg with noise from torch's global generator, which depends on who drew before."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Add noise that nobody can repeat."""
        reply = super().train(client, request)
        return Message({**reply, "model": shifted(reply["model"], float(torch.rand(())))})


@settings
class PythonGlobal(FedAvg):
    """FedAvg with noise from Python's global generator, which depends on who drew before."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Add noise that nobody can repeat."""
        reply = super().train(client, request)
        return Message({**reply, "model": shifted(reply["model"], random.random())})


@settings
class NumpyGlobal(FedAvg):
    """FedAvg with noise from numpy's global generator, which depends on who drew before."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Add noise that nobody can repeat."""
        reply = super().train(client, request)
        noise = float(np.random.rand())  # noqa: NPY002  (the fault)
        return Message({**reply, "model": shifted(reply["model"], noise)})


@settings
class CountsOnItself(FedAvg):
    """FedAvg that counts its calls in an attribute and lets the count change the model."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Use what should be in client.state."""
        count = vars(self).get("count", 0) + 1
        object.__setattr__(self, "count", count)
        reply = super().train(client, request)
        return Message({**reply, "model": shifted(reply["model"], 1e-3 * count)})


@settings
class RemembersOnItself(FedAvg):
    """FedAvg that writes down on itself who answered, without any harm yet."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    def round(self, server: Server) -> None:
        """Use what should be in server.state."""
        super().round(server)
        object.__setattr__(self, "seen", True)


@settings
class Undeclared(FedAvg):
    """FedAvg whose clients also send something that the class does not declare."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Send one part too many."""
        return Message({**super().train(client, request), "age": 71})


@settings
class TalksFromHome(FedAvg):
    """FedAvg whose clients send the models away that they should keep at home."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train_at_home(self, client: Client, request: Message) -> Message:
        """Send the home model."""
        super().train_at_home(client, request)
        return Message.of(model=client.state["home"])


@settings
class AveragesAtHome(FedAvg):
    """FedAvg whose rounds at home are rounds like any other."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    def round_at_home(self, server: Server) -> None:
        """Change the global model."""
        self.round(server)


@settings
class DeclaresTooMuch(FedAvg):
    """FedAvg that declares a part which none of its clients ever sends."""

    sends: ClassVar[Mapping[str, PartSchema]] = {"ghost": Count()}


@settings
class OrderDependent(FedAvg):
    """FedAvg whose server moves half-way to each client in turn, so that the last weighs most."""

    neutral: ClassVar[Mapping[str, Any] | None] = None

    def round(self, server: Server) -> None:
        """Forget earlier clients geometrically."""
        for _, reply in server.ask(self.train, model=server.state["model"]):
            server.state["model"] = 0.5 * server.state["model"] + 0.5 * reply["model"]


@settings
class LearnsInEvaluation(FedAvg):
    """FedAvg whose clients count their evaluations in a state that evaluating must not touch."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def evaluate(self, client: Client, request: Message) -> Message:
        """Change client.state where it is not kept."""
        client.state["evaluations"] = client.state.get("evaluations", 0) + 1
        return super().evaluate(client, request)


@settings
class ServerLearnsInEvaluation(FedAvg):
    """FedAvg whose server changes its state when it says what clients receive to be evaluated."""

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Change server.state."""
        server.state["asked"] = server.state.get("asked", 0) + 1
        return super().shared(server)


@settings
class Forgetful(FedAvg):
    """FedAvg with momentum at the client, kept on the client object instead of in its state."""

    neutral: ClassVar[Mapping[str, Any] | None] = None

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Lose the last update where the site restarts."""
        reply = super().train(client, request)
        last = vars(client).get("last", 0.0 * reply["model"])
        model = reply["model"] + 0.5 * last
        vars(client)["last"] = reply["model"] - request["model"]
        return Message({**reply, "model": model})


@settings
class Accumulates(FedAvg):
    """FedAvg that counts deliveries in a file, so that a repeated request counts twice."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Let the count change the model."""
        path = client.root / "deliveries"  # type: ignore[attr-defined]
        count = len(path.read_text()) if path.exists() else 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * (count + 1))
        reply = super().train(client, request)
        return Message({**reply, "model": shifted(reply["model"], 1e-3 * count)})


@settings
class NotNeutral(FedAvg):
    """FedAvg that says it is FedAvg, but takes a step of only nine tenths."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    def round(self, server: Server) -> None:
        """Move less than FedAvg does."""
        start = server.state["model"]
        super().round(server)
        server.state["model"] = 0.1 * start + 0.9 * server.state["model"]


@settings
class Diverges(FedAvg):
    """FedAvg that keeps something infinite in its state, as a division by nothing gives."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    def round(self, server: Server) -> None:
        """Divide by nothing."""
        super().round(server)
        server.state["scale"] = float("inf") * server.state["model"]


@settings
class StandsStill(FedAvg):
    """FedAvg whose server forgets to use what the clients send, so that nothing is learnt."""

    neutral: ClassVar[Mapping[str, Any] | None] = None

    def round(self, server: Server) -> None:
        """Ask and forget."""
        server.ask(self.train, model=server.state["model"])


@settings
class Undescribed(FedAvg):
    """FedAvg with a hyper-parameter that no docstring describes."""

    strength: float = 1.0


@dataclass(frozen=True)
class NotWritable(FedAvg):
    """FedAvg with a hyper-parameter that JSON turns into something else.

    Attributes:
        steps: a tuple of numbers.
    """

    steps: tuple[int, ...] = field(default=(1, 2))


@settings
class NeedsEverybody(FedAvg):
    """FedAvg that stops, without saying why, when one client is missing."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    def round(self, server: Server) -> None:
        """Count the replies."""
        replies = server.ask(self.train, model=server.state["model"]).collect()
        server.state["model"] = replies.mean("model")
        if len(replies.clients) < len(server.clients):
            server.ask(self.missing)

    def missing(self, client: Client, request: Message) -> Message:
        """Not a handler."""
        return Message.of()


@settings
class Terse(FedAvg):
    """FedAvg."""


@settings
class HidesItsLayer(FedAvg):
    """FedAvg with a layer that changes predictions, although the class says that it does not."""

    neutral: ClassVar[Mapping[str, Any] | None] = None
    extension_predicts: ClassVar[bool] = False

    def extend(self, module: nn.Module) -> None:
        """Add a layer behind the output."""
        module.scale = nn.Linear(1, 1)
        module.register_forward_hook(lambda module, _, output: module.scale(output))


@dataclass(frozen=True)
class Gullible(FedAvg):
    """FedAvg with a hyper-parameter that may be anything.

    Attributes:
        strength: a number, or so it says.
    """

    strength: float = 1.0


@settings
class CallsItselfAnother(FedProx):
    """FedProx that says that it is FedAvg, whatever its mu."""

    def same_as(self, parts: ModelParts) -> str:
        """Return another method than it is."""
        return "fedavg"


@settings
class InheritsNeutral(FedAvg):
    """FedAvg with another training, which says by its base that it is FedAvg all the same."""

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train less."""
        model = 0.5 * request["model"] + 0.5 * client.fit(request["model"])
        return Message.of(model=model, num_examples=client.num_examples)


@settings
class Misspelt(FedAvg):
    """FedAvg for a task that does not exist, so that it would be refused everywhere."""

    tasks: ClassVar[frozenset[str] | None] = frozenset({"segmentaton"})


@settings
class ForNothing(FedAvg):
    """FedAvg that finds a fault with every network, so that it is of no use."""

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse."""
        raise ConfigError("it wants another network; choose one")


@settings
class WantsOneLayer(FedAvg):
    """FedAvg that takes the head for a single layer, which the default U-Net does not have."""

    neutral: ClassVar[Mapping[str, Any] | None] = None
    extension_predicts: ClassVar[bool] = False

    def extend(self, module: nn.Module) -> None:
        """Add a second head like the first."""
        head: Any = head_layer(module)
        module.second = nn.Linear(head.weight.shape[1], 2)


@settings
class OneModelEach(FedAvg):
    """FedAvg that keeps a dictionary where everybody reads the global model."""

    neutral: ClassVar[Mapping[str, Any] | None] = None

    def round(self, server: Server) -> None:
        """Keep a model for every client."""
        replies = server.ask(self.train, model=server.initial_model)
        server.state["model"] = {client: reply["model"] for client, reply in replies.items()}


@settings
class ManyNotModels(FedAvg):
    """FedAvg that keeps numbers where models by name are read."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    def setup(self, server: Server) -> None:
        """Keep a number for every client."""
        super().setup(server)
        server.state["models"] = dict.fromkeys(server.clients, 0.0)


@settings
class TakesHome(FedAvg):
    """FedAvg whose clients use the key of home models for something else."""

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Keep the received model."""
        client.state["home"] = request["model"]
        return super().train(client, request)
