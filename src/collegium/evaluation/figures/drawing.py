"""Draw figures with matplotlib, as SVG and PDF.

Equal figures give equal bytes: no date, no random ids. Lines differ in colour, marker and dashes,
and colours are the light ones of the report. Nothing that a run names is read as mathematics.
"""

from __future__ import annotations

import io
import logging
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from collegium.evaluation.figures.data import Axis, Boxes, Figure, Heat, Look, Panel, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

LINES = (
    "#0b6ea8", "#b54800", "#007a58", "#a63d7c", "#806000", "#5a4fc0", "#007c8c", "#5f656b",
    "#a32a2a", "#46791a",
)  # fmt: skip
"""The colours of lines: ``--line-0`` and so on of the report's style sheet, on light."""

PAPER, INK, SOFT, GRID, SHADE = "#ffffff", "#1c2024", "#565d65", "#dadee2", "#0072b2"
"""``--paper``, ``--ink``, ``--soft``, ``--line`` and ``--first`` of the style sheet, on light."""

_WIDE, _TALL = (
    [(-0.5, -0.2), (0.5, -0.2), (0.5, 0.2), (-0.5, 0.2), (-0.5, -0.2)],
    [(-0.2, -0.5), (0.2, -0.5), (0.2, 0.5), (-0.2, 0.5), (-0.2, -0.5)],
)
MARKERS: tuple[Any, ...] = ("o", "s", "D", "^", "v", "P", _WIDE, _TALL)
"""The markers, in the order of those of the report."""

WIDTHS = {1: 4.7, 2: 7.0, 3: 7.0}
"""Width of a figure in inches, by the number of panels in a row; 7 is two columns of a paper."""

_DASHES = (0, (4.0, 2.2))
_BY_COUNT = {1: 1, 2: 2, 4: 2}  # panels in a row; three of any other number
_LETTER, _ROW, _LEGEND, _KEY = 0.063, 0.115, 0.19, 0.55  # in inches
_SHADES = 20
_MARKED = 5  # markers of a line, about, if it has more points than `_ALL_MARKED`
_ALL_MARKED = 12
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": SOFT, "axes.facecolor": PAPER, "axes.grid": True,
    "axes.labelcolor": INK, "axes.labelsize": 8, "axes.linewidth": 0.6, "axes.spines.right": False,
    "axes.spines.top": False, "axes.titlesize": 8, "figure.facecolor": PAPER,
    "font.family": ["DejaVu Sans"], "font.size": 8, "grid.color": GRID, "grid.linewidth": 0.6,
    "legend.fontsize": 7.5, "pdf.fonttype": 42, "savefig.facecolor": PAPER, "svg.fonttype": "none",
    "svg.hashsalt": "collegium", "text.color": INK, "text.parse_math": False,
    "xtick.color": SOFT, "xtick.labelcolor": INK, "xtick.labelsize": 7.5, "ytick.color": SOFT,
    "ytick.labelcolor": INK, "ytick.labelsize": 7.5,
}  # fmt: skip

Format = Literal["svg", "pdf"]


def draw(figure: Figure, form: Format) -> bytes:
    """Draw a figure.

    Args:
        figure: What it shows.
        form: ``"svg"``, whose text stays text, or ``"pdf"``, which holds its fonts.

    Returns:
        The content of a file.
    """
    about = {"Title": figure.title, "Creator": "Collegium"}
    if form == "svg":
        about |= {"Date": None, "Description": figure.description}  # type: ignore[dict-item]
    else:
        about |= {"CreationDate": None, "Subject": figure.description}  # type: ignore[dict-item]
    content = io.BytesIO()
    with _matplotlib():
        compose(figure).savefig(content, format=form, metadata=about)
    return content.getvalue()


