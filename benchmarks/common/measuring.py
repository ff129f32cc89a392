"""How the scripts measure: works in turns, peaks of memory, and a figure beside its target."""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def in_turns(
    works: Mapping[str, Callable[[], object]],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each work by repetition, done in turns after one round to warm up.

    Args:
        works: what to do, by name.
        repetitions: how often each is timed.
        clock: `time.process_time` counts what the processor did, whatever else the machine does.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for repetition in range(repetitions + 1):
        for name, work in works.items():
            start = clock()
            work()
            if repetition > 0:
                times[name].append(clock() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each work's times."""
    return {name: statistics.median(found) for name, found in times.items()}


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def peak_of(work: Callable[[], object]) -> int:
    """Return how many bytes a work and its result add at most, looked at every millisecond."""
    before = highest = resident()
    finished = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not finished.wait(0.001):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    highest = max(highest, resident())
    finished.set()
    watcher.join()
    del result
    return highest - before


def verdict(
    name: str, figure: float, target: float, text: str = "", *, least: bool = False
) -> bool:
    """Print a figure beside its target, and return whether it reaches it.

    Args:
        name: what was measured.
        figure: the figure.
        target: the most that is allowed.
        text: stands behind the figure, such as its unit.
        least: whether the target is the least instead.
    """
    good = figure >= target if least else figure <= target
    shown = f"{figure:.3g} {text}".rstrip()
    print(f"{name}: {shown} (target {target:g}): {'ok' if good else 'short'}")
    return good
