"""The layout of the model, which both sides know, so that no message repeats it."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from collegium.core.tensors import Tensors, identity


class ModelLayout:
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
        tied: dict[str, list[str]] = {}
        for name, first in self.template(self._names).first_names().items():
            tied.setdefault(first, []).append(name)
        self._tied_names = list(tied.values())

    def template(self, names: Collection[str]) -> Tensors:
        """Return tensors of the model's shapes, dtypes and ties, of any content."""
        return Tensors((name, self._model[name]) for name in names)

    def codable(self, part: Tensors) -> list[str]:
        """Return the names in ``part`` that a codec takes, sorted.

        Those of trainable floating-point tensors that have the shape and dtype of the model's, and
        are equal if the model's are tied.
        """
        codable: list[str] = []
        for tied in self._tied_names:
            present = [name for name in tied if name in part]
            if all(self._matches(part[name], name, part[present[0]]) for name in present):
                codable += present
        return sorted(codable)

    def _matches(self, tensor: Tensor, name: str, first: Tensor) -> bool:
        model_tensor = self._model[name]
        if tensor.shape != model_tensor.shape or tensor.dtype != model_tensor.dtype:
            return False
        return identity(tensor) == identity(first) or torch.equal(tensor, first)

    def align(self, part: Tensors, names: Collection[str]) -> Tensors:
        """Return tensors on the CPU, tied exactly as the model's are.

        Args:
            part: the tensors.
            names: which of them are returned.
        """
        aligned: dict[Hashable, Tensor] = {}
        memories: set[Hashable] = set()
        for name in names:
            key = identity(self._model[name])
            if key not in aligned:
                tensor = part[name].detach().to("cpu")
                aligned[key] = tensor.clone() if identity(tensor) in memories else tensor
                memories.add(identity(tensor))
        return Tensors((name, aligned[identity(self._model[name])]) for name in names)

    def join(self, rest: Tensors, coded: Tensors) -> Tensors:
        """Return both as one group, in the model's order.

        Args:
            rest: tensors that are not coded; those of other names than the model's come last.
            coded: tensors that are.
        """
        both = rest | coded
        known = [name for name in self._model if name in both]
        return Tensors((name, both[name]) for name in [*known, *both.without(self._model)])

    def mask(self, names: Collection[str]) -> str:
        """Return as hexadecimal digits which of the trainable names are in ``names``."""
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
