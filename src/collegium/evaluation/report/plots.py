"""The charts of the report as SVG, without scripts and in the colours of the page.

Every algorithm has a colour and a marker of its own, and personal models are dashed, so that lines
differ in print and for those who do not see all colours. Colours are variables of the style sheet:
charts are legible on light and dark. Each chart has a text alternative.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from collegium.evaluation.scores import METHOD, group_means, method_name, rows_of

if TYPE_CHECKING:
    import pandas as pd

COLOURS = 10
"""How many colours of lines the style sheet has: ``--line-0`` and so on."""

MARKERS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "m-3.5-3.5h7v7h-7z", "m0-5l5 5l-5 5l-5-5z",
    "m0-5l5 9h-10z", "m0 5l5-9h-10z", "m-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z", "m-5-2h10v4h-10z",
    "m-2-5h4v10h-4z",
)  # fmt: skip
"""The markers as paths from their middle."""

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 508, 10, 212
"""The frame of a chart, in units of the drawing."""

_AIR = 6  # beside the frame, for markers on its edge
_MOST_POINTS, _MARKED = 150, 5
WARM_UP = 0.15
"""Share of the rounds that do not decide what a frame holds."""

Limits = tuple[float, float]


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        name: What it is, for a reader.
        place: Number of its colour and marker.
        dashed: Whether it is dashed.
        points: Its values over x, in order.
    """

    name: str
    place: int
    dashed: bool
    points: Mapping[int, float]

    @property
    def key(self) -> str:
        """A class name that the line shares with its entry in the legend."""
        return f"l{self.place}{'p' if self.dashed else 'g'}"

    @property
    def look(self) -> str:
        """The classes that give colour and dashes."""
        return f"c{self.place % COLOURS}" + (" dashed" if self.dashed else "")


def learning_curves(
    results: pd.DataFrame, metric: str, split: str, order: Sequence[str]
) -> dict[str, list[ChartLine]]:
    """Return a metric over rounds: by site, a line for each algorithm and model.

    A line is the mean over seeds and folds.

    Args:
        results: The table of results; only rows of rounds are used.
        metric: Which metric.
        split: ``"val"`` or ``"train"``.
        order: Labels of the algorithms; gives colours and markers.

    Returns:
        Site -> lines, sites by name; empty if there is nothing to draw.
    """
    wanted = (results["case"] == "") & (results["split"] == split) & (results["metric"] == metric)
    rows = results[wanted & results["algorithm"].isin(order)].dropna(subset="value")
    lines: dict[tuple[str, int, str, str], dict[int, float]] = defaultdict(dict)
    means = group_means(rows, ["site", *METHOD, "round"])
    for site, algorithm, model, number, value in rows_of(means):
        lines[site, list(order).index(algorithm), algorithm, model][number] = value
    drawn: dict[str, list[ChartLine]] = defaultdict(list)
    for (site, place, algorithm, model), points in sorted(lines.items()):
        name = method_name(algorithm, model)
        drawn[site].append(ChartLine(name, place, model == "personal", points))
    return dict(drawn)


def limits(lines: Iterable[ChartLine], *, warm_up: float = WARM_UP) -> Limits:
    """Return the lowest and highest value of a frame that holds the lines, with some air.

    Args:
        lines: The lines.
        warm_up: The share of the rounds at the start that do not count, of ten rounds or more.
    """
    lines = list(lines)
    last = max((x for line in lines for x in line.points), default=0)
    first = warm_up * last if last >= 10 else 0.0
    values = [y for line in lines for x, y in line.points.items() if x >= first]
    low, high = min(values, default=0.0), max(values, default=1.0)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - air, high + air


def line_chart(
    lines: Sequence[ChartLine],
    what: str,
    frame: Limits | None = None,
    *,
    axis: str = "",
    over: str = "round",
) -> str:
    """Draw lines.

    Args:
        lines: The lines.
        what: What the drawing shows, for its text alternative.
        frame: Lowest and highest value in the frame, by default those of `limits`. Lines are cut
            off there.
        axis: Title of the vertical axis.
        over: What x counts.

    Returns:
        An ``<svg>`` element.
    """
    low, high = frame or limits(lines)
    last = max((x for line in lines for x in line.points), default=1)
    first = min((x for line in lines for x in line.points), default=0)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (RIGHT - LEFT) * (x - first) / ((last - first) or 1)
        return across, BOTTOM - (BOTTOM - TOP) * (y - low) / ((high - low) or 1.0)

    across = [(place(x, low)[0], f"{x:.0f}") for x in ticks(first, last) if x == int(x)]
    up = [(place(first, y)[1], y) for y in ticks(low, high)]
    drawn = [_line(line, [place(x, y) for x, y in _thinned(line.points)]) for line in lines]
    ends = "; ".join(f"{line.name} {list(line.points.values())[-1]:.3g}" for line in lines)
    several = f"{over}es" if over.endswith(("s", "ch")) else f"{over}s"
    label = html.escape(f"{what} over {several} {first} to {last}. Last values: {ends}.")
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'data-x="{LEFT} {RIGHT} {first} {last}" data-y="{BOTTOM} {TOP} {low:.6g} {high:.6g}" '
        f'data-over="{html.escape(over)}">'
        f"{axes(across, up, (over, axis))}{_cut(drawn)}</svg>"
    )


