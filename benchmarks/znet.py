"""pFedNet's Z-update against its Algorithm 4 written down in torch.

p = 2: twenty iterations on small matrices (`collegium.solvers.consensus`) against twenty on the
sites' vectors, from the same start, in turns, one thread each. The baseline keeps the vectors as
rows, inverts its matrix once and works in place where it can. Both must agree in float64, from
other starts too. For p = 1 and "inf", whose exact solvers have no such counterpart, the time of the
processor has to grow linearly with the number of parameters, and the memory beside the points must
stay below two copies of them; with "inf" at a penalty that touches about one parameter in a
hundred, as the memory grows with these.

    python benchmarks/znet.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common.measuring import in_turns, medians, peak_of

FASTER, EQUAL, LINEAR, COPIES = 30.0, 1e-10, 1.5, 2.0
ITERATIONS = 20
THREADS = 1
AT_ONCE = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""The environment in which memory goes back to the system once it is free, so that it counts."""


def make_problem(sites: int, size: int, dtype: Any) -> tuple[Any, Any, Any]:
    """Return incidence matrix (sites, edges), Z_t and B as rows, for a graph of 3 neighbours."""
    import numpy as np
    import torch

    from collegium.heterogeneity.graphs import edges, incidence, neighbours

    rng = torch.Generator().manual_seed(0)
    places = torch.randn(sites, 4, generator=rng).double().numpy()
    distances = np.linalg.norm(places[:, None] - places[None], axis=2)
    q = incidence(sites, edges(neighbours(distances, 3)))
    anchors = torch.randn(size, generator=rng, dtype=dtype).repeat(sites, 1)
    for row in anchors:
        row += 0.1 * torch.randn(size, generator=rng, dtype=dtype)
    points = anchors.clone()
    for row in points:
        row += 0.01 * torch.randn(size, generator=rng, dtype=dtype)
    return q, anchors, points


def literal(anchors: Any, points: Any, q: Any, eta: float, lam: float, rho: float) -> Any:
    """Return Z after Algorithm 4 with p = 2; rows are sites, Z_t - (eta/N) U are the points."""
    import torch

    q = q.to(points.dtype)
    inverse = torch.linalg.inv(torch.eye(len(q), dtype=q.dtype) + eta * rho * q @ q.T)
    w = q.T @ anchors
    omega = torch.zeros_like(w)
    z = points
    for _ in range(ITERATIONS):
        z = inverse @ torch.addmm(points, q, w.mul_(rho).sub_(omega), alpha=eta)
        difference = q.T @ z
        w = torch.add(difference, omega, alpha=1 / rho)
        lengths = w.norm(dim=1, keepdim=True)
        w.mul_((1 - lam / (rho * lengths).clamp_min(1e-30)).clamp_min_(0))
        omega.add_(difference.sub_(w), alpha=rho)
    return z


def as_sites(rows: Any) -> list[Any]:
    """Return the rows as models."""
    from collegium.core.tensors import Tensors

    return [Tensors({"z": row}) for row in rows]


def compare(sites: int, size: int, repetitions: int) -> float:
    """Print and return how many times as fast the small matrices are, with p = 2 in float32."""
    import torch

    from collegium.solvers.admm import Coupling
    from collegium.solvers.consensus import consensus

    q, _, points = make_problem(sites, size, torch.float32)
    eta, rho, lam = 0.1, 1.0, 0.005 * size**0.5
    matrix, models = torch.from_numpy(q), as_sites(points)
    coupling, best = Coupling.of(q, eta, lam, rho), Coupling.of(q, eta, lam)
    works: dict[str, Callable[[], object]] = {
        "literal": lambda: literal(points, points, matrix, eta, lam, rho),
        "gram": lambda: consensus(models, coupling, iterations=ITERATIONS),
        "optimum": lambda: consensus(models, best),
    }
    took = medians(in_turns(works, repetitions))
    print(
        f"p=2 N={sites} edges={q.shape[1]} d={size:.1e}:  literal {took['literal'] * 1e3:9.1f} ms"
        f"  same iterations {took['gram'] * 1e3:7.1f} ms  optimum {took['optimum'] * 1e3:7.1f} ms"
    )
    return took["literal"] / took["gram"]


