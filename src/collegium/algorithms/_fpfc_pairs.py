"""FPFC's ADMM at the server: what is kept of every pair of clients.

theta_ij and v_ij are kept for i < j alone, since theta_ji = -theta_ij and v_ji = -v_ij.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from collegium.core.tensors import Tensors, mean

if TYPE_CHECKING:
    from collegium.algorithms.fpfc import FPFC

Pairs = Mapping[str, Mapping[str, Tensors]]
"""Tensors of the pairs of clients, by the first and the second name."""


def zeta(i: str, w: Mapping[str, Tensors], theta: Pairs, v: Pairs, *, rho: float) -> Tensors:
    """Return zeta_i = 1/N sum_j (w_j + theta_ij - v_ij / rho).

    Args:
        i: a client.
        w: the fused parameters of each client.
        theta: of each pair.
        v: of each pair.
        rho: of the augmented Lagrangian.
    """
    terms = [w[i]]
    for j in sorted(w.keys() - {i}):
        first, second, sign = (i, j, 1.0) if i < j else (j, i, -1.0)
        terms.append(w[j] + sign * (theta[first][second] + (-1 / rho) * v[first][second]))
    return mean(terms)


def shrunk(d: Tensors, method: FPFC) -> Tensors:
    """Return argmin g(||theta||) + rho/2 ||theta - d||^2, with g the smoothed SCAD penalty.

    Args:
        d: w_i - w_j + v_ij / rho.
        method: its lam, rho, a and smoothing.
    """
    lam, rho, a, xi = method.lam, method.rho, method.a, method.smoothing
    r = math.sqrt(d.distinct().dot(d.distinct()))
    if r <= xi + lam / rho:
        return xi * rho / (lam + xi * rho) * d
    if r <= lam + lam / rho:
        return (1 - lam / (rho * r)) * d
    if r <= a * lam:
        convex = (a - 1) * rho
        return max(0.0, 1 - a * lam / (convex * r)) / (1 - 1 / convex) * d
    return d
