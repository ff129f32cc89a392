"""MOON (Li, He and Song, 2021, https://arxiv.org/abs/2103.16257)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.dataset import Batch
from collegium.core.message import Message
from collegium.core.settings import NonNegative, Positive, settings
from collegium.core.tensors import Tensors
from collegium.training.alignment import contrastive, pool

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork, Objective


@settings
class Moon(FedAvg):
    """FedAvg whose clients' features stay like the received model's: L + mu L_con (Eq. 4).

    L_con = -log(exp(s_g / tau) / (exp(s_g / tau) + exp(s_p / tau))) per example, with s_g and s_p
    the cosines of the features of the model in training with those of the model received and of the
    client's own model of its last round.

    Features are the tensor that enters the head: the paper adds a projection of two layers, which
    would change the network and is left out here. The two other models run in evaluation mode
    (released code runs them in training mode) and the last model is that of the last round (GRACE's
    code renews it in every epoch). In a client's first round its last model is the received one:
    the term is the constant log 2, without a gradient, and is not computed. A step costs two
    forward passes more than FedAvg's.

    Attributes:
        mu: weight of the contrastive loss; the paper tries 0.1, 1, 5 and 10. At 0 the method is
            FedAvg.
        temperature: tau.
        features: "pooled" compares means over space, "flat" whole feature maps.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {"mu": 0.0}

    mu: NonNegative = 1.0
    temperature: Positive = 0.5
    features: Literal["pooled", "flat"] = "pooled"

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model on L + mu L_con.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        received, previous = request["model"], client.state.get("previous")
        objective = self.objective(received, previous) if self.mu > 0 and previous else None
        model = client.fit(received, objective=objective)
        client.state["previous"] = model
        return Message.of(model=model, num_examples=client.num_examples)

    def objective(self, received: Tensors, previous: Tensors) -> Objective:
        """Return the objective of local training.

        Args:
            received: the model received.
            previous: the client's own model of its last round.
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
            output = network.forward(batch["image"])
            now, theirs, last = (
                pool(features) if self.features == "pooled" else features.flatten(1)
                for features in (
                    output.features,
                    network.reference(batch["image"], received).features,
                    network.reference(batch["image"], previous).features,
                )
            )
            term = contrastive(now, theirs, last, temperature=self.temperature)
            return network.loss(output, batch), self.mu * term

        return losses
