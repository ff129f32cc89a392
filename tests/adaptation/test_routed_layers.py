"""Routed layers against the models that they mix, and their variation against numpy."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from collegium.adaptation import _routed_layers
from collegium.adaptation._routed_layers import (
    RoutedLayer,
    Router,
    SharedRouter,
    fill_weights,
    gram_matrix,
    mix_weights,
    replace_layers,
    router_factory,
    routing_parameters,
    weight_variation,
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
    fill_weights(replace_layers(module, len(given), router), given, list(given))
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
    layers = replace_layers(network(), 2, router_factory(2, 0.0))
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
    assert set(replace_layers(module, 2, router_factory(2, 0.0))) == plain
    left = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)]
    routers = sum(isinstance(m, RoutedLayer) for m in module.modules())
    assert len(left) == 2 * routers  # the two linear layers of each router


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_at_the_start_the_network_has_the_mean_of_the_weights(kind: str, granularity: str) -> None:
    network, shape = NETWORKS[kind]
    given = models(network)
    shared = SharedRouter(3)
    router = router_factory(3, 0.2) if granularity == "layer" else lambda channels: shared
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
    monkeypatch.setattr(_routed_layers, "MAX_MIXED_WEIGHTS", most)
    given = models(network)
    mixed = routed(network, given, router_factory(3, 0.0)).double().requires_grad_(False)
    layers = {name: m for name, m in mixed.named_modules() if isinstance(m, RoutedLayer)}
    trained = list(routing_parameters(layers))
    rng = torch.Generator().manual_seed(4)
    for parameter in trained:  # no coefficient as at the start, and gradients everywhere
        parameter.requires_grad_(True).data.normal_(generator=rng)
    looped = network().double()
    for name, layer in layers.items():
        setattr(looped, name, Looped(copy.deepcopy(looped.get_submodule(name)), layer))
    shape = (4, 1, 12, 12) if network is odd_network else (4, 9)
    images = torch.randn(shape, generator=rng, dtype=torch.float64)
    found, expected = mixed(images), looped(images)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    gradients = (torch.autograd.grad(out.square().mean(), trained) for out in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


def test_what_attention_only_reads_stays_and_what_cannot_be_mixed_is_refused() -> None:
    attention = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 2))
    assert set(replace_layers(attention, 2, router_factory(2, 0.0))) == {"1"}
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 1)))
    with pytest.raises(ConfigError, match="the layer 0 computes its weights from other"):
        replace_layers(normed, 2, router_factory(2, 0.0))
    with pytest.raises(ConfigError, match="neither convolutions nor linear layers"):
        replace_layers(nn.Sequential(nn.ReLU()), 2, router_factory(2, 0.0))


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


def test_a_router_gives_the_coefficients_of_the_paper(golden) -> None:
    case = golden("router")
    inputs, expected = case["inputs"], case["expected"]
    h = torch.tensor(inputs["h"], dtype=torch.float64).unsqueeze(0)
    router = Router(channels=3, sources=case["params"]["K"] + 1).double().eval()
    at_start = router(h).detach().numpy()
    np.testing.assert_allclose(at_start[0], expected["r_at_zero_fc2_weight"], atol=1e-7)
    state = {
        f"{layer}.{kind}": torch.tensor(inputs[f"{short}_{kind[0]}"], dtype=torch.float64)
        for layer, short in (("hidden", "fc1"), ("output", "fc2"))
        for kind in ("weight", "bias")
    }
    router.load_state_dict(state)
    np.testing.assert_allclose(router(h).detach()[0], expected["r"], atol=case["atol"])


def test_routed_weights_are_the_sum_over_the_sources(golden) -> None:
    case = golden("routed_weight")
    weights = torch.tensor(case["inputs"]["W"], dtype=torch.float64)
    r = torch.tensor(case["inputs"]["r"], dtype=torch.float64)
    np.testing.assert_allclose(mix_weights(weights, r), case["expected"]["W_o"], atol=case["atol"])


def test_every_sample_gets_weights_of_its_own() -> None:
    rng = np.random.default_rng(0)
    weights, r = rng.normal(size=(4, 5, 2, 3)), rng.random((3, 4))
    found = mix_weights(torch.tensor(weights), torch.tensor(r))
    np.testing.assert_allclose(found, np.einsum("bk,koij->boij", r, weights), atol=1e-12)


def test_a_one_hot_coefficient_gives_that_source_bit_by_bit() -> None:
    weights = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    assert mix_weights(weights, torch.tensor([0.0, 1.0, 0.0])).equal(weights[1])


def test_one_model_cannot_be_routed() -> None:
    with pytest.raises(ConfigError, match="needs two models or more, but there is 1"):
        Router(channels=3, sources=1)


@pytest.mark.parametrize("size", [1, 7, 2**20])
def test_the_gram_matrix_is_that_of_the_whole_weights_for_any_chunk_size(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_routed_layers, "GRAM_CHUNK", size)
    weights = np.random.default_rng(0).normal(size=(3, 4, 2, 5))
    flat = weights.reshape(3, 40)
    found = gram_matrix(torch.from_numpy(weights).float())
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, flat @ flat.T, rtol=1e-5, atol=1e-5)


def test_two_orthogonal_sources_have_a_closed_form() -> None:
    """W(e) is (1/2, 1/2); taking one source alone is as far from it as it is from zero."""
    weights = torch.eye(2, dtype=torch.float64)
    coefficients = torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 1.0], [0.5, 0.8]])
    expected = [0.0, 1.0, 1.0, 0.3 * np.sqrt(2)]
    np.testing.assert_allclose(weight_variation(weights, coefficients), expected, atol=1e-7)


def test_equal_sources_vary_by_what_the_coefficients_sum_to() -> None:
    weights = torch.full((4, 3, 3), 0.7)
    coefficients = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.5, 0.5]])
    np.testing.assert_allclose(weight_variation(weights, coefficients), [0.0, 1.0], atol=1e-6)


def test_the_variation_is_that_of_the_weights_of_each_case() -> None:
    rng = np.random.default_rng(1)
    weights, coefficients = rng.normal(size=(3, 5, 4, 3, 3)), rng.uniform(size=(6, 3))
    equal = weights.mean(0)
    expected = [
        np.linalg.norm(np.tensordot(r, weights, 1) - equal) / np.linalg.norm(equal)
        for r in coefficients
    ]
    found = weight_variation(torch.from_numpy(weights), torch.from_numpy(coefficients))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_small_differences_of_models_that_are_nearly_equal_are_not_lost() -> None:
    """The sources differ by 1e-4 and the coefficients sum to one."""
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(1, 50, 40)) + 1e-4 * rng.normal(size=(3, 50, 40))
    coefficients = np.array([[0.3, 0.3, 0.4]])
    apart = np.tensordot(coefficients[0] - 1 / 3, weights, 1)
    expected = np.linalg.norm(apart) / np.linalg.norm(weights.mean(0))
    found = weight_variation(torch.from_numpy(weights), torch.from_numpy(coefficients))
    np.testing.assert_allclose(found, [expected], rtol=1e-4)


def test_a_layer_of_zeros_does_not_vary() -> None:
    assert weight_variation(torch.zeros(2, 3), torch.rand(4, 2)).tolist() == [0.0] * 4
