"""Ditto (Li et al., 2021, https://arxiv.org/abs/2012.04221)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.message import Message
from collegium.core.settings import NonNegative, settings
from collegium.core.tensors import Tensors


@settings
class Ditto(FedAvg):
    """FedAvg beside personal models that are pulled towards the global one (Algorithm 1).

    A client's personal model v minimises L(v) + lam/2 ||v - w^t||^2.

    The pull is towards the model as received, not as trained by the client afterwards. The personal
    pass draws from random streams of its own, so that the global model is FedAvg's bit by bit. It
    doubles the local work: the same number of steps again.

    Attributes:
        lam: strength of the pull; the paper tries 0.05, 0.1, 1 and 2.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {}
    private_fits: ClassVar[int] = 2

    lam: NonNegative = 0.1

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the personal model towards the received one, and that as FedAvg does.

        Args:
            client: the site.
            request: ``model``, w^t.
        """
        received = request["model"]
        client.state["personal"] = client.fit(
            client.state.get("personal", received),
            correct=lambda gradient, now: gradient + self.lam * (now - received.select(now)),
            stream="personal",
        )
        return super().train(client, request)

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the client's v, or the received model before its first round.

        See `Algorithm.personal_model`.
        """
        model: Tensors = client.state.get("personal", request["model"])
        return model
