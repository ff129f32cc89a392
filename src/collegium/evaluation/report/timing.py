"""The chart of time against quality: a labelled point for each method at sites outside.

Seconds per image are on a logarithmic axis. A method has the colour of its algorithm and the marker
of its adapter; its label stands where there is room, joined to its point if that is farther off.
Without room it has none, and its name shows when the pointer rests on it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

from collegium.evaluation.report.plots import (
    COLOURS,
    LEFT,
    MARKERS,
    RIGHT,
    TOP,
    WIDTH,
    axes,
    ticks,
)
from collegium.evaluation.scores import ADAPTERS, rows_of
from collegium.evaluation.timing import TimeTable
from collegium.evaluation.wording import title

HEIGHT = 340
BOTTOM = 296  # of the frame, in units of the drawing
_GLYPH, _LINE = 6.3, 13.0  # width of a letter and height of a line of a label, on average
_GAP = 8.0  # between a point and its label
_MOST_TICKS = 9

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""

Point = tuple[float, float]


def time_chart(table: TimeTable, order: Sequence[str]) -> str:
    """Draw seconds per image against the metric.

    Args:
        table: The methods.
        order: Labels of the algorithms; gives colours.

    Returns:
        An ``<svg>`` element; empty if no method has both a time and a score.
    """
    known = table.methods[table.methods["seconds"] > 0].dropna(subset="quality")
    if known.empty:
        return ""  # a logarithmic axis has no place for zero
    steps = log_ticks(known["seconds"].min(), known["seconds"].max())
    scores = known["quality"].tolist()
    air = 0.1 * (max(scores) - min(scores)) or 0.05 * abs(scores[0]) or 0.5
    low, high = min(scores) - air, max(scores) + air

    def place(seconds: float, score: float) -> Point:
        across = math.log(seconds / steps[0]) / math.log(steps[-1] / steps[0])
        up = (score - low) / (high - low)
        return LEFT + (RIGHT - LEFT) * across, BOTTOM - (BOTTOM - TOP) * up

    metric = title(table.metric) + (f" ({table.unit})" if table.unit else "")
    across = [(place(x, low)[0], f"{x:g}") for x in steps]
    up = [(place(steps[0], y)[1], y) for y in ticks(low, high)]
    frame = axes(across, up, ("seconds per image", metric), bottom=BOTTOM, grid=True)
    methods = rows_of(known)
    points = [place(one.seconds, one.quality) for one in methods]
    labels = place_labels([one.method for one in methods], points)
    marks = [_mark(*each, order) for each in zip(methods, points, labels, strict=True)]
    values = "; ".join(f"{one.method} {one.seconds:.3g} s, {one.quality:.3g}" for one in methods)
    what = f"{metric} against seconds per image at sites outside: {values}."
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(what)}">{frame}{"".join(marks)}</svg>'
    )


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers that enclose two positive ones: 1, 2, 5, 10, or only 1, 10, 100.

    Args:
        low: The smaller one.
        high: The larger one.
    """
    low, high = low / 1.25, high * 1.25
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = [10.0**power for power in powers]
    fine = [factor * decade for decade in decades for factor in (1, 2, 5)]
    start = max(place for place, tick in enumerate(fine) if tick <= low)
    end = min(place for place, tick in enumerate(fine) if tick >= high)
    return fine[start : end + 1] if end - start < _MOST_TICKS else decades


def place_labels(names: Sequence[str], points: Sequence[Point]) -> list[Box | None]:
    """Return a box for the label of each point, clear of points and of other labels.

    Args:
        names: The labels.
        points: Where their points are, in the frame of `time_chart`.

    Returns:
        The boxes; None if no place is clear.
    """
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    boxes: list[Box | None] = []
    for name, point in zip(names, points, strict=True):
        wanted = list(_places(point, _GLYPH * len(name)))
        inside = [box for box in wanted if box[0] >= LEFT and box[2] <= RIGHT + 10]
        clear = (box for box in inside if not any(_meet(box, other) for other in taken))
        box = next(clear, None)
        boxes.append(box)
        taken += [box] if box else []
    return boxes


def _places(point: Point, width: float) -> Iterator[Box]:
    """Yield the places of a label: right and left of its point, then higher and lower."""
    x, y = point
    for step in range(12):
        for way in (-1, 1) if step else (1,):
            top = y - _LINE / 2 + way * step * _LINE * 0.75
            if top >= TOP and top + _LINE <= BOTTOM:
                yield x + _GAP, top, x + _GAP + width, top + _LINE
                yield x - _GAP - width, top, x - _GAP, top + _LINE


def _meet(one: Box, other: Box) -> bool:
    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    return not apart


def _mark(one: Any, point: Point, box: Box | None, order: Sequence[str]) -> str:
    """Return a point and its label."""
    x, y = point
    labels = list(order)
    place = labels.index(one.algorithm) if one.algorithm in labels else len(labels)
    known = list(ADAPTERS)
    kind = known.index(one.model) if one.model in known else len(known)
    shape = MARKERS[kind % len(MARKERS)]
    lead, text = _label(html.escape(one.method), point, box) if box else ("", "")
    return (
        f'{lead}<g class="line c{place % COLOURS}"><title>{html.escape(one.method)}</title>'
        f'<path d="M{x:.1f} {y:.1f}{shape}"/>{text}</g>'
    )


def _label(name: str, point: Point, box: Box) -> tuple[str, str]:
    """Return a line from a point to its label, empty if they are close, and the label."""
    x, y = point
    right = box[0] > x
    end, middle = box[0] if right else box[2], (box[1] + box[3]) / 2
    lead = (
        f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{middle:.1f}"/>'
        if abs(middle - y) > _LINE / 2
        else ""
    )
    anchor = "" if right else ' class="end"'
    return lead, f'<text{anchor} x="{end:.1f}" y="{box[3] - 3:.1f}">{name}</text>'
