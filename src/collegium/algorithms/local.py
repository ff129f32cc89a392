"""Single-site training, the baseline of a hospital alone."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.message import Message
from collegium.core.settings import settings
from collegium.core.tensors import Tensors


@settings
class Local(Algorithm):
    """Every client trains on its own data only, with the same budget as in a federation.

    All start from the common initial model.

    Nothing but training progress and scores leaves a site.
    """

    has_global: ClassVar[bool] = False
    private_fits: ClassVar[int] = 1

    def setup(self, server: Server) -> None:
        """Send the initial model, once."""
        server.ask(self.start, model=server.initial_model)

    def round(self, server: Server) -> None:
        """Continue training at every client."""
        server.ask(self.train)

    @handler
    def start(self, client: Client, request: Message) -> Message:
        """Keep the initial model.

        Args:
            client: the site.
            request: ``model``, the common initial model.
        """
        client.state["model"] = request["model"]
        return Message.of()

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the client's own model.

        Args:
            client: the site.
            request: nothing.
        """
        client.state["model"] = client.fit(client.state["model"])
        return Message.of()

    def shared(self, server: Server) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the client's own model. See `Algorithm.personal_model`."""
        model: Tensors = client.state["model"]
        return model
