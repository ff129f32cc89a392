"""The fused lasso of a few numbers on a graph, for very many independent problems at once."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.kernels import compiled

logger = logging.getLogger(__name__)

Array = NDArray[Any]

TOLERANCE = 1e-13
"""Change in one sweep, relative to the spread of the numbers, at which a problem is solved."""

MAX_SWEEPS = 20_000
"""Sweeps after which it stops with a warning."""


@compiled
def _descend(
    values: Array, flows: Array, ends: Array, eta: Array, lam: float, tolerance: float, sweeps: int
) -> int:
    sites, columns = values.shape
    edges = len(ends)
    z, y = np.empty(sites), np.empty(edges)
    unsolved = 0
    for column in range(columns):
        low = high = values[0, column]
        for site in range(sites):
            z[site] = values[site, column]
            low, high = min(low, z[site]), max(high, z[site])
        if high == low:
            continue
        for edge in range(edges):
            y[edge] = min(lam, max(-lam, flows[edge, column]))
            z[ends[edge, 0]] -= eta[ends[edge, 0]] * y[edge]
            z[ends[edge, 1]] += eta[ends[edge, 1]] * y[edge]
        change = high - low
        sweep = 0
        while change > tolerance * (high - low) and sweep < sweeps:
            change = 0.0
            sweep += 1
            for edge in range(edges):
                i, j = ends[edge, 0], ends[edge, 1]
                room = eta[i] + eta[j]
                step = min(lam, max(-lam, y[edge] + (z[i] - z[j]) / room)) - y[edge]
                y[edge] += step
                z[i] -= eta[i] * step
                z[j] += eta[j] * step
                change = max(change, abs(step) * room)
        unsolved += change > tolerance * (high - low)
        for site in range(sites):
            values[site, column] = z[site]
    return unsolved


class FusedLasso:
    """A solver of many small fused lassos on one graph.

    Minimises sum_n (z_n - b_n)^2 / (2 eta_n) + lam sum_{(i, j)} |z_i - z_j| for many vectors b.
    Works on the dual: a flow y in [-lam, lam] along every edge, with z = b - diag(eta) Q y. Each
    sweep sets one flow after the other to its optimum given the rest, which converges for a
    quadratic in a box (Luo and Tseng, 1992). The start is the flow that would make all numbers of a
    connected component equal, clipped: it is the solution if it fits into the box.

    Args:
        incidence: Q, (sites, edges), +1 and -1 at the ends of each edge.
        eta: step of each site, (sites,).
        lam: strength of the penalty.
    """

    def __init__(self, incidence: Array, eta: Array, lam: float) -> None:
        self._ends = np.stack([incidence.argmax(0), incidence.argmin(0)], axis=1)
        self._eta, self._lam = eta, lam
        system = incidence.T @ (eta[:, None] * incidence)
        self._fusing = np.linalg.pinv(system, rcond=1e-12, hermitian=True) @ incidence.T

    def solve(self, values: Array) -> Array:
        """Return the minimisers of the columns of ``values``, (sites, problems), float64."""
        values = np.ascontiguousarray(values, dtype=np.float64)
        flows = self._fusing @ values
        solved = values.copy()
        unsolved = _descend(solved, flows, self._ends, self._eta, self._lam, TOLERANCE, MAX_SWEEPS)
        if unsolved:
            logger.warning("%d parameters have not converged in %d sweeps", unsolved, MAX_SWEEPS)
        return solved
