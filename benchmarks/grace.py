"""GRACE's similarities: one blockwise Gram matrix against a loop over pairs of clients.

Twenty clients with the IOP-FL U-Net of 8 million parameters. Both ways start from the clients'
models and the global one, and return the matrix of cosines of the updates. The loop flattens every
update once and calls `torch.nn.functional.cosine_similarity` for every pair once (the authors' code
flattens for every pair, and computes each pair twice). They run in one process, in turns, with one
thread, which is the default of an engine; figures are medians of processor time, which does not
count what other work on the machine takes. Memory is measured in processes of their own: how far
the peak rises above the models themselves and the libraries.

    python benchmarks/grace.py [--quick]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

from common.measuring import in_turns

CLIENTS = 20
SPEED, MEMORY = 10.0, 1.0


def make_models(base: int) -> tuple[list[Any], Any]:
    """Return the clients' parameters and the global ones; all updates have a part in common."""
    import torch

    from collegium.core.tensors import Tensors
    from collegium.models.unet import IOPUNet

    shapes = {name: p.shape for name, p in IOPUNet(base=base).named_parameters()}
    rng = torch.Generator().manual_seed(0)

    def draw() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}

    start = draw()
    models = [
        Tensors((n, t.add_(start[n], alpha=1.5)) for n, t in draw().items()) for _ in range(CLIENTS)
    ]
    return models, Tensors(start)


def blockwise(models: list[Any], start: Any) -> Any:
    """Return the cosines as `Grace` computes them.

    Args:
        models: the clients' parameters.
        start: the global ones.
    """
    from collegium.solvers.gram import cosines, gram

    return cosines(gram(models, start))


def pairwise(models: list[Any], start: Any) -> Any:
    """Return the cosines pair by pair.

    Args:
        models: the clients' parameters.
        start: the global ones.
    """
    import torch
    from torch.nn.functional import cosine_similarity

    updates = [torch.cat([(m[n] - start[n]).flatten() for n in start]) for m in models]
    found = torch.eye(len(updates))
    for i, one in enumerate(updates):
        for j, other in enumerate(updates[:i]):
            found[i, j] = found[j, i] = cosine_similarity(one, other, dim=0)
    return found.numpy()


def rise(work: Callable[[list[Any], Any], Any], base: int) -> float:
    """Return how far the peak memory rises, in models.

    Args:
        work: computes the cosines.
        base: channels of the U-Net's first layer.
    """
    import numpy as np
    import torch

    from collegium.runtime.process import prepare
    from collegium.solvers.products import add_products

    prepare(threads=1)
    work(*make_models(1))  # loads whatever is loaded at the first call
    add_products(np.zeros((2, 2)), torch.ones(2, 2))  # and numba, which large models need
    models, start = make_models(base)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(models, start)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return float(more * 1024 / (4 * start.numel()))


def rise_apart(name: str, base: int) -> float:
    """Measure `rise` in a process of its own.

    Args:
        name: "blockwise" or "pairwise".
        base: channels of the U-Net's first layer.
    """
    command = [sys.executable, __file__, "--rise", name, "--base", str(base)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(base: int, repetitions: int) -> tuple[int, dict[str, list[float]], float]:
    """Return the model's size, the seconds of both by repetition, and how far results differ.

    Args:
        base: channels of the U-Net's first layer.
        repetitions: how often both run, in turns.
    """
    import numpy as np

    from collegium.runtime.process import prepare

    prepare(threads=1)
    models, start = make_models(base)
    works = {"blockwise": blockwise, "pairwise": pairwise}
    results: dict[str, Any] = {}

    def keep(name: str) -> None:
        results[name] = works[name](models, start)

    times = in_turns({name: partial(keep, name) for name in works}, repetitions, process_time)
    apart = float(np.abs(results["blockwise"] - results["pairwise"]).max())
    return start.numel(), times, apart


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a model of 2 million parameters")
    parser.add_argument("--rise", help=argparse.SUPPRESS)
    parser.add_argument("--base", type=int, default=32, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rise:
        print(rise({"blockwise": blockwise, "pairwise": pairwise}[options.rise], options.base))
        return 0
    base = 16 if options.quick else options.base
    # first of all, since a process inherits the peak of the one that starts it
    more, most = rise_apart("blockwise", base), rise_apart("pairwise", base)
    size, times, apart = measure(base, 7 if options.quick else 5)
    ours, loop = (statistics.median(times[name]) for name in ("blockwise", "pairwise"))
    ratio = statistics.median(
        slow / quick for quick, slow in zip(times["blockwise"], times["pairwise"], strict=True)
    )
    print(f"{CLIENTS} clients, {size / 1e6:.1f} million parameters, largest difference {apart:.1e}")
    print(f"blockwise  {ours * 1e3:8.0f} ms, memory of {more:5.2f} models more")
    print(f"pairwise   {loop * 1e3:8.0f} ms, memory of {most:5.2f} models more")
    fast, small = ratio >= SPEED, more <= MEMORY
    print(
        f"grace_speed: {ratio:.1f} times as fast as the loop over pairs (target {SPEED:g}): "
        f"{'ok' if fast else 'short'}"
    )
    print(
        f"grace_memory: {more:.2f} models beside the {CLIENTS} (target {MEMORY:g}): "
        f"{'ok' if small else 'short'}"
    )
    return 0 if fast and small else 1


if __name__ == "__main__":
    sys.exit(main())
