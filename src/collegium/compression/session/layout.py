"""What both sides know of the model, so that no message repeats it."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from collegium.core.tensors import Tensors, identity


class Form:
    """Names, shapes, dtypes and ties of a model.

    Args:
        model: the model.
        trainable: names of its trainable parameters.
    """

    def __init__(self, model: Tensors, trainable: Collection[str]) -> None:
        self._model = model.map(lambda tensor: torch.empty_like(tensor, device="cpu"))
        self._names = sorted(
            n for n, t in self._model.items() if n in trainable and t.is_floating_point()
        )
        twins: dict[Hashable, list[str]] = {}
        for name in self._names:
            twins.setdefault(identity(self._model[name]), []).append(name)
        self._twins = list(twins.values())

    def like(self, names: Collection[str]) -> Tensors:
        """Return tensors of the model's form, without its numbers."""
        return Tensors((name, self._model[name]) for name in names)

    def codable(self, part: Tensors) -> list[str]:
        """Return the names in ``part`` that a codec takes, sorted.

        Those of trainable floating-point tensors that have the shape and dtype of the model's, and
        are equal where the model's are tied.
        """
        found: list[str] = []
        for twins in self._twins:
            here = [name for name in twins if name in part]
            if all(self._agrees(part[name], name, part[here[0]]) for name in here):
                found += here
        return sorted(found)

    def _agrees(self, tensor: Tensor, name: str, twin: Tensor) -> bool:
        mine = self._model[name]
        if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
            return False
        return identity(tensor) == identity(twin) or torch.equal(tensor, twin)

    def aligned(self, part: Tensors, names: Collection[str]) -> Tensors:
        """Return tensors of ``part`` on the CPU, tied where the model's are and nowhere else."""
        made: dict[Hashable, Tensor] = {}
        memories: set[Hashable] = set()
        for name in names:
            key = identity(self._model[name])
            if key not in made:
                tensor = part[name].detach().to("cpu")
                made[key] = tensor.clone() if identity(tensor) in memories else tensor
                memories.add(identity(tensor))
        return Tensors((name, made[identity(self._model[name])]) for name in names)

    def joined(self, rest: Tensors, coded: Tensors) -> Tensors:
        """Return both as one group, in the model's order."""
        both = rest | coded
        known = [name for name in self._model if name in both]
        return Tensors((name, both[name]) for name in [*known, *both.without(self._model)])

    def mask(self, names: Collection[str]) -> str:
        """Return which of the trainable names are in ``names``, as hexadecimal digits."""
        return f"{sum(1 << i for i, name in enumerate(self._names) if name in names):x}"

    def unmask(self, mask: Any) -> list[str]:
        """Return the names that `mask` wrote.

        Raises:
            TypeError: this is no mask.
            ValueError: this is no mask of these names.
        """
        bits = int(mask, 16)
        if not 0 < bits < 1 << len(self._names):
            raise ValueError(mask)
        return [name for i, name in enumerate(self._names) if bits >> i & 1]
