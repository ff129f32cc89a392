"""Quantities that were recorded beside scores, as tables with a row for every number of a figure.

They come from the table of results and from the accounts of adaptations. A run without them has an
empty table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from collegium.compression.cer import CER
from collegium.core.lazy import torch
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

RUN = ["algorithm", "variation", "seed", "fold", "part"]
"""The columns that tell one training from another."""

LAYER_DISTANCE, CONSISTENCY, SDWD = "layer_distance/", "consistency/", "sdwd/"
"""How the metrics of the rows begin."""

BOX = ["min", "q1", "median", "q3", "max", "mean"]
"""The numbers of a box plot, as `collegium.tasks.metrics.overlap.box_plot_summary` has them."""

LOSSES = ["algorithm", "adapter", "seed", "site", "step", "loss", "mean", "deviation"]
"""The columns of `adaptation_losses`."""

STEPS = [
    "algorithm", "adapter", "seed", "site", "step", "seconds", "metric", "unit", "mean",
    "deviation", "cases",
]  # fmt: skip
"""The columns of `adaptation_steps`."""


def layer_distances(results: pd.DataFrame) -> pd.DataFrame:
    """Return how far local training moved each layer (IOP-FL, Fig. 9 left).

    A layer is a module with its weight and bias; its distance is the norm over all of its tensors.

    Args:
        results: The table of results, see `collegium.runtime.distances.layer_distances`.

    Returns:
        Columns `RUN`, site, round, layer and value; layers in the order of the model.
    """
    rows = _named(results, LAYER_DISTANCE)
    modules = [name.rpartition(".")[0] or name for name in rows["name"]]
    layers = rows.assign(layer=modules, value=rows["value"] ** 2)
    keys = [*RUN, "site", "round", "layer"]
    found = layers.groupby(keys, sort=False)["value"].sum(min_count=1).pow(0.5)
    return found.reset_index()


def consistencies(results: pd.DataFrame) -> pd.DataFrame:
    """Return the sides of GRACE's Eq. 4, by round.

    Args:
        results: The table of results.

    Returns:
        Columns `RUN`, round, and the mean consistency before and after the server's weights.
    """
    return _beside(results, CONSISTENCY, ["before", "after"])


def weight_deviations(results: pd.DataFrame) -> pd.DataFrame:
    """Return the box plots of pFedNet's SDWD, by round (pFedNet, Fig. 7 and 11).

    Args:
        results: The table of results.

    Returns:
        Columns `RUN`, round and `BOX`: over all personal parameters, the standard deviation over
        sites of each.
    """
    return _beside(results, SDWD, BOX)


def _named(results: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Return the rows of some metrics, with what follows the prefix as their name."""
    rows = results[results["metric"].str.startswith(prefix) & (results["split"] == "train")]
    return rows.assign(name=rows["metric"].str.removeprefix(prefix))


def _beside(results: pd.DataFrame, prefix: str, names: Sequence[str]) -> pd.DataFrame:
    """Return the numbers of a round in columns; rounds that lack one of them are left out."""
    keys = [*RUN, "round"]
    rows = _named(results, prefix)
    rows = rows[rows["name"].isin(list(names))]
    wide = rows.pivot(index=keys, columns="name", values="value").reindex(columns=list(names))
    return wide.dropna().reset_index().rename_axis(columns=None)


def adaptation_losses(accounts: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the losses of each pass over a site's cases (IOP-FL, Fig. 9 right).

    Args:
        accounts: The accounts, see `collegium.evaluation.timing.read_accounts`.

    Returns:
        The columns `LOSSES`: the name of a loss ("total" was minimised), its mean and its standard
        deviation over samples; NaN where no deviations were recorded.
    """
    rows = []
    for account in accounts:
        losses = account["losses"] if account.get("over") == "pass" else []
        spread = account.get("loss_deviations") or [{}] * len(losses)
        for means, deviations in zip(losses, spread, strict=True):
            rows += [
                [*_whose(account), means["step"], name, value, deviations.get(name, np.nan)]
                for name, value in means.items()
                if name != "step"
            ]
    return pd.DataFrame(rows, columns=LOSSES)


def adaptation_steps(accounts: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the scores after each step of the adaptations that recorded them (IOP-FL, Fig. 7b).

    Args:
        accounts: The accounts, see `collegium.evaluation.timing.read_accounts`.

    Returns:
        The columns `STEPS`: the mean of the metric and its standard deviation over so many cases,
        NaN where it is not defined; and the seconds that it took all cases of the site together to
        come so far.
    """
    rows = []
    for account in accounts:
        found = account.get("by_step", {"steps": []})
        for place, step in enumerate(found["steps"]):
            mean, deviation = (
                np.nan if found[name][place] is None else found[name][place]
                for name in ("mean", "deviation")
            )
            about = found["seconds"][place], found["metric"], found["unit"]
            rows.append([*_whose(account), step, *about, mean, deviation, found["cases"][place]])
    return pd.DataFrame(rows, columns=STEPS)


def _whose(account: Mapping[str, Any]) -> tuple[str, str, int, str]:
    adapter = account["adapter"]
    label = str(adapter.get("label") or adapter["name"])
    return str(account["algorithm"]), label, int(account["seed"]), str(account["site"])


def smoothed(
    vector: NDArray[Any] | Sequence[float], strengths: Iterable[float], *, absolute: bool = False
) -> pd.DataFrame:
    """Return what CER makes of a vector at several strengths (pFedNet, Fig. 4 and 5).

    The vector goes through the codec, so that the values are those that a receiver decodes.

    Args:
        vector: (d,) the numbers of an update, in the order in which they are sent.
        strengths: The values of `collegium.compression.cer.CER.gamma`.
        absolute: Whether these are used as they are, and not in units of the mean of |vector|.

    Returns:
        Columns strength, position (from 0), value, and bytes, how many the codec sends of all
        positions together. The first rows are the vector itself, of strength 0, as it is sent
        without smoothing.

    Raises:
        ConfigError: The vector has no numbers, or several axes.
    """
    flat = torch.as_tensor(np.asarray(vector, dtype=np.float32))
    if flat.ndim != 1 or not len(flat):
        raise ConfigError(
            f"CER smooths a vector, and this has the shape {tuple(flat.shape)}; give one axis of "
            f"one number or more"
        )
    target, parts = Tensors({"vector": flat}), []
    for strength in (0.0, *strengths):
        codec = CER(gamma=strength, absolute=absolute)
        encoded = codec.encode(target, torch.Generator(), {})
        values = encoded.decoded["vector"].numpy().astype(np.float64)
        rows = pd.DataFrame({"position": np.arange(len(values)), "value": values})
        parts.append(rows.assign(strength=float(strength), bytes=len(encoded.data)))
    return pd.concat(parts, ignore_index=True)[["strength", "position", "value", "bytes"]]
