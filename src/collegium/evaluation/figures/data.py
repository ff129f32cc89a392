"""What a figure shows, as plain data: every number that is drawn, and what it is.

The families (`curves`, `sweeps` and so on) make figures from the results of a run, and `drawing`
draws them. Nothing is computed in between, so a figure in a report and in a paper is the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np

Kind = Literal["line", "points", "settings", "scatter", "bars"]
"""A line with a band; points with error bars, joined by a line; small ones, not joined; points
alone; bars."""

Numbers = tuple[float, ...]

_MOST_SAID = 8  # points of a series in the text alternative
_MOST_NAMED = 12  # series of a panel there


@dataclass(frozen=True)
class Look:
    """Colour, marker and dashes, which tell a series from the others without colour too.

    Attributes:
        colour: Number of its colour, that of its algorithm in the report.
        marker: Number of its marker.
        dashed: Whether its line is dashed, as those of personal models are.
    """

    colour: int
    marker: int
    dashed: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one method.

    Attributes:
        name: What it is, for a reader; series of one figure with one name share their look.
        look: How it is drawn.
        kind: What is drawn.
        x: (n,) the values on the horizontal axis.
        y: (n,) the values on the vertical axis.
        low: (n,) lower ends of the band or the error bars, NaN where there is none; or none at all.
        high: (n,) their upper ends.
    """

    name: str
    look: Look
    kind: Kind
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()


@dataclass(frozen=True)
class Box:
    """The distribution of some scores (Tukey, 1977).

    Attributes:
        place: Where it stands on the axis of names, whose n-th name is at n.
        low: The least score within 1.5 interquartile ranges of the box.
        first: The first quartile, by linear interpolation.
        median: The median.
        third: The third quartile.
        high: The largest score within 1.5 interquartile ranges of the box.
        beyond: The scores farther off, in order.
        count: How many scores there are; 0 if unknown.
    """

    place: float
    low: float
    first: float
    median: float
    third: float
    high: float
    beyond: Numbers = ()
    count: int = 0


@dataclass(frozen=True)
class Boxes:
    """The boxes of one method.

    Attributes:
        name: What it is, for a reader.
        look: How it is drawn.
        boxes: The boxes.
        width: How wide they are, in units of their axis.
    """

    name: str
    look: Look
    boxes: tuple[Box, ...]
    width: float = 0.6


@dataclass(frozen=True)
class Heat:
    """A heat map.

    Attributes:
        rows: The names of the rows, the first on top.
        columns: (columns,) the numbers of the columns, such as rounds.
        values: By row, (columns,) the values; NaN where there is none.
        title: What the values are.
        limits: The values of the palest and of the deepest shade.
    """

    rows: tuple[str, ...]
    columns: Numbers
    values: tuple[Numbers, ...]
    title: str
    limits: tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        title: What it counts.
        unit: In which unit; empty for a pure number.
        names: The names that stand at 0, 1 and so on, in place of numbers.
        scale: Whether it is logarithmic.
        limits: Where it begins and ends; None: where the numbers do.
        ticks: Where numbers stand; none: where it suits.
        whole: Whether it has whole numbers only.
    """

    title: str
    unit: str = ""
    names: tuple[str, ...] = ()
    scale: Literal["linear", "log"] = "linear"
    limits: tuple[float, float] | None = None
    ticks: Numbers = ()
    whole: bool = False

    @property
    def label(self) -> str:
        """The title with its unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclass(frozen=True)
class Panel:
    """One frame with its axes.

    Attributes:
        title: What tells it from the other panels; empty if there is one only.
        x: The horizontal axis.
        y: The vertical axis.
        series: Lines and points.
        boxes: Box plots, which lie along the horizontal axis.
        heat: A heat map, or None.
        guide: A line to compare with: where both axes are equal, or where y is zero.
    """

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    boxes: tuple[Boxes, ...] = ()
    heat: Heat | None = None
    guide: Literal["", "diagonal", "zero"] = ""


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        name: Its name in a command and of its files.
        title: What it shows, in a few words.
        caption: What lines, points, bands and intervals are, in sentences.
        panels: Its frames, by rows.
        in_report: Whether it stands in the report too; of several metrics one does.
        across: How many panels stand in a row; 0: as many as suits.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    in_report: bool = True
    across: int = 0

    @property
    def description(self) -> str:
        """A text alternative: what is drawn, panel by panel, with the numbers that tell most."""
        return " ".join([f"{self.title}.", *(_describe(panel) for panel in self.panels)])


def _describe(panel: Panel) -> str:
    """Return a panel as a sentence."""
    parts = [_say_series(series, panel.x) for series in panel.series]
    parts += [_say_boxes(boxes, panel.y) for boxes in panel.boxes]
    if len(parts) > _MOST_NAMED:
        parts = [*parts[:_MOST_NAMED], f"and {len(parts) - _MOST_NAMED} more"]
    if panel.heat:
        known = [value for row in panel.heat.values for value in row if isfinite(value)]
        parts.append(
            f"{panel.heat.title} of {len(panel.heat.rows)} rows, from {min(known):.3g} to "
            f"{max(known):.3g}"
        )
    axes = f"{panel.y.label} over {panel.x.label}"
    if panel.boxes:
        axes = f"{panel.x.label} by {panel.y.label or 'method'}"
    parts = ["; ".join(parts)] if panel.heat else [axes, "; ".join(parts)]
    return ": ".join([panel.title, *parts] if panel.title else parts) + "."


def _say_series(series: Series, x: Axis) -> str:
    if series.kind == "scatter":
        return f"{series.name}, {len(series.x)} points"
    points = list(zip(series.x, series.y, strict=True))
    shown = points[-1:] if series.kind == "line" or len(points) > _MOST_SAID else points
    at = [f"{y:.3g} at {x.names[int(where)] if x.names else f'{where:g}'}" for where, y in shown]
    return f"{series.name} {', '.join(at)}"


def _say_boxes(boxes: Boxes, y: Axis) -> str:
    said = [f"{y.names[round(box.place)]} median {box.median:.3g}" for box in boxes.boxes]
    return f"{boxes.name} {', '.join(said)}"


def box_of(place: float, values: Numbers) -> Box:
    """Return the box of some scores.

    Args:
        place: Where it stands.
        values: (n,) the scores, at least one, all defined.
    """
    scores = np.sort(np.asarray(values, dtype=np.float64))
    first, median, third = np.percentile(scores, [25, 50, 75])
    reach = 1.5 * (third - first)
    within = (scores >= first - reach) & (scores <= third + reach)
    kept = scores[within]
    return Box(
        place,
        min(float(kept[0]), float(first)),
        float(first),
        float(median),
        float(third),
        max(float(kept[-1]), float(third)),
        tuple(scores[~within].tolist()),
        len(scores),
    )
