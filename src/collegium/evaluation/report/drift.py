"""The page of a drift: how far features move in training, in one file that opens offline.

It takes the content of ``drift.json``. Drawings are SVG without scripts, in the colours of the
page; each has a text alternative.
"""

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

from collegium.evaluation.report import assessment
from collegium.evaluation.report.plots import (
    COLOURS,
    MARKERS,
    ChartLine,
    Limits,
    line_chart,
)
from collegium.evaluation.report.rendering import render_page

LARGEST = 2.0
"""The largest proxy A-distance there is: the deepest shade of every matrix."""

FRAME: Limits = (-0.1, LARGEST + 0.1)
"""Of all charts: every distance there can be, and some air."""

WIDTH, HEIGHT, MARGIN = 460.0, 400.0, 14.0
"""Size of a map, and the space around its points, in units of the drawing."""

Content = Mapping[str, Any]
"""Of ``drift.json``, or of one of its moments."""


def render(data: Content) -> str:
    """Return the page.

    Args:
        data: the content of ``drift.json``.

    Returns:
        HTML that refers to nothing outside itself.
    """
    by_algorithm = {
        label: [moment for moment in data["moments"] if moment["algorithm"] == label]
        for label in data["algorithms"]
    }
    content = {
        **data,
        "legend": [ChartLine(site, place, False, {}) for place, site in enumerate(data["sites"])],
        "panels": {label: lines(found, data["sites"]) for label, found in by_algorithm.items()},
        "by_algorithm": by_algorithm,
        "overview": [row(moment) for moment in data["moments"]],
    }
    return render_page(
        "drift.html.j2",
        content,
        filters={"heat": partial(assessment.heat, top=LARGEST)},
        drawings={"drift": drift_svg, "features": map_svg},
    )


def lines(moments: Sequence[Content], sites: Sequence[str]) -> list[ChartLine]:
    """Return a line over rounds for every site that was measured: the drift of its features.

    Args:
        moments: of one algorithm, by round.
        sites: all sites; gives colours and markers.
    """
    found = []
    for place, site in enumerate(sites):
        points = {m["round"]: m["drift"][site] for m in moments if site in m["drift"]}
        if points:
            found.append(ChartLine(site, place, False, points))
    return found


def row(moment: Content) -> dict[str, Any]:
    """Return what a moment comes to over the sites.

    Args:
        moment: one algorithm in one round.

    Returns:
        Algorithm, round, mean, smallest and largest drift, and the mean distance between two sites,
        which is None if there is no second site.
    """
    drift, matrix = moment["drift"].values(), moment["between"]
    between = [matrix[i][j] for i, j in combinations(range(len(matrix)), 2)]
    return {
        "algorithm": moment["algorithm"],
        "round": moment["round"],
        "mean": fmean(drift),
        "smallest": min(drift),
        "largest": max(drift),
        "between": fmean(between) if between else None,
    }


def drift_svg(drawn: Sequence[ChartLine], label: str) -> str:
    """Draw the drift of one algorithm, in the frame that all of them share.

    Args:
        drawn: the lines, see `lines`.
        label: of the algorithm.

    Returns:
        An ``<svg>`` element.
    """
    chart = line_chart(drawn, f"Drift under {label}", FRAME, axis="proxy A-distance")
    return chart.replace(">\u22120<", ">0<")  # the tick below which the frame has some air


def map_svg(moment: Content, sites: Sequence[str], name: str) -> str:
    """Draw the map of a moment: a point per window and model, in the look of its site.

    Args:
        moment: one algorithm in one round; it has points.
        sites: all sites; gives colours and markers.
        name: of the drawing, which no other element of the page has.

    Returns:
        An ``<svg>`` element.
    """
    points = moment["points"]
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for point, (x, y) in zip(points, _places(points), strict=True):
        number = list(sites).index(point["site"])
        shape = MARKERS[number % len(MARKERS)]
        groups[number, point["kind"]].append(f"M{x:.1f} {y:.1f}{shape}")
    drawn = "".join(
        f'<path class="{kind} c{number % COLOURS}" d="{"".join(marks)}"/>'
        for (number, kind), marks in groups.items()
    )
    counts = ", ".join(
        f"{sites[number]} {len(marks)}"
        for (number, kind), marks in groups.items()
        if kind == "global"
    )
    drifts = (f"{site} {assessment.short(value)}" for site, value in moment["drift"].items())
    title = html.escape(f"Map of the features of {moment['algorithm']}, round {moment['round']}")
    description = html.escape(
        f"Windows by site: {counts}; each is there twice, filled under the model received and "
        f"hollow under the model trained. Drift: {', '.join(drifts)}."
    )
    return (
        f'<svg class="map" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{title}</title>'
        f'<desc id="{name}-desc">{description}</desc>{drawn}</svg>'
    )


def _places(points: Sequence[Content]) -> list[tuple[float, float]]:
    """Return where points lie in the drawing, both axes in one scale and the middle in its middle.

    They lie apart as far as the drawing allows.
    """
    xs, ys = [p["x"] for p in points], [p["y"] for p in points]
    room = (max(xs) - min(xs)) / (WIDTH - 2 * MARGIN), (max(ys) - min(ys)) / (HEIGHT - 2 * MARGIN)
    scale = 1 / (max(room) or 1.0)
    middle = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
    return [
        (WIDTH / 2 + scale * (x - middle[0]), HEIGHT / 2 - scale * (y - middle[1]))
        for x, y in zip(xs, ys, strict=True)
    ]
