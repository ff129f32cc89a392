"""Quantities that the server records in every round: GRACE's consistency, pFedNet's SDWD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from collegium.evaluation.figures.curves import BAND, line_of
from collegium.evaluation.figures.data import Axis, Box, Boxes, Figure, Look, Panel
from collegium.evaluation.figures.recorded import BOX, consistencies, weight_deviations
from collegium.evaluation.figures.source import FigureSource, suffix
from collegium.evaluation.scores import group_means, method_name

if TYPE_CHECKING:
    import pandas as pd

MOST_BOXES = 12
"""With more rounds every second one has a box, or every third and so on."""

_SIDES = {"before": Look(0, 0), "after": Look(1, 1)}


def server_figures(source: FigureSource) -> Iterator[Figure]:
    """Yield ``consistency[-<setting>]`` and ``sdwd[-<setting>]``, a panel for each algorithm.

    Args:
        source: The results of a run.
    """
    yield from _consistency(source)
    yield from _deviations(source)


def _consistency(source: FigureSource) -> Iterator[Figure]:
    """Yield both sides of GRACE's Eq. 4 over rounds."""
    rows = consistencies(source.results)
    for setting in source.settings:
        panels = []
        for label in source.order:
            own = rows[(rows["variation"] == setting) & (rows["algorithm"] == label)]
            lines = []
            for side, look in _SIDES.items():
                means = group_means(own, ["seed", "round"], side).rename(columns={side: "value"})
                line = line_of(f"{side} the server's weights", look, means)
                lines += [line] if line else []
            if lines:
                over, up = Axis("round", whole=True), Axis("mean consistency")
                panels.append(Panel(method_name(label), over, up, tuple(lines)))
        if panels:
            yield Figure(
                "consistency" + suffix(setting),
                "Consistency of gradients over rounds" + (f", {setting}" if setting else ""),
                "The mean consistency of the sites' gradients with their sum, weighted before and "
                f"after the server's correction. {BAND.format(sites=' and folds')}",
                tuple(panels),
            )


def _deviations(source: FigureSource) -> Iterator[Figure]:
    """Yield the box plots of pFedNet's SDWD by round."""
    rows = weight_deviations(source.results)
    for setting in source.settings:
        panels = []
        for label in source.order:
            own = rows[(rows["variation"] == setting) & (rows["algorithm"] == label)]
            if own.empty:
                continue
            name, means = method_name(label), own.groupby("round")[BOX].mean()
            drawn = means.iloc[:: -(-len(means) // MOST_BOXES)]
            places = tuple(map(str, drawn.index))
            rounds = Axis("round", names=places, limits=(-0.6, len(places) - 0.4))
            boxes = Boxes(name, source.look((label, "")), tuple(_boxes(drawn)))
            panels.append(Panel(name, Axis("standard deviation"), rounds, boxes=(boxes,)))
        if panels:
            yield Figure(
                "sdwd" + suffix(setting),
                "Standard deviation of the weights between sites"
                + (f", {setting}" if setting else ""),
                "Of each personal parameter the standard deviation over sites (SDWD): a box "
                "reaches from the first to the third quartile over parameters, line and marker in "
                "it are the median, and whiskers reach to the least and the largest. Each number "
                f"is a mean over seeds and folds; at most {MOST_BOXES} rounds are drawn.",
                tuple(panels),
            )


def _boxes(means: pd.DataFrame) -> Iterator[Box]:
    """Yield a box for each row of the numbers of a box plot."""
    for place, (low, first, median, third, high) in enumerate(means[BOX[:5]].to_numpy().tolist()):
        yield Box(float(place), low, first, median, third, high)
