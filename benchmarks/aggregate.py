"""The streaming mean against copying memory and against stacking.

Ten clients with the classic U-Net of 31 million parameters. Copying and our mean run in one
process, in turns; stacking, as most libraries average, in a process of its own with the allocator
as it comes, since that is how those libraries run.

    python benchmarks/aggregate.py [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

from common.measuring import in_turns, medians

PASSES, STACKING = 1.3, 4.0
CLIENTS = 10


def make_models() -> list[dict[str, Any]]:
    """Return the clients' parameters."""
    import torch

    from collegium.models.unet import IOPUNet

    shapes = {name: p.shape for name, p in IOPUNet(base=64).named_parameters()}
    rng = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
        for _ in range(CLIENTS)
    ]


def measure_ours(repetitions: int) -> tuple[int, dict[str, float]]:
    """Return a model's size, and the seconds of copying it and of averaging as the server does."""
    import torch

    from collegium.core.tensors import Mean, Tensors
    from collegium.runtime.process import prepare

    prepare(threads=2)
    models = [Tensors(model) for model in make_models()]
    source = torch.randn(models[0].numel())
    target = torch.empty_like(source)

    def stream() -> Tensors:
        running = Mean()
        for model in models:
            running.add(model, 3.0)
        return running.result()

    works = {"memcpy": lambda: target.copy_(source), "streaming": stream}
    return len(source), medians(in_turns(works, repetitions))


def measure_stacking(repetitions: int) -> float:
    """Measure averaging by stacking every tensor over the clients."""
    import torch

    torch.set_num_threads(2)
    models = make_models()
    weights = torch.full((CLIENTS,), 1 / CLIENTS)

    def stack() -> dict[str, Any]:
        return {
            name: (
                torch.stack([model[name] for model in models]) * weights.view(-1, *[1] * t.ndim)
            ).sum(0)
            for name, t in models[0].items()
        }

    return medians(in_turns({"stacking": stack}, repetitions))["stacking"]


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--stacking", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    repetitions = 3 if options.quick else 9
    if options.stacking:
        print(measure_stacking(repetitions))
        return 0
    command = [sys.executable, __file__, "--stacking", *(["--quick"] if options.quick else [])]
    stacking = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    size, ours = measure_ours(repetitions)
    per_client = ours["streaming"] / CLIENTS
    speed = 8 * size / ours["memcpy"] / 1e9
    print(f"memcpy of one model  {ours['memcpy'] * 1e3:8.1f} ms  ({speed:.1f} GB/s)")
    print(f"streaming, a client  {per_client * 1e3:8.1f} ms")
    print(f"stacking, a client   {stacking / CLIENTS * 1e3:8.1f} ms")
    passes, faster = per_client / ours["memcpy"], stacking / ours["streaming"]
    good = passes <= PASSES and faster >= STACKING
    print(
        f"aggregate: {passes:.2f} passes of memcpy, {faster:.1f} times as fast as stacking "
        f"(target {PASSES}, {STACKING}): {'ok' if good else 'short'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
