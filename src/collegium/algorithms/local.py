"""Single-site training: what every hospital reaches alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.tensors import Tensors


@dataclass(frozen=True)
class Local(Algorithm):
    """Every client trains on its own data only, with the same budget as in a federation.

    All start from the common initial model.

    Nothing but training progress and scores leaves a site.
    """

    has_global: ClassVar[bool] = False

    def setup(self, server: Server) -> None:
        """Send the initial model, once."""
        server.ask(self.start, model=server.initial_model)

    def round(self, server: Server) -> None:
        """Let every client go on training."""
        server.ask(self.train)

    @handler
    def start(self, client: Client, request: Message) -> Message:
        """Keep the initial model."""
        client.state["model"] = request["model"]
        return Message.of()

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the client's own model."""
        client.state["model"] = client.fit(client.state["model"])
        return Message.of()

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """The client's own model."""
        model: Tensors = client.state["model"]
        return model
