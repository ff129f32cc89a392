"""Local training against a bare PyTorch loop, for four networks and every precision and layout.

A fit of some steps through `LocalTraining` takes turns with the loop that one would write without
it: the same network, optimiser and batches, the same loss by MONAI or torch, in the order of memory
that torch uses, in float32, without compiling. Images are in memory already. Times are processor
seconds if one thread computes. With --dice, every setting also trains the vessel network on real
images for 1,500 steps with three seeds, so that what a setting changes can be seen beside what a
seed changes.

    python benchmarks/training.py [--quick] [--threads 1] [--networks vessel,iop,volume,densenet]
    python benchmarks/training.py --dice DATA    (the folder that holds vessel/)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.measuring import in_turns, verdict

SETTINGS: dict[str, dict[str, str]] = {
    "contiguous": {"memory_format": "contiguous"},
    "default": {},
    "bf16": {"precision": "bf16"},
    "compiled": {"compile": "on"},
    "compiled bf16": {"compile": "on", "precision": "bf16"},
}
TARGETS = {"default": 1.2, "bf16": 1.5, "compiled": 1.5, "compiled bf16": 2.2}
"""The least speed on the vessel network by that of the bare loop."""

STEPS = 10
"""Steps of a fit, a third of those of `configs/vessel.yaml`; a fit does some things once."""

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A network and its batches.

    Attributes:
        build: builds the network.
        shape: of a batch of images.
        labels: the shape of its labels.
        classes: of the labels.
    """

    build: Callable[[], Any]
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int


def cases() -> dict[str, Case]:
    """Return the networks by name."""
    from monai.networks.nets.densenet import DenseNet121

    from collegium.models.factory import build_model
    from collegium.models.unet import IOPUNet

    def unet(dimensions: int, inputs: int, outputs: int) -> Callable[[], Any]:
        return lambda: build_model(
            name="unet", spatial_dims=dimensions, in_channels=inputs, out_channels=outputs,
            channels=(16, 32, 64, 128), num_res_units=1,
        )  # fmt: skip

    return {
        "vessel": Case(unet(2, 3, 2), (8, 3, 128, 128), (8, 128, 128), 2),
        "iop": Case(lambda: IOPUNet(3, 2, base=16), (2, 3, 384, 384), (2, 384, 384), 2),
        "volume": Case(unet(3, 1, 3), (4, 1, 32, 48, 32), (4, 32, 48, 32), 3),
        "densenet": Case(lambda: DenseNet121(2, 3, 2), (8, 3, 96, 96), (8,), 2),
    }


def make_works(case: Case, names: list[str], threads: int) -> dict[str, Work]:
    """Return a fit of `STEPS` steps by the bare loop, and one for every setting.

    Args:
        case: the network.
        names: of the settings.
        threads: of torch.
    """
    import torch
    from monai.losses.dice import DiceCELoss
    from torch import nn

    from collegium.algorithms.fedavg import FedAvg
    from collegium.core.algorithm import NetworkBuilder
    from collegium.core.dataset import TensorDataset
    from collegium.core.tensors import Tensors
    from collegium.runtime.process import prepare
    from collegium.tasks import SegmentationTask, SupervisedTask
    from collegium.tasks.losses import SMOOTH
    from collegium.training.loop import LocalTraining, TrainingConfig

    prepare(threads)
    torch.manual_seed(0)
    images = torch.randn(STEPS * case.shape[0], *case.shape[1:])
    labels = torch.randint(case.classes, (STEPS * case.labels[0], *case.labels[1:]))
    segments = len(case.labels) > 1
    task: Any = (
        SegmentationTask(case.classes, "dice_ce")
        if segments
        else SupervisedTask(nn.functional.cross_entropy)
    )
    dice_ce = DiceCELoss(
        to_onehot_y=True, softmax=True, batch=True, smooth_nr=SMOOTH, smooth_dr=SMOOTH
    )
    network = case.build()
    model = Tensors(network.state_dict()).clone()
    whole = case.shape[0]
    batches = [
        {"image": images[start : start + whole], "label": labels[start : start + whole]}
        for start in range(0, len(images), whole)
    ]

    def bare() -> None:
        network.load_state_dict(dict(model))
        network.train()
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        for batch in batches:
            optimizer.zero_grad()
            output, label = network(batch["image"]), batch["label"]
            loss = (
                dice_ce(output, label.unsqueeze(1))
                if segments
                else nn.functional.cross_entropy(output, label)
            )
            torch.autograd.backward(loss)
            optimizer.step()

    def ours(name: str) -> Work:
        config = TrainingConfig(batch_size=case.shape[0], lr=1e-3, **SETTINGS[name])  # type: ignore[arg-type]
        own = NetworkBuilder(case.build, FedAvg(), config.memory_format)()
        local, data = (
            LocalTraining(own, task, config),
            TensorDataset({"image": images, "label": labels}),
        )
        return lambda: local.fit(model, data, seed=0, path=("fit",), lr=1e-3)

    return {"bare": bare, **{name: ours(name) for name in names}}


