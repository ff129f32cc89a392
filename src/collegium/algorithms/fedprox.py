"""FedProx (Li et al., 2020, https://arxiv.org/abs/1812.06127)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.message import Message
from collegium.core.settings import NonNegative, settings


@settings
class FedProx(FedAvg):
    """FedAvg whose clients stay close to the received model: L + mu/2 ||w - w^t||^2 (Eq. 2).

    The proximal gradient mu (w - w^t) is added to the gradient before the optimiser sees it, over
    parameters only. With Adam this differs from adding the term to the loss by nothing, and from
    released code that shifts the weights after the step.

    Attributes:
        mu: strength; the paper tries 0.001, 0.01, 0.1 and 1. At 0 the method is FedAvg.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {"mu": 0.0}
    private_fits: ClassVar[int] = 1

    mu: NonNegative = 0.01

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model under the proximal term.

        Args:
            client: the site.
            request: ``model``, w^t.
        """
        received = request["model"]
        model = client.fit(
            received,
            correct=lambda gradient, now: gradient + self.mu * (now - received.select(now)),
        )
        return Message.of(model=model, num_examples=client.num_examples)
