"""Masking rates of pFL-ResFIM: the share of each tensor that stays personal, by round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collegium.evaluation.figures.data import Axis, Figure, Heat, Panel
from collegium.evaluation.figures.source import FigureSource, suffix
from collegium.evaluation.scores import group_means, method_name

PREFIX = "masking_rates/"
"""Metrics of rounds that hold the rates, followed by the name of the tensor."""

MOST_ROUNDS = 40
"""With more rounds every second one is drawn, or every third and so on."""


def masking_figures(source: FigureSource) -> Iterator[Figure]:
    """Yield the rates by tensor and round: ``masking-rates[-<algorithm>][-<setting>]``.

    Args:
        source: The results of a run.
    """
    rows = source.results[source.results["metric"].str.startswith(PREFIX)]
    several = rows["algorithm"].nunique() > 1
    for setting in source.settings:
        for label in source.order:
            own = rows[(rows["variation"] == setting) & (rows["algorithm"] == label)]
            if own.empty:
                continue
            layers = list(dict.fromkeys(own["metric"]))  # in the order of the model
            means = group_means(own, ["site", "metric", "round"])
            rounds = sorted(means["round"].unique().tolist())
            step = -(-len(rounds) // MOST_ROUNDS)
            table = means.pivot(index=["site", "metric"], columns="round", values="value")
            shown = table[rounds[::step]]
            high = float(np.nanmax(shown.to_numpy()))
            panels = tuple(
                Panel(
                    str(site), Axis("round", whole=True), Axis(""),
                    heat=Heat(
                        tuple(layer.removeprefix(PREFIX) for layer in layers),
                        tuple(float(number) for number in rounds[::step]),
                        tuple(
                            tuple(shown.loc[(site, layer)].tolist())
                            if (site, layer) in shown.index
                            else (float("nan"),) * shown.shape[1]
                            for layer in layers
                        ),
                        "masking rate",
                        (0.0, high or 1.0),
                    ),
                )
                for site in sorted(means["site"].unique())
            )  # fmt: skip
            about = ", ".join(filter(None, [method_name(label), setting]))
            thinned = f" Of every {step} rounds the first is drawn." if step > 1 else ""
            yield Figure(
                "masking-rates" + suffix(label if several else "", setting),
                f"Masking rates by tensor and round, {about}",
                "The share of the entries of each tensor that stay personal, mean over seeds and "
                f"folds, at every site; the deeper, the larger.{thinned}",
                panels,
            )
