"""Single-site training, the baseline of a hospital alone."""

from collegium.algorithms._own_models import OwnModels
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.settings import settings


@settings
class Local(OwnModels):
    """Every client trains on its own data only, with the same budget as in a federation.

    All start from the common initial model.

    Nothing but training progress and scores leaves a site.
    """

    def round(self, server: Server) -> None:
        """Continue training at every client."""
        server.ask(self.train)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the client's own model.

        Args:
            client: the site.
            request: nothing.
        """
        client.state["model"] = client.fit(client.state["model"])
        return Message.of()