def difference(sites: int, size: int) -> float:
    """Return the largest difference to Algorithm 4, begun at Z_t, relative to the whole step."""
    import torch

    from collegium.solvers.admm import Coupling
    from collegium.solvers.consensus import consensus

    q, anchors, points = make_problem(sites, size, torch.float64)
    lam = 0.05 * size**0.5
    expected = literal(anchors, points, torch.from_numpy(q), 0.1, lam, 1.0)
    coupling = Coupling.of(q, 0.1, lam, 1.0)
    sides = as_sites(points), as_sites(anchors)
    found = consensus(sides[0], coupling, iterations=ITERATIONS, start=sides[1])
    rows = torch.stack([site["z"] for site in found])
    return float((rows - expected).abs().max() / (expected - anchors).abs().max())


def measure_exact(norm: str, size: int, repetitions: int) -> dict[str, float]:
    """Return processor seconds, and memory beside the points in copies of them, of p = 1 or inf."""
    import torch

    from collegium.solvers.admm import Coupling
    from collegium.solvers.consensus import consensus

    torch.set_num_threads(THREADS)
    q, _, few = make_problem(5, 40_000, torch.float32)
    points = make_problem(5, size, torch.float32)[2]
    sites = as_sites(points)

    def solve(models: list[Any]) -> object:
        lam = 0.2 if norm == "1" else 5e-5 * models[0].numel()
        return consensus(models, Coupling.of(q, 0.1, lam), p=1 if norm == "1" else "inf")

    solve(as_sites(few))  # compiles, and loads what multiplies matrices
    peaks, times = [], []
    for _ in range(repetitions):
        start = time.process_time()
        peaks.append(peak_of(lambda: solve(sites)))
        times.append(time.process_time() - start)
    copy = points.numel() * points.element_size()
    return {"seconds": min(times), "copies": max(peaks) / copy}


def judge_exact(norm: str, sizes: tuple[int, int], repetitions: int) -> bool:
    """Measure an exact solver at two sizes in processes of their own, print and judge."""
    found = []
    for size in sizes:
        command = [sys.executable, __file__, "--exact", norm, str(size), str(repetitions)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=AT_ONCE)
        found.append(json.loads(done.stdout))
        print(
            f"p={norm} N=5 d={size:.1e}:  {found[-1]['seconds'] * 1e3:8.1f} ms  "
            f"{found[-1]['copies']:.2f} copies"
        )
    growth = found[1]["seconds"] / found[0]["seconds"] / (sizes[1] / sizes[0])
    copies = found[1]["copies"]
    good = bool(growth <= LINEAR and copies <= COPIES)
    print(
        f"znet p={norm}: time grows {growth:.2f} times as fast as d, {copies:.2f} copies of Z "
        f"(target {LINEAR}, {COPIES}): {'ok' if good else 'short'}"
    )
    return good


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller and fewer")
    parser.add_argument("--exact", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.exact:
        norm, size, repetitions = options.exact
        print(json.dumps(measure_exact(norm, int(size), int(repetitions))))
        return 0
    from collegium.runtime.process import prepare

    prepare(threads=THREADS)
    cases = [(5, 1_000_000), (50, 200_000)] if options.quick else [
        (5, 1_000_000), (5, 7_800_000), (50, 200_000)
    ]  # fmt: skip
    slowest = min(compare(sites, size, 1 if options.quick else 3) for sites, size in cases)
    apart = max(difference(5, 50_000), difference(50, 5_000))
    good = [slowest >= FASTER and apart <= EQUAL]
    print(
        f"znet p=2: {slowest:.0f} times as fast as Algorithm 4, {apart:.0e} apart "
        f"(target {FASTER:.0f}, {EQUAL:.0e}): {'ok' if good[0] else 'short'}"
    )
    sizes = (250_000, 1_000_000) if options.quick else (1_000_000, 4_000_000)
    good += [judge_exact(norm, sizes, 1 if options.quick else 3) for norm in ("1", "inf")]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