@contextmanager
def _matplotlib() -> Iterator[None]:
    """Use matplotlib in the style of this module, whatever a user has set, and in silence."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)  # where it caches the list of fonts
    try:
        import matplotlib as mpl

        with mpl.rc_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            mpl.rcdefaults()
            mpl.rcParams.update(_STYLE)
            yield
    finally:
        log.setLevel(level)


def compose(figure: Figure) -> Canvas:
    """Return a figure of matplotlib; the n-th series of the m-th panel has the gid "series-m-n".

    Args:
        figure: What it shows.
    """
    from matplotlib.figure import Figure as Canvas

    across = figure.across or _BY_COUNT.get(len(figure.panels), 3)
    down = -(-len(figure.panels) // across)
    width = WIDTHS[across]
    handles = _legend(figure)
    columns = _legend_columns([handle.get_label() for handle in handles], width)
    if any(panel.heat for panel in figure.panels):
        columns = len(handles)  # few and short
    rows = [
        _height(figure.panels[start : start + across], width / across)
        for start in range(0, len(figure.panels), across)
    ]
    room = _LEGEND * -(-len(handles) // columns) + 0.1 if handles else 0.0
    square = any(panel.guide == "diagonal" for panel in figure.panels)
    canvas = Canvas(
        figsize=(width, sum(rows) + room), layout="compressed" if square else "constrained"
    )
    grid = canvas.add_gridspec(down, across, height_ratios=rows)
    for number, panel in enumerate(figure.panels):
        axes = canvas.add_subplot(grid[divmod(number, across)])
        _draw_panel(axes, panel, number, width / across)
        left = figure.panels[number - 1] if number % across else None
        if left and (panel.y, _beside(panel)) == (left.y, _beside(left)):
            axes.set_ylabel("")
            axes.tick_params(labelleft=not _beside(panel))
    if handles:
        canvas.legend(
            handles=handles, loc="outside lower center", ncols=columns, frameon=False,
            handlelength=2.6, columnspacing=1.4,
        )  # fmt: skip
    return canvas


def _beside(panel: Panel) -> Sequence[str]:
    """Return the names beside a panel, which stand once in a row of panels."""
    return panel.heat.rows if panel.heat else panel.y.names


def _height(panels: Sequence[Panel], width: float) -> float:
    """Return the height of a row of panels, each of a width, in inches."""
    heights = [2.3]
    for panel in panels:
        if panel.guide == "diagonal":
            heights.append(width + 0.3)
        if panel.heat:
            heights.append(0.75 + _ROW * len(panel.heat.rows))
        if panel.boxes:
            heights.append(
                0.8 + 0.22 * max(len(panel.y.names), sum(len(b.boxes) for b in panel.boxes))
            )
    if all(panel.heat or panel.boxes for panel in panels):
        heights = heights[1:]
    return max(heights)


def _legend_columns(labels: Sequence[str], width: float) -> int:
    longest = max(map(len, labels), default=1)
    return max(1, min(len(labels), int(width / (_KEY + _LETTER * longest))))


def _legend(figure: Figure) -> list[Any]:
    """Return the entries of the legend, one for each name that does not stand beside its boxes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found: dict[str, Any] = {}
    for panel in figure.panels:
        every: list[Series | Boxes] = [*panel.series, *panel.boxes]
        for drawn in every:
            if isinstance(drawn, Boxes) and drawn.name in (panel.title, *panel.y.names):
                continue
            marked = {**_markers(drawn.look), **_line(drawn.look)}
            if isinstance(drawn, Series) and drawn.kind == "scatter":
                marked["linestyle"] = "none"
            found.setdefault(drawn.name, Line2D([], [], label=drawn.name, **marked))
    heat = next((panel.heat for panel in figure.panels if panel.heat), None)
    if heat:
        low, high = heat.limits
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            label = f"{low + share * (high - low):.3g}"
            label = f"{heat.title} {label}" if not share else label
            found[label] = Patch(
                facecolor=SHADE, alpha=_opacity(share), edgecolor=SOFT, linewidth=0.4, label=label
            )
    return list(found.values())


def _colour(look: Look) -> str:
    return LINES[look.colour % len(LINES)]


def _line(look: Look) -> dict[str, Any]:
    return {
        "color": _colour(look), "linewidth": 1.3, "linestyle": _DASHES if look.dashed else "-",
    }  # fmt: skip


def _markers(look: Look) -> dict[str, Any]:
    size = 4.0 if look.marker % len(MARKERS) < 6 else 5.5
    return {
        "marker": MARKERS[look.marker % len(MARKERS)], "markersize": size,
        "markerfacecolor": PAPER if look.dashed else _colour(look),
        "markeredgecolor": _colour(look), "markeredgewidth": 0.9 if look.dashed else 0.0,
    }  # fmt: skip


