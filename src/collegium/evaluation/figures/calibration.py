"""Reliability diagrams: how often what was said to be likely is so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from collegium.evaluation.figures.data import Axis, Figure, Panel, Series
from collegium.evaluation.figures.source import FigureSource, suffix
from collegium.evaluation.reliability import reliability_table
from collegium.evaluation.scores import METHOD, Where, method_name, position

if TYPE_CHECKING:
    import pandas as pd


def reliability_figures(source: FigureSource) -> Iterator[Figure]:
    """Yield ``reliability[-outside][-<class>][-<setting>]``, a panel for each site.

    The class is named if there are more than two. Without the metric ``ece`` there are none.

    Args:
        source: The results of a run.
    """
    if "ece" not in set(source.results["metric"]):
        return
    settings = source.compared.settings
    bins = reliability_table(source.used, bins=settings.calibration_bins, classes=settings.classes)
    several = bins["class"].nunique() > 1
    for (where, name, setting), own in bins.groupby(["where", "class", "variation"], sort=False):
        outside = " outside" if where == "outside" else ""
        about = [f"of {name}", str(setting)] if setting else [f"of {name}"]
        parts = outside.strip(), str(name) if several else "", str(setting)
        yield Figure(
            "reliability" + suffix(*parts),
            f"Reliability of the probability {', '.join(about)}{outside}",
            "A point is a bin of test cases by their probability: their mean probability, and the "
            "share of them that is of the class; of several seeds and folds the mean by the number "
            "of cases. On the dotted line probabilities are right.",
            tuple(_panels(source, own, "outside" if outside else "inside")),
        )


def _panels(source: FigureSource, rows: pd.DataFrame, where: Where) -> Iterator[Panel]:
    """Yield a diagram for each site, with a line for each method."""
    for site, at_site in rows.groupby("site"):
        groups = {(str(key[0]), str(key[1])): own for key, own in at_site.groupby(METHOD)}
        lines = []
        for key in sorted(groups, key=lambda key: position(key, source.order)):
            by_bin = [own for _, own in groups[key].groupby("low")]
            x, y = (
                tuple(float(np.average(own[column], weights=own["cases"])) for own in by_bin)
                for column in ("confidence", "observed")
            )
            lines.append(Series(method_name(*key, where), source.look(key, where), "line", x, y))
        across = Axis("mean probability", limits=(-0.02, 1.02))
        up = Axis("observed share", limits=(-0.02, 1.02))
        yield Panel(str(site), across, up, tuple(lines), guide="diagonal")
