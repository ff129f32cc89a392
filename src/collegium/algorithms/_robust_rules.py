"""Robust means of models, of which a minority may be anything.

Each takes a model, or an update, of every site; names, shapes and dtypes are alike and all numbers
finite. Sums are in float64, in the order given. Integer tensors are counters and never averaged.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

from collegium.core.lazy import torch
from collegium.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor

CLOSE = 1e-9
"""The tolerance added before a share of the sites is rounded down, so that 0.29 of 100 are 29."""


def trimmed_count(trim: float, count: int) -> int:
    """Return how many values a trimmed mean leaves out at either end.

    Args:
        trim: the share at either end.
        count: of how many values.
    """
    return int(trim * count + CLOSE)


def trimmed_mean(models: Sequence[Tensors], cut: int) -> Tensors:
    """Return the mean of each coordinate without its largest and its smallest values.

    Definition 2 of Yin et al. (2018). Of integers it is the lower median, which one site has sent.

    Args:
        models: one of each site.
        cut: how many values are left out at either end; fewer than half.
    """
    return models[0].map(lambda *sites: _trimmed(torch.stack(sites), cut), *models[1:])


def _trimmed(values: Tensor, cut: int) -> Tensor:
    count = len(values)
    if not values.is_floating_point():
        return values.sort(0).values[(count - 1) // 2]
    return values.double().sort(0).values[cut : count - cut].mean(0).to(values.dtype)


def median(models: Sequence[Tensors]) -> Tensors:
    """Return the median of each coordinate; of an even number of sites the middle of the two.

    Definition 1 of Yin et al. (2018). Of integers it is the lower of the two.

    Args:
        models: one of each site.
    """
    return trimmed_mean(models, (len(models) - 1) // 2)


def clip_updates(
    models: Mapping[str, Tensors],
    starts: Mapping[str, Tensors],
    trainable: Collection[str],
    *,
    factor: float,
    bound: float | None,
) -> tuple[dict[str, Tensors], dict[str, float]]:
    """Shorten updates that are too long; the others stay as they are, bit by bit.

    Norm thresholding of Sun et al. (2019), Section 4: an update is divided by max(1, norm / M).
    Parameters and buffers have a norm and a bound each, since their scales have nothing in common.

    Args:
        models: by client, what it sent.
        starts: by client, what it started from, with the same names.
        trainable: the names of the parameters.
        factor: M is so many times the median norm of the clients.
        bound: M of parameters, instead; None: there is none.

    Returns:
        By client the model, and the smaller of the factors by which its updates were shortened.
    """
    clipped, scales = dict(models), dict.fromkeys(models, 1.0)
    parameters, buffers = _groups(next(iter(models.values())), trainable)
    for names, fixed in ((parameters, bound), (buffers, None)):
        pairs = {c: (starts[c].select(names), model.select(names)) for c, model in models.items()}
        norms = {client: _squared(model - start) ** 0.5 for client, (start, model) in pairs.items()}
        limit = factor * statistics.median(norms.values()) if fixed is None else fixed
        for client, norm in norms.items():
            if norm > limit:
                start, model = pairs[client]
                clipped[client] |= start.map(partial(_towards, share=limit / norm), model)
                scales[client] = min(scales[client], limit / norm)
    return clipped, scales


def _squared(tensors: Tensors) -> float:
    once = tensors.distinct()
    return once.dot(once)


def _towards(start: Tensor, end: Tensor, share: float) -> Tensor:
    wide = start.double()
    return (wide + share * (end.double() - wide)).to(start.dtype)


def krum(
    models: Sequence[Tensors], trainable: Collection[str], *, hostile: int, selected: int
) -> list[int]:
    """Return the positions of the models that lie closest to others, in ascending order.

    The score of a model is the sum of the squared distances to its n - hostile - 2 closest ones
    (Blanchard et al., 2017, Section 4); those with the lowest scores are selected. Of equal scores
    the one with the closer further models counts as lower, so that names decide only between models
    that are equally far from all. Where there are buffers beside the parameters, the squared
    distances of either are divided by their median over all pairs before they are added, so that
    neither hides the other.

    Args:
        models: one of each site, at least 2 hostile + 3.
        trainable: the names of the parameters.
        hostile: how many sites may be hostile, f.
        selected: how many models are selected, m.
    """
    count = len(models)
    distances = torch.zeros(count, count, dtype=torch.float64)
    pairs = list(combinations(range(count), 2))
    groups = [names for names in _groups(models[0], trainable) if names]
    for names in groups:
        some = [model.select(names) for model in models]
        squares = [_squared(some[i] - some[j]) for i, j in pairs]
        scale = statistics.median(squares) if len(groups) > 1 else 1.0
        for (i, j), square in zip(pairs, squares, strict=True):
            distances[i, j] += square / (scale or 1.0)
    distances += distances.T.clone()
    others = distances.sort(1).values[:, 1:].tolist()  # the first is itself
    scores = [(sum(row[: count - hostile - 2]), *row) for row in others]
    return sorted(sorted(range(count), key=lambda position: scores[position])[:selected])


def _groups(model: Tensors, trainable: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the parameters, and of the floating-point buffers."""
    floats = frozenset(name for name, tensor in model.items() if tensor.is_floating_point())
    return floats.intersection(trainable), floats.difference(trainable)
