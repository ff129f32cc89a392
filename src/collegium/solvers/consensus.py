"""pFedNet's Z-update: pulls vectors of several sites together along a graph, exactly.

Zhao et al. (2023, https://arxiv.org/abs/2306.14483; Algorithm 4, Eq. 8-9) minimise over one column
z_n per site

    (1/N) <U, Z> + lam ||Z Q||_{1,p} + ||Z - Z_t||_F^2 / (2 eta),

the norm being the sum over the edges of the p-norm of the difference of two sites. Completing the
square, this is the proximal problem that `consensus` solves, at the points B = Z_t - (eta/N) U:

    minimise  sum_n ||z_n - b_n||^2 / (2 eta_n)  +  lam sum_{edges (i, j)} ||z_i - z_j||_p.

The solution for each norm:

* p = 2: every iterate is B times a small matrix, so the iteration runs on N x N matrices and the
  Gram matrix of the points: two passes over the data for any number of iterations.
* p = 1: the problem separates into one per parameter; see `collegium.solvers.fused`.
* p = inf: only parameters with large differences change. The iteration runs on those, and the
  others are checked against the result; if the check fails, more of them are included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from collegium.core.lazy import torch
from collegium.core.tensors import Tensors, identity, require_same_names
from collegium.errors import ConfigError
from collegium.solvers.admm import Coupling, Norm, prox, run_admm, shrinkage
from collegium.solvers.gram import gram_of_blocks

if TYPE_CHECKING:
    from torch import Tensor

WIDTH = 1 << 15
"""Parameters in a block that is processed at once."""

MAX_BLOCK = 1 << 22
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

    Beside the result, memory holds blocks of parameters only; with p = inf also the parameters
    whose difference between two neighbours the penalty limits. Ties between weights are kept.

    Args:
        points: b_n of each site, floating-point tensors of equal names and shapes.
        coupling: the graph, with a row per site.
        p: the norm.
        iterations: number of iterations of Algorithm 4 (with p = inf this holds all parameters at
            once); None: the problem is solved.
        start: Z_t, at which W starts if ``iterations`` is given; None: at the points.

    Raises:
        ConfigError: the graph has another number of sites.
        ProtocolError: the names differ between sites.
    """
    if len(points) != len(coupling.incidence):
        raise ConfigError(
            f"{len(points)} sites do not fit a graph of {len(coupling.incidence)} sites"
        )
    if coupling.lam == 0 or not coupling.incidence.shape[1]:  # nothing is coupled
        return [point.clone() for point in points]
    matrix = SiteMatrix(points)
    if p == 2:
        return _solve_l2(matrix, coupling, iterations, None if start is None else SiteMatrix(start))
    if iterations is not None:
        return _iterate_algorithm4(matrix, coupling, p, iterations, start)
    return _solve_l1(matrix, coupling) if p == 1 else _solve_max(matrix, coupling)


class SiteMatrix:
    """The sites' tensors as one matrix (sites, parameters), read and written by blocks.

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

    @property
    def columns(self) -> int:
        """Return the number of parameters."""
        return sum(len(vector) for vector in self.flat[0].values())

    def blocks(self) -> Iterator[tuple[str, slice]]:
        """Yield the name and the range of every block."""
        width = max(min(WIDTH, MAX_BLOCK // len(self.sites)), 1)
        for name in self.names:
            length = len(self.flat[0][name])
            for begin in range(0, length, width):
                yield name, slice(begin, min(begin + width, length))

    def read(self, name: str, part: slice) -> Tensor:
        """Return a block, (sites, parameters): float32 or float64.

        Args:
            name: of the tensor.
            part: range of its parameters.
        """
        block = torch.stack([flat[name][part] for flat in self.flat])
        return block if block.dtype == torch.float32 else block.double()

    def write(self, block_of: Callable[[str, slice], Tensor]) -> list[Tensors]:
        """Return new tensors of the sites, of which ``block_of`` returns every block."""
        results = [{n: torch.empty_like(t) for n, t in flat.items()} for flat in self.flat]
        for name, part in self.blocks():
            for result, row in zip(results, block_of(name, part), strict=True):
                result[name][part] = row
        return [_shape_like(site, new) for site, new in zip(self.sites, results, strict=True)]

    def map(self, fn: Callable[[Tensor, str, slice], Tensor]) -> list[Tensors]:
        """Return new tensors of the sites, with ``fn`` applied to every block, in float64."""
        return self.write(lambda name, part: fn(self.read(name, part).double(), name, part))


def _shape_like(site: Tensors, flat: dict[str, Tensor]) -> Tensors:
    """Return flat tensors with the shapes and the ties of a site's."""
    shaped = {identity(site[name]): vector.view(site[name].shape) for name, vector in flat.items()}
    return Tensors((name, shaped[identity(tensor)]) for name, tensor in site.items())


