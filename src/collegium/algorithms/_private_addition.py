"""The common base of methods that add to the network what never leaves a client."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Server
from collegium.core.message import Message
from collegium.core.payloads import Count, ModelPart, PartSchema
from collegium.core.settings import settings
from collegium.core.tensors import Tensors


@settings
class PrivateAddition(FedAvg):
    """FedAvg over the network as built; what `extend` adds stays at the client between rounds.

    A subclass adds it so that it takes no part in the predictions of the global model, whose own
    addition stays as initialised, and trains it.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "model": ModelPart(without="added"),
        "num_examples": Count(),
    }
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    neutral: ClassVar[Mapping[str, Any] | None] = None

    def round(self, server: Server) -> None:
        """Average the network as built."""
        model = server.state["model"]
        replies = server.ask(self.train, model=model.without(server.parts.added))
        server.state["model"] = model | replies.mean("model", self.weight)

    def split(self, client: Client, model: Tensors) -> Message:
        """Keep the addition and return the message with the rest.

        Args:
            client: the site.
            model: the whole model.
        """
        client.state["own"] = model.select(client.parts.added)
        return Message.of(model=model.without(client.parts.added), num_examples=client.num_examples)

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the global model with the client's own addition.

        See `Algorithm.personal_model`.
        """
        model: Tensors = request["model"]
        own: Tensors = client.state.get("own", Tensors())
        return model | own
