"""Sites that train together in one vectorised loop against the same sites one after the other.

Fits of 10 Adam steps at 4 and at 16 sites, by the same calls with the same batches: a perceptron on
rows of 28 numbers, as `configs/heart.yaml` trains, and a small network with convolutions on images
of 32 x 32, which `engine.together` refuses since it is slower; and whole runs of FedAvg with the
perceptron, messages, stored states and evaluation included. Processor seconds of one thread, in
turns.

    python benchmarks/together.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from common.measuring import in_turns, medians, verdict
from torch import nn

from collegium import ClassificationTask, FedAvg, Site, TensorDataset, TrainingConfig, simulate
from collegium.core.tensors import Tensors
from collegium.models.factory import build_model
from collegium.runtime.process import prepare
from collegium.training.loop import Fit, LocalTraining
from collegium.training.together import fit_all

LEAST_FIT, MOST_RUN = {4: 1.3, 16: 3.0}, {4: 0.85, 16: 0.65}
"""Limits by the number of sites: of the speed of fits, and of the time of a run."""

ROWS, BATCH, STEPS = 150, 32, 10

Network = Callable[[], nn.Module]


def perceptron() -> nn.Module:
    """Return the network of `configs/heart.yaml`."""
    return build_model("mlp", in_features=28, out_features=2, hidden=[32, 16])


def convolutions() -> nn.Module:
    """Return a small network for images of 32 x 32."""

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*stage(3, 16), *stage(16, 32), nn.Flatten(), nn.Linear(32 * 64, 2))


def make_data(shape: tuple[int, ...], count: int, seed: int) -> TensorDataset:
    """Return cases with two classes.

    Args:
        shape: of an image or a row.
        count: the number of cases.
        seed: decides the numbers.
    """
    random = torch.Generator().manual_seed(seed)
    return TensorDataset({
        "image": torch.randn(count, *shape, generator=random),
        "label": torch.randint(2, (count,), generator=random),
    })  # fmt: skip


def measure_fits(network: Network, shape: tuple[int, ...], sites: int, repetitions: int) -> float:
    """Return how many times as fast fits are together.

    Args:
        network: builds the network.
        shape: of an image or a row.
        sites: how many.
        repetitions: how often each is timed.
    """
    torch.manual_seed(0)
    config, module = TrainingConfig(batch_size=BATCH, local_steps=STEPS), network()
    local = LocalTraining(module, ClassificationTask(2), config)
    model = Tensors(module.state_dict()).clone()
    fits = [
        Fit(
            local, model, make_data(shape, ROWS, site), 0, ("fit", site), config.lr,
            epochs=None, steps=None, optimizer_state=None,
        )
        for site in range(sites)
    ]  # fmt: skip
    works: dict[str, Callable[[], object]] = {
        "apart": lambda: [fit.alone() for fit in fits],
        "together": partial(fit_all, fits),
    }
    seconds = medians(in_turns(works, repetitions, time.process_time))
    steps = sites * STEPS / 1e6
    shown = ", ".join(f"{name} {value / steps:.0f} us" for name, value in seconds.items())
    print(f"{sites} sites, a step of one of them: {shown}", flush=True)
    return seconds["apart"] / seconds["together"]


def measure_runs(count: int, rounds: int, repetitions: int) -> float:
    """Return the time of a run of FedAvg together by that of the same run apart.

    Args:
        count: the number of sites.
        rounds: of the run.
        repetitions: how often each is timed.
    """
    data = partial(make_data, (28,))
    sites = [
        Site(f"site-{k:02}", data(ROWS, 3 * k), data(30, 3 * k + 1), data(60, 3 * k + 2))
        for k in range(count)
    ]
    recipe = TrainingConfig(batch_size=BATCH, local_steps=STEPS, lr=1e-2)

    def run(*, together: bool) -> object:
        return simulate(
            FedAvg(), sites, perceptron, ClassificationTask(2), rounds=rounds, training=recipe,
            evaluate_every=5, together=together,
        )  # fmt: skip

    works = {"apart": partial(run, together=False), "together": partial(run, together=True)}
    seconds = medians(in_turns(works, repetitions, time.process_time))
    return seconds["together"] / seconds["apart"]


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no convolutions")
    options = parser.parse_args()
    repetitions = 5 if options.quick else 15
    prepare(threads=1)
    good = True
    for sites, least in LEAST_FIT.items():
        ratio = measure_fits(perceptron, (28,), sites, repetitions)
        name, text = f"together, perceptron, {sites} sites", "times as fast as one after the other"
        good &= verdict(name, ratio, least, text, least=True)
    for sites, most in MOST_RUN.items():
        ratio = measure_runs(sites, 10 if options.quick else 20, 3 if options.quick else 7)
        name = f"together, a run, {sites} sites"
        good &= verdict(name, ratio, most, "of the time one after the other")
    for sites in () if options.quick else LEAST_FIT:
        ratio = measure_fits(convolutions, (3, 32, 32), sites, 5)
        print(f"convolutions, {sites} sites: {ratio:.2f} times as fast, not judged")
    print(f"together: all of the above (target {LEAST_FIT[4]:g}): {'ok' if good else 'short'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
