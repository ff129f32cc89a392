"""pFedNet's Z-update: vectors of several sites are pulled together along a graph, exactly.

Zhao et al. (2023, https://arxiv.org/abs/2306.14483; Algorithm 4, Eq. 8-9) minimise over one column
z_n per site

    (1/N) <U, Z> + lam ||Z Q||_{1,p} + ||Z - Z_t||_F^2 / (2 eta),

the norm being the sum over the edges of the p-norm of the difference of two sites. Completing the
square, this is the proximal problem that `consensus` solves, at the points B = Z_t - (eta/N) U:

    minimise  sum_n ||z_n - b_n||^2 / (2 eta_n)  +  lam sum_{edges (i, j)} ||z_i - z_j||_p.

How each norm is solved:

* p = 2: every iterate is B times a small matrix, so the iteration runs on N x N matrices and the
  Gram matrix of the points: two passes over the data, whatever the number of iterations.
* p = 1: the problem falls apart into one per parameter; see `collegium.solvers.fused`.
* p = inf: only parameters with large differences are touched. The iteration runs on those, and the
  others are checked against the result; where the check fails, more of them join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from collegium.core.tensors import Tensors, identity, require_same_names
from collegium.errors import ConfigError
from collegium.solvers.admm import Coupling, Norm, algorithm4, alternate, prox, shrinkage
from collegium.solvers.gram import gram_of_blocks

WIDTH = 1 << 15
"""Parameters in a block that is worked on at once."""

LARGEST = 1 << 22
"""Numbers of all sites together in such a block, at most."""


def consensus(
    points: Sequence[Tensors],
    coupling: Coupling,
    *,
    p: Norm = 2,
    iterations: int | None = None,
    start: Sequence[Tensors] | None = None,
) -> list[Tensors]:
    """Return the minimiser of the problem above, one `Tensors` per site.

    Beside the result it holds blocks of parameters only; with p = inf also the parameters whose
    difference between two neighbours the penalty limits. Ties between weights are kept.

    Args:
        points: b_n of each site, floating-point tensors of equal names and shapes.
        coupling: the graph, with a row per site.
        p: the norm.
        iterations: None solves the problem. A number runs so many iterations of Algorithm 4 instead
            (with p = inf this holds all parameters at once).
        start: Z_t, where W starts with ``iterations``; None: at the points.

    Raises:
        ConfigError: the graph has another number of sites.
        ProtocolError: the names differ between sites.
    """
    if len(points) != len(coupling.incidence):
        raise ConfigError(
            f"{len(points)} sites do not fit a graph of {len(coupling.incidence)} sites"
        )
    if coupling.trivial:
        return [point.clone() for point in points]
    columns = Columns(points)
    if p == 2:
        return _by_gram(columns, coupling, iterations, None if start is None else Columns(start))
    if iterations is not None:
        return _by_algorithm4(columns, coupling, p, iterations, start)
    return _by_row(columns, coupling) if p == 1 else _by_peaks(columns, coupling)


class Columns:
    """The sites' tensors seen as one matrix (sites, parameters), read and written by blocks.

    Args:
        sites: floating-point tensors of equal names and shapes.

    Raises:
        ProtocolError: the names differ between sites.
    """

    def __init__(self, sites: Sequence[Tensors]) -> None:
        for other in sites[1:]:
            require_same_names(sites[0], other)
        self.sites = sites
        self.names = list(sites[0].distinct())
        self.flat = [
            {name: site[name].detach().reshape(-1) for name in self.names} for site in sites
        ]

    def blocks(self) -> Iterator[tuple[str, slice]]:
        """Yield the name and the range of every block."""
        width = max(min(WIDTH, LARGEST // len(self.sites)), 1)
        for name in self.names:
            length = len(self.flat[0][name])
            for begin in range(0, length, width):
                yield name, slice(begin, min(begin + width, length))

    def read(self, name: str, part: slice) -> Tensor:
        """Return a block, (sites, parameters): float32 or float64."""
        block = torch.stack([flat[name][part] for flat in self.flat])
        return block if block.dtype == torch.float32 else block.double()

    def write(self, work: Callable[[str, slice], Tensor]) -> list[Tensors]:
        """Return new tensors of the sites, ``work`` having given every block."""
        results = [{n: torch.empty_like(t) for n, t in flat.items()} for flat in self.flat]
        for name, part in self.blocks():
            for result, row in zip(results, work(name, part), strict=True):
                result[name][part] = row
        return [self.shaped(site, new) for site, new in zip(self.sites, results, strict=True)]

    def map(self, work: Callable[[Tensor, str, slice], Tensor]) -> list[Tensors]:
        """Return new tensors of the sites, ``work`` having changed every block, in float64."""
        return self.write(lambda name, part: work(self.read(name, part).double(), name, part))

    @staticmethod
    def shaped(site: Tensors, new: dict[str, Tensor]) -> Tensors:
        """Give flat tensors the shapes and the ties of a site's."""
        shaped = {identity(site[name]): flat.view(site[name].shape) for name, flat in new.items()}
        return Tensors((name, shaped[identity(tensor)]) for name, tensor in site.items())