def _draw_panel(axes: Axes, panel: Panel, number: int, width: float) -> None:
    """Draw a panel into its frame; ``width`` is in inches."""
    axes.set_gid(f"panel-{number}")
    if panel.title:
        axes.set_title(textwrap.fill(panel.title, int((width - 0.5) / _LETTER)))
    if panel.heat:
        _draw_heat(axes, panel.heat, number)
    moved = [series for series in panel.series if series.kind in ("points", "settings")]
    room = 25.0 * width / max(1, len({x for series in moved for x in series.x}))
    step = min(4.0, room / len(moved)) if moved else 0.0
    axes.margins(x=0.05 + step * len(moved) / (100.0 * width))  # so that none is cut off
    for place, series in enumerate(panel.series):
        aside = 0.0
        if series in moved and len(moved) > 1:
            aside = step * (moved.index(series) - (len(moved) - 1) / 2)
        joined = not panel.x.names
        _DRAW[series.kind](axes, series, f"series-{number}-{place}", aside=aside, joined=joined)
    for place, boxes in enumerate(panel.boxes):
        _draw_boxes(axes, boxes, f"boxes-{number}-{place}")
    if panel.guide == "diagonal":
        axes.axline((0.0, 0.0), slope=1.0, color=SOFT, linewidth=0.8, linestyle=":", zorder=1)
    elif panel.guide == "zero":
        axes.axhline(0.0, color=SOFT, linewidth=0.8, linestyle=":", zorder=1)
    axes.set_xlabel(panel.x.label)
    axes.set_ylabel(panel.y.label)
    if not panel.heat:
        _set_axis(axes, "x", panel.x, width)
        _set_axis(axes, "y", panel.y, width)
    if panel.guide == "diagonal":
        axes.set_aspect("equal", adjustable="box")


def _set_axis(axes: Axes, which: Literal["x", "y"], axis: Axis, width: float) -> None:
    """Set scale, limits and ticks of an axis."""
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        MaxNLocator,
        NullLocator,
        ScalarFormatter,
    )

    drawn = axes.xaxis if which == "x" else axes.yaxis
    if axis.names:
        drawn.set_major_locator(FixedLocator(range(len(axis.names))))
        drawn.set_ticklabels(axis.names)
        if which == "x":
            _fit_names(axes, axis.names, width)
    elif axis.ticks or axis.scale == "log":
        (axes.set_xscale if which == "x" else axes.set_yscale)(axis.scale)
        if axis.ticks:
            drawn.set_major_locator(FixedLocator(axis.ticks))
        drawn.set_minor_locator(NullLocator())
        drawn.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        plain = ScalarFormatter(useOffset=False)
        plain.set_scientific(False)
        drawn.set_major_formatter(plain)
        drawn.set_major_locator(MaxNLocator(5 if which == "x" else 6, integer=axis.whole))
    if axis.limits:
        low, high = axis.limits
        ends = (high, low) if axis.names and which == "y" else (low, high)
        (axes.set_xlim if which == "x" else axes.set_ylim)(*ends)


def _fit_names(axes: Axes, names: Sequence[str], width: float) -> None:
    """Break names below an axis into lines, or turn them if a word is too long for that."""
    room = max(6, int((width - 0.7) / len(names) / _LETTER))
    broken = [textwrap.fill(name, room, break_long_words=False) for name in names]
    if all(len(line) <= room for text in broken for line in text.split("\n")):
        axes.xaxis.set_ticklabels(broken)
        return
    for label in axes.get_xticklabels():
        label.set(rotation=40, ha="right", rotation_mode="anchor")


def _draw_line(axes: Axes, series: Series, gid: str, **_: Any) -> None:
    """Draw a line with its band."""
    step = len(series.x) // _MARKED if len(series.x) > _ALL_MARKED else 1
    style = {
        **_markers(series.look),
        **_line(series.look),
        "markevery": (series.look.marker % step, step),
    }
    if series.low:
        across, up = (*series.x, *series.x[::-1]), (*series.low, *series.high[::-1])
        (band,) = axes.fill(across, up, color=_colour(series.look), alpha=0.16, linewidth=0)
        band.set_gid(f"{gid}-band")
    (line,) = axes.plot(series.x, series.y, **style)
    line.set_gid(gid)


def _draw_points(axes: Axes, series: Series, gid: str, *, aside: float, joined: bool) -> None:
    """Draw points with error bars, moved aside by some points of 1/72 inch."""
    from matplotlib.transforms import ScaledTranslation

    canvas = axes.get_figure(root=True)
    assert canvas is not None
    place = axes.transData + ScaledTranslation(aside / 72, 0.0, canvas.dpi_scale_trans)
    style = {**_markers(series.look), **_line(series.look)}
    if not joined:
        style["linestyle"] = "none"
    if series.kind == "settings":
        style |= {"markersize": 0.6 * style["markersize"], "alpha": 0.8}
    ranges = zip(series.x, series.low, series.high, strict=False)
    for number, (x, low, high) in enumerate(ranges):
        if math.isfinite(low) and math.isfinite(high):
            (bar,) = axes.plot(
                (x, x), (low, high), color=_colour(series.look), linewidth=1.0, transform=place,
                marker="_", markersize=4, markeredgewidth=1.0,
            )  # fmt: skip
            bar.set_gid(f"{gid}-bar-{number}")
    (line,) = axes.plot(series.x, series.y, transform=place, **style)
    line.set_gid(gid)
    ends = [value for value in (*series.y, *series.low, *series.high) if math.isfinite(value)]
    axes.update_datalim([(x, y) for x in series.x for y in (min(ends), max(ends))])
    axes.autoscale_view()


