"""GRACE at the server: how consistent the clients' updates are, and their weights (Eq. 3-5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collegium.core.tensors import Tensors
from collegium.solvers.gram import cosines, gram, gram_by_name

Array = NDArray[Any]

FLOOR = 1e-3
"""Least consistency if some are negative."""


def similarities(
    models: Sequence[Tensors], start: Tensors, kind: Literal["total", "split", "reweight"]
) -> Array:
    """Return the cosines sigma_mn of the clients' updates.

    Args:
        models: theta_m, the parameters that M clients returned.
        start: theta_g, those that they received.
        kind: over which parameters; see `collegium.algorithms.grace.Grace`.

    Returns:
        (M, M), symmetric, 1 on the diagonal but for updates that are zero.
    """
    if kind == "total":
        return cosines(gram(models, start))
    by_tensor = [cosines(products) for products in gram_by_name(models, start).values()]
    last = 1.0 if kind == "split" else 0.0
    sigma: Array = np.average(by_tensor, axis=0, weights=np.linspace(1, last, len(by_tensor)))
    return sigma


def consistency(sigma: Array, *, include_self: bool) -> Array:
    """Return c_m, the mean of sigma_mn over the clients n.

    A client that is alone agrees with itself: its c is 1.

    Args:
        sigma: (M, M) cosines.
        include_self: whether sigma_mm takes part in the mean.

    Returns:
        (M,).
    """
    if len(sigma) == 1:
        return np.ones(1)
    counted = sigma if include_self else sigma - np.diag(np.diagonal(sigma))
    c: Array = counted.sum(axis=1) / (len(sigma) if include_self else len(sigma) - 1)
    return c


def nonnegative(c: Array, rule: Literal["shift", "relu"]) -> Array:
    """Return consistencies without negative values.

    The released code then divides by max c if that exceeds 1, which the normalisation of the
    weights undoes.

    Args:
        c: (M,) consistencies.
        rule: what becomes of negative ones; see `collegium.algorithms.grace.Grace`.
    """
    if rule == "relu":
        return np.maximum(c, FLOOR)
    return c - c.min() + FLOOR if c.min() < 0 else c


def reweighted(shares: Mapping[str, float], c: Array) -> dict[str, float]:
    """Return p'_m = c_m p_m / sum_n c_n p_n, or p itself if every c is 0.

    Args:
        shares: p by client, up to a factor, such as the number of examples; not all 0.
        c: consistencies of the clients whose share is above 0, none negative. The others' weight
            is 0.
    """
    compared = [client for client, share in shares.items() if share > 0]
    p = np.array([shares[client] for client in compared], dtype=float)
    weights = c * p if (c * p).sum() > 0 else p
    normalised = (weights / weights.sum()).tolist()
    return dict.fromkeys(shares, 0.0) | dict(zip(compared, normalised, strict=True))
