"""Filters of a decoder that each client shares with the others until it lets them go their way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from collegium.core.lazy import torch
from collegium.core.model_parts import ModelParts
from collegium.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor


Standing = Mapping[str, Tensors]
"""How the filters of a client stand, each layer's in a tensor (filters,).

``weight`` is v, float64 and 0 once a filter is private; ``patience`` how many rounds of
disagreement are left, int64.
"""


def filters_of(model: Tensors, parts: ModelParts, names: Collection[str]) -> dict[str, list[str]]:
    """Return by layer the tensors whose first axis counts its filters: the weight, and a bias.

    A layer is named by its weight, a trainable tensor with more than one axis.

    Args:
        model: a whole model, for its shapes.
        parts: the roles of its tensors.
        names: the tensors to look among.
    """
    found = {}
    for name in sorted(parts.trainable.intersection(names)):
        bias = f"{name.removesuffix('weight')}bias"
        if model[name].ndim > 1:
            follows = bias in model and model[bias].shape == model[name].shape[:1]
            found[name] = [name, bias] if follows else [name]
    return found


def newcomer(weights: Tensors, patience: int) -> Standing:
    """Return how filters stand at first: all shared, with weight 1.

    Args:
        weights: of the layers, each (filters, ...).
        patience: the full one.
    """
    sizes = {name: len(weight) for name, weight in weights.items()}
    return {
        "weight": Tensors((n, torch.ones(k, dtype=torch.float64)) for n, k in sizes.items()),
        "patience": Tensors((n, torch.full((k,), patience)) for n, k in sizes.items()),
    }


def judged(
    old: Standing, server: Tensors, client: Tensors, *, share: float, momentum: float, patience: int
) -> Standing:
    """Return how the filters of a client stand after a round.

    With a and b the updates of a filter at server and client, and for filters that are shared and
    moved at both,

        patience - 1 if cos(a, b) < 0, the full patience if cos(a, b) > 0,
        v = momentum v + (1 - momentum) share |a| / |b|,

    and v = 0 where no patience is left.

    Args:
        old: before it.
        server: update by the server's own training, of all layers at least.
        client: update by the client's.
        share: of the client in all examples of the round.
        momentum: of v.
        patience: the full one.
    """
    weights, left = {}, {}
    for layer, before in old["patience"].items():
        a, b = (update[layer].double().flatten(1) for update in (server, client))
        inner, length_a, length_b = (a * b).sum(1), a.norm(dim=1), b.norm(dim=1)
        counts = (before > 0) & (length_a > 0) & (length_b > 0)
        now = torch.where(counts & (inner < 0), before - 1, before)
        now = torch.where(counts & (inner > 0), patience, now)
        v = old["weight"][layer]
        moved = momentum * v + (1 - momentum) * share * length_a / length_b
        weights[layer] = torch.where(now > 0, torch.where(counts, moved, v), 0.0)
        left[layer] = now
    return {"weight": Tensors(weights), "patience": Tensors(left)}


def combined(
    own: Tensor,
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
    retain: float,
) -> Tensor:
    """Return (1 - retain) times the weighted mean of the clients' filters plus retain times own.

    A filter that has no weight anywhere stays the server's own.

    Args:
        own: the server's, (filters, ...).
        values: the clients', each in this shape.
        weights: of each client's filters, (filters,).
        retain: the share of the server's own.
    """
    total, above = torch.zeros_like(weights[0]), torch.zeros_like(own, dtype=torch.float64)
    for value, weight in zip(values, weights, strict=True):
        total = total + weight
        above = above + along(weight, value) * value.double()
    mean = above / along(total, own)
    new = (1 - retain) * mean + retain * own.double()
    return torch.where(along(total > 0, own), new, own.double()).to(own.dtype)


def along(numbers: Tensor, like: Tensor) -> Tensor:
    """Return (filters,) in a shape that multiplies (filters, ...) filter by filter.

    Args:
        numbers: one for each filter.
        like: a tensor whose first axis counts the filters.
    """
    return numbers.view(-1, *[1] * (like.ndim - 1))


def overlaid(
    model: Tensors, own: Tensors, layers: Mapping[str, Sequence[str]], shared: Tensors
) -> Tensors:
    """Return a model with a client's own tensors where its filters are private.

    Args:
        model: the server's, whole.
        own: the client's tensors of all layers.
        layers: what `filters_of` returned.
        shared: by layer which filters are shared, (filters,).
    """
    placed = {
        name: torch.where(along(shared[layer], model[name]), model[name], own[name])
        for layer, names in layers.items()
        for name in names
    }
    return model | Tensors(placed)
