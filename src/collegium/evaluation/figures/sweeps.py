"""Sweeps: scores, differences and bytes over the value that the settings of a run differ in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from numbers import Real
from statistics import fmean
from typing import Any

from collegium.core.text import byte_unit
from collegium.evaluation.comparisons import Comparison, ComparisonTable
from collegium.evaluation.figures.data import Axis, Figure, Look, Panel, Series
from collegium.evaluation.figures.source import FigureSource, suffix
from collegium.evaluation.scores import (
    WHERES,
    MethodKey,
    Where,
    final_scores,
    is_compared,
    method_name,
    rows_of,
)
from collegium.evaluation.tables import MethodTable, sweep_table
from collegium.evaluation.traffic import count_traffic
from collegium.evaluation.wording import name_in_sentence, title

NAN = float("nan")

LOG_FROM = 50.0
"""Values that are all positive and span this factor or more are on a logarithmic axis."""

Points = dict[str, tuple[float, float, float]]
"""Setting -> a value with the ends of its interval, NaN where there is none."""

_SHARED = (
    " Where several settings have one value, the line joins their means, and small points are the "
    "settings."
)
_ASIDE = " Points at one value stand a little beside each other, so that all can be seen."
_MISSING = object()


@dataclass(frozen=True)
class Swept:
    """The value that the settings of a run differ in.

    Attributes:
        axis: The axis of it.
        places: Setting -> where it stands on the axis.
    """

    axis: Axis
    places: Mapping[str, float]

    @property
    def shared(self) -> bool:
        """Whether several settings stand at one place."""
        return len(set(self.places.values())) < len(self.places)


def swept_value(config: Mapping[str, Any], settings: Sequence[str]) -> Swept:
    """Return what the settings of a run differ in, a number if it is a single one.

    It is a number if the keys whose values differ end alike and hold one number in each setting, as
    ``algorithms.2.tau`` and ``algorithms.3.tau``. Lists of sites outside count as the number of
    sites inside. Otherwise the settings stand side by side under their names.

    Args:
        config: The configuration of the experiment, as plain data.
        settings: The settings in the order wanted.
    """
    found = _number(_differing(config, settings), config)
    if found is None:
        axis = Axis("setting", names=tuple(settings), limits=(-0.5, len(settings) - 0.5))
        return Swept(axis, {name: float(place) for place, name in enumerate(settings)})
    name, numbers = found
    ticks = tuple(sorted(set(numbers)))
    wide = ticks[0] > 0 and ticks[-1] / ticks[0] >= LOG_FROM
    axis = Axis(name, scale="log" if wide else "linear", ticks=ticks)
    return Swept(axis, dict(zip(settings, numbers, strict=True)))


def _differing(config: Mapping[str, Any], settings: Sequence[str]) -> dict[str, list[Any]]:
    """Return the keys in which settings differ, and the value of each setting."""
    variations = config.get("variations") or {}
    given = [dict(_flat(variations.get(name) or {})) for name in settings]
    keys = dict.fromkeys(key for values in given for key in values)
    found = {key: [v.get(key, _value(config, key)) for v in given] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


def _flat(values: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with dots, and their values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", value


def _value(config: Any, key: str) -> Any:
    """Return the value of a key with dots."""
    found = config
    for part in key.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, Sequence) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            return _MISSING
    return found


def _number(
    differing: Mapping[str, Sequence[Any]], config: Mapping[str, Any]
) -> tuple[str, list[float]] | None:
    """Return the name and the numbers of what settings differ in; None if it is no number."""
    ends = {key.rpartition(".")[2] for key in differing}
    rows = list(zip(*differing.values(), strict=True))
    if len(ends) != 1 or any(value != row[0] for row in rows for value in row):
        return None
    values, sites = [row[0] for row in rows], _value(config, "federation.sites")
    if [*differing] == ["federation.outside"] and isinstance(sites, Mapping):
        inside = [float(len(sites) - len(outside)) for outside in values]
        return ("sites that train", inside) if len(set(inside)) > 1 else None
    if all(isinstance(value, Real) and not isinstance(value, bool) for value in values):
        return ends.pop().replace("_", " "), [float(value) for value in values]
    return None


def sweep_figures(source: FigureSource) -> Iterator[Figure]:
    """Yield a figure of each metric, inside and outside, and one of the bytes if they differ.

    ``sweep-<metric>[-outside]``: what the table of that name holds, beside it the differences from
    training alone, outside from the unadapted model, with the intervals of the verdicts.
    ``sweep-bytes``: what all sites sent and received.

    Args:
        source: The results of a run.
    """
    if not source.swept:
        return
    swept = swept_value(source.config, source.settings)
    for where in WHERES:
        for metric in final_scores(source.used, where=where)["metric"].unique().tolist():
            yield from _scores(source, swept, metric, where)
    yield from _bytes(source, swept)


def _scores(source: FigureSource, swept: Swept, metric: str, where: Where) -> Iterator[Figure]:
    """Yield the figure of a metric."""
    table = sweep_table(source.used, metric, source.order, where=where, settings=source.settings)
    score = Axis(title(metric), table.unit)
    means = tuple(_means(source, table, swept, where))
    if not means:
        return  # no setting has a defined score
    panels = [Panel("Average over sites", swept.axis, score, means)]
    caption = (
        f"Left: {name_in_sentence(metric)}, mean over the patients of each site and then over "
        f"{'sites' if where == 'inside' else 'sites outside'}; points are means over seeds, and "
        "bars one sample standard deviation over seeds to either side, absent with one seed."
    )
    compared = is_compared(metric)
    differences = tuple(_differences(source, swept, metric, where)) if compared else ()
    other = "training alone" if where == "inside" else "the unadapted model"
    if differences:
        panels.append(
            Panel(
                f"Difference from {other}", swept.axis, replace(score, title="difference"),
                differences, guide="zero",
            )
        )  # fmt: skip
        caption += (
            f" Right: the difference from {other}, averaged over sites; bars are 95 % intervals "
            "over patients and, with three trainings or more, over trainings, as in the tables, "
            "not corrected for how many there are; a site with too few patients leaves no bar."
        )
    else:
        caption = caption.removeprefix("Left: ").capitalize()
        panels = [replace(panels[0], title="")]
    place = "" if where == "inside" else " outside"
    yield Figure(
        f"sweep-{metric}" + suffix(place.strip()),
        f"{title(metric)}{place} over {swept.axis.title}",
        caption + _ASIDE + _SHARED * swept.shared,
        tuple(panels),
        in_report=metric == source.metric,
    )


def _means(
    source: FigureSource, table: MethodTable, swept: Swept, where: Where
) -> Iterator[Series]:
    """Yield the means of each method with one standard deviation to either side."""
    for _, cells in table.methods:
        key = cells[0].algorithm, cells[0].model
        points = {c.column: (c.mean, c.mean - c.sd, c.mean + c.sd) for c in cells}
        yield from _series(cells[0].method, source.look(key, where), swept, points)


def _differences(source: FigureSource, swept: Swept, metric: str, where: Where) -> Iterator[Series]:
    """Yield the differences of each method from the reference, with their intervals."""
    by_method: dict[MethodKey, Points] = {}
    for setting in source.settings:
        compare = source.compared.joining if where == "inside" else source.compared.adapting
        for found in _over_sites(compare(metric, setting)):
            v = found.verdict
            ends = (v.difference, v.low, v.high)
            numbers = tuple(NAN if end is None else float(end) for end in ends)
            by_method.setdefault(found.key, {})[setting] = numbers  # type: ignore[assignment]
    for key in by_method:
        name = method_name(*key, where)
        yield from _series(name, source.look(key, where), swept, by_method[key])


def _over_sites(table: ComparisonTable) -> Sequence[Comparison]:
    """Return the comparisons over all sites; of a single site, those at it."""
    sites = {found.verdict.site for found in table.by_site}
    return table.over_sites or (table.by_site if len(sites) == 1 else [])


def _series(name: str, look: Look, swept: Swept, points: Points) -> Iterator[Series]:
    """Yield a method's points in the order of the axis; of a shared place also their mean."""
    known = {s: numbers for s, numbers in points.items() if not isnan(numbers[0])}
    ordered = sorted(known, key=lambda setting: swept.places[setting])
    if not ordered:
        return
    at: dict[float, list[str]] = {}
    for setting in ordered:
        at.setdefault(swept.places[setting], []).append(setting)
    if swept.shared:
        means = tuple(fmean(known[setting][0] for setting in found) for found in at.values())
        yield Series(name, look, "points", tuple(at), means)
    for number in range(max(map(len, at.values()))):
        found = [settings[number] for settings in at.values() if number < len(settings)]
        x = tuple(swept.places[setting] for setting in found)
        y, low, high = zip(*(known[setting] for setting in found), strict=True)
        yield Series(name, look, "settings" if swept.shared else "points", x, y, low, high)