def _cut(drawn: Iterable[str]) -> str:
    """Return drawings, cut off above and below the frame."""
    left, across, down = LEFT - _AIR, RIGHT - LEFT + 2 * _AIR, BOTTOM - TOP
    return (
        f'<svg x="{left}" y="{TOP}" width="{across}" height="{down}" '
        f'viewBox="{left} {TOP} {across} {down}" overflow="hidden">{"".join(drawn)}</svg>'
    )


def _thinned(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """Leave out points that a drawing of this size cannot show; the last one stays."""
    items = list(points.items())
    step = -(-len(items) // _MOST_POINTS)
    return items if step < 2 else [*items[:-1:step], items[-1]]


def _line(line: ChartLine, points: Sequence[tuple[float, float]]) -> str:
    """Return a line with a few markers."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    step = max(1, len(points) // _MARKED)
    offset = line.place % step  # so that markers of lines that coincide stand side by side
    shape = MARKERS[line.place % len(MARKERS)]
    marks = "".join(f"M{x:.1f} {y:.1f}{shape}" for x, y in points[offset::step])
    return (
        f'<g class="line {line.key} {line.look}" data-name="{html.escape(line.name)}">'
        f'<polyline points="{path}"/><path d="{marks}"/></g>'
    )


def legend_svg(line: ChartLine) -> str:
    """Draw a line's entry in the legend: a piece of the line with its marker."""
    shape = MARKERS[line.place % len(MARKERS)]
    return (
        f'<svg class="sample {line.look}" viewBox="0 0 34 12" width="34" height="12" '
        f'aria-hidden="true" focusable="false"><polyline points="1,6 33,6"/>'
        f'<path d="M17 6{shape}"/></svg>'
    )


def axes(
    across: Iterable[tuple[float, str]],
    up: Sequence[tuple[float, float]],
    titles: tuple[str, str],
    *,
    bottom: float = BOTTOM,
    grid: bool = False,
) -> str:
    """Return grid, numbers and titles of the axes of a chart.

    Args:
        across: Place (in units of the drawing) and text of the numbers on the horizontal axis.
        up: Place and value of the numbers on the vertical axis.
        titles: Of the horizontal and of the vertical axis.
        bottom: Where the frame ends.
        grid: Whether the numbers on the horizontal axis have lines too.
    """
    parts = []
    for (y, _), text in zip(up, tick_texts([value for _, value in up]), strict=True):
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{text}</text>')
    for x, text in across:
        if grid:
            line = f'x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"'
            parts.append(f'<line class="grid" {line}/>')
        parts.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 17}">{text}</text>')
    beneath, beside = map(html.escape, titles)
    middle = (TOP + bottom) / 2
    parts.append(f'<text class="mid" x="{(LEFT + RIGHT) / 2}" y="{bottom + 34}">{beneath}</text>')
    parts.append(
        f'<text class="mid" transform="translate(12 {middle}) rotate(-90)">{beside}</text>'
    )
    return f'<g aria-hidden="true">{"".join(parts)}</g>'


def tick_texts(values: Sequence[float]) -> list[str]:
    """Return the numbers of an axis, all with as many decimals as one of them needs."""
    texts = [f"{value:.6g}" for value in values]
    if not any("e" in text for text in texts):
        decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
        texts = [f"{value:.{decimals}f}" for value in values]
    return [text.replace("-", "\u2212") for text in texts]


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two.

    Args:
        low: The smaller one.
        high: The larger one.
    """
    if high <= low:
        return [low]
    rough = (high - low) / 5
    step = 10.0 ** np.floor(np.log10(rough))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= rough)
    first = np.ceil(low / step)
    return [float(step * k + 0.0) for k in np.arange(first, np.floor(high / step) + 1)]  # no -0.0


def reach(ends: Iterable[float | None]) -> float:
    """Return how far from zero numbers reach: the half width of the common scale of intervals.

    Args:
        ends: Means and ends of the intervals; None is left out.
    """
    return max((abs(end) for end in ends if end is not None), default=0.0) or 1.0


def interval_svg(
    mean: float | None, low: float | None, high: float | None, half_width: float
) -> str:
    """Draw an interval on a line whose middle is zero.

    It is hidden from screen readers, for the numbers stand beside it.

    Args:
        mean: The difference seen; None if it is undefined.
        low: Lower end of the interval; None if there is none.
        high: Its upper end.
        half_width: Value at the right end of the line.

    Returns:
        An ``<svg>`` element that takes its colours from the page.
    """

    def place(value: float) -> float:
        return round(80 + 72 * max(-1.0, min(1.0, value / half_width)), 1)

    parts = ['<line class="zero" x1="80" y1="1" x2="80" y2="19"/>']
    if low is not None and high is not None:
        parts.append(f'<line class="bar" x1="{place(low)}" y1="10" x2="{place(high)}" y2="10"/>')
    if mean is not None:
        parts.append(f'<circle class="dot" cx="{place(mean)}" cy="10" r="4"/>')
    return (
        '<svg class="interval" viewBox="0 0 160 20" width="160" height="20" aria-hidden="true" '
        f'focusable="false">{"".join(parts)}</svg>'
    )
