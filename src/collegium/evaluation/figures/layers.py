"""Quantities of every layer and round, as heat maps: masking rates, distances of local models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from collegium.evaluation.figures.data import Axis, Figure, Heat, Panel
from collegium.evaluation.figures.recorded import layer_distances
from collegium.evaluation.figures.source import FigureSource, suffix
from collegium.evaluation.scores import group_means, method_name

if TYPE_CHECKING:
    import pandas as pd

MASKING = "masking_rates/"
"""Metrics of rounds that hold pFL-ResFIM's rates, followed by the name of the tensor."""

MOST_ROUNDS = 40
"""With more rounds every second one is drawn, or every third and so on."""


@dataclass(frozen=True)
class _Quantity:
    """A quantity of layers.

    Attributes:
        name: The name of its figures.
        title: Their title.
        value: The name of the quantity.
        caption: What a cell is.
    """

    name: str
    title: str
    value: str
    caption: str


_RATES = _Quantity(
    "masking-rates",
    "Masking rates by tensor and round",
    "masking rate",
    "The share of the entries of each tensor that stay personal",
)
_DISTANCES = _Quantity(
    "layer-distances",
    "Distances of local models by layer and round",
    "distance",
    "The Euclidean distance between what a site trained and what it was sent, by layer",
)


def layer_figures(source: FigureSource) -> Iterator[Figure]:
    """Yield the heat maps: ``<name>[-<algorithm>][-<setting>]``, a panel for each site.

    ``masking-rates`` and ``layer-distances``; the algorithm is named if there are several.

    Args:
        source: The results of a run.
    """
    rates = source.results[source.results["metric"].str.startswith(MASKING)]
    layers = rates["metric"].str.removeprefix(MASKING)
    yield from _heat_maps(source, _RATES, rates.assign(layer=layers))
    yield from _heat_maps(source, _DISTANCES, layer_distances(source.results))


def _heat_maps(source: FigureSource, what: _Quantity, rows: pd.DataFrame) -> Iterator[Figure]:
    """Yield the heat maps of one quantity: columns algorithm, variation, site, layer, round."""
    several = rows["algorithm"].nunique() > 1
    rows = rows.dropna(subset="value")
    for setting in source.settings:
        for label in source.order:
            own = rows[(rows["variation"] == setting) & (rows["algorithm"] == label)]
            if own.empty:
                continue
            rounds = sorted(own["round"].unique().tolist())
            step = -(-len(rounds) // MOST_ROUNDS)
            about = ", ".join(filter(None, [method_name(label), setting]))
            thinned = f" Of every {step} rounds the first is drawn." if step > 1 else ""
            yield Figure(
                what.name + suffix(label if several else "", setting),
                f"{what.title}, {about}",
                f"{what.caption}, mean over seeds and folds, at every site; the deeper, the "
                f"larger.{thinned}",
                _panels(own, what.value, rounds[::step]),
            )


def _panels(rows: pd.DataFrame, value: str, rounds: list[int]) -> tuple[Panel, ...]:
    """Return a heat map for each site, all of one scale; layers in the order of the rows."""
    layers = list(dict.fromkeys(rows["layer"]))
    means = group_means(rows, ["site", "layer", "round"])
    table = means.pivot(index=["site", "layer"], columns="round", values="value")[rounds]
    limits = (0.0, float(np.nanmax(table.to_numpy())) or 1.0)
    columns, panels = tuple(map(float, rounds)), []
    for site in sorted(means["site"].unique()):
        cells = table.loc[site].reindex(layers).to_numpy(np.float64)
        heat = Heat(tuple(layers), columns, tuple(map(tuple, cells.tolist())), value, limits)
        panels.append(Panel(str(site), Axis("round", whole=True), Axis(""), heat=heat))
    return tuple(panels)