def _bytes(source: FigureSource, swept: Swept) -> Iterator[Figure]:
    """Yield the figure of bytes, unless they are the same in all settings."""
    sent: dict[str, dict[str, dict[str, float]]] = {"up": {}, "down": {}}
    for setting in source.settings:
        rows = source.results[source.results["variation"] == setting]
        for row in rows_of(count_traffic(rows, source.order)):
            for way, found in sent.items():
                found.setdefault(row.algorithm, {})[setting] = getattr(row, way)
    several = [values for found in sent.values() for values in found.values()]
    if all(len(set(values.values())) < 2 for values in several):
        return
    unit, size = byte_unit(max(max(values.values()) for values in several))
    panels = [
        Panel(name, swept.axis, Axis("bytes", unit), tuple(_totals(source, swept, sent[way], size)))
        for way, name in (("up", "Sent by the sites"), ("down", "Received by the sites"))
    ]
    yield Figure(
        "sweep-bytes",
        f"Bytes over {swept.axis.title}",
        "Bytes of a training as they crossed the border of the sites, all sites together; points "
        "are means over seeds and folds." + _SHARED * swept.shared,
        tuple(panels),
    )


def _totals(
    source: FigureSource, swept: Swept, totals: Mapping[str, Mapping[str, float]], size: int
) -> Iterator[Series]:
    """Yield the bytes of each algorithm, in units of ``size`` bytes."""
    for algorithm, values in totals.items():
        points = {setting: (value / size, NAN, NAN) for setting, value in values.items()}
        look = source.look((algorithm, ""))
        yield from _series(method_name(algorithm), look, swept, points)
