"""Compiled loops for operations that take torch several passes over memory.

Imported only if vectors are long: compiling takes about a second, once per machine, since the
result is cached.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numba.core.caching import FunctionCache
from numpy.typing import NDArray

from collegium.core.files import lock

Array = NDArray[Any]
Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Return a loop that is compiled when first called, and cached if a folder is writable."""
    return _compile(loop, order_matters=True)


def compiled_sums(loop: Loop) -> Loop:
    """Return a loop like `compiled`, whose sums are taken in whatever order is fastest.

    The order depends on the processor, and on nothing that changes from call to call.
    """
    return _compile(loop, order_matters=False)


def _compile(loop: Loop, *, order_matters: bool) -> Loop:
    allowed = set() if order_matters else {"reassoc", "contract"}
    dispatcher: Any = numba.njit(nogil=True, fastmath=allowed)(loop)
    with suppress(RuntimeError):  # no folder is writable
        dispatcher._cache = _LockedCache(loop)  # type: ignore[no-untyped-call] # as cache=True does
    return cast(Loop, dispatcher)


class _LockedCache(FunctionCache):
    """numba's cache of compiled code on disk, used by one process at a time.

    Without the lock, two processes that compile a loop for different types at once may both take
    the same free file name, and each of them then loads the code of the other's types.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with lock(Path(self.cache_path), wait=True):
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]

    def save_overload(self, sig: Any, data: Any) -> None:
        with lock(Path(self.cache_path), wait=True):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


@compiled
def _add_four(
    total: Array, a: Array, b: Array, c: Array, d: Array, weights: Array, fresh: bool
) -> None:
    wa, wb, wc, wd = weights[0], weights[1], weights[2], weights[3]
    for i in range(len(total)):
        start = 0.0 if fresh else total[i]
        total[i] = (((start + wa * a[i]) + wb * b[i]) + wc * c[i]) + wd * d[i]


@compiled
def _add_one(total: Array, a: Array, weight: float, fresh: bool) -> None:
    for i in range(len(total)):
        total[i] = (0.0 if fresh else total[i]) + weight * a[i]


@compiled
def _divide(total: Array, by: float, result: Array) -> None:
    for i in range(len(total)):
        result[i] = total[i] / by


WeightedSum = tuple[torch.Tensor, Sequence[torch.Tensor], bool]
"""A float64 vector, changed in place; up to four float32 vectors of its length to add to it; and
whether the first is uninitialised and counts as zero. All are contiguous and on the CPU."""


def add_weighted(sums: Sequence[WeightedSum], weights: Sequence[float]) -> None:
    """Add the weighted operands of every sum, in their order, each rounded as numpy would.

    Args:
        sums: the sums, each with as many operands as there are weights.
        weights: the weight of each operand.
    """
    factors = np.array(weights)
    arrays = [(total.numpy(), [t.numpy() for t in vectors], new) for total, vectors, new in sums]

    def work(index: int, part: slice) -> None:
        total, vectors, fresh = arrays[index]
        if len(vectors) == 4:
            a, b, c, d = (vector[part] for vector in vectors)
            _add_four(total[part], a, b, c, d, factors, fresh)
            return
        for position, vector in enumerate(vectors):
            _add_one(total[part], vector[part], factors[position], fresh and position == 0)

    in_threads([len(total) for total, _, _ in arrays], work)


def divide(totals: Sequence[torch.Tensor], by: float) -> list[torch.Tensor]:
    """Return float64 vectors divided by a number, as float32 vectors.

    Args:
        totals: the vectors, contiguous, on the CPU.
        by: the divisor.
    """
    results = [torch.empty(len(total)) for total in totals]
    pairs = [(total.numpy(), result.numpy()) for total, result in zip(totals, results, strict=True)]
    in_threads(
        [len(total) for total in totals],
        lambda index, part: _divide(pairs[index][0][part], by, pairs[index][1][part]),
    )
    return results


def in_threads(lengths: Sequence[int], work: Callable[[int, slice], None]) -> None:
    """Do ``work`` on all elements of some vectors, in as many threads as torch may use.

    Every thread gets a stretch of the concatenated vectors; no element depends on another.

    Args:
        lengths: of the vectors.
        work: takes the index of a vector and the range of its elements that are to be done.
    """
    threads = torch.get_num_threads()
    share = -(-sum(lengths) // threads)
    stretches: list[list[tuple[int, slice]]] = [[]]
    room = share
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                stretches.append([])
                room = share
            end = min(length, start + room)
            stretches[-1].append((index, slice(start, end)))
            room -= end - start
            start = end

    def do(stretch: Sequence[tuple[int, slice]]) -> None:
        for index, part in stretch:
            work(index, part)

    if len(stretches) == 1:
        do(stretches[0])
    else:
        list(_pool(threads).map(do, stretches))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "collegium-kernels")