def _solve_l2(
    matrix: SiteMatrix, coupling: Coupling, iterations: int | None, start: SiteMatrix | None
) -> list[Tensors]:
    """Solve for p = 2 on matrices that have a row per site (twice that with a start).

    The rows are the sites' differences from the first site: Q^T 1 = 0, so that nothing else
    matters, and what sites have in common costs no digits, even in single precision.
    """
    matrices = [matrix] if start is None else [matrix, start]
    count = len(coupling.incidence)
    rows = len(matrices) * (count - 1)
    differences = (_from_first(matrices, *at)[1] for at in matrix.blocks())
    gram = gram_of_blocks(differences, rows, matrix.columns)
    values, vectors = torch.linalg.eigh(torch.from_numpy(gram))
    root = values.clamp(min=0).sqrt()[:, None] * vectors.T  # root^T root = gram
    unit = torch.zeros(2, rows, count, dtype=torch.float64)
    for i in range(len(matrices)):
        unit[i, i * (count - 1) :][: count - 1, 1:] = torch.eye(count - 1)
    solution = run_admm(
        unit[0],
        coupling,
        lambda v, step: v * shrinkage((root @ v).norm(dim=0), step),
        start=None if start is None else unit[1],
        iterations=iterations,
        length=lambda v: float((root @ v).norm()),
    )

    def combine(name: str, part: slice) -> Tensor:
        first, others = _from_first(matrices, name, part)
        return torch.addmm(first.expand(count, -1), solution.z.T.to(others.dtype), others)

    return matrix.write(combine)


def _from_first(matrices: Sequence[SiteMatrix], name: str, part: slice) -> tuple[Tensor, Tensor]:
    """Return a block of the first site, and the differences of the others from it."""
    blocks = [matrix.read(name, part) for matrix in matrices]
    differences = [block[1:] - block[:1] for block in blocks]
    return blocks[0][0], differences[0] if len(matrices) == 1 else torch.cat(differences)


def _iterate_algorithm4(
    matrix: SiteMatrix,
    coupling: Coupling,
    p: Norm,
    iterations: int,
    start: Sequence[Tensors] | None,
) -> list[Tensors]:
    """Run a number of iterations for p = 1, block by block, or p = inf, all at once."""
    begin = matrix if start is None else SiteMatrix(start)

    def run(block: Tensor, first: Tensor) -> Tensor:
        b, z = block.double().T, first.double().T
        return run_admm(b, coupling, partial(prox, p=p), start=z, iterations=iterations).z.T

    if p == 1:
        return matrix.map(lambda block, name, part: run(block, begin.read(name, part)))
    blocks = list(matrix.blocks())
    whole = [torch.cat([each.read(*block) for block in blocks], 1) for each in (matrix, begin)]
    pieces = torch.split(run(*whole), [part.stop - part.start for _, part in blocks], dim=1)
    results = {
        (name, part.start): piece for (name, part), piece in zip(blocks, pieces, strict=True)
    }
    return matrix.map(lambda block, name, part: results[name, part.start])


def _solve_l1(matrix: SiteMatrix, coupling: Coupling) -> list[Tensors]:
    """Solve for p = 1, separately for every parameter."""
    from collegium.solvers.fused import FusedLasso

    lasso = FusedLasso(coupling.incidence.numpy(), coupling.eta.numpy(), coupling.lam)
    return matrix.map(lambda block, name, part: torch.from_numpy(lasso.solve(block.numpy())))


def _solve_max(matrix: SiteMatrix, coupling: Coupling) -> list[Tensors]:
    """Solve for p = inf on the parameters with the largest differences, and check all others.

    A parameter whose differences stay below every edge's limit keeps its value: the penalty counts
    the largest difference of an edge only.
    """
    q = coupling.incidence
    limits = _single_edge_limits(matrix, q, coupling.lam * (q.abs().T @ coupling.eta))
    chosen = _above(matrix, q, 0.9 * limits)
    while True:
        rows = [matrix.read(n, part)[:, chosen[n, part.start]] for n, part in matrix.blocks()]
        result = torch.cat(rows, 1).double()
        if not result.numel():
            break
        solution = run_admm(result.T, coupling, partial(prox, p="inf"))
        limits, result = solution.w.abs().amax(0), solution.z.T
        missed = _above(matrix, q, limits * (1 + 1e-9))
        if not any((mask & ~chosen[key]).any() for key, mask in missed.items()):
            break
        wider = _above(matrix, q, 0.9 * limits)
        chosen = {key: mask | wider[key] for key, mask in chosen.items()}
    counts = [int(mask.sum()) for mask in chosen.values()]
    pieces = dict(zip(chosen, torch.split(result, counts, dim=1), strict=True))

    def replace_chosen(block: Tensor, name: str, part: slice) -> Tensor:
        block[:, chosen[name, part.start]] = pieces[name, part.start]
        return block

    return matrix.map(replace_chosen)


def _above(matrix: SiteMatrix, q: Tensor, limits: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return, by block, which parameters differ by more than the limit of some edge."""
    return {
        (name, part.start): (sizes > limits[:, None]).any(0)
        for name, part, sizes in _differences(matrix, q)
    }


def _differences(matrix: SiteMatrix, q: Tensor) -> Iterator[tuple[str, slice, Tensor]]:
    """Yield every block's name and range, and its absolute differences, (edges, parameters)."""
    for name, part in matrix.blocks():
        yield name, part, (q.T @ matrix.read(name, part).double()).abs()


def _single_edge_limits(matrix: SiteMatrix, q: Tensor, radius: Tensor) -> Tensor:
    """Return the difference at which each edge alone would be clipped (as `ball_threshold`).

    Takes about ten passes over the blocks.
    """
    limits = torch.zeros_like(radius)
    active = torch.full_like(radius, -1)
    while True:
        total, count = torch.zeros_like(radius), torch.zeros_like(radius)
        for _, _, sizes in _differences(matrix, q):
            above = sizes > limits[:, None]
            total += (sizes * above).sum(1)
            count += above.sum(1)
        if torch.equal(count, active):
            return limits
        active = count
        limits = torch.where(total > radius, (total - radius) / count.clamp(min=1), 0.0)
