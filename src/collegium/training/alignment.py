"""Losses that align the features of the model in training with those of the model received.

CORAL, MMD and adversarial alignment compare two sets of feature vectors; MOON's contrastive loss
compares example by example. Equations and conventions are those of `docs/algorithms/grace.md`;
where GRACE and its released code leave one open, the docstring states the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from collegium.core.dataset import Batch
from collegium.core.lazy import functional, torch
from collegium.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Widths of the Gaussian kernels of `mmd`, in median distances."""

HIDDEN = 64
"""Hidden units of the domain classifier."""


def pool(features: Tensor) -> Tensor:
    """Return the mean over space.

    Args:
        features: (B, C, *spatial) or (B, C).

    Returns:
        (B, C).
    """
    return features if features.ndim == 2 else features.flatten(2).mean(2)


def pick_pixels(features: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the feature vectors of some pixels of the whole batch, and their positions.

    Args:
        features: (B, C, *spatial) or (B, C), in which every example is one pixel.
        count: how many are drawn, without replacement; all are taken if there are no more.
        generator: on the CPU; not used if all are taken.

    Returns:
        (at most ``count``, C), and the positions for `pixels_at`.
    """
    total = features.numel() // features.shape[1]
    if total > count:
        positions = torch.randperm(total, generator=generator)[:count]
    else:
        positions = torch.arange(total)
    return pixels_at(features, positions), positions


def pixels_at(features: Tensor, positions: Tensor) -> Tensor:
    """Return the feature vectors at some pixels.

    Args:
        features: (B, C, *spatial) or (B, C).
        positions: (n,), as `pick_pixels` returned them.

    Returns:
        (n, C).
    """
    rows = features.movedim(1, -1).reshape(-1, features.shape[1])
    return rows[positions.to(rows.device)]


def class_means(features: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return the mean features of each class in each image of a batch, and the classes.

    Args:
        features: (B, C, *spatial) or (B, C).
        batch: with the "label": (B,), or (B, *spatial) of any resolution, with an optional "mask".

    Returns:
        (n, C), and (n,), the class of each, for every class of every image; None if labels are no
        classes.
    """
    label, mask = batch["label"], batch.get("mask")
    if label.is_floating_point():
        return None
    if label.ndim == 1:
        return pool(features), label
    shown = functional.one_hot(label).movedim(-1, 1).to(features)  # (B, classes, *spatial)
    if mask is not None:
        shown = shown * mask.unsqueeze(1)
    shown = functional.interpolate(shown, features.shape[2:]).flatten(2)
    counts = shown.sum(2)
    present = counts > 0
    sums = torch.einsum("bkp,bcp->bkc", shown, features.flatten(2))
    return sums[present] / counts[present].unsqueeze(1), present.nonzero()[:, 1]


def prototypes(means: Sequence[tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    """Return the mean vector of each class.

    Args:
        means: what `class_means` returned, batch by batch.

    Returns:
        By class (C,).
    """
    if not means:
        return {}
    vectors, classes = (torch.cat(column) for column in zip(*means, strict=True))
    return {y: vectors[classes == y].mean(0) for y in sorted({*classes.tolist()})}


def coral(received: Tensor, local: Tensor) -> Tensor:
    """Return the squared distance of covariances, ||C_r - C_l||_F^2 / (4 d^2).

    Covariances divide by n - 1. Fewer than two vectors have none: the loss is 0 then.

    Source: Sun and Saenko, 2016, https://arxiv.org/abs/1607.01719, Eq. 1-3.

    Args:
        received: (n, d).
        local: (m, d).

    Returns:
        A scalar.
    """
    if min(len(received), len(local)) < 2:
        return local.new_zeros(())
    gap = _covariance(received) - _covariance(local)
    return gap.square().sum() / (4 * received.shape[1] ** 2)


def _covariance(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(0)
    return centred.T @ centred / (len(rows) - 1)


def mmd(received: Tensor, local: Tensor, *, sigma: float | None = None) -> Tensor:
    """Return the squared maximum mean discrepancy: mean k(r,r) + mean k(l,l) - 2 mean k(r,l).

    It is the biased estimate, a V-statistic, which is never negative. k(a,b) is
    exp(-|a - b|^2 / (2 sigma^2)), or the sum of five of them, whose sigma is `BANDWIDTHS` times the
    median distance of all pairs that differ. If no pair differs the loss is 0. GRACE does not name
    its kernel; this is the usual choice.

    Source: Gretton et al., 2012, https://jmlr.org/papers/v13/gretton12a.html, Eq. 5.

    Args:
        received: (n, d).
        local: (m, d).
        sigma: width of a single kernel; None: the five. No gradient passes through the median.

    Returns:
        A scalar.
    """
    count, rows = len(received), torch.cat([received, local])
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    widths = [sigma] if sigma is not None else _widths(distances.detach(), rows.detach())
    if not widths:
        return local.new_zeros(())
    squares = distances.square()
    kernel = torch.stack([torch.exp(squares / (-2 * width**2)) for width in widths]).sum(0)
    within = kernel[:count, :count].mean() + kernel[count:, count:].mean()
    return within - 2 * kernel[:count, count:].mean()


def _widths(distances: Tensor, rows: Tensor) -> list[float]:
    """Return multiples of the median distance; none if vectors differ by rounding at most."""
    above = torch.ones_like(distances, dtype=torch.bool).triu(1)
    least = 10 * torch.finfo(rows.dtype).eps * rows.norm(dim=1).max()
    different = distances[above & (distances > least)]
    if len(different) == 0:
        return []
    return [factor * float(different.median()) for factor in BANDWIDTHS]


def contrastive(
    current: Tensor, received: Tensor, previous: Tensor, *, temperature: float
) -> Tensor:
    """Return MOON's loss: small if features resemble the received model's, not the last local ones.

    The mean over examples of -log(exp(s_r / tau) / (exp(s_r / tau) + exp(s_p / tau))), where s_r
    and s_p are the cosines of an example's features with those of the two other models.

    Source: Li, He and Song, 2021, https://arxiv.org/abs/2103.16257, Eq. 3.

    Args:
        current: (B, d), with a gradient.
        received: (B, d), of the model at the start of the round.
        previous: (B, d), of the client's last local model.
        temperature: tau.

    Returns:
        A scalar.
    """
    similar = [
        functional.cosine_similarity(current, other, dim=1) for other in (received, previous)
    ]
    logits = torch.stack(similar, dim=1) / temperature
    return functional.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.int64))


def boundary_contrast(
    features: Sequence[Tensor],
    label: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float,
    width: int = 5,
) -> Tensor:
    """Return FedDG's loss: features of boundaries resemble each other, and not what surrounds them.

    A boundary is what one erosion takes from the foreground, its surroundings what ``width``
    dilations add, both with the direct neighbours of a pixel; the edge of the image is no boundary.
    Of every image the features are averaged over either. With s the cosines of these means divided
    by tau, the loss is the mean, over all ordered pairs (m, p) of one kind, of

        -log(exp(s_mp) / (exp(s_mp) + sum_q exp(s_mq))),  q of the other kind.

    Source: Liu et al., 2021, https://arxiv.org/abs/2103.06030, Eq. 5-6.

    Args:
        features: of the same images, seen in several styles; (B, d, *spatial) each. Masks are
            averaged down to their size.
        label: (B, *spatial), whose foreground is what is above 0.
        mask: (B, *spatial), bool, where the label is known: neither kind reaches beyond it, and its
            edge is no boundary. None: everywhere.
        temperature: tau.
        width: how many dilations.

    Returns:
        A scalar; 0 if the images have no boundary.
    """
    foreground = (label > 0).to(features[0]).unsqueeze(1)
    inside = torch.ones_like(foreground) if mask is None else mask.to(foreground).unsqueeze(1)
    boundary = inside * foreground * _dilated(inside * (1 - foreground), 1)
    surroundings = inside * (_dilated(inside * foreground, width) - foreground)
    kinds = [_masked_means(features, kind) for kind in (boundary, surroundings)]
    first, second = (functional.normalize(means, dim=1) for means in kinds)
    losses = [
        _pull(one @ one.T / temperature, one @ other.T / temperature)
        for one, other in ((first, second), (second, first))
        if len(one) > 1 and len(other)
    ]
    return torch.cat(losses).mean() if losses else features[0].new_zeros(())


def _pull(alike: Tensor, apart: Tensor) -> Tensor:
    """Return the loss of every ordered pair of one kind, from cosines within and across kinds."""
    against = apart.logsumexp(dim=1, keepdim=True)
    pairs = torch.logaddexp(alike, against) - alike
    return pairs[~torch.eye(len(alike), dtype=torch.bool, device=alike.device)]


def _dilated(mask: Tensor, times: int) -> Tensor:
    """Return a mask (B, 1, *spatial) grown by direct neighbours."""
    axes = mask.ndim - 2
    pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[axes - 1]
    for _ in range(times):
        grown = []
        for axis in range(axes):
            size = [3 if other == axis else 1 for other in range(axes)]
            grown.append(pool(mask, size, stride=1, padding=[side // 2 for side in size]))
        mask = torch.stack(grown).amax(0)
    return mask


def _masked_means(features: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return the mean features of the images that a mask is not empty in, of all styles."""
    means = []
    for one in features:
        axes = tuple(range(2, one.ndim))
        weights = functional.interpolate(mask, one.shape[2:], mode="area")
        total = weights.sum(axes)
        means.append(((one * weights).sum(axes) / total.clamp_min(1e-12))[total[:, 0] > 0])
    return torch.cat(means)


class DomainClassifier:
    """An adversary that learns to distinguish local from received features.

    Linear, ReLU, linear, one logit: 1 is received. A method calls `confusion` once per step: it
    returns the loss whose gradient is that of a gradient-reversal layer, and lets the classifier
    take one step of Adam. Both gradients are taken at the same weights, as with the layer, with one
    backward pass less through the network.

    Source: Ganin and Lempitsky, 2015, https://arxiv.org/abs/1409.7495.

    Args:
        weights: from `initial`, or another classifier's `weights`.
        lr: learning rate of the classifier.
    """

    def __init__(self, weights: Tensors, *, lr: float) -> None:
        self._leaves = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
        self._optimizer = torch.optim.Adam(list(self._leaves.values()), lr=lr)

    @staticmethod
    def initial(features: int, generator: torch.Generator, *, hidden: int = HIDDEN) -> Tensors:
        """Return new weights, uniform within 1/sqrt(inputs); all of them from ``generator``.

        Args:
            features: length of a feature vector.
            generator: on the CPU.
            hidden: number of hidden units.
        """
        shapes = {
            "hidden.weight": (hidden, features), "hidden.bias": (hidden,),
            "out.weight": (1, hidden), "out.bias": (1,),
        }  # fmt: skip
        return Tensors(
            (name, (2 * torch.rand(shape, generator=generator) - 1) / inputs**0.5)
            for (name, shape), inputs in zip(
                shapes.items(), (features, features, hidden, hidden), strict=True
            )
        )

    @property
    def weights(self) -> Tensors:
        """A copy of the weights."""
        return Tensors((name, leaf.detach().clone()) for name, leaf in self._leaves.items())

    def confusion(self, received: Tensor, local: Tensor) -> Tensor:
        """Return minus the classifier's cross-entropy, and let the classifier take a step.

        Args:
            received: (n, d), without a gradient.
            local: (m, d).

        Returns:
            A scalar, lower the more the classifier errs; its gradient reaches ``local`` only.
        """
        rows = torch.cat([received.detach(), local])
        truth = torch.cat([torch.ones(len(received)), torch.zeros(len(local))]).to(rows)
        loss = _cross_entropy(self.weights, rows, truth)
        self._optimizer.zero_grad(set_to_none=True)
        _cross_entropy(self._leaves, rows.detach(), truth).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return -loss


def _cross_entropy(weights: Mapping[str, Tensor], rows: Tensor, truth: Tensor) -> Tensor:
    hidden = functional.linear(rows, weights["hidden.weight"], weights["hidden.bias"]).relu()
    logit = functional.linear(hidden, weights["out.weight"], weights["out.bias"]).squeeze(1)
    return functional.binary_cross_entropy_with_logits(logit, truth)
