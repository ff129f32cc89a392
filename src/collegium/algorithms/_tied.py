"""The common base of methods that tie the models that clients train for themselves."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from collegium.algorithms.local import Local
from collegium.core.algorithm import Client, Replies, Server
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


@settings
class TiedModels(Local):
    """Single-site training, but every client's parameters are pulled towards those of others.

    The server keeps the parameters w_i that each client sent last, at first the common initial
    ones, in ``server.state["parameters"]``. Running statistics never leave a client.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"parameters": ModelPart(only="trainable")}

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a single site. See `Algorithm.check_setup`."""
        if len(clients) < 2:
            raise ConfigError(
                f"{type(self).__name__} ties the models of several sites, and there is one site "
                f"only; add sites, or choose local"
            )

    def setup(self, server: Server) -> None:
        """Start every w_i from the common model."""
        super().setup(server)
        start = server.initial_model.select(server.parts.trainable)
        server.state["parameters"] = dict.fromkeys(server.clients, start)

    def exchange(self, server: Server, each: Mapping[str, Mapping[str, Any]]) -> Replies:
        """Ask every client to train, keep the w_i that come back, and return the replies.

        Args:
            server: its state receives the w_i.
            each: the parts that each client receives.
        """
        replies = server.ask(self.train, each=each).collect()
        sent = {client: reply["parameters"] for client, reply in replies}
        server.state["parameters"] = server.state["parameters"] | sent
        return replies

    def fit(self, client: Client, aim: Tensors, strength: float) -> Message:
        """Train the client's model on L(w) + strength/2 ||w - aim||^2, and return its parameters.

        Args:
            client: the site.
            aim: parameters towards which those of the same names are pulled.
            strength: of the pull; at 0 there is none.
        """

        def pulled(gradient: Tensors, w: Tensors) -> Tensors:
            near = w.select(aim)
            return gradient | (gradient.select(aim) + strength * (near - aim.select(near)))

        model = client.fit(client.state["model"], correct=pulled if strength else None)
        client.state["model"] = model
        return Message.of(parameters=model.select(client.parts.trainable))
