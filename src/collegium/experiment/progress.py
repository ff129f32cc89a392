"""Shows the progress of a run: live bars in a terminal, single plain lines anywhere else."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from collegium.core.text import format_bytes, format_duration

if TYPE_CHECKING:
    from collegium.experiment.grid import JobKey
    from collegium.experiment.jobs import Event

MOST_SITES = 6
"""Federations with more sites show their range in place of every site."""


@contextmanager
def show_progress(
    console: Console, jobs: int | None, now: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Event], None]]:
    """Yield the observer of a run, and tidy the terminal up after it.

    Args:
        console: Where to show it; bars if it is a terminal that can move its cursor.
        jobs: How many (algorithm, seed) pairs the run has; None where that is not known yet.
        now: The clock.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(console, jobs, Clock(now))
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[says]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:
        yield Bars(bars, jobs, Clock(now))


class Clock:
    """Estimates how long a job still takes, from the rounds seen in this process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.first: dict[JobKey, tuple[float, int]] = {}
        self.last: dict[JobKey, tuple[float, int]] = {}
        self.done: set[JobKey] = set()

    def note(self, event: Event) -> None:
        """Take an event into account."""
        job = event.job
        if event.kind == "job":
            self.first[job] = self.now(), -1
        elif event.kind == "round":
            began, before = self.first.get(job, (0.0, -1))
            if before < 0:  # the first round seen shows where the run continues
                self.first[job] = (began or self.now()), event.round - 1
            self.last[job] = self.now(), event.round
        elif event.kind == "done":
            self.done.add(job)

    def remaining(self, event: Event) -> float | None:
        """Return the seconds that the job of an event still takes; None before its first round."""
        job = event.job
        if job not in self.last:
            return None
        (began, before), (ended, after) = self.first[job], self.last[job]
        return (ended - began) / max(after - before, 1) * max(event.rounds - after, 0)


class Lines:
    """Writes a line for each event, without control characters."""

    def __init__(self, console: Console, jobs: int | None, clock: Clock) -> None:
        self.console = console
        self.of_all = "" if jobs is None else f" of {jobs}"
        self.clock = clock

    def __call__(self, event: Event) -> None:
        """Write what happened."""
        self.clock.note(event)
        if event.kind == "job":
            parts = [f"{event.rounds} rounds"]
        elif event.kind == "done":
            parts = [f"done, {len(self.clock.done)}{self.of_all}", *measurements(event)]
        elif event.kind in ("note", "adapt"):
            parts = []
        elif event.round > event.rounds:  # what an algorithm does after its last round
            parts = ["after the last round", *measurements(event)]
        else:
            left = eta(self.clock.remaining(event))
            parts = [f"round {event.round}/{event.rounds}", *measurements(event), left]
        line = "  ".join(word for word in [job_name(event), *parts, event.text] if word)
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class Bars:
    """Moves one bar for each job, with the last measurements and the sites beside it."""

    def __init__(self, bars: Progress, jobs: int | None, clock: Clock) -> None:
        self.bars = bars
        self.clock = clock
        self.tasks: dict[JobKey, TaskID] = {}
        self.latest: dict[JobKey, dict[str, str]] = defaultdict(dict)
        self.all = bars.add_task("all", total=jobs, says="")

    def __call__(self, event: Event) -> None:
        """Show what happened."""
        self.clock.note(event)
        if event.kind == "note":
            self.bars.console.print(event.text, markup=False, highlight=False, emoji=False)
            return
        job = event.job
        if job not in self.tasks:
            self.tasks[job] = self.bars.add_task(job_name(event), total=event.rounds, says="")
        latest = self.latest[job]
        latest |= {word.partition(" ")[0]: word for word in measurements(event)}
        if known := event.scores or event.losses:
            latest["sites"] = sites(known)
        ended = event.kind == "done"
        latest["adapts"] = event.text if event.kind == "adapt" else ""
        latest["eta"] = "" if ended else eta(self.clock.remaining(event))
        says = "  ".join(word for word in latest.values() if word)
        self.bars.update(
            self.tasks[job],
            completed=event.rounds if ended else min(event.round, event.rounds),
            says=says,
        )
        self.bars.update(self.all, completed=len(self.clock.done))


def job_name(event: Event) -> str:
    """Name the job of an event; nothing for an event of the whole run."""
    words = [event.variation, event.fold, event.algorithm, f"seed {event.seed}"]
    return " ".join(filter(None, words)) if event.algorithm else ""


def measurements(event: Event) -> list[str]:
    """Write the means over the sites, and the bytes of all of them, where there are any."""
    words = [
        f"{name} {fmean(values.values()):.3f}"
        for name, values in (("loss", event.losses), (event.metric or "score", event.scores))
        if values
    ]
    if event.bytes_up or event.bytes_down:
        words += [f"up {format_bytes(event.bytes_up)}", f"down {format_bytes(event.bytes_down)}"]
    return words


def sites(values: Mapping[str, float]) -> str:
    """Write one number for each site, or their range where there are many sites."""
    if len(values) > MOST_SITES:
        return f"{len(values)} sites {min(values.values()):.3f} to {max(values.values()):.3f}"
    return " ".join(f"{site} {value:.3f}" for site, value in sorted(values.items()))


def eta(seconds: float | None) -> str:
    """Write how long something still takes; nothing where it is not known."""
    return "" if seconds is None else f"eta {format_duration(seconds)}"
