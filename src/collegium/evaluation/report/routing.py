"""Summaries of adaptations at sites outside: costs, losses and routing coefficients."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from collegium.evaluation.report.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MARKERS,
    RIGHT,
    TOP,
    WIDTH,
    ChartLine,
    Limits,
    axes,
    limits,
    ticks,
)
from collegium.evaluation.scores import method_name, position
from collegium.evaluation.wording import number

Content = Mapping[str, Any]
"""The content of an ``account.json``."""

MOST_NUMBERS = 16
"""Of layers below the chart; if there are more layers, some go without."""


@dataclass(frozen=True)
class AdaptationSummary:
    """The adaptations of one algorithm's models by one adapter at one site, over seeds.

    Attributes:
        site: Name of the site.
        name: Algorithm and adapter as a reader calls them.
        seeds: The seeds.
        sources: Names of the models that it used.
        cases: Cases of the site.
        steps: Steps of the optimiser, mean over seeds.
        seconds: That it took, mean over seeds.
        notes: What else to know, each note once.
        losses: A line for each loss of the lowest seed; empty with fewer than two steps.
        chosen: The step whose model predicts, of the lowest seed; None if none was chosen.
        routes: The coefficients; None if the adapter has none.
    """

    site: str
    name: str
    seeds: tuple[int, ...]
    sources: tuple[str, ...]
    cases: int
    steps: float
    seconds: float
    notes: tuple[str, ...]
    losses: tuple[ChartLine, ...]
    chosen: int | None
    routes: RoutingCoefficients | None

    @property
    def frame(self) -> Limits:
        """The limits of a chart of the losses."""
        return limits(self.losses, warm_up=0.0)


@dataclass(frozen=True)
class RoutingCoefficients:
    """The coefficients of a routed network, mean over seeds.

    Attributes:
        layers: Names of the layers, in the order of the network.
        sources: Names of the models.
        values: A row for each layer, a column for each source.
        deviations: As the values, their standard deviations over cases; empty if the account is
            older than they are, as are the other two.
        variation: By layer, the mean over cases of the relative distance of a case's weights from
            the equal mix.
        variation_deviation: By layer, its standard deviation over cases.
    """

    layers: tuple[str, ...]
    sources: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    deviations: tuple[tuple[float, ...], ...] = ()
    variation: tuple[float, ...] = ()
    variation_deviation: tuple[float, ...] = ()

    @property
    def means(self) -> tuple[float, ...]:
        """Of each source, the mean over layers."""
        return tuple(map(fmean, zip(*self.values, strict=True)))

    @property
    def favourite(self) -> str:
        """The source with the largest mean."""
        return self.sources[max(range(len(self.sources)), key=self.means.__getitem__)]

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest coefficient."""
        every = [value for row in self.values for value in row]
        return min(every), max(every)

    @property
    def varied(self) -> list[tuple[float, float]]:
        """Of each layer, the mean of the weight variation and its deviation, in percent."""
        pairs = zip(self.variation, self.variation_deviation, strict=True)
        return [(100 * mean, 100 * deviation) for mean, deviation in pairs]


def gather_adaptations(
    accounts: Iterable[Content], order: Sequence[str]
) -> list[AdaptationSummary]:
    """Summarise the accounts of all seeds.

    Args:
        accounts: The accounts, see `collegium.evaluation.timing.read_accounts`.
        order: Labels of the algorithms in the order wanted.

    Returns:
        By site, then algorithm and adapter.
    """
    groups: dict[tuple[str, str, str], list[Content]] = defaultdict(list)
    for account in accounts:
        adapter = account["adapter"]
        label = str(adapter.get("label") or adapter["name"])
        groups[account["site"], account["algorithm"], label].append(account)
    keys = sorted(groups, key=lambda key: (key[0], position(key[1:], order)))
    return [_gather(key, sorted(groups[key], key=lambda found: found["seed"])) for key in keys]


def _gather(key: tuple[str, str, str], found: Sequence[Content]) -> AdaptationSummary:
    first = found[0]
    return AdaptationSummary(
        site=key[0],
        name=method_name(key[1], key[2], "outside"),
        seeds=tuple(account["seed"] for account in found),
        sources=tuple(first["sources"]),
        cases=first["cases"],
        steps=fmean(account["steps"] for account in found),
        seconds=fmean(account["seconds"] for account in found),
        notes=tuple(dict.fromkeys(note for account in found for note in account["notes"])),
        losses=loss_lines(first["losses"]),
        chosen=first.get("chosen"),
        routes=mean_routes([account.get("coefficients") for account in found]),
    )


