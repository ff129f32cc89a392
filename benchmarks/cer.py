"""The exact CER solver against ADMM, the paper's way of solving its Eq. 4.

ADMM is as good as we can write it: its linear system is tridiagonal and factored beforehand (the
paper takes the eigenvectors of a d x d matrix), every iteration is two compiled passes over two
vectors, and rho is tuned for each update, gamma and number of iterations. Up to a million numbers
(with --quick, a hundred thousand) it runs all its iterations; beyond, ten are timed and the rest is
extrapolated, linearly.

Updates are drawn as noise with heavy tails, of one scale or of one per layer; gamma is once and ten
times the median magnitude. Times are medians of processor time, which does not count what other
work on the machine takes, in turns in one process; memory is measured in a process of its own.

    python benchmarks/cer.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from common.measuring import in_turns, medians, verdict

from collegium.solvers.taut_string import certificate, objective, solve

Array = np.ndarray[Any, Any]

FASTER = {50: 20.0, 200: 50.0}  # than ADMM with so many iterations
VIOLATION, VECTORS, NANOSECONDS = 1e-9, 6.0, 200.0
RHOS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
FEW = 10
PIECES, PIECE = 50, 1000  # of an update, to tune rho on


@numba.njit(nogil=True)
def factor(size: int, rho: float) -> tuple[Array, Array]:
    """Return the pivots' inverses and the factors of Thomas' algorithm for I + rho Lambda^T Lambda.

    Both settle to constants after a few dozen rows, so only as many are kept as differ.
    """
    inverse, factors = np.empty(size), np.empty(size)
    previous = 0.0
    for i in range(size):
        inverse[i] = 1 / (1 + (rho if i == 0 else 2 * rho) - rho * previous)
        factors[i] = rho * inverse[i]
        if i > 1 and factors[i] == previous:
            return inverse[: i + 1].copy(), factors[: i + 1].copy()
        previous = factors[i]
    return inverse, factors


@numba.njit(nogil=True)
def iterate(
    g: Array, v: Array, w: Array, threshold: float, rho: float, inverse: Array, factors: Array
) -> None:
    """Do one iteration on v and the scaled dual w, in place."""
    size, rows = len(g), len(inverse) - 1
    q_before = solved = 0.0
    for i in range(size):
        a = v[i] - (v[i + 1] if i + 1 < size else 0.0) - w[i]
        q = w[i] + max(a - threshold, 0.0) + min(a + threshold, 0.0)
        solved = (g[i] + rho * (q - q_before + solved)) * inverse[min(i, rows)]
        v[i], w[i], q_before = solved, q, q
    after = 0.0
    for i in range(size - 1, -1, -1):
        here = v[i] + factors[min(i, rows)] * after
        w[i] -= here - after
        v[i] = after = here


class Admm:
    """ADMM for one update: its memory, its factors and its iterations."""

    def __init__(self, g: Array, gamma: float, rho: float) -> None:
        self.g, self.threshold, self.rho = g, gamma / rho, rho
        self.inverse, self.factors = factor(len(g), rho)
        self.v, self.w = np.zeros(len(g)), np.zeros(len(g))

    def run(self, iterations: int) -> Array:
        """Return v after so many iterations from zero."""
        self.v.fill(0)
        self.w.fill(0)
        for _ in range(iterations):
            iterate(self.g, self.v, self.w, self.threshold, self.rho, self.inverse, self.factors)
        return self.v


def tune(update: Array, gamma: float, iterations: int) -> float:
    """Return the rho with the least objective after so many iterations, on pieces of an update."""
    starts = np.linspace(0, len(update) - PIECE, PIECES).astype(int)
    g = np.concatenate([update[start : start + PIECE] for start in starts])
    return min(RHOS, key=lambda rho: objective(g, Admm(g, gamma, rho).run(iterations), gamma))


def make_update(size: int, *, layered: bool) -> Array:
    """Return noise with heavy tails; if layered, every stretch has its own scale and mean."""
    rng = np.random.default_rng(size)
    update = rng.laplace(0, 1e-3, size).astype(np.float32)
    start = 0
    while layered and start < size:
        end = start + int(rng.integers(64, 200_000))
        update[start:end] *= 10 ** rng.uniform(-1, 0.5)
        update[start:end] += rng.choice([0, 1e-4])
        start = end
    return update


def hard_inputs(size: int) -> Iterator[tuple[str, Array, list[float]]]:
    """Yield inputs that are hard for one method or another: a name, the values, some gammas."""
    rng, index = np.random.default_rng(0), np.arange(size)
    place, noise = index / size, rng.standard_normal(size)
    yield "ramp up", place, [1e-3, 1.0, size / 100]
    yield "ramp down", 1 - place, [1e-3, 1.0, size / 100]
    yield "ramp through zero", 2 * place - 1, [1.0, size / 100]
    yield "ramp behind noise", np.where(place < 0.5, noise, place), [1.0, 100.0]
    yield "constant", np.ones(size), [1.0, size / 2]
    yield "ties", np.round(noise), [0.5, 10.0, 100.0]
    yield "alternating signs", (-1.0) ** index, [0.25, 0.5, 10.0]
    yield "alternating ramp", place + (-1.0) ** index, [1.0, 100.0]
    yield "sawtooth", index % 1000 / 1000 - 0.5, [0.1, 1.0, 30.0]
    yield "growth", np.exp(20 * place), [1.0, 1e6]
    yield "decay", np.exp(-20 * place), [1e-3, 1.0]
    yield "random walk", np.cumsum(noise), [1.0, 100.0, 1e4]


@dataclass
class Comparison:
    """Our solver beside ADMM on one update.

    Attributes:
        ours: nanoseconds a number that we take.
        iteration: nanoseconds a number that one iteration of ADMM takes.
        faster: how many times as long ADMM takes, by its number of iterations.
        excess: of its objective over ours, relative to ours; empty if extrapolated.
        violation: of the conditions of the minimum, by our solution.
    """

    ours: float
    iteration: float
    faster: dict[int, float]
    excess: dict[int, float]
    violation: float


def compare(size: int, full: float, repetitions: int) -> Iterator[Comparison]:
    """Yield how we compare with ADMM, for every kind of update of a size and every gamma."""
    for layered in (False, True):
        update = make_update(size, layered=layered)
        middle = float(np.median(np.abs(update)))
        for times in (1, 10):
            found = compare_one(update, times * middle, size <= full, repetitions)
            kind = f"{'layers' if layered else 'noise'}, gamma {times:2} x"
            excess = "".join(f"{found.excess.get(n, np.nan):10.1e}" for n in FASTER)
            print(
                f"{size:.1e}{' ' if size <= full else '*'} {kind:19}"
                f"{found.ours:6.1f} ns{found.iteration:9.1f} ns "
                f"{found.faster[50]:7.0f} x{found.faster[200]:7.0f} x {excess}"
                f"{found.violation:11.1e}",
                flush=True,
            )
            yield found


def compare_one(update: Array, gamma: float, full: bool, repetitions: int) -> Comparison:
    """Return how we compare with ADMM on one update, which runs in full or for a few iterations."""
    size = len(update)
    out = np.empty_like(update)
    counts = tuple(FASTER) if full else (FEW,)
    solvers = {n: Admm(update, gamma, tune(update, gamma, n if full else 50)) for n in counts}
    works: dict[str, Callable[[], object]] = {"ours": lambda: solve(update, gamma, out)}
    works |= {str(n): partial(solver.run, n) for n, solver in solvers.items()}
    seconds = medians(in_turns(works, repetitions, time.process_time))
    exact = solve(update, gamma, np.empty(size))
    best = objective(update, exact, gamma)
    needed = {n: seconds[str(n if full else FEW)] * (1 if full else n / FEW) for n in FASTER}
    return Comparison(
        ours=seconds["ours"] / size * 1e9,
        iteration=needed[50] / 50 / size * 1e9,
        faster={n: taken / seconds["ours"] for n, taken in needed.items()},
        excess={n: objective(update, solvers[n].v, gamma) / best - 1 for n in FASTER if full},
        violation=certificate(update, exact, gamma),
    )


def measure_hard(size: int) -> float:
    """Return the most nanoseconds a number that a hard input takes, medians of three."""
    worst = 0.0
    for name, values, gammas in hard_inputs(size):
        out = np.empty(size)
        longest = 0.0
        for gamma in gammas:
            times = []
            for _ in range(3):
                start = time.process_time()
                solve(values, gamma, out)
                times.append(time.process_time() - start)
            longest = max(longest, statistics.median(times) / size * 1e9)
        print(f"  {name:20}{longest:6.1f} ns")
        worst = max(worst, longest)
    return worst


def resident() -> dict[str, int]:
    """Return the bytes that the process holds and has held at most, on Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return {
        line.split(":")[0]: 1024 * int(line.split()[1])
        for line in lines
        if line.startswith(("VmRSS", "VmHWM"))
    }


