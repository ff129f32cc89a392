"""Named tensors with the arithmetic that federated-learning papers write down.

Two rules hold for every operation of this module:

* Integer and boolean tensors are counters and flags (``num_batches_tracked``), not quantities. They
  are never scaled or averaged: whatever combines several operands keeps the elementwise maximum,
  and scaling leaves them as they are.
* Tied weights stay tied: names that share one tensor going in share one tensor coming out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from collegium.core.lazy import torch
from collegium.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

LARGE_MODEL = 1 << 21
"""Least numbers in a model for which loading the compiled loops pays off in its mean."""

LONG_TENSOR = 1 << 14
"""Least numbers in a tensor for which a compiled loop is faster than several passes of torch."""


def identity(tensor: Tensor) -> Hashable:
    """Return a key that tensors share exactly when they are the same view of the same memory."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor as float32 if it is of half precision, and otherwise as it is.

    Args:
        tensor: of any shape.
    """
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Tensors(Mapping[str, "Tensor"]):
    """An immutable mapping from names to tensors; ``+ - *`` act element by element.

    Operands must have equal names: a mismatch is a `ProtocolError` that lists the names.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = ()) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Tensor:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Tensors({len(self)} names, {self.numel():,} numbers)"

    def first_names(self) -> dict[str, str]:
        """Return by name the first of the names that share its tensor: itself unless it is tied."""
        first: dict[Hashable, str] = {}
        return {name: first.setdefault(identity(t), name) for name, t in self._items.items()}

    def distinct(self) -> Tensors:
        """Return the tensors with tied weights only once, under their first name."""
        return self.select(self.first_names().values())

    def numel(self) -> int:
        """Return how many numbers there are, tied weights counted once."""
        return sum(tensor.numel() for tensor in self.distinct().values())

    def map(self, fn: Callable[..., Tensor], *others: Tensors) -> Tensors:
        """Return the results of a function applied tensor by tensor.

        Args:
            fn: takes the tensor, and that of each of the others.
            *others: further operands with the same names.

        Raises:
            ProtocolError: names differ.
        """
        for other in others:
            require_same_names(self, other)
        done: dict[Hashable, Tensor] = {}
        result = {}
        for name, tensor in self._items.items():
            operands = (tensor, *(other[name] for other in others))
            key = tuple(map(identity, operands))
            if key not in done:
                done[key] = fn(*operands)
            result[name] = done[key]
        return Tensors(result)

    def __add__(self, other: Tensors) -> Tensors:
        return self._combine(torch.add, other)

    def __sub__(self, other: Tensors) -> Tensors:
        return self._combine(torch.sub, other)

    def _combine(self, fn: Callable[[Tensor, Tensor], Tensor], other: Tensors) -> Tensors:
        def combine(a: Tensor, b: Tensor) -> Tensor:
            return fn(a, b) if a.is_floating_point() else torch.maximum(a, b)

        return self.map(combine, other)

    def __mul__(self, factor: float) -> Tensors:
        return self.map(lambda t: t * factor if t.is_floating_point() else t)

    __rmul__ = __mul__

    def __or__(self, other: Tensors) -> Tensors:
        """Overlay: names of ``other`` win."""
        return Tensors({**self._items, **other._items})

    def clone(self) -> Tensors:
        """Return a copy that shares no memory with this one, each tensor contiguous."""
        return self.map(partial(torch.clone, memory_format=torch.contiguous_format))

    def select(self, names: Collection[str]) -> Tensors:
        """Return the tensors whose name is in ``names``, in the order they have here."""
        wanted = names if isinstance(names, frozenset | set | Mapping) else frozenset(names)
        return Tensors((n, t) for n, t in self._items.items() if n in wanted)

    def without(self, names: Collection[str]) -> Tensors:
        """Return the tensors whose name is not in ``names``."""
        return Tensors((n, t) for n, t in self._items.items() if n not in names)

    def dot(self, other: Tensors) -> float:
        """Return the inner product over all floating-point tensors, summed in float64."""
        require_same_names(self, other)
        pairs = [
            (t.double().flatten(), other[n].double().flatten())
            for n, t in self._items.items()
            if t.is_floating_point()
        ]
        return float(sum(torch.dot(a, b) for a, b in pairs))


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU, byte by byte; of a contiguous one it is no copy.

    An empty tensor of numpy and an expanded single number count as contiguous and may have a stride
    of 0, of which torch shows no bytes.
    """
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def require_same_names(
    expected: Mapping[str, object], found: Mapping[str, Tensor], where: str = ""
) -> None:
    """Check that two groups of tensors have the same names.

    Args:
        expected: the names that there should be.
        found: the tensors to check.
        where: what the error begins with.

    Raises:
        ProtocolError: they differ; it lists missing and unexpected names.
    """
    if expected.keys() == found.keys():
        return
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    prefixed = [name for name in extra if name.removeprefix("module.") in missing]
    if prefixed and len(prefixed) == len(extra) == len(missing):
        detail = (
            f"all {len(extra)} names carry 'module.' (saved from DataParallel); strip the prefix"
        )
    else:
        lists = {"missing": missing, "unexpected": extra}
        parts = [
            f"{word} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for word, names in lists.items()
            if names
        ]
        detail = "; ".join(parts)
    raise ProtocolError(f"{where + ': ' if where else ''}tensor names differ: {detail}")


class Mean:
    """A weighted mean accumulated in float64, in the order in which its operands arrive.

    Holds one float64 sum and at most `GROUP` operands, whatever their number: operands are added
    group by group, so that the sum passes through memory once per group instead of once per
    operand. Integer tensors keep the maximum, dtypes are kept, half precision cannot overflow.
    """

    GROUP = 4

    def __init__(self) -> None:
        self.total = 0.0
        self._group: list[tuple[Tensors, float]] = []
        self._layout: dict[str, _TensorLayout] = {}
        self._sums: dict[str, Tensor] = {}
        self._large = False

    def add(self, tensors: Tensors, weight: float = 1.0, source: str = "") -> None:
        """Add one operand.

        Args:
            tensors: must have the names and shapes of the first operand.
            weight: not negative; an operand of weight 0 does not count.
            source: the sender, named in errors.

        Raises:
            ProtocolError: names or shapes differ from the first operand's.
        """
        if not self._layout:
            self._layout = {
                name: _TensorLayout(tensors[name].shape, tensors[name].dtype, first)
                for name, first in tensors.first_names().items()
            }
            self._large = tensors.numel() >= LARGE_MODEL
        require_same_names(self._layout, tensors, source)
        for name, tensor in tensors.items():
            if tensor.shape != self._layout[name].shape:
                raise ProtocolError(
                    f"{source}: {name} has shape {tuple(tensor.shape)}, not "
                    f"{tuple(self._layout[name].shape)}"
                )
        self.total += weight
        if weight > 0:
            self._group.append((tensors, weight))
        else:
            logger.warning("%s has weight 0 and does not count in the mean", source or "an operand")
        if len(self._group) == self.GROUP:
            self._add_group()

    def _add_group(self) -> None:
        group, self._group = self._group, []
        weights = [weight for _, weight in group]
        long = []
        for name, layout in self._layout.items():
            if not group or layout.first_name != name:
                continue
            vectors = [tensors[name].detach().reshape(-1) for tensors, _ in group]
            fresh = name not in self._sums
            if not layout.dtype.is_floating_point:
                highest = torch.stack(vectors).amax(0)
                self._sums[name] = highest if fresh else torch.maximum(self._sums[name], highest)
                continue
            if fresh:
                self._sums[name] = torch.empty_like(vectors[0], dtype=torch.float64)
            if self._is_long(name):
                long.append((self._sums[name], vectors, fresh))
                continue
            if fresh:
                self._sums[name].zero_()
            for vector, weight in zip(vectors, weights, strict=True):
                self._sums[name].add_(vector.double() * weight)
        if long:
            from collegium.core import kernels

            kernels.add_weighted(long, weights)

    def _is_long(self, name: str) -> bool:
        """Return whether the compiled loops, which round as torch does, are faster for a tensor."""
        total, dtype = self._sums[name], self._layout[name].dtype
        fits = dtype == torch.float32 and total.device.type == "cpu"
        return fits and self._large and len(total) >= LONG_TENSOR

    def result(self) -> Tensors:
        """Return the mean.

        Raises:
            ProtocolError: nothing was added, or every weight was zero.
        """
        if not self._layout:
            raise ProtocolError("nothing to average: no client sent a reply that can be used")
        if self.total <= 0:
            raise ProtocolError(
                "nothing to average: every client reported 0 examples; the model stays as it was"
            )
        self._add_group()
        means = {}
        long = [name for name in self._sums if self._is_long(name)]
        if long:
            from collegium.core import kernels

            quotients = kernels.divide([self._sums[name] for name in long], self.total)
            means = dict(zip(long, quotients, strict=True))
        for name in self._sums.keys() - means.keys():
            total, dtype = self._sums[name], self._layout[name].dtype
            means[name] = (total / self.total).to(dtype) if dtype.is_floating_point else total
        shaped = {name: total.reshape(self._layout[name].shape) for name, total in means.items()}
        return Tensors((name, shaped[layout.first_name]) for name, layout in self._layout.items())


class _TensorLayout(NamedTuple):
    """Shape and dtype of a tensor, and the first name under which it appears."""

    shape: torch.Size
    dtype: torch.dtype
    first_name: str


def mean(items: Sequence[Tensors], weights: Sequence[float] | None = None) -> Tensors:
    """Return the weighted mean, summed in float64 in the order given.

    Args:
        items: the operands.
        weights: one for each operand; None: all count the same.
    """
    running = Mean()
    for tensors, weight in zip(items, weights or [1.0] * len(items), strict=True):
        running.add(tensors, weight)
    return running.result()
