"""IOP-FL's test-time routing against a plain network, and against mixing outputs.

One step of adaptation (forward passes of 384 x 384 images, clean and noisy, the whole loss, the
backward pass, Adam) with six models, five personal ones and the global one, of the prototype's
U-Net (1.96 million parameters) or, with --large, of the IOP-FL U-Net (7.8 million), batches of one
and of four:

- plain: the same loss of one network, gradients of all its weights, and no optimiser;
- ours: weights mixed for every sample by one product, all samples in one grouped convolution;
- outputs: every layer convolves with the weights of all six models, and the results are mixed.

Times are processor seconds, medians in turns, one thread. Memory is what a whole adaptation of the
IOP-FL U-Net holds at its peak in a process of its own, the models read from files, in models. Two
things are taken off and shown: what a plain step holds beside its weights and gradients, and what
training the routers takes whoever does it (their parameters, gradients, two moments and the best
state: a third of a model each).

    python benchmarks/routing.py [--quick] [--large]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.measuring import in_turns, medians, peak_of, verdict

SLOWER, FASTER, MODELS = 1.2, 3.0, 7.0
"""Most time by the plain step's, least by output mixing's, most memory in models."""

SOURCES, SIZE = 6, 384
BASES = (32, 2)
"""Channels of the IOP-FL U-Net, and of one that is used to warm up."""

NAMES = ("global", "a", "b", "c", "d", "e")


def make_network(*, large: bool) -> Any:
    """Return a new U-Net with batch normalisation."""
    from collegium.models.factory import build_model

    if large:
        return build_model("iop_unet", in_channels=1)
    return build_model("iop_unet", in_channels=1, base=16)


def make_works(batch: int, *, large: bool) -> dict[str, Callable[[], object]]:
    """Return the three ways to take a step, on the same images."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from collegium.adaptation._norms import use_batch_statistics
    from collegium.adaptation._routed_layers import (
        RoutedLayer,
        fill_weights,
        replace_layers,
        router_factory,
        routing_parameters,
    )
    from collegium.adaptation.base import Window, optimizer_step
    from collegium.adaptation.routing import Routing, _RoutedNetwork
    from collegium.core.tensors import Tensors
    from collegium.runtime.process import prepare
    from collegium.tasks import SegmentationTask

    class MixedOutputs(RoutedLayer):
        """Convolves with every model's weights and mixes what comes out."""

        def forward(self, inputs: Tensor) -> Tensor:
            coefficients = self.router(inputs)
            settings = dict(self.settings)
            convolve = functional.conv_transpose2d if self.transposed else functional.conv2d
            if not self.transposed:
                settings.pop("output_padding", None)
            bias = self._buffers["bias"]
            parts = [
                coefficients[:, k, None, None, None]
                * convolve(inputs, weight, None if bias is None else bias[k], **settings)
                for k, weight in enumerate(self.get_buffer("weight"))
            ]
            return torch.stack(parts).sum(dim=0)

    prepare(threads=1)
    torch.manual_seed(0)
    models = {name: Tensors(make_network(large=large).state_dict()).clone() for name in NAMES}
    images = torch.randn(batch, 1, SIZE, SIZE)
    plain = make_network(large=large)
    use_batch_statistics(plain)

    def loss_of(module: nn.Module) -> Tensor:
        network = _RoutedNetwork(module, {}, [], [], SegmentationTask(2), 0)
        return Routing()._loss(network, Window(images), ("benchmark",))[0]

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        return lambda: optimizer_step(optimizer, loss_of(module), "routing")

    weights = list(plain.parameters())
    works: dict[str, Callable[[], object]] = {
        "plain": lambda: torch.autograd.grad(loss_of(plain), weights, allow_unused=True)
    }
    for name in ("ours", "outputs"):
        module = make_network(large=large)
        layers = replace_layers(module, SOURCES, router_factory(SOURCES, 0.2))
        fill_weights(layers, models, NAMES)
        use_batch_statistics(module)
        module.requires_grad_(False)
        trained = list(routing_parameters(layers))
        for parameter in trained:
            parameter.requires_grad_(True)
        if name == "outputs":
            for layer in layers.values():
                layer.__class__ = MixedOutputs
        works[name] = step(module, torch.optim.Adam(trained, lr=1e-4, foreach=False))
    return works


def write_models(folder: Path) -> None:
    """Write the models of an adaptation of each size: large, and small ones to warm up."""
    from collegium.core.tensors import Tensors
    from collegium.models.factory import build_model
    from collegium.models.files import export_model

    for base in BASES:
        for name in NAMES:
            model = Tensors(build_model("iop_unet", in_channels=1, base=base).state_dict())
            export_model(model, folder / str(base) / f"{name}.safetensors")


