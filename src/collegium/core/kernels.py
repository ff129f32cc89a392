"""Compiled loops for what torch would need several passes over memory for.

Imported only where vectors are long: compiling takes about a second, once per machine, since the
result is cached.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from filelock import FileLock
from numba.core.caching import FunctionCache
from numpy.typing import NDArray

Array = NDArray[Any]
Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Compile a loop when it is first called; kept for later where there is a place to keep it."""
    dispatcher: Any = numba.njit(nogil=True)(loop)
    with suppress(RuntimeError):  # no folder is writable
        dispatcher._cache = _SharedCache(loop)  # type: ignore[no-untyped-call] # as cache=True does
    return cast(Loop, dispatcher)


class _SharedCache(FunctionCache):
    """numba's compiled code on disk, for one process at a time.

    Without the lock, two processes that compile a loop for different types at once may both take
    the same free file name, and each of them then loads the code of the other's types.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with self._alone():
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]

    def save_overload(self, sig: Any, data: Any) -> None:
        with self._alone():
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]

    def _alone(self) -> FileLock:
        return FileLock(Path(self.cache_path) / ".compiled.lock", is_singleton=True)


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


@dataclass(frozen=True)
class Sum:
    """One float64 vector and the float32 ones, up to four, that are to be added to it.

    Attributes:
        total: the sum, contiguous, on the CPU; changed in place.
        operands: vectors of the same length, contiguous.
        fresh: whether ``total`` is uninitialised and counts as zero.
    """

    total: torch.Tensor
    operands: Sequence[torch.Tensor]
    fresh: bool


def add_weighted(sums: Sequence[Sum], weights: Sequence[float]) -> None:
    """Add the weighted operands of every sum, in their order, each rounded as numpy would."""
    factors = np.array(weights)
    arrays = [(s.total.numpy(), [t.numpy() for t in s.operands], s.fresh) for s in sums]

    def work(index: int, part: slice) -> None:
        total, vectors, fresh = arrays[index]
        if len(vectors) == 4:
            a, b, c, d = (vector[part] for vector in vectors)
            _add_four(total[part], a, b, c, d, factors, fresh)
            return
        for position, vector in enumerate(vectors):
            _add_one(total[part], vector[part], factors[position], fresh and position == 0)

    _share_out([len(total) for total, _, _ in arrays], work)


def divide(totals: Sequence[torch.Tensor], by: float) -> list[torch.Tensor]:
    """Return float64 vectors divided by a number, as float32 ones."""
    results = [torch.empty(len(total)) for total in totals]
    pairs = [(total.numpy(), result.numpy()) for total, result in zip(totals, results, strict=True)]
    _share_out(
        [len(total) for total in totals],
        lambda index, part: _divide(pairs[index][0][part], by, pairs[index][1][part]),
    )
    return results


def _share_out(lengths: Sequence[int], work: Callable[[int, slice], None]) -> None:
    """Do ``work`` on all elements of some vectors, as many at once as torch may use threads.

    Every thread gets a stretch of the vectors laid end to end; no element depends on another.
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
