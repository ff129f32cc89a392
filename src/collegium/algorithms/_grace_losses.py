"""GRACE at the client: the look ahead and the alignment of features (Eq. 1-2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collegium.core.algorithm import Client, State
from collegium.core.dataset import Batch
from collegium.core.lazy import torch
from collegium.core.tensors import Tensors
from collegium.training.alignment import (
    DomainClassifier,
    coral,
    mmd,
    pick_pixels,
    pixels_at,
    pool,
)

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.algorithms.grace import Grace
    from collegium.training.objectives import LiveNetwork


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Return the first and the second half of a batch, by position; the second may have one more.

    Fewer than four examples are not divided, since a half of one has neither batch statistics nor a
    covariance: the whole batch serves as both halves.
    """
    count = len(batch["image"])
    if count < 4:
        return batch, batch
    middle = count // 2
    return (
        {key: value[:middle] for key, value in batch.items()},
        {key: value[middle:] for key, value in batch.items()},
    )


def look_ahead(network: LiveNetwork, batch: Batch, *, lr: float, order: int) -> Tensors:
    """Return theta' = theta - lr grad L(theta) as a function of theta.

    Running statistics learn here, at theta, and nowhere else: theta' is not a model that is kept.

    Args:
        network: the network at theta.
        batch: the meta-training half.
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


class Alignment:
    """The loss A(h_g, h') of `Grace` in one round of a client.

    Args:
        method: chooses the loss and the features.
        client: the site, whose domain classifier continues from its last round.
    """

    def __init__(self, method: Grace, client: Client) -> None:
        self._method = method
        self._random = client.rng("alignment")
        self._weights: Tensors | None = client.state.get("adversary")
        self._classifier: DomainClassifier | None = None

    def __call__(self, received: Tensor, local: Tensor) -> Tensor:
        """Return A, a scalar.

        Args:
            received: h_g, (B, C, *spatial) or (B, C), without a gradient.
            local: h', in the same shape.
        """
        if self._method.features == "pooled":
            received, local = pool(received), pool(local)
        else:
            local, positions = pick_pixels(local, self._method.pixels, self._random)
            received = pixels_at(received, positions)
        if self._method.alignment == "coral":
            return coral(received, local)
        if self._method.alignment == "mmd":
            return mmd(received, local)
        if self._classifier is None:
            self._classifier = self._new_classifier(local)
        return self._classifier.confusion(received, local)

    def _new_classifier(self, local: Tensor) -> DomainClassifier:
        weights = self._weights
        if weights is None:
            weights = DomainClassifier.initial(local.shape[1], self._random)
        on_device = weights.map(lambda tensor: tensor.to(local))
        return DomainClassifier(on_device, lr=self._method.adversary_lr)

    def state(self) -> State:
        """Return what the client keeps for its next round."""
        return {} if self._classifier is None else {"adversary": self._classifier.weights}
