"""Dirichlet distributions over classes, whose concentrations a network's outputs give.

Concentrations alpha are (B, K, *spatial), or (B, K) where a case has one class. They are computed
in float32 at least, since exp(80) is beyond half precision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from collegium.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 80.0
"""The largest output: exp of it, summed over classes, is still within float32."""

SERIES = 20.0
"""From this number on a series is exact to 1e-8, where differences of large numbers are not."""


def evidence(output: Tensor) -> Tensor:
    """Return alpha - 1 = exp(min(z, 80)).

    Args:
        output: z, (B, K, *spatial).
    """
    output = output if output.dtype == torch.float64 else output.float()
    return output.clamp(max=LARGEST).exp()


def uncertainties(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return epistemic and aleatoric uncertainty, which add up to the entropy of the mean.

    With S the sum of alpha and p = alpha / S, the aleatoric one is the expected entropy of the
    class, sum_c p_c (psi(S + 1) - psi(alpha_c + 1)). Neither is negative nor above ln K.

    Args:
        alpha: (B, K, *spatial).

    Returns:
        Both (B, *spatial).
    """
    total = alpha.sum(1, keepdim=True)
    p = alpha / total
    aleatoric = (p * (torch.digamma(total + 1) - torch.digamma(alpha + 1))).sum(1)
    entropy = -(p * p.log()).sum(1)
    return (entropy - aleatoric).clamp(min=0), aleatoric.clamp(min=0)


def divergence(alpha: Tensor) -> Tensor:
    """Return KL(Dir(alpha) || Dir(1, ..., 1)).

    With S the sum of alpha it is h(S) - sum_c h(alpha_c) + (K - 1) psi(S) - ln Gamma(K), where
    h(x) = ln Gamma(x) - (x - 1) psi(x) + x grows as ln(x) / 2: the numbers of order S, whose
    differences float32 would lose from an S of a few millions on, have dropped out.

    Args:
        alpha: (B, K, *spatial).

    Returns:
        (B, *spatial).
    """
    count, total = alpha.shape[1], alpha.sum(1)
    first = _slow_part(total) - _slow_part(alpha).sum(1)
    return first + (count - 1) * torch.digamma(total) - math.lgamma(count)


def _slow_part(x: Tensor) -> Tensor:
    """Return h(x), for x from 1 on."""
    low, high = x.clamp(max=SERIES), x.clamp(min=SERIES)
    exact = torch.lgamma(low) - (low - 1) * torch.digamma(low) + low
    part = 1 / high
    rest = -part / 3 - part**2 / 12 - part**3 / 90 + part**4 / 120
    series = high.log() / 2 + math.log(2 * math.pi) / 2 + 0.5 + rest
    return torch.where(x < SERIES, exact, series)


def evidential_loss(
    output: Tensor, label: Tensor, mask: Tensor | None = None, *, smooth: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return the two terms of FedEvi's loss: overlap, and evidence for classes that are wrong.

    The first is 1 - mean_c (2 sum p y + smooth) / (sum p^2 + sum y + smooth), with p the mean of
    the distribution, y the one-hot label and the background a class; sums run over batch and space.
    The second is the mean over pixels of KL(Dir(alpha') || Dir(1)), with alpha' = 1 for the true
    class and alpha for the others.

    Args:
        output: (B, K, *spatial).
        label: (B, *spatial), int64.
        mask: (B, *spatial), bool, where pixels count; None: everywhere. Without any both are 0.
        smooth: keeps a class that is absent defined.

    Returns:
        Two scalars.
    """
    found = evidence(output)
    classes = torch.arange(output.shape[1], device=label.device).view(-1, *[1] * (label.ndim - 1))
    y = (label.unsqueeze(1) == classes).to(found)
    alpha = found + 1
    p = alpha / alpha.sum(1, keepdim=True)
    inside = torch.ones_like(label, dtype=torch.bool) if mask is None else mask
    counts = inside.unsqueeze(1).to(found)
    axes = [axis for axis in range(p.ndim) if axis != 1]
    both, squares, truth = ((counts * part).sum(axes) for part in (p * y, p**2, y))
    overlap = 1 - ((2 * both + smooth) / (squares + truth + smooth)).mean()
    wrong = divergence(found * (1 - y) + 1)
    return overlap, (inside * wrong).sum() / inside.sum().clamp(min=1)
