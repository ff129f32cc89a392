"""The exact diagonal of the Fisher information against one bare backward pass per sample.

The U-Net of 7.8 million parameters, 8 images of 96 x 96 and 4 of 256 x 256, one thread. Ours runs
in turns with the bare passes (nothing is squared or kept: a bound, not a method), with the loop as
it is usually written (zero, backward, clone, square, add) and with per-sample gradients of the
whole batch at once (`torch.func.vmap`). Times are processor seconds, so that what else the machine
does matters little. Peaks of memory are those of processes of their own, beyond the bare passes.

Beside it stands why a batch is no substitute: the square of its gradient picks other parameters.

    python benchmarks/fisher.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common.measuring import in_turns, peak_of

USUAL, BARE, MEMORY = 0.97, 0.9, 2.5
"""Least speed by the usual loop's and by the bare passes', and most memory in models."""

SETTINGS, QUICK = {96: 8, 256: 4}, {96: 4, 256: 2}
PERCENT = 10
CHILDREN = 3
Work = Callable[[], dict[str, Any]]


def make_works(size: int, count: int) -> dict[str, Work]:
    """Return the ways to compute the diagonal, on the same images.

    Args:
        size: pixels along each side of the images.
        count: number of images.
    """
    import torch
    from torch.func import functional_call, grad, vmap

    from collegium.core.dataset import TensorDataset
    from collegium.core.tensors import Tensors
    from collegium.models.unet import IOPUNet
    from collegium.runtime.process import prepare
    from collegium.tasks import SegmentationTask
    from collegium.training.fisher import diagonal_fisher
    from collegium.training.loop import LocalTraining, TrainingConfig

    prepare(threads=1)
    torch.manual_seed(0)
    network = IOPUNet(base=32, norm="instance")
    images = torch.randn(count, 3, size, size)
    labels = (torch.rand(count, size, size) > 0.7).long()
    task = SegmentationTask(2, "ce")
    training = LocalTraining(network, task, TrainingConfig())
    model = Tensors(network.state_dict()).clone()
    data = TensorDataset({"image": images, "label": labels})
    network.eval()
    parameters = dict(network.named_parameters())

    def loss(image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return task.loss(network(image), {"image": image, "label": label})

    def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def ours() -> dict[str, Any]:
        return dict(diagonal_fisher(training, model, data, seed=0, path=("benchmark",))[0])

    def bare() -> dict[str, Any]:
        for i in range(count):
            network.zero_grad(set_to_none=True)
            torch.autograd.backward(loss(images[i : i + 1], labels[i : i + 1]))
        return {}

    def usual() -> dict[str, Any]:
        found = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for i in range(count):
            network.zero_grad()
            torch.autograd.backward(loss(images[i : i + 1], labels[i : i + 1]))
            for name, p in parameters.items():
                found[name] = found[name] + gradient_of(p).clone().pow(2) / count
        return found

    def at_once() -> dict[str, Any]:
        def one(now: dict[str, Any], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            batch = {"image": image[None], "label": label[None]}
            return task.loss(functional_call(network, now, (image[None],)), batch)

        point = {name: p.detach() for name, p in parameters.items()}
        gradients = vmap(grad(one), in_dims=(None, 0, 0))(point, images, labels)
        return {name: g.square().mean(0) for name, g in gradients.items()}

    def of_batch() -> dict[str, Any]:
        network.zero_grad()
        torch.autograd.backward(loss(images, labels))
        return {name: gradient_of(p).square() for name, p in parameters.items()}

    return {"ours": ours, "bare": bare, "usual": usual, "vmap": at_once, "batch": of_batch}


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    """Return the median of the ratios of two ways that ran in turns.

    Args:
        times: seconds by way and repetition.
        above: the way whose seconds are divided.
        below: the way by whose seconds they are divided.
    """
    return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))


def peak_apart(name: str, size: int, count: int) -> float:
    """Return the peak memory of one way beyond the bare passes, in MB; the median of processes.

    How much the allocator holds back differs between two runs of the same program.

    Args:
        name: of the way.
        size: pixels along each side of the images.
        count: number of images.
    """
    command = [sys.executable, __file__, "--peak", name, str(size), str(count)]
    return statistics.median(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(CHILDREN)
    )


def measure_peak(name: str, size: int, count: int) -> float:
    """Run the bare passes and then one way, and return how many MB more it needed.

    Args:
        name: of the way.
        size: pixels along each side of the images.
        count: number of images.
    """
    works = make_works(size, count)
    works["bare"]()
    return peak_of(works[name]) / 1e6


def compare(works: dict[str, Work]) -> tuple[float, float, float]:
    """Return the largest relative error, the batch's overlap, and the MB of the parameters.

    The overlap is the share of the parameters with the largest information that the square of the
    batch's gradient finds too.
    """
    import torch

    from collegium.core.tensors import Tensors
    from collegium.training.fisher import top_mask

    exact, other, wrong = (Tensors(works[name]()) for name in ("ours", "usual", "batch"))
    error = max(
        float((exact[name] - other[name]).norm() / other[name].norm().clamp(min=1e-30))
        for name in exact
    )
    first, second = (
        torch.cat([t.flatten() for t in top_mask(values, PERCENT).values()])
        for values in (exact, wrong)
    )
    return error, float((first & second).sum() / first.sum()), exact.numel() * 4 / 1e6


def run(size: int, count: int, *, quick: bool) -> bool:
    """Measure one size of images, print the figures and return whether the targets are met.

    Args:
        size: pixels along each side of the images.
        count: number of images.
        quick: fewer repetitions, and no vmap.
    """
    names = ["bare", "ours", "usual"] + ([] if quick else ["vmap"])
    unmeasured, repetitions = ({"bare", "usual"}, 2) if quick else ({"bare"}, 7)
    works = make_works(size, count)
    times = in_turns({name: works[name] for name in names}, repetitions, time.process_time)
    for name in names:
        seconds = statistics.median(times[name])
        print(
            f"{size} x {size}, {count} images  {name:8} {seconds * 1e3:8.0f} ms  "
            f"{ratio(times, 'bare', name):5.2f} of the speed of bare passes"
        )
    error, overlap, megabytes = compare(works)
    peaks = {name: peak_apart(name, size, count) for name in names if name not in unmeasured}
    megabytes_of = ", ".join(f"{name} {peak:.0f} MB" for name, peak in peaks.items())
    print(f"  peak beyond the bare passes: {megabytes_of} (the model has {megabytes:.0f} MB)")
    print(f"  largest error against the usual loop {error:.1e}")
    print(f"  top {PERCENT} % of the batch's squared gradient: {overlap:.0%} are right")
    usual, bare = ratio(times, "usual", "ours"), ratio(times, "bare", "ours")
    memory = peaks["ours"] / megabytes
    good = usual >= USUAL and bare >= BARE and memory <= MEMORY and error < 1e-5
    print(
        f"fisher {size} x {size}: {usual:.2f} times the speed of the usual loop, {bare:.2f} times "
        f"that of bare passes, {memory:.1f} models of memory (target {USUAL}, {BARE}, {MEMORY}): "
        f"{'ok' if good else 'short'}"
    )
    return good


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer images and repetitions, no vmap"
    )
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        name, size, count = options.peak
        print(measure_peak(name, int(size), int(count)))
        return 0
    settings = QUICK if options.quick else SETTINGS
    good = [run(size, count, quick=options.quick) for size, count in settings.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
