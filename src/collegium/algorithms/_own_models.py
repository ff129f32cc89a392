"""The common base of methods in which every client trains a whole model of its own."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.settings import settings
from collegium.core.tensors import Tensors


@settings
class OwnModels(Algorithm):
    """Every client keeps a whole model of its own; all start from the common initial model.

    It is in ``client.state["model"]`` and predicts for the client. There is no global model.
    """

    has_global: ClassVar[bool] = False

    def setup(self, server: Server) -> None:
        """Send the initial model, once."""
        server.ask(self.start, model=server.initial_model)

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    @handler
    def start(self, client: Client, request: Message) -> Message:
        """Keep the initial model.

        Args:
            client: the site.
            request: ``model``, the common initial model.
        """
        client.state["model"] = request["model"]
        return Message.of()

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the client's own model. See `Algorithm.personal_model`."""
        model: Tensors = client.state["model"]
        return model
