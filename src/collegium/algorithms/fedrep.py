"""FedRep (Collins et al., 2021, https://arxiv.org/abs/2102.07078)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from collegium.algorithms._partial import PartialSharing
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import NonNegativeInt, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


@settings
class FedRep(PartialSharing):
    """A shared body under private heads: first the head trains, then the body (Algorithm 1).

    While one of them trains, the other is frozen, its running statistics included (released code
    lets the frozen body's statistics move). Defaults follow the released code: four passes for the
    head, then one for the body. With ``training.local_steps`` the steps are divided in the same
    proportion, so that the budget equals that of other methods. After the last round every client
    trains its head once more under the final body.

    Attributes:
        head_epochs: passes over the data that train the head.
        body_epochs: passes that train the body.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart(without="head")}
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    private: ClassVar[str] = "head"

    head_epochs: NonNegativeInt = 4
    body_epochs: PositiveInt = 1

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a network without a head, too. See `Algorithm.check_setup`."""
        super().check_setup(clients, parts)
        if not parts.head:
            raise ConfigError(
                "FedRep trains the head apart, and the network has none: name it in the network's "
                "roles, or choose fedavg"
            )

    def finish(self, server: Server) -> None:
        """Fit every head once more, to the final body."""
        server.ask(self.refit_head, model=server.state["model"])

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the head on the received body, then the body under the new head.

        Args:
            client: the site.
            request: ``model``, the shared body.
        """
        model = self._fit_head(client, self.personal_model(client, request))
        budget: dict[str, Any] = {"epochs": self.body_epochs}
        if client.local_steps is not None:
            budget = {"steps": client.local_steps - self._head_steps(client.local_steps)}
        model = client.fit(model, trainable=client.parts.trainable - client.parts.head, **budget)
        return self.split(client, model)

    @handler
    def refit_head(self, client: Client, request: Message) -> Message:
        """Train the head once more.

        Args:
            client: the site.
            request: ``model``, the final body.
        """
        self.split(client, self._fit_head(client, self.personal_model(client, request)))
        return Message.of()

    def _fit_head(self, client: Client, model: Tensors) -> Tensors:
        head = client.parts.trainable & client.parts.head
        budget: dict[str, Any] = {"epochs": self.head_epochs}
        if client.local_steps is not None:
            budget = {"steps": self._head_steps(client.local_steps)}
        return client.fit(model, trainable=head, stream="head", **budget)

    def _head_steps(self, steps: int) -> int:
        """Return the head's share of local steps; at least one is left to the body."""
        share = round(steps * self.head_epochs / (self.head_epochs + self.body_epochs))
        return min(share, steps - 1)
