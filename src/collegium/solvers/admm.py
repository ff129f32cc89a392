"""Algorithm 4 of pFedNet on dense matrices, with the right proximal maps.

The reference for `collegium.solvers.consensus`, which also runs it on small matrices. Eq. 8 is
implemented as printed, with Z_t fixed in the loop (the released code overwrites it, so that every
inner iteration is one more gradient step). Eq. 9 is the proximal map for p = 2 only; `prox` has the
right ones. Iterations stop on residuals instead of after a fixed number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collegium.core.lazy import torch
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

Norm = Literal[1, 2, "inf"]

TOLERANCE = 1e-9
"""Residuals at which an iteration stops, relative to the differences between the points."""

MAX_ITERATIONS = 20_000
"""Iterations after which it stops with a warning."""

REBALANCE = 20
"""Iterations between two adaptations of rho (Boyd et al., 2011, section 3.4.1)."""


def ball_threshold(values: Tensor, radius: Tensor) -> Tensor:
    """Return the soft threshold that projects each column onto its l1 ball (Michelot, 1986).

    Args:
        values: (rows, columns).
        radius: (columns,), the radius of each column's ball, above 0.

    Returns:
        Thresholds (columns,); 0 if the column lies inside its ball.
    """
    sizes = values.abs()
    threshold = torch.zeros_like(radius)
    active = torch.full_like(radius, -1)
    while True:
        above = sizes > threshold
        count = above.sum(0).to(radius.dtype)
        if torch.equal(count, active):
            return threshold
        active = count
        excess = (sizes * above).sum(0) - radius
        threshold = torch.where(excess > 0, excess / count.clamp(min=1), 0.0)


def prox(values: Tensor, step: float, p: Norm) -> Tensor:
    """Return the proximal map of ``step ||.||_p`` of every column.

    p = 1 is the soft threshold, p = 2 the block shrinkage of Eq. 9, and p = inf the column minus
    its projection onto the l1 ball of radius ``step``, which clips it.

    Args:
        values: (rows, columns).
        step: not negative.
        p: the norm.
    """
    if step == 0:
        return values.clone()
    if p == 1:
        return values - values.clamp(-step, step)
    if p == 2:
        return values * shrinkage(values.norm(dim=0), step)
    limit = ball_threshold(values, values.new_full((values.shape[1],), step))
    return torch.minimum(torch.maximum(values, -limit), limit)


def shrinkage(lengths: Tensor, step: float) -> Tensor:
    """Return [1 - step / length]_+, or 0 if the length is 0.

    Args:
        lengths: (columns,), not negative.
        step: above 0.
    """
    return torch.where(lengths > step, 1 - step / lengths.clamp(min=step), 0.0)


@dataclass(frozen=True)
class Coupling:
    """A graph with the strength of its penalty, and the factorisation that every iteration uses.

    Attributes:
        incidence: Q, (sites, edges), +1 and -1 at the ends of each edge, float64.
        eta: step of each site, (sites,), float64.
        lam: strength of the penalty.
        rho: parameter of the augmented Lagrangian; the optimum does not depend on it.
    """

    incidence: Tensor
    eta: Tensor
    lam: float
    rho: float

    @classmethod
    def of(
        cls,
        incidence: NDArray[np.float64] | Tensor,
        eta: float | Sequence[float],
        lam: float,
        rho: float | None = None,
    ) -> Coupling:
        """Return the coupling of a graph, after checking the numbers.

        Args:
            incidence: Q, (sites, edges), +1 and -1 at the ends of each edge.
            eta: step of each site, or of all.
            lam: strength of the penalty, at least 0.
            rho: parameter of the augmented Lagrangian, above 0; None: chosen so that it balances
                the two extreme eigenvalues of the matrix that it multiplies.

        Raises:
            ConfigError: a number is out of its range, or this is not an incidence matrix.
        """
        q = torch.as_tensor(incidence, dtype=torch.float64)
        steps = torch.as_tensor(eta, dtype=torch.float64).expand(len(q)).clone()
        if q.numel() and not (torch.equal(q.sum(0), 0 * q[0]) and (q.abs().sum(0) == 2).all()):
            raise ConfigError("the incidence matrix needs one 1 and one -1 in every column")
        if not 0 <= lam < float("inf") or not bool(((steps > 0) & steps.isfinite()).all()):
            raise ConfigError(
                f"lam is {lam} and eta {steps.tolist()}; lam must be at least 0, eta above 0"
            )
        if rho is not None and not rho > 0:
            raise ConfigError(f"rho is {rho}; it must be above 0")
        return cls(q, steps, float(lam), _balanced(q, steps) if rho is None else float(rho))

    @cached_property
    def inverse(self) -> Tensor:
        """(diag(1/eta) + rho Q Q^T)^-1, which is eta (I + eta rho Q Q^T)^-1 of Eq. 8."""
        system = torch.diag(1 / self.eta) + self.rho * self.incidence @ self.incidence.T
        inverse: Tensor = torch.linalg.inv(system)
        return inverse

    def rebalanced(self, primal: float, dual: float) -> Coupling:
        """Return the coupling with a rho that makes the residuals more alike, if they differ much.

        Args:
            primal: primal residual.
            dual: dual residual.
        """
        if min(primal, dual) <= 0 or 0.25 < primal / dual < 4:
            return self
        return replace(self, rho=self.rho * min(max((primal / dual) ** 0.5, 0.1), 10.0))


def _balanced(q: Tensor, eta: Tensor) -> float:
    if not q.numel():
        return 1.0
    scaled = eta.sqrt()[:, None] * q
    values = torch.linalg.eigvalsh(scaled @ scaled.T)
    positive = values[values > 1e-9 * values[-1]]
    return float((positive[0] * positive[-1]).rsqrt())


class AdmmResult(NamedTuple):
    """Z, W and Omega of Algorithm 4 after its last iteration.

    Attributes:
        z: (rows, sites).
        w: (rows, edges).
        omega: (rows, edges).
    """

    z: Tensor
    w: Tensor
    omega: Tensor


def run_admm(
    points: Tensor,
    coupling: Coupling,
    shrink: Callable[[Tensor, float], Tensor],
    *,
    start: Tensor | None = None,
    iterations: int | None = None,
    length: Callable[[Tensor], float] = lambda values: float(values.norm()),
) -> AdmmResult:
    """Run Algorithm 4 on a dense matrix, in float64.

        Z     <- (B diag(1/eta) + (rho W - Omega) Q^T) (diag(1/eta) + rho Q Q^T)^-1
        W     <- shrink(Z Q + Omega / rho, lam / rho)
        Omega <- Omega + rho (Z Q - W)

    Args:
        points: B, (rows, sites).
        coupling: the graph.
        shrink: the proximal map of a multiple of the norm, such as `prox` with its `p`.
        start: (rows, sites); W starts at this times Q, Omega at 0; None: at B Q. The paper starts
            at Z_t Q.
        iterations: number of iterations, with rho unchanged; None: until primal and dual residual
            are below `TOLERANCE`, while rho is adapted to keep them alike.
        length: returns the length of a matrix of differences, to measure residuals.
    """
    q, z = coupling.incidence, points
    fixed = points / coupling.eta
    w = (points if start is None else start) @ q
    omega = torch.zeros_like(w)
    tolerance = TOLERANCE * length(points @ q)
    for count in range(1, (MAX_ITERATIONS if iterations is None else iterations) + 1):
        rho, old = coupling.rho, w
        z = (fixed + (rho * w - omega) @ q.T) @ coupling.inverse
        difference = z @ q
        w = shrink(difference + omega / rho, coupling.lam / rho)
        omega = omega + rho * (difference - w)
        if iterations is not None:
            continue
        primal = length(difference - w)
        dual = length(rho * (w - old) @ q.T @ coupling.inverse @ q)
        if primal <= tolerance and dual <= tolerance:
            break
        if count % REBALANCE == 0:
            coupling = coupling.rebalanced(primal, dual)
    else:
        if iterations is None:
            logger.warning(
                "the consensus step stopped after %d iterations, not converged", MAX_ITERATIONS
            )
    return AdmmResult(z, w, omega)
