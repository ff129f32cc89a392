"""The charts of the report: plotly figures, and small drawings of intervals as SVG.

Colours are Okabe and Ito's, of which the two that vanish on white or on black are left out; every
algorithm also has a marker of its own, and personal models are dashed. Backgrounds are transparent
and text is coloured by the page, so charts are legible on light and dark.
"""

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add
from statistics import fmean
from typing import TYPE_CHECKING, Any

from collegium.benchmark.significance import Interval
from collegium.benchmark.tables import method_name
from collegium.results import Row

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "hexagon")
_ABBREVIATIONS = {"assd": "ASSD", "auc": "AUC", "hd95": "HD95", "iou": "IoU"}
_GRID = "rgba(128,128,128,0.28)"
_COLUMNS = 2


def title(metric: str) -> str:
    """Return a metric as a heading, without unit: "Dice" for ``dice``, "HD95" for ``hd95_px``."""
    first, *rest = metric.removesuffix("_px").replace("_", " ").split(" ")
    first = _ABBREVIATIONS.get(first, first[:1].upper() + first[1:])
    return " ".join([first, *rest])


def style(algorithm: str, order: Sequence[str]) -> tuple[str, str]:
    """Return the colour and the marker of an algorithm, the same in all charts.

    Args:
        algorithm: Its label.
        order: The labels of all algorithms.

    Returns:
        A hex colour and the name of a plotly marker.
    """
    place = list(order).index(algorithm)
    return COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]


def learning_curves(
    rows: Iterable[Row], metric: str, split: str, order: Sequence[str]
) -> "Figure | None":
    """Draw a metric over rounds, one panel per site, one line per algorithm and model.

    A line is the mean over seeds.

    Args:
        rows: Rows of results; only rows of rounds are used.
        metric: Which metric.
        split: ``"val"`` or ``"train"``.
        order: Labels of the algorithms; gives colours and markers.

    Returns:
        The figure, or None where there is nothing to draw.
    """
    lines: dict[tuple[str, str, str], dict[int, list[float]]]
    lines = defaultdict(lambda: defaultdict(list))
    for row in rows:
        wanted = not row.case and row.split == split and row.metric == metric
        if wanted and row.value is not None and row.algorithm in order:
            lines[row.site, row.algorithm, row.model][row.round].append(row.value)
    if not lines:
        return None
    sites = sorted({site for site, _, _ in lines})
    figure = _panels(sites, metric)
    named: set[tuple[str, str]] = set()
    for key in sorted(lines, key=lambda key: (key[0], list(order).index(key[1]), key[2])):
        place = divmod(sites.index(key[0]), _COLUMNS)
        means = {number: fmean(values) for number, values in sorted(lines[key].items())}
        trace = _line(key[1], key[2], means, order) | {"showlegend": key[1:] not in named}
        figure.add_scatter(row=place[0] + 1, col=place[1] + 1, **trace)
        named.add(key[1:])
    return figure


def _line(
    algorithm: str, model: str, means: dict[int, float], order: Sequence[str]
) -> dict[str, Any]:
    colour, marker = style(algorithm, order)
    name = html.escape(method_name(algorithm, model))
    size = 5 if len(means) <= 40 else 3
    return {
        "x": list(means),
        "y": list(means.values()),
        "name": name,
        "legendgroup": name,
        "mode": "lines+markers",
        "line": {"color": colour, "width": 1.8, "dash": "dash" if model == "personal" else "solid"},
        "marker": {"symbol": marker, "size": size, "color": colour},
        "hovertemplate": "%{y:.3f}",
    }


def _panels(sites: Sequence[str], metric: str) -> "Figure":
    from plotly.subplots import make_subplots

    columns = min(_COLUMNS, len(sites))
    rows = -(-len(sites) // columns)
    height = 100 + 240 * rows
    figure = make_subplots(
        rows, columns, subplot_titles=[html.escape(site) for site in sites],
        shared_xaxes="all", shared_yaxes="all", horizontal_spacing=0.04,
        vertical_spacing=min(0.1, 0.2 / rows),
    )  # fmt: skip
    _calm(figure, height)
    figure.update_xaxes(gridcolor=_GRID, zeroline=False, linecolor=_GRID)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False, linecolor=_GRID, tickformat=".2~f")
    figure.update_xaxes(title_text="round", title_font_size=13, row=rows)
    figure.update_yaxes(title_text=html.escape(title(metric)), title_font_size=13, col=1)
    figure.update_layout(hovermode="x unified")
    return figure


