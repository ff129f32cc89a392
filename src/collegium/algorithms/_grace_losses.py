"""GRACE at the client: the alignment of features (Eq. 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collegium.core.algorithm import Client, State
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
