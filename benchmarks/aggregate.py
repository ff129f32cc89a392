"""The streaming mean against copying memory and against stacking.

Ten clients, a model of 31 million parameters in a hundred tensors.

python benchmarks/aggregate.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from collegium.process import prepare
from collegium.tensors import Mean, Tensors

PASSES, STACKING = 1.3, 4.0
TENSORS = 100


def seconds(work: Callable[[], object]) -> float:
    """Return how long ``work`` takes once."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def stream(models: list[Tensors]) -> Tensors:
    """Average as the server does."""
    running = Mean()
    for model in models:
        running.add(model, 3.0)
    return running.result()


def stack(models: list[Tensors]) -> Tensors:
    """Average by stacking, as most libraries do."""
    weights = torch.full((len(models),), 1 / len(models))
    return Tensors(
        (name, (torch.stack([m[name] for m in models]) * weights[:, None]).sum(0))
        for name in models[0]
    )


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the parameters, fewer repetitions"
    )
    options = parser.parse_args()
    prepare(threads=2)
    size, clients, repetitions = (7_750_000, 10, 7) if options.quick else (31_000_000, 10, 9)
    rng = torch.Generator().manual_seed(0)
    models = [
        Tensors((f"t{k}", torch.randn(size // TENSORS, generator=rng)) for k in range(TENSORS))
        for _ in range(clients)
    ]
    source = torch.randn(size)
    target = torch.empty_like(source)
    work: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(source),
        "streaming": lambda: stream(models),
        "stacking": lambda: stack(models),
    }
    for run in work.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repetitions):
        for name, run in work.items():
            times[name].append(seconds(run))
    median = {name: statistics.median(found) for name, found in times.items()}
    per_client = median["streaming"] / clients
    print(
        f"memcpy of one model  {median['memcpy'] * 1e3:8.1f} ms  "
        f"({8 * size / median['memcpy'] / 1e9:.1f} GB/s)"
    )
    print(f"streaming, a client  {per_client * 1e3:8.1f} ms")
    print(f"stacking, a client   {median['stacking'] / clients * 1e3:8.1f} ms")
    passes, times_faster = per_client / median["memcpy"], median["stacking"] / median["streaming"]
    good = passes <= PASSES and times_faster >= STACKING
    print(
        f"aggregate: {passes:.2f} passes of memcpy, {times_faster:.1f} times stacking "
        f"(target {PASSES}, {STACKING}): {'ok' if good else 'short'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
