"""Compiled loops for what torch would need several passes over memory for.

Imported only where vectors are long: compiling takes about a second, once per machine, since the
result is cached.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Loop = TypeVar("Loop", bound=Callable[..., None])


def _compiled(loop: Loop) -> Loop:
    """Compile a loop when it is first called; kept for later where there is a place to keep it."""
    try:
        return cast(Loop, numba.njit(nogil=True, cache=True)(loop))
    except RuntimeError:  # no folder is writable
        return cast(Loop, numba.njit(nogil=True)(loop))


@_compiled
def _add_four(
    total: Array, a: Array, b: Array, c: Array, d: Array, weights: Array, fresh: bool
) -> None:
    wa, wb, wc, wd = weights[0], weights[1], weights[2], weights[3]
    for i in range(len(total)):
        start = 0.0 if fresh else total[i]
        total[i] = (((start + wa * a[i]) + wb * b[i]) + wc * c[i]) + wd * d[i]


@_compiled
def _add_one(total: Array, a: Array, weight: float, fresh: bool) -> None:
    for i in range(len(total)):
        total[i] = (0.0 if fresh else total[i]) + weight * a[i]


@_compiled
def _divide(total: Array, by: float, result: Array) -> None:
    for i in range(len(total)):
        result[i] = total[i] / by


def add_weighted(
    total: torch.Tensor, operands: Sequence[tuple[torch.Tensor, float]], *, fresh: bool
) -> None:
    """Add up to four weighted float32 or float64 vectors to a float64 one, in their order.

    Args:
        total: the sum, contiguous, on the CPU; changed in place.
        operands: vectors of the same length, contiguous, with their weights.
        fresh: whether ``total`` is uninitialised and counts as zero.
    """
    vectors = [tensor.numpy() for tensor, _ in operands]
    weights = np.array([weight for _, weight in operands])
    out = total.numpy()

    def work(part: slice) -> None:
        if len(vectors) == 4:
            a, b, c, d = (vector[part] for vector in vectors)
            _add_four(out[part], a, b, c, d, weights, fresh)
            return
        for position, vector in enumerate(vectors):
            _add_one(out[part], vector[part], weights[position], fresh and position == 0)

    _in_parts(len(out), work)


def divide(total: torch.Tensor, by: float, result: torch.Tensor) -> None:
    """Write a float64 vector divided by a number into a float32 or float64 one."""
    source, target = total.numpy(), result.numpy()
    _in_parts(len(source), lambda part: _divide(source[part], by, target[part]))


def _in_parts(length: int, work: Callable[[slice], None]) -> None:
    """Do ``work`` on as many parts at once as torch may use threads; no part depends on another."""
    threads = torch.get_num_threads()
    if threads == 1:
        work(slice(0, length))
        return
    size = -(-length // threads)
    parts = [slice(start, min(start + size, length)) for start in range(0, length, size)]
    list(_pool(threads).map(work, parts))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "collegium-kernels")
