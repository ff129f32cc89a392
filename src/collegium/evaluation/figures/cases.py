"""The scores of single test cases: box plots, and joined against alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from collegium.evaluation.arms import alone_at
from collegium.evaluation.figures.data import Axis, Box, Boxes, Figure, Panel, Series, box_of
from collegium.evaluation.figures.source import (
    FigureSource,
    mean_of_trainings,
    of_single_cases,
    suffix,
)
from collegium.evaluation.scores import (
    METHOD,
    WHERES,
    MethodKey,
    Where,
    final_scores,
    method_name,
    position,
    unit_of,
)
from collegium.evaluation.wording import title
from collegium.tasks import ALL_CASES

if TYPE_CHECKING:
    import pandas as pd

_BOX = (
    "A box holds the scores of the test cases, each the mean over its seeds and folds, from the "
    "first to the third quartile; line and marker in it are the median, whiskers reach to the "
    "last score within 1.5 interquartile ranges, and circles are the scores beyond."
)


def case_boxes(source: FigureSource) -> Iterator[Figure]:
    """Yield box plots by site: ``cases-<metric>[-outside]``.

    Of a sweep the boxes stand by setting, otherwise by method.

    Args:
        source: The results of a run.
    """
    for where in WHERES:
        scores = _single_cases(source, where)
        metrics = of_single_cases(scores)
        shown = source.metric if source.metric in metrics else "".join(metrics[:1])
        for metric in metrics:
            own = scores[scores["metric"] == metric]
            means = mean_of_trainings(own)
            if means.empty:
                continue
            axis = Axis(title(metric), unit_of(own), limits=_with_air(means["value"].tolist()))
            panels = tuple(
                _boxes_at(source, means[means["site"] == site], axis, where, str(site))
                for site in sorted(means["site"].unique())
            )
            outside = " outside" if where == "outside" else ""
            by = "setting" if source.swept else "method"
            yield Figure(
                f"cases-{metric}" + suffix(outside.strip()),
                f"{title(metric)} of single test cases{outside}, by {by}",
                _BOX,
                panels,
                in_report=metric == shown,
            )


def _single_cases(source: FigureSource, where: Where) -> pd.DataFrame:
    """Return the scores of single test cases of the models that take part in answers."""
    scores = final_scores(source.used, where=where)
    return scores[scores["case"] != ALL_CASES]


def _boxes_at(
    source: FigureSource, means: pd.DataFrame, axis: Axis, where: Where, site: str
) -> Panel:
    """Return the boxes of one site."""
    groups = {
        ((str(key[0]), str(key[1])), str(key[2])): tuple(own["value"])
        for key, own in means.groupby([*METHOD, "variation"])
    }
    keys = sorted({key for key, _ in groups}, key=lambda key: position(key, source.order))
    if source.swept:
        names: Sequence[str] = source.settings
        width = 0.8 / len(keys)
        boxes = [
            Boxes(
                method_name(*key, where),
                source.look(key, where),
                tuple(
                    _box(groups, key, setting, place + width * (number - (len(keys) - 1) / 2))
                    for place, setting in enumerate(names)
                    if (key, setting) in groups
                ),
                0.85 * width,
            )
            for number, key in enumerate(keys)
        ]
    else:
        names = [method_name(*key, where) for key in keys]
        boxes = [
            Boxes(name, source.look(key, where), (_box(groups, key, "", float(place)),))
            for place, (name, key) in enumerate(zip(names, keys, strict=True))
        ]
    across = Axis(
        "setting" if source.swept else "", names=tuple(names), limits=(-0.6, len(names) - 0.4)
    )
    return Panel(site, axis, across, boxes=tuple(boxes))


def _box(
    groups: dict[tuple[MethodKey, str], tuple[float, ...]],
    key: MethodKey,
    setting: str,
    place: float,
) -> Box:
    return box_of(place, groups[key, setting])


def joined_against_alone(source: FigureSource) -> Iterator[Figure]:
    """Yield what each site's chosen method scores against training alone, case by case.

    ``joined-against-alone[-<setting>]``, a panel for each site with the method of its answer.

    Args:
        source: The results of a run.
    """
    scores = _single_cases(source, "inside")
    metrics = of_single_cases(scores)
    if not metrics:
        return
    metric = source.metric if source.metric in metrics else metrics[0]
    own = scores[scores["metric"] == metric]
    means, unit = mean_of_trainings(own), unit_of(own)
    for setting in source.settings:
        panels = _against_alone(source, means[means["variation"] == setting], metric, unit, setting)
        if panels:
            about = f", {setting}" if setting else ""
            yield Figure(
                "joined-against-alone" + suffix(setting),
                f"{title(metric)} of single test cases, joined against alone{about}",
                "A point is a test case, its score the mean over seeds and folds. Joined is the "
                "method that the site chose on its validation cases; on the dotted line both are "
                "equal.",
                panels,
            )


def _against_alone(
    source: FigureSource, means: pd.DataFrame, metric: str, unit: str, setting: str
) -> tuple[Panel, ...]:
    """Return a panel for each site that chose a method and trained alone."""
    chosen = [
        found for found in source.compared.joining(source.metric, setting).by_site if found.chosen
    ]
    arms = {
        ((str(key[0]), str(key[1])), str(key[2])): own.set_index("case")["value"]
        for key, own in means.groupby([*METHOD, "site"])
    }
    alone = alone_at(arms, source.compared.labels.local)
    drawn: dict[str, Series] = {}
    for found in chosen:
        site = found.verdict.site
        if site not in alone or (found.key, site) not in arms:
            continue
        both = (
            arms[alone[site], site]
            .to_frame("alone")
            .join(arms[found.key, site].rename("joined"), how="inner")
            .sort_index()
        )
        look = source.look(found.key)
        x, y = tuple(both["alone"].tolist()), tuple(both["joined"].tolist())
        drawn[site] = Series(found.verdict.method, look, "scatter", x, y)
    if not drawn:
        return ()
    values = [value for series in drawn.values() for value in (*series.x, *series.y)]
    limits = _with_air(values)
    heading = title(metric)
    return tuple(
        Panel(
            site, Axis(f"{heading} alone", unit, limits=limits),
            Axis(f"{heading} joined", unit, limits=limits), (series,), guide="diagonal",
        )
        for site, series in drawn.items()
    )  # fmt: skip


def _with_air(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis that holds some values."""
    air = 0.04 * (max(values) - min(values)) or 0.5
    return min(values) - air, max(values) + air