def loss_lines(rows: Sequence[Mapping[str, float]]) -> tuple[ChartLine, ...]:
    """Return a line per loss; steps that were taken for several cases are averaged.

    Args:
        rows: The losses of an account.

    Returns:
        Lines of two steps or more; a term that is the total itself has none.
    """
    lines: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for name, value in row.items():
            if name != "step" and value is not None:
                lines[name][int(row["step"])].append(value)
    return tuple(
        ChartLine(name, place, False, {step: fmean(points[step]) for step in sorted(points)})
        for place, (name, points) in enumerate(lines.items())
        if len(points) > 1 and (name == "total" or points != lines.get("total"))
    )


def mean_routes(found: Sequence[Mapping[str, Any] | None]) -> RoutingCoefficients | None:
    """Return the mean over the seeds that have the same layers and sources.

    Args:
        found: The coefficients of accounts.

    Returns:
        The coefficients; None if there are none.
    """
    present = [entry for entry in found if entry and entry.get("values")]
    if not present:
        return None
    layers, sources = present[0]["layers"], present[0]["sources"]
    alike = [e for e in present if (e["layers"], e["sources"]) == (layers, sources)]
    spread = [entry for entry in alike if "variation" in entry]
    return RoutingCoefficients(
        tuple(layers),
        tuple(sources),
        tuple(_mean(rows) for rows in zip(*(e["values"] for e in alike), strict=True)),
        tuple(_mean(rows) for rows in zip(*(e["deviations"] for e in spread), strict=True)),
        _mean([e["variation"] for e in spread]),
        _mean([e["variation_deviation"] for e in spread]),
    )


def _mean(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The mean of each column."""
    return tuple(map(fmean, zip(*rows, strict=True)))


def shades(routes: RoutingCoefficients) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the cells of a heat map, from the palest for the smallest to the deepest.

    Args:
        routes: The coefficients.

    Returns:
        For each layer its name and its cells: text, shade in percent, and the text of the standard
        deviation, empty if none is known.
    """
    low, high = routes.range
    span = (high - low) or 1.0
    deviations = routes.deviations or [[None] * len(routes.sources)] * len(routes.layers)
    found = []
    for layer, row, spread in zip(routes.layers, routes.values, deviations, strict=True):
        texts = ["" if sd is None else number(sd) for sd in spread]
        cells = [
            {"text": number(v), "shade": round(88 * (v - low) / span), "deviation": text}
            for v, text in zip(row, texts, strict=True)
        ]
        found.append((layer, cells))
    return found


def variation_svg(routes: RoutingCoefficients, what: str) -> str:
    """Draw the weight variation over the layers, with a band of one standard deviation.

    Args:
        routes: The coefficients.
        what: Whose weights they are, for the text alternative.

    Returns:
        An ``<svg>`` element; empty if fewer than two layers have a variation.
    """
    layers = len(routes.varied)
    if layers < 2:
        return ""
    high = 1.05 * max(map(sum, routes.varied)) or 1.0

    def place(layer: float, value: float) -> tuple[float, float]:
        across = (layer - 1) / (layers - 1)
        return LEFT + (RIGHT - LEFT) * across, BOTTOM - (BOTTOM - TOP) * value / high

    def path(values: Iterable[float]) -> list[str]:
        places = (place(layer, value) for layer, value in enumerate(values, 1))
        return [f"{x:.1f},{y:.1f}" for x, y in places]

    middle = path(mean for mean, _ in routes.varied)
    upper = path(mean + sd for mean, sd in routes.varied)
    lower = path(max(0.0, mean - sd) for mean, sd in routes.varied)
    marks = "".join(f"M{point.replace(',', ' ')}{MARKERS[0]}" for point in middle)
    numbered = range(1, layers + 1, -(-layers // MOST_NUMBERS))
    across = [(place(layer, 0.0)[0], str(layer)) for layer in numbered]
    up = [(place(1, value)[1], value) for value in ticks(0.0, high)]
    frame = axes(across, up, ("layer", "weight variation (%)"))
    most, layer = max(
        (mean, layer) for layer, (mean, _) in zip(routes.layers, routes.varied, strict=True)
    )
    label = f"Weight variation of {what} over {layers} layers; largest at {layer}, {most:.3g} %."
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(label)}">{frame}<g class="line c0">'
        f'<path fill-opacity=".2" d="M{" ".join(upper + lower[::-1])}z"/>'
        f'<polyline points="{" ".join(middle)}"/><path d="{marks}"/></g></svg>'
    )
