"""Layers that mix the weights of several models, against those models one by one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from collegium.adaptation import _routed
from collegium.adaptation._routed import (
    RoutedLayer,
    SharedRouter,
    fill,
    layer_router,
    make_routed,
    routing_parameters,
)
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.models.factory import build_model
from collegium.models.unet import IOPUNet

NAMES = ("global", "east", "north")


def monai(axes: int) -> Callable[[], nn.Module]:
    return lambda: build_model(
        "unet", spatial_dims=axes, in_channels=1, channels=[4, 8, 16], num_res_units=1
    )


def odd_network() -> nn.Module:
    """Groups, dilation, strides, reflecting padding, output padding, and a transposed group."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1),
        nn.Conv2d(6, 6, 3, groups=3, dilation=2, padding=2, padding_mode="reflect"),
        nn.Conv2d(6, 4, 3, padding="same", bias=False),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.Conv2d(6, 2, 1),
    )


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "monai 2-D": (monai(2), (3, 1, 16, 24)),
    "IOP": (lambda: IOPUNet(1, 2, base=4), (3, 1, 32, 16)),
    "monai 3-D": (monai(3), (2, 1, 8, 12, 8)),
    "odd": (odd_network, (3, 1, 12, 12)),
    "classifier": (classifier, (4, 9)),
}


def models(network: Callable[[], nn.Module], names: tuple[str, ...] = NAMES) -> dict[str, Tensors]:
    found = {}
    for k, name in enumerate(names):
        with ambient(3, "routing test", k):
            found[name] = Tensors(network().state_dict()).clone()
    return found


class Fixed(nn.Module):
    """A router that always says the same of each sample."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.values[: len(inputs)]


def routed(network: Callable[[], nn.Module], given: dict[str, Tensors], router: Any) -> nn.Module:
    module = network()
    module.load_state_dict(dict(given["global"]))
    fill(make_routed(module, len(given), router), given, list(given))
    return module.eval()


@pytest.mark.parametrize("kind", NETWORKS)
def test_forced_to_one_model_the_network_is_that_model(kind: str) -> None:
    network, shape = NETWORKS[kind]
    given = models(network)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    choice = torch.eye(3)[[1, 2, 0, 1][: shape[0]]]  # another model for every sample
    mixed = routed(network, given, lambda channels: Fixed(choice))
    with torch.no_grad():
        found = mixed(images)
        for sample, position in enumerate([1, 2, 0, 1][: shape[0]]):
            alone = network()
            # what is not routed (scales, slopes, statistics) is the global model's
            own = given[NAMES[position]]
            rest = {n: t for n, t in given["global"].items() if n not in routed_names(network)}
            alone.load_state_dict({**dict(own), **rest})
            expected = alone.eval()(images[sample : sample + 1])
            torch.testing.assert_close(found[sample : sample + 1], expected, atol=1e-6, rtol=1e-5)


def routed_names(network: Callable[[], nn.Module]) -> set[str]:
    layers = make_routed(network(), 2, layer_router(2, 0.0))
    return {f"{name}.{kind}" for name in layers for kind in ("weight", "bias")}


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_convolution_and_linear_layer_is_routed(kind: str) -> None:
    network, _ = NETWORKS[kind]
    plain = {
        name
        for name, layer in network().named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d
                      | nn.ConvTranspose3d)
    }  # fmt: skip
    module = network()
    assert set(make_routed(module, 2, layer_router(2, 0.0))) == plain
    left = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)]
    routers = sum(isinstance(m, RoutedLayer) for m in module.modules())
    assert len(left) == 2 * routers  # the two linear layers of each router


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_at_the_start_the_network_has_the_mean_of_the_weights(kind: str, granularity: str) -> None:
    network, shape = NETWORKS[kind]
    given = models(network)
    shared = SharedRouter(3)
    router = layer_router(3, 0.2) if granularity == "layer" else lambda channels: shared
    mixed = routed(network, given, router)
    names = routed_names(network)
    mean = {
        n: torch.stack([given[s][n] for s in NAMES]).mean(0) if n in names else t
        for n, t in given["global"].items()
    }
    alone = network()
    alone.load_state_dict(mean)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(mixed(images), alone.eval()(images), atol=2e-6, rtol=1e-4)


class Looped(nn.Module):
    """A layer that makes the weights of each sample by a plain sum, one sample after the other."""

    def __init__(self, layer: nn.Module, mixed: RoutedLayer) -> None:
        super().__init__()
        self.layer, self.mixed = layer, mixed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = []
        for image in inputs.split(1):
            r = self.mixed.router(image)[0]
            own = {
                name: sum(r[k] * weight for k, weight in enumerate(stacked))
                for name, stacked in self.mixed.named_buffers(recurse=False)
            }
            outputs.append(functional_call(self.layer, own, image))
        return torch.cat(outputs)


@pytest.mark.parametrize("most", [1, 200, 2**19], ids=["one by one", "some", "all at once"])
@pytest.mark.parametrize("network", [odd_network, classifier])
def test_samples_together_give_the_outputs_and_gradients_of_a_loop(
    network: Callable[[], nn.Module], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_routed, "MOST", most)
    given = models(network)
    mixed = routed(network, given, layer_router(3, 0.0)).double().requires_grad_(False)
    layers = {name: m for name, m in mixed.named_modules() if isinstance(m, RoutedLayer)}
    moving = list(routing_parameters(layers))
    rng = torch.Generator().manual_seed(4)
    for parameter in moving:  # no coefficient as at the start, and gradients everywhere
        parameter.requires_grad_(True).data.normal_(generator=rng)
    looped = network().double()
    for name, layer in layers.items():
        setattr(looped, name, Looped(copy.deepcopy(looped.get_submodule(name)), layer))
    shape = (4, 1, 12, 12) if network is odd_network else (4, 9)
    images = torch.randn(shape, generator=rng, dtype=torch.float64)
    found, expected = mixed(images), looped(images)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    gradients = (torch.autograd.grad(out.square().mean(), moving) for out in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


def test_what_attention_only_reads_stays_and_what_cannot_be_mixed_is_refused() -> None:
    attention = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 2))
    assert set(make_routed(attention, 2, layer_router(2, 0.0))) == {"1"}
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 1)))
    with pytest.raises(ConfigError, match="the layer 0 makes its weights from others"):
        make_routed(normed, 2, layer_router(2, 0.0))
    with pytest.raises(ConfigError, match="neither convolutions nor linear layers"):
        make_routed(nn.Sequential(nn.ReLU()), 2, layer_router(2, 0.0))


@pytest.mark.parametrize("grad", [False, True])
def test_a_transformer_in_evaluation_mode_asks_its_routers(grad: bool) -> None:
    """Torch's fast path would read the weights of its linear layers past them."""

    def network() -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    given = models(network)
    choice = torch.eye(3)[[1, 2]]
    mixed = routed(network, given, lambda channels: Fixed(choice))
    names = routed_names(network)
    assert {name.rpartition(".")[0] for name in names} == {
        f"layers.{k}.linear{j}" for k in (0, 1) for j in (1, 2)
    }
    tokens = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        found = mixed(tokens)
    for sample, source in enumerate(("east", "north")):
        own = {name: given[source if name in names else "global"][name] for name in given[source]}
        alone = network()
        alone.load_state_dict(own)
        expected = alone.eval()(tokens[sample : sample + 1])
        torch.testing.assert_close(found[sample : sample + 1], expected, atol=1e-5, rtol=1e-4)