def _draw_settings(axes: Axes, series: Series, gid: str, *, aside: float, **_: Any) -> None:
    """Draw the points of single settings."""
    _draw_points(axes, series, gid, aside=aside, joined=False)


def _draw_scatter(axes: Axes, series: Series, gid: str, **_: Any) -> None:
    """Draw points alone, with error bars if they have some."""
    _draw_points(axes, series, gid, aside=0.0, joined=False)


def _draw_bars(axes: Axes, series: Series, gid: str, **_: Any) -> None:
    """Draw bars from zero."""
    bars = axes.bar(series.x, series.y, width=0.7, color=_colour(series.look), alpha=0.75)
    for number, bar in enumerate(bars):
        bar.set_gid(f"{gid}-bar-{number}")


_DRAW: dict[str, Any] = {
    "line": _draw_line, "points": _draw_points, "settings": _draw_settings,
    "scatter": _draw_scatter, "bars": _draw_bars,
}  # fmt: skip


def _draw_boxes(axes: Axes, boxes: Boxes, gid: str) -> None:
    """Draw horizontal boxes, with the marker of their method at the median."""
    colour = _colour(boxes.look)
    stats = [
        {
            "med": box.median, "q1": box.first, "q3": box.third, "whislo": box.low,
            "whishi": box.high, "fliers": box.beyond,
        }
        for box in boxes.boxes
    ]  # fmt: skip
    thin = {"color": colour, "linewidth": 1.0}
    parts = axes.bxp(
        stats, positions=[b.place for b in boxes.boxes], orientation="horizontal",
        widths=boxes.width, patch_artist=True, manage_ticks=False, whiskerprops=thin, capprops=thin,
        medianprops={"color": colour, "linewidth": 1.6},
        boxprops={"facecolor": colour, "alpha": 0.25, "edgecolor": colour, "linewidth": 1.0,
                  "linestyle": _DASHES if boxes.look.dashed else "-"},
        flierprops={"marker": "o", "markersize": 2.5, "markerfacecolor": "none",
                    "markeredgecolor": colour, "markeredgewidth": 0.7},
    )  # fmt: skip
    for kind, artists in parts.items():
        for number, artist in enumerate(artists):
            artist.set_gid(f"{gid}-{kind}-{number}")
    (middle,) = axes.plot(
        [b.median for b in boxes.boxes], [b.place for b in boxes.boxes], linestyle="none", zorder=4,
        **_markers(boxes.look),
    )  # fmt: skip
    middle.set_gid(gid)


def _opacity(share: float) -> float:
    return round(0.04 + 0.96 * share, 3)


def _draw_heat(axes: Axes, heat: Heat, number: int) -> None:
    """Draw a heat map: cells of one shade are one shape, in `_SHADES` shades."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    low, high = heat.limits
    shapes: dict[int, list[Any]] = {}
    for row, values in enumerate(heat.values):
        shades = [
            round(_SHADES * (value - low) / ((high - low) or 1.0)) if math.isfinite(value) else -1
            for value in values
        ]
        start = 0
        for shade, run in groupby(shades):
            end = start + len(list(run))
            if shade >= 0:
                corners = [(start, row), (end, row), (end, row + 1), (start, row + 1), (start, row)]
                shapes.setdefault(shade, []).append(Path(corners, closed=True))
            start = end
    for shade, paths in sorted(shapes.items()):
        patch = PathPatch(
            Path.make_compound_path(*paths), facecolor=SHADE, alpha=_opacity(shade / _SHADES),
            linewidth=0, antialiased=False,
        )  # fmt: skip
        patch.set_gid(f"heat-{number}-{shade}")
        axes.add_patch(patch)
    axes.grid(visible=False)
    axes.set_xlim(0, len(heat.columns))
    axes.set_ylim(len(heat.rows), 0)
    axes.spines[["left", "bottom"]].set_visible(False)
    step = max(1, -(-len(heat.columns) // 8))
    axes.set_xticks(
        [place + 0.5 for place in range(0, len(heat.columns), step)],
        [f"{heat.columns[place]:g}" for place in range(0, len(heat.columns), step)],
    )
    axes.set_yticks([place + 0.5 for place in range(len(heat.rows))], heat.rows, fontsize=7)
    axes.tick_params(length=0)
