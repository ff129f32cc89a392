"""An algorithm that keeps reserved keys in one of the other forms that they may have.

Every site trains alone, and the server holds the models; see https://arxiv.org/abs/1602.05629.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import settings
from collegium.core.tensors import Tensors


@settings
class ModelsByClient(Algorithm):
    """Single-site training whose server keeps the models, by client."""

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart()}
    has_global: ClassVar[bool] = False

    def setup(self, server: Server) -> None:
        """Begin with the common model."""
        server.state["models"] = dict.fromkeys(server.clients, server.initial_model)

    def round(self, server: Server) -> None:
        """Train every model at its client."""
        each = {client: self.shared_with(server, client) for client in server.clients}
        for client, reply in server.ask(self.train, each=each):
            server.state["models"][client] = reply["model"]

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model."""
        return Message.of(model=client.fit(request["own"]))

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def shared_with(self, server: Server, client: str) -> Mapping[str, Any]:
        """Return the client's model."""
        return {"own": server.state["models"][client]}

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the client's model."""
        model: Tensors = request["own"]
        return model