def _by_gram(
    columns: Columns, coupling: Coupling, iterations: int | None, start: Columns | None
) -> list[Tensors]:
    """Solve for p = 2 on matrices that have a row per site (twice that with a start).

    The rows are the sites' differences from the first site: Q^T 1 = 0, so that nothing else
    matters, and what sites have in common costs no digits, in single precision neither.
    """
    sides = [columns] if start is None else [columns, start]
    count = len(coupling.incidence)
    rows = len(sides) * (count - 1)
    gram = gram_of_blocks((_from_first(sides, *at)[1] for at in columns.blocks()), rows)
    values, vectors = torch.linalg.eigh(torch.from_numpy(gram))
    root = values.clamp(min=0).sqrt()[:, None] * vectors.T  # root^T root = gram
    unit = torch.zeros(2, rows, count, dtype=torch.float64)
    for side in range(len(sides)):
        unit[side, side * (count - 1) :][: count - 1, 1:] = torch.eye(count - 1)
    found = alternate(
        unit[0],
        coupling,
        lambda v, step: v * shrinkage((root @ v).norm(dim=0), step),
        start=None if start is None else unit[1],
        iterations=iterations,
        length=lambda v: float((root @ v).norm()),
    )

    def combine(name: str, part: slice) -> Tensor:
        first, others = _from_first(sides, name, part)
        return torch.addmm(first.expand(count, -1), found.z.T.to(others.dtype), others)

    return columns.write(combine)


def _from_first(sides: Sequence[Columns], name: str, part: slice) -> tuple[Tensor, Tensor]:
    """Return a block of the first site, and how much those of the others differ from it."""
    blocks = [side.read(name, part) for side in sides]
    differences = [block[1:] - block[:1] for block in blocks]
    return blocks[0][0], differences[0] if len(sides) == 1 else torch.cat(differences)


def _by_algorithm4(
    columns: Columns,
    coupling: Coupling,
    p: Norm,
    iterations: int,
    start: Sequence[Tensors] | None,
) -> list[Tensors]:
    """Run a number of iterations for p = 1, block by block, or p = inf, all at once."""
    begin = columns if start is None else Columns(start)

    def run(block: Tensor, first: Tensor) -> Tensor:
        b, z = block.double().T, first.double().T
        return algorithm4(b, coupling, p, start=z, iterations=iterations).z.T

    if p == 1:
        return columns.map(lambda block, name, part: run(block, begin.read(name, part)))
    places = list(columns.blocks())
    whole = [torch.cat([side.read(*place) for place in places], 1) for side in (columns, begin)]
    ends = np.cumsum([part.stop - part.start for _, part in places])
    pieces = dict(
        zip(
            [(name, part.start) for name, part in places],
            run(*whole).tensor_split(ends[:-1].tolist(), dim=1),
            strict=True,
        )
    )
    return columns.map(lambda block, name, part: pieces[name, part.start])


def _by_row(columns: Columns, coupling: Coupling) -> list[Tensors]:
    """Solve for p = 1, every parameter on its own."""
    from collegium.solvers.fused import Rows

    rows = Rows(coupling.incidence.numpy(), coupling.eta.numpy(), coupling.lam)
    return columns.map(lambda block, name, part: torch.from_numpy(rows.solve(block.numpy())))


def _by_peaks(columns: Columns, coupling: Coupling) -> list[Tensors]:
    """Solve for p = inf on the parameters with the largest differences, all others being checked.

    A parameter whose differences stay below every edge's limit keeps its value: the penalty counts
    the largest difference of an edge only.
    """
    q = coupling.incidence
    limits = _single_edge_limits(columns, q, coupling.lam * (q.abs().T @ coupling.eta))
    chosen = _above(columns, q, 0.9 * limits)
    while True:
        rows = [columns.read(n, part)[:, chosen[n, part.start]] for n, part in columns.blocks()]
        result = torch.cat(rows, 1).double()
        if not result.numel():
            break
        found = alternate(result.T, coupling, lambda v, step: prox(v, step, "inf"))
        limits, result = found.w.abs().amax(0), found.z.T
        missed = _above(columns, q, limits * (1 + 1e-9))
        if not any((mask & ~chosen[key]).any() for key, mask in missed.items()):
            break
        wider = _above(columns, q, 0.9 * limits)
        chosen = {key: mask | wider[key] for key, mask in chosen.items()}
    counts = [int(mask.sum()) for mask in chosen.values()]
    pieces = dict(zip(chosen, torch.split(result, counts, dim=1), strict=True))

    def place(block: Tensor, name: str, part: slice) -> Tensor:
        block[:, chosen[name, part.start]] = pieces[name, part.start]
        return block

    return columns.map(place)


def _above(columns: Columns, q: Tensor, limits: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return, by block, which parameters differ by more than the limit of some edge."""
    return {
        (name, part.start): ((q.T @ columns.read(name, part).double()).abs() > limits[:, None]).any(
            0
        )
        for name, part in columns.blocks()
    }


def _single_edge_limits(columns: Columns, q: Tensor, radius: Tensor) -> Tensor:
    """Return at which difference each edge, were it alone, would be clipped (as `ball_threshold`).

    Takes passes over the blocks, about ten.
    """
    limits = torch.zeros_like(radius)
    active = torch.full_like(radius, -1)
    while True:
        total, count = torch.zeros_like(radius), torch.zeros_like(radius)
        for name, part in columns.blocks():
            sizes = (q.T @ columns.read(name, part).double()).abs()
            above = sizes > limits[:, None]
            total += (sizes * above).sum(1)
            count += above.sum(1)
        if torch.equal(count, active):
            return limits
        active = count
        limits = torch.where(total > radius, (total - radius) / count.clamp(min=1), 0.0)