def _calm(figure: "Figure", height: int) -> None:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 62, "r": 12, "t": 34, "b": 96},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#6b6b6b"},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom",
                "x": 0, "xanchor": "left"},
        hoverlabel={"bgcolor": "#ffffff", "font": {"color": "#222222"}},
    )  # fmt: skip
    figure.update_annotations(font_size=14)


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of an algorithm, summed over sites, mean over seeds.

    Attributes:
        algorithm: Its label.
        up: Bytes that left the sites.
        down: Bytes that came to them.
        seconds: Seconds that the sites worked.
        up_round: Bytes that left the sites in a round, mean over rounds.
        down_round: Bytes that came to them in a round, mean over rounds.
    """

    algorithm: str
    up: float
    down: float
    seconds: float
    up_round: float
    down_round: float

    @property
    def name(self) -> str:
        """The algorithm as a reader calls it."""
        return method_name(self.algorithm, "")


def count_traffic(rows: Iterable[Row], order: Sequence[str]) -> list[Traffic]:
    """Count what each algorithm sent: round by round, and in total where case rows say more.

    Args:
        rows: Rows of results.
        order: Labels of the algorithms.

    Returns:
        One entry per algorithm that has trained.
    """
    rounds: dict[tuple[str, int], set[int]] = defaultdict(set)
    sums: dict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    totals: dict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in rows:
        numbers = [row.bytes_up, row.bytes_down, row.seconds]
        key = (row.algorithm, row.seed, row.site)
        if row.case:
            totals[key] = list(map(max, totals[key], numbers))
        elif row.metric == "loss" and row.split == "train":
            rounds[key[:2]].add(row.round)
            sums[key] = list(map(add, sums[key], numbers))
    found = []
    for label in order:
        runs = []
        for run in sorted(key for key in rounds if key[0] == label):
            sites = [key for key in sums if key[:2] == run]
            whole = [sum(max(sums[key][i], totals[key][i]) for key in sites) for i in range(3)]
            per_round = [sum(sums[key][i] for key in sites) / len(rounds[run]) for i in range(2)]
            runs.append(whole + per_round)
        if runs:
            found.append(Traffic(label, *map(fmean, zip(*runs, strict=True))))
    return found


def traffic(totals: Sequence[Traffic]) -> "Figure | None":
    """Draw the bytes that each algorithm sent and received, as horizontal bars.

    Args:
        totals: What was counted.

    Returns:
        The figure, or None where nothing was sent.
    """
    if not any(total.up or total.down for total in totals):
        return None
    from plotly.graph_objects import Figure

    figure = Figure()
    names = [html.escape(total.name) for total in totals]
    sent, received = [total.up for total in totals], [total.down for total in totals]
    bars = (("left the sites", COLOURS[0], sent), ("came to the sites", COLOURS[5], received))
    for name, colour, values in bars:
        figure.add_bar(
            y=names, x=[value / 1e6 for value in values], name=name, orientation="h",
            marker_color=colour, text=[size(value) for value in values],
            textposition="outside", cliponaxis=False, hovertemplate="%{y}: %{x:.2f} MB",
        )  # fmt: skip
    _calm(figure, 110 + 52 * len(totals))
    figure.update_layout(barmode="group", bargap=0.35, margin={"l": 110, "t": 12, "b": 84, "r": 80})
    figure.update_yaxes(autorange="reversed", automargin=True, ticks="")
    figure.update_xaxes(gridcolor=_GRID, zeroline=False, title_text="MB", title_font_size=13)
    return figure


def size(count: float | None) -> str:
    """Return bytes as a reader counts them, e.g. "1.2 MB"."""
    if count is None:
        return "\u2013"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def reach(intervals: Iterable[Interval]) -> float:
    """Return how far from zero the intervals reach: the half width of their common scale."""
    ends = [
        abs(end)
        for interval in intervals
        for end in (interval.mean, interval.low, interval.high)
        if end is not None
    ]
    return max(ends, default=0.0) or 1.0


def interval_svg(interval: Interval, half_width: float) -> str:
    """Draw an interval on a line whose middle is zero.

    It is hidden from screen readers, for the numbers stand beside it.

    Args:
        interval: What to draw.
        half_width: Value at the right end of the line.

    Returns:
        An ``<svg>`` element that takes its colours from the page.
    """

    def place(value: float) -> float:
        return round(80 + 72 * max(-1.0, min(1.0, value / half_width)), 1)

    parts = ['<line class="zero" x1="80" y1="1" x2="80" y2="19"/>']
    if interval.low is not None and interval.high is not None:
        ends = place(interval.low), place(interval.high)
        parts.append(f'<line class="bar" x1="{ends[0]}" y1="10" x2="{ends[1]}" y2="10"/>')
    if interval.mean is not None:
        parts.append(f'<circle class="dot" cx="{place(interval.mean)}" cy="10" r="4"/>')
    return (
        '<svg class="interval" viewBox="0 0 160 20" width="160" height="20" aria-hidden="true" '
        f'focusable="false">{"".join(parts)}</svg>'
    )
