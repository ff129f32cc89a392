"""The drawings of an assessment: how different the sites are.

Drawings are SVG without scripts, in the colours of the page, so that they are legible on light and
dark; each has a text alternative.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.evaluation.report.plots import ticks

WIDTH, HEIGHT, MARGIN = 440.0, 300.0, 54.0
"""Size of a network in pixels, and the space that is kept for labels."""

CLOSEST = 52.0
"""Pixels that two nodes of a network are kept apart."""

LEFT, RIGHT, ROW = 132.0, 700.0, 30.0
"""Where a strip begins and ends, and how high a site's row is, in pixels."""

Array = NDArray[np.float64]


def short(value: float) -> str:
    """Return a number with about three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def heat(matrix: Sequence[Sequence[float]], top: float = 0.0) -> list[list[dict[str, Any]]]:
    """Return the cells of a heat map: text, shade in percent, and whether the shade is deep.

    Args:
        matrix: distances.
        top: the distance of the deepest shade; by default the largest there is.
    """
    highest = top or max((value for row in matrix for value in row), default=0.0) or 1.0
    return [
        [
            {"text": short(v), "shade": round(88 * v / highest), "deep": v > 0.55 * highest}
            for v in row
        ]
        for row in matrix
    ]


def network_svg(geometry: Mapping[str, Any]) -> str:
    """Draw sites as points whose distances on paper follow their distances, nearest ones joined.

    Args:
        geometry: a `collegium.diagnostics.assessment.findings.Geometry` as plain data.

    Returns:
        An ``<svg>`` element.
    """
    sites = geometry["sites"]
    places = dict(zip(sites, layout(np.array(geometry["matrix"])), strict=True))
    groups = geometry["clusters"].get("recommended", [sites])
    parts = []
    for first, second in geometry["edges"]:
        (x1, y1), (x2, y2) = places[first], places[second]
        parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for site in sites:
        x, y = places[site]
        number = next(index for index, members in enumerate(groups) if site in members)
        if site == geometry["most_distant"]:
            parts.append(f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="15"/>')
        shape = f'cx="{x:.1f}" cy="{y:.1f}" r="9"'
        parts.append(f'<circle class="node group-{number}" {shape}/>')
        parts.append(f'<text x="{x:.1f}" y="{y - 20:.1f}">{html.escape(site)}</text>')
    pairs = ", ".join(f"{first} with {second}" for first, second in geometry["edges"])
    joined = f"joined are {pairs}" if pairs else "none are joined"
    label = html.escape(f"Network of the sites by {geometry['made_of']}; {joined}.")
    ys = [y for _, y in places.values()]
    top, height = min(ys) - 42, max(ys) - min(ys) + 66
    return (
        f'<svg class="network" viewBox="0 {top:.0f} {WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def layout(matrix: Array) -> Array:
    """Return a place in the drawing for every site: classical scaling, then pushed apart.

    Args:
        matrix: (N, N) distances.

    Returns:
        (N, 2) pixels.
    """
    count = len(matrix)
    centre = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-centre @ ((matrix + matrix.T) / 2) ** 2 @ centre / 2)
    places = np.zeros((count, 2))
    for axis, index in enumerate(range(count - 1, max(count - 3, -1), -1)):
        direction = vectors[:, index] * np.sign(vectors[np.abs(vectors[:, index]).argmax(), index])
        places[:, axis] = direction * np.sqrt(max(values[index], 0.0))
    room = np.array([WIDTH, HEIGHT]) - 2 * MARGIN
    reach = np.ptp(places, axis=0)
    used = reach > 1e-9 * max(reach.max(), 1e-300)
    scale = (room[used] / reach[used]).min() if used.any() else 0.0
    middle = (places.max(0) + places.min(0)) / 2
    return _pushed_apart((places - middle) * scale + np.array([WIDTH, HEIGHT]) / 2)


def _pushed_apart(places: Array) -> Array:
    """Move nodes that would cover each other, the first to the left of the second."""
    for _ in range(60):
        for i in range(len(places)):
            for j in range(i):
                gap = places[i] - places[j]
                length = float(np.hypot(*gap))
                if length < CLOSEST:
                    step = gap / length if length > 1e-6 else np.array([1.0, 0.0])
                    places[i] += step * (CLOSEST - length) / 2
                    places[j] -= step * (CLOSEST - length) / 2
    low, high = np.full(2, MARGIN / 2), np.array([WIDTH, HEIGHT]) - MARGIN / 2
    return np.clip(places, low, high)


def strips_svg(column: Mapping[str, Any]) -> str:
    """Draw the values of one quantity, a row per site: cases, middle half and median.

    Args:
        column: a `collegium.diagnostics.assessment.findings.Column` as plain data.

    Returns:
        An ``<svg>`` element.
    """
    levels = {site: _levels(values) for site, values in column["told"].items()}
    low, high = min(row[0] for row in levels.values()), max(row[-1] for row in levels.values())
    bottom = ROW * len(levels) + 8

    def place(value: float) -> float:
        return LEFT + 8 + (RIGHT - LEFT - 16) * (value - low) / ((high - low) or 1.0)

    parts = []
    for tick in ticks(low, high):
        x = place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{bottom:.0f}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15:.0f}">{short(tick)}</text>')
    for number, (site, values) in enumerate(column["told"].items()):
        parts += _strip(site, values, 8 + ROW * (number + 0.5), place)
    medians = ", ".join(f"{site} {short(row[2])}" for site, row in levels.items())
    label = html.escape(f"{column['name']} in {column['unit']}; medians: {medians}.")
    return (
        f'<svg class="strips" viewBox="0 0 {RIGHT:.0f} {bottom + 22:.0f}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def _strip(site: str, values: Any, y: float, place: Callable[[float], float]) -> list[str]:
    """Return the elements of one site's row."""
    _, quarter, median, three, _ = map(place, _levels(values))
    width = max(three - quarter, 1.0)
    parts = [
        f'<text class="site" x="{LEFT - 10:.0f}" y="{y + 4:.1f}">{html.escape(site)}</text>',
        f'<rect class="half" x="{quarter:.1f}" y="{y - 9:.1f}" width="{width:.1f}" height="18"/>',
    ]
    cases = values if isinstance(values, list) else []
    parts += [f'<circle class="case" cx="{place(v):.1f}" cy="{y:.1f}" r="3.5"/>' for v in cases]
    ends = f'x1="{median:.1f}" y1="{y - 11:.1f}" x2="{median:.1f}" y2="{y + 11:.1f}"'
    return [*parts, f'<line class="median" {ends}/>']


def _levels(values: Any) -> list[float]:
    """Return minimum, quartiles and maximum, of values or of a summary's evenly filled bins."""
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    if isinstance(values, list):
        return [float(level) for level in np.quantile(values, shares)]
    counts = np.asarray(values["counts"], np.float64)
    reached = np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum()
    return [float(level) for level in np.interp(shares, reached, values["edges"])]
