"""FedAvg's clients after local training, the row "FedAvg P" of GRACE's tables."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.message import Message
from collegium.core.settings import settings
from collegium.core.tensors import Tensors


@settings
class FedAvgP(FedAvg):
    """FedAvg whose clients predict with the model that they sent last.

    The global model is FedAvg's (McMahan et al., 2017, https://arxiv.org/abs/1602.05629) bit by
    bit. A client's personal model is what it returned in the last round in which it trained, before
    the server averaged; before its first it is the model received. ``finetune`` trains the averaged
    model once more instead.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {}

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model, and keep it.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        reply = super().train(client, request)
        client.state["personal"] = reply["model"]
        return reply

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the client's last trained model. See `Algorithm.personal_model`."""
        model: Tensors = client.state.get("personal", request["model"])
        return model
