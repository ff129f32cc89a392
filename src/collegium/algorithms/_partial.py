"""The common base of methods that keep one part of the model at the client."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.settings import settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


@settings
class PartialSharing(FedAvg):
    """FedAvg over all but a private part, which stays at the client between rounds.

    A subclass names the part by its role in the network or the name of a submodule
    (`collegium.core.model_parts.ModelParts.named`) and declares what is sent
    without it. There is no global model: the server's copy of the private part stays as
    initialised.
    """

    has_global: ClassVar[bool] = False
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    neutral: ClassVar[Mapping[str, Any] | None] = None
    private: ClassVar[str]

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a network of which nothing would be shared. See `Algorithm.check_setup`."""
        if parts.names <= parts.named(self.private):
            raise ConfigError(
                f"{type(self).__name__} shares nothing of a network whose tensors are all "
                f"{self.private}; choose another network, or local or fedavg"
            )

    def same_as(self, parts: ModelParts) -> str | None:
        """Return "fedavg" if nothing of the network stays private. See `Algorithm.same_as`."""
        return None if parts.named(self.private) else "fedavg"

    def round(self, server: Server) -> None:
        """Average the shared part."""
        replies = server.ask(self.train, model=server.state["model"])
        server.state["model"] |= replies.mean("model", self.weight)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the shared part together with the client's own.

        Args:
            client: the site.
            request: ``model``, the shared part.
        """
        model = client.fit(self.personal_model(client, request))
        return self.split(client, model)

    def split(self, client: Client, model: Tensors) -> Message:
        """Keep the private part and return the message with the rest.

        Args:
            client: the site.
            model: the whole model.
        """
        names = client.parts.named(self.private)
        client.state["private"] = model.select(names)
        return Message.of(model=model.without(names), num_examples=client.num_examples)

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the shared part with the client's own. See `Algorithm.personal_model`."""
        model: Tensors = request["model"]
        own: Tensors = client.state.get("private", Tensors())
        return model | own
