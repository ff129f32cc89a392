"""What adapters did at sites outside: their costs, their losses and their routing coefficients."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from collegium.benchmark.scores import position
from collegium.benchmark.tables import number, scored_name
from collegium.report.plots import Limits, Series, limits

Content = Mapping[str, Any]
"""The content of an ``account.json``."""


@dataclass(frozen=True)
class Adaptation:
    """What one adapter did with one algorithm's models at one site, over seeds.

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
        chosen: The step whose model predicts, of the lowest seed; None where none was chosen.
        routes: The coefficients; None where the adapter has none.
    """

    site: str
    name: str
    seeds: tuple[int, ...]
    sources: tuple[str, ...]
    cases: int
    steps: float
    seconds: float
    notes: tuple[str, ...]
    losses: tuple[Series, ...]
    chosen: int | None
    routes: "Routes | None"

    @property
    def frame(self) -> Limits:
        """The limits of a chart of the losses."""
        return limits(self.losses, warm_up=0.0)


@dataclass(frozen=True)
class Routes:
    """Routing coefficients, mean over seeds.

    Attributes:
        layers: Names of the layers.
        sources: Names of the models.
        values: A row for each layer, a column for each source.
    """

    layers: tuple[str, ...]
    sources: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]

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


def gather_adaptations(accounts: Iterable[Content], order: Sequence[str]) -> list[Adaptation]:
    """Bring together the accounts of all seeds.

    Args:
        accounts: What was read.
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


def _gather(key: tuple[str, str, str], found: Sequence[Content]) -> Adaptation:
    first = found[0]
    return Adaptation(
        site=key[0],
        name=scored_name(key[1], key[2], "outside"),
        seeds=tuple(account["seed"] for account in found),
        sources=tuple(first["sources"]),
        cases=first["cases"],
        steps=fmean(account["steps"] for account in found),
        seconds=fmean(account["seconds"] for account in found),
        notes=tuple(dict.fromkeys(note for account in found for note in account["notes"])),
        losses=_losses(first["losses"]),
        chosen=first.get("chosen"),
        routes=_routes([account.get("coefficients") for account in found]),
    )


def _losses(rows: Sequence[Mapping[str, float]]) -> tuple[Series, ...]:
    """A line per loss; steps that were taken for several cases are averaged."""
    lines: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for name, value in row.items():
            if name != "step" and value is not None:
                lines[name][int(row["step"])].append(value)
    drawn = [
        Series(name, place, False, {step: fmean(values) for step, values in sorted(points.items())})
        for place, (name, points) in enumerate(lines.items())
    ]
    return tuple(line for line in drawn if len(line.points) > 1)


def _routes(found: Sequence[Mapping[str, Any] | None]) -> Routes | None:
    """The mean of the coefficients over the seeds that have the same layers and sources."""
    present = [entry for entry in found if entry and entry.get("values")]
    if not present:
        return None
    layers, sources = present[0]["layers"], present[0]["sources"]
    alike = [e["values"] for e in present if (e["layers"], e["sources"]) == (layers, sources)]
    values = tuple(tuple(map(fmean, zip(*rows, strict=True))) for rows in zip(*alike, strict=True))
    return Routes(tuple(layers), tuple(sources), values)


def shades(routes: Routes) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the cells of a heat map, from the palest for the smallest to the deepest.

    Args:
        routes: The coefficients.

    Returns:
        For each layer its name and its cells: text, and shade in percent.
    """
    low, high = routes.range
    span = (high - low) or 1.0
    return [
        (
            layer,
            [{"text": number(v), "shade": round(88 * (v - low) / span)} for v in row],
        )
        for layer, row in zip(routes.layers, routes.values, strict=True)
    ]