def measure(name: str, settings: list[str], threads: int, repetitions: int) -> bool:
    """Time one network with every setting, print, and return whether the targets are reached.

    Args:
        name: of the network.
        settings: the settings' names.
        threads: of torch.
        repetitions: how often each is timed.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    found = in_turns(make_works(cases()[name], settings, threads), repetitions, clock)
    bare, good = statistics.median(found["bare"]), True
    print(f"{name}, {threads} thread(s): the bare loop takes {bare / STEPS * 1e3:.0f} ms a step")
    for setting in settings:
        ratio = statistics.median(b / o for b, o in zip(found["bare"], found[setting], strict=True))
        speed = STEPS / statistics.median(found[setting])
        if name == "vessel" and setting in TARGETS:
            text = f"times the bare loop, {speed:.2f} steps/s"
            good &= verdict(
                f"training, {name}, {setting}", ratio, TARGETS[setting], text, least=True
            )
        else:
            print(f"  {setting:14}{speed:8.2f} steps/s, {ratio:.2f} times the bare loop")
    return good


def dice_after(data: Path, setting: str, seed: int, steps: int) -> float:
    """Return the mean Dice of the vessel network on the test images of the sites together.

    Args:
        data: the folder that holds vessel/.
        setting: a name of `SETTINGS`.
        seed: of initial weights and of the batches.
        steps: how many to train for.
    """
    from collegium.algorithms.fedavg import FedAvg
    from collegium.core.algorithm import NetworkBuilder
    from collegium.core.dataset import ConcatDataset
    from collegium.experiment.config.building import network_of, task_of
    from collegium.experiment.config.experiment import load_config
    from collegium.experiment.federation import open_configured
    from collegium.runtime.federation import initial_model
    from collegium.training.loop import LocalTraining, TrainingConfig

    file = Path(__file__).parents[1] / "configs" / "vessel.yaml"
    config = load_config(file, [f"federation.root={data}"])
    sites = [*open_configured(config, splits=None).sites.values()]
    recipe = TrainingConfig(batch_size=8, lr=2e-3, local_steps=steps, **SETTINGS[setting])  # type: ignore[arg-type]
    network = network_of(config)
    module = NetworkBuilder(network, FedAvg(), recipe.memory_format)()
    local = LocalTraining(module, task_of(config), recipe)
    train = ConcatDataset([site.train for site in sites])
    start = initial_model(network, seed)
    model, _ = local.fit(start, train, seed=seed, path=("dice",), lr=recipe.lr)
    test = ConcatDataset([site.test for site in sites])
    scores = [
        local.task.scores(prediction, example)["dice"] or 0.0
        for _, example, prediction in local.predictions(model, test)
    ]
    return statistics.fmean(scores)


def measure_dice(data: Path, steps: int, seeds: int) -> bool:
    """Print the Dice of every setting, and return whether it is within the spread of the seeds.

    Args:
        data: the folder that holds vessel/.
        steps: how many to train for.
        seeds: how many trainings.
    """
    from collegium.runtime.process import prepare

    prepare(1)
    found: dict[str, list[float]] = {}
    for setting in SETTINGS:
        found[setting] = [dice_after(data, setting, seed, steps) for seed in range(seeds)]
        print(f"{setting:14} Dice {', '.join(f'{value:.4f}' for value in found[setting])}")
    plain = found["contiguous"]
    spread = max(plain) - min(plain)
    good = True
    for setting, values in found.items():
        apart = abs(statistics.fmean(values) - statistics.fmean(plain))
        good &= verdict(f"training, Dice, {setting} from contiguous", apart, spread)
    return good


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the vessel network, not compiled")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--networks", default="vessel,iop,volume,densenet")
    parser.add_argument("--dice", type=Path, metavar="DATA")
    parser.add_argument("--steps", type=int, default=1500, help="of --dice")
    parser.add_argument("--seeds", type=int, default=3, help="of --dice")
    options = parser.parse_args()
    if options.dice:
        return 0 if measure_dice(options.dice, options.steps, options.seeds) else 1
    settings = [name for name in SETTINGS if not (options.quick and "compiled" in name)]
    networks = ["vessel"] if options.quick else options.networks.split(",")
    good = [
        measure(name, settings, options.threads, 7 if options.quick else 9) for name in networks
    ]
    print(
        f"training: all of the above (target {TARGETS['default']}): "
        f"{'ok' if all(good) else 'short'}"
    )
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
