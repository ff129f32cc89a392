"""Per-FedAvg (Fallah, Mokhtari and Ozdaglar, 2020, https://arxiv.org/abs/2002.07948)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.dataset import Batch
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.randomness import restoring
from collegium.core.settings import Positive, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.training.meta import gradient_at, look_ahead, split_batch

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork


@settings
class PerFedAvg(FedAvg):
    """Train a model that suits every client after one gradient step of its own (Algorithm 1).

    With w' = w - inner_lr grad L(w; D) the gradient of a local step is, for "first_order",

        g = grad L(w'; D')

    and for "hessian_free", whose last term stands for inner_lr times the Hessian at w times g,

        g - inner_lr [grad L(w + delta g; D'') - grad L(w - delta g; D'')] / (2 delta).

    The personal model is the global one after ``adaptation_steps`` steps of inner_lr on the
    client's training data, each on one batch; it is formed where it is evaluated, and the global
    model itself is no good one for any client.

    D, D' and D'' are the halves or thirds of one batch of the recipe, while the paper draws a batch
    for each: an epoch has as many steps as FedAvg's, on smaller batches. A batch too small for two
    examples in each part serves whole as all of them. The gradient goes to the recipe's optimiser,
    with plain SGD the paper's step, beta being the learning rate (GRACE's code for Adam takes a
    step of Adam and one of SGD). Running statistics learn once for each batch, on D at w; released
    code updates them in both passes. Both gradients of the last term see the same dropout. The
    formula of the exact Hessian is left out. inner_lr and delta have the values of released code.

    Attributes:
        weighting: "uniform" (the paper) or "examples", for the mean.
        variant: "first_order" or "hessian_free", which takes twice as many passes.
        inner_lr: step of the look ahead and of the adaptation, alpha in the paper.
        delta: step of the difference that stands for the Hessian.
        adaptation_steps: steps from the global to the personal model; 1 in the paper.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = None

    weighting: Literal["examples", "uniform"] = "uniform"
    variant: Literal["first_order", "hessian_free"] = "first_order"
    inner_lr: Positive = 0.01
    delta: Positive = 1e-3
    adaptation_steps: PositiveInt = 1

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train w on the loss after a step.

        Args:
            client: the site.
            request: ``model``, w.
        """
        model = client.fit(request["model"], objective=self.objective)
        return Message.of(model=model, num_examples=client.num_examples)

    def objective(self, network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return L(w'; D'), and for the Hessian a term that has its gradient.

        Args:
            network: the network at w.
            batch: D, D' and D'' together.
        """
        first_order = self.variant == "first_order"
        first, second, *rest = split_batch(batch, 2 if first_order else 3)  # D, D', D''
        ahead = look_ahead(network, first, lr=self.inner_lr, order=1)  # w'
        output = network.forward(second["image"], ahead, learn_statistics=False)
        loss = network.loss(output, second)
        if first_order:
            return loss, None
        w = network.parameters
        found = torch.autograd.grad(
            loss, list(w.values()), retain_graph=True, materialize_grads=True
        )
        step = self.delta * Tensors(zip(w, found, strict=True))  # delta g
        with restoring():
            forward = self._loss(network, rest[0], w + step)
        return loss, -self.inner_lr / (2 * self.delta) * (
            forward - self._loss(network, rest[0], w - step)
        )

    def _loss(self, network: LiveNetwork, batch: Batch, parameters: Tensors) -> Tensor:
        output = network.forward(batch["image"], parameters, learn_statistics=False)
        return network.loss(output, batch)

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the global model after steps on the client's data.

        See `Algorithm.personal_model`.
        """
        adapted = Tensors()

        def descend(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
            """Take a step that is not the optimiser's, which receives no gradient."""
            nonlocal adapted
            w = adapted or network.parameters.map(torch.Tensor.detach)
            loss, gradient = gradient_at(network, batch, w)
            adapted = w - self.inner_lr * gradient
            still = torch.stack([0.0 * p.sum() for p in network.parameters.values()])
            return loss, still.sum()

        model = client.fit(
            request["model"], objective=descend, steps=self.adaptation_steps, stream="adaptation"
        )
        return model | adapted