def measure_memory(kind: str, batch: int, folder: Path) -> float:
    """Return the peak of a plain step or of a whole adaptation, in models of the IOP-FL U-Net.

    The images are small, so that weights and not activations fill the memory.
    """
    import torch

    from collegium.adaptation._norms import use_batch_statistics
    from collegium.adaptation.base import Sources
    from collegium.adaptation.outside import ModelFiles
    from collegium.adaptation.routing import Routing
    from collegium.core.dataset import TensorDataset, UnlabelledDataset
    from collegium.models.factory import build_model
    from collegium.runtime.process import prepare
    from collegium.tasks import SegmentationTask

    def plain(base: int) -> object:
        module = build_model("iop_unet", in_channels=1, base=base)
        use_batch_statistics(module)
        clean, noisy = module(images).softmax(dim=1), module(images).softmax(dim=1)
        (clean - noisy).square().mean().backward()
        return module

    def adapt(base: int) -> object:
        network = partial(build_model, "iop_unet", in_channels=1, base=base)
        sources = Sources(ModelFiles(folder / str(base)), network, SegmentationTask(2))
        cases = UnlabelledDataset(TensorDataset({"image": images}))
        return Routing(epochs=2, batch_size=batch).adapt(sources, cases, lambda *_: None)

    prepare(threads=1)
    give_back_freed_memory()
    images = torch.randn(batch, 1, 32, 32)
    work = plain if kind == "plain" else adapt
    work(BASES[1])  # loads whatever is loaded at first use
    return peak_of(partial(work, BASES[0])) / bytes_of(
        make_network(large=True).state_dict().values()
    )


def give_back_freed_memory() -> None:
    """Let the C library give freed blocks back at once, so that only what is held counts."""
    mallopt = ctypes.CDLL(None).mallopt
    for setting in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
        mallopt(setting, 1 << 16)


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors."""
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)


def training_of_routers() -> float:
    """Return the memory of what trains the routers, in models.

    Parameters, gradients, Adam's two moments and the state that is kept.
    """
    from collegium.adaptation._routed_layers import (
        replace_layers,
        router_factory,
        routing_parameters,
    )

    network = make_network(large=True)
    model = bytes_of(network.state_dict().values())
    layers = replace_layers(network, SOURCES, router_factory(SOURCES, 0.2))
    return 5 * bytes_of(routing_parameters(layers)) / model


def judge_memory(batches: Sequence[int], children: int) -> list[bool]:
    """Measure in processes of their own, print, and judge."""
    routers, good = training_of_routers(), []
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for batch in batches:
            peaks = {
                kind: peak_in_a_child(kind, batch, Path(folder), children)
                for kind in ("plain", "routing")
            }
            passes = max(0.0, peaks["plain"] - 2)  # without its weights and gradients
            shown = ", ".join(f"{kind} {value:.2f}" for kind, value in peaks.items())
            print(f"batch {batch}, models held: {shown}; to train the routers {routers:.2f}")
            held = peaks["routing"] - passes - routers
            good.append(verdict(f"routing, batch {batch}, memory", held, MODELS, "models"))
    return good


def peak_in_a_child(kind: str, batch: int, folder: Path, children: int) -> float:
    """Return the median of what `measure_memory` finds in some processes."""
    command = [sys.executable, __file__, "--memory", kind, str(batch), str(folder)]
    found = [
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(children)
    ]
    return statistics.median(found)


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a batch of one only, fewer repetitions"
    )
    parser.add_argument("--large", action="store_true", help="the IOP-FL U-Net")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        kind, batch, folder = options.memory
        print(measure_memory(kind, int(batch), Path(folder)))
        return 0
    repetitions, children, batches = (1, 1, (1,)) if options.quick else (5, 3, (1, 4))
    good = []
    for batch in batches:
        seconds = medians(
            in_turns(make_works(batch, large=options.large), repetitions, time.process_time)
        )
        slower = seconds["ours"] / seconds["plain"]
        faster = seconds["outputs"] / seconds["ours"]
        shown = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
        print(f"batch {batch}: {shown}", flush=True)
        good += [
            verdict(f"routing, batch {batch}, time of a plain step", slower, SLOWER, "times"),
            verdict(
                f"routing, batch {batch}, by mixing outputs", faster, FASTER, "times as fast",
                least=True,
            ),
        ]  # fmt: skip
    good += judge_memory(batches, children)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
