"""Plain gradient steps beside the optimiser's, for objectives that look at other parameters.

Meta-learning and proximal methods take steps inside one step of the local loop; see
`collegium.training.objectives`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from collegium.core.dataset import Batch
from collegium.core.lazy import torch
from collegium.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """Return a batch in parts of equal size, by position; later ones may have one more.

    Fewer than two examples for a part are not divided, since one example has neither batch
    statistics nor a covariance: the whole batch serves as every part.

    Args:
        batch: the batch.
        count: how many parts.
    """
    total = len(batch["image"])
    if total < 2 * count:
        return [batch] * count
    cuts = [total * k // count for k in range(count + 1)]
    return [
        {key: value[start:end] for key, value in batch.items()} for start, end in pairwise(cuts)
    ]


def look_ahead(network: LiveNetwork, batch: Batch, *, lr: float, order: int) -> Tensors:
    """Return theta' = theta - lr grad L(theta) as a function of theta.

    Running statistics learn here, at theta, and nowhere else: theta' is not a model that is kept.

    Args:
        network: the network at theta.
        batch: of the step.
        lr: the step.
        order: 1: the step is a constant; 2: it depends on theta.
    """
    theta = network.parameters
    loss = network.loss(network.forward(batch["image"]), batch)
    gradients = torch.autograd.grad(
        loss, list(theta.values()), create_graph=order == 2, allow_unused=True
    )
    return Tensors(
        (name, parameter if step is None else parameter - lr * step)
        for (name, parameter), step in zip(theta.items(), gradients, strict=True)
    )


def gradient_at(
    network: LiveNetwork, batch: Batch, theta: Tensors, *, learn_statistics: bool = True
) -> tuple[Tensor, Tensors]:
    """Return the loss at other parameters and its gradient there, both without a graph.

    Args:
        network: the network.
        batch: of the loss.
        theta: the parameters, with the names of those that are trained.
        learn_statistics: whether running statistics of normalisation layers are updated.
    """
    leaves = theta.map(lambda tensor: tensor.detach().requires_grad_())
    output = network.forward(batch["image"], leaves, learn_statistics=learn_statistics)
    loss = network.loss(output, batch)
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return loss.detach(), Tensors(zip(theta, found, strict=True))