def measure_memory(size: int) -> dict[str, float]:
    """Return the vectors of float64 held at most while a ramp is solved, input and output counted.

    A ramp needs the hulls, hence the most memory.
    """
    solve(np.arange(1000) / 1000, 10.0)
    tracemalloc.start()
    before = resident()
    values = np.arange(size, dtype=np.float64)
    values /= size
    solve(values, size / 100)
    after, unit = resident(), 8 * size
    found = {"allocated": tracemalloc.get_traced_memory()[1] / unit}
    if before:
        found["resident"] = (after["VmHWM"] - before["VmRSS"]) / unit
    return found


def measure_threads() -> float:
    """Return the time of two clients on two threads, as a multiple of one client's."""
    update = make_update(1_000_000, layered=True)
    gamma = float(np.median(np.abs(update)))
    with ThreadPoolExecutor(2) as pool:
        works: dict[str, Callable[[], object]] = {
            "one": lambda: solve(update, gamma),
            "two": lambda: list(pool.map(lambda _: solve(update, gamma), range(2))),
        }
        seconds = medians(in_turns(works, 5))
    return seconds["two"] / seconds["one"]


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to a million numbers")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(measure_memory(options.memory)))
        return 0
    print(f"{'':28}{'ours':>9}{'iteration':>12}{'ADMM-50':>10}{'ADMM-200':>10}", end="")
    print("   objective above ours  violation   (*: ADMM extrapolated)")
    largest, full, repetitions = (4_000_000, 1e5, 5) if options.quick else (31_000_000, 1e6, 7)
    sizes = (100_000, 1_000_000) + (() if options.quick else (10_000_000, largest))
    found = [row for size in sizes for row in compare(size, full, repetitions)]
    print("hard inputs of a million numbers")
    hard = measure_hard(1_000_000)
    print(f"two clients on two threads take {measure_threads():.2f} times as long as one")
    command = [sys.executable, __file__, "--memory", str(largest)]
    memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"memory of a ramp of {largest} numbers:", end=" ")
    print(", ".join(f"{vectors:.2f} vectors {kind}" for kind, vectors in memory.items()))
    faster = {n: min(row.faster[n] for row in found) for n in FASTER}
    below = max(-excess for row in found for excess in row.excess.values())
    violation, most = max(row.violation for row in found), max(memory.values())
    good = [
        *(verdict(f"cer admm-{n}", faster[n], FASTER[n], "times", least=True) for n in FASTER),
        verdict("cer objective", below, 1e-12, "above ADMM's"),
        verdict("cer kkt", violation, VIOLATION, "violation"),
        verdict("cer memory", most, VECTORS, "vectors"),
        verdict("cer worst case", hard, NANOSECONDS, "ns a number"),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
