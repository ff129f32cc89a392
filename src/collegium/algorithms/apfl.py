"""APFL (Deng, Kamani and Mahdavi, 2020, https://arxiv.org/abs/2003.13461)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collegium.algorithms._private_addition import PrivateAddition
from collegium.core.algorithm import Client, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.settings import Fraction, NonNegative, settings
from collegium.core.tensors import Tensors
from collegium.models.mixture import WEIGHT, attach_second_network, second_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from collegium.core.dataset import Batch
    from collegium.training.objectives import LiveNetwork, Objective


@settings
class APFL(PrivateAddition):
    """FedAvg beside a network of every client's own, whose outputs are mixed with the global one's.

    With f_w the global model and f_v the client's own, the personal prediction is

        alpha f_v(x) + (1 - alpha) f_w(x).

    In every step w descends L(f_w), as in FedAvg, and v the loss of the mixture with f_w held
    fixed; then alpha moves against that loss' derivative by alpha, and is kept in [0, 1]. A client
    predicts with its v and alpha and the global model as it received it.

    Deviations. The paper mixes weights (alpha v + (1 - alpha) w); as the authors' later code and
    others do, outputs are mixed, so that normalisation statistics belong to the network that made
    them. The paper takes the derivative by alpha in every step, as here; released code takes it in
    the first step of a round alone and adds 0.02 alpha, which is in no paper. One optimiser holds
    both networks, which for SGD and Adam without ``clip_norm`` is the same as one each.

    Attributes:
        alpha: the weight of a client's own network to begin with.
        alpha_lr: the step of alpha; at 0 it stays as it is.
    """

    alpha: Fraction = 0.5
    alpha_lr: NonNegative = 0.01

    def extend(self, module: nn.Module) -> None:
        """Add the client's own network, as a copy."""
        attach_second_network(module)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model, and the client's own network within the mixture.

        Args:
            client: the site.
            request: ``model``, w.
        """
        received: Tensors = request["model"]
        alpha = torch.tensor(self.alpha, dtype=next(iter(received.values())).dtype)
        own = client.state.get("own", second_of(received) | Tensors({WEIGHT: alpha}))
        weight = own[WEIGHT].clone()
        trained = client.fit(received | own, objective=self.objective(weight))
        return self.split(client, trained | Tensors({WEIGHT: weight}))

    def objective(self, weight: Tensor) -> Objective:
        """Return the objective of local training, which moves alpha in place.

        Args:
            weight: alpha, a scalar.
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
            first = network.forward(batch["image"])
            second = network.call("second.network", batch["image"])
            alpha = weight.clone().requires_grad_()
            mixed = alpha * second + (1 - alpha) * first.prediction.detach()
            personal = network.task.loss(mixed, batch)
            (slope,) = torch.autograd.grad(personal, alpha, retain_graph=True)
            weight.copy_((weight - self.alpha_lr * slope).clamp(0, 1))
            return network.loss(first, batch), personal

        return losses
