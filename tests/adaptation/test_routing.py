"""IOP-FL's routing against the models that it mixes, and its steps against numbers by hand."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation._routed import RoutedLayer, SharedRouter, fill, layer_router, make_routed
from collegium.adaptation.base import Sources, Unlabelled
from collegium.adaptation.routing import Routing
from collegium.data.dataset import TensorDataset
from collegium.errors import ConfigError, DivergedError
from collegium.models.factory import build_model
from collegium.models.unet import IOPUNet
from collegium.randomness import ambient
from collegium.tasks import SegmentationTask
from collegium.tensors import Tensors

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


def models(network: Callable[[], nn.Module], names: Any = NAMES) -> dict[str, Tensors]:
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


def run(
    adapter: Routing, given: dict[str, Tensors], network: Any, images: Any, seed: int = 0
) -> Any:
    found: dict[int, torch.Tensor] = {}
    cases = Unlabelled(TensorDataset({"image": torch.as_tensor(images)}))
    task = SegmentationTask(2)
    adapted = adapter.adapt(
        Sources(given, network, task, seed=seed), cases,
        lambda name, index, prediction: found.__setitem__(index, prediction),
    )  # fmt: skip
    return adapted, found


def small() -> nn.Module:
    return IOPUNet(1, 2, base=2)


IMAGES = np.random.default_rng(0).normal(size=(6, 1, 16, 16)).astype(np.float32)


@pytest.mark.parametrize("affine", [False, True])
def test_only_routers_move_and_scales_where_asked(affine: bool) -> None:
    given = models(small)
    adapter = Routing(epochs=2, adapt_bn_affine=affine, lr=0.1, selection="last")
    adapted, _ = run(adapter, given, small, IMAGES)
    assert adapted.model is not None
    moved = set()
    for name, tensor in adapted.model.items():
        if ".router." in name:
            moved.add("router")
            continue
        layer = name.rpartition(".")[0]
        if tensor.ndim and len(tensor) == 3 and name in routed_names(small):
            for k, source in enumerate(NAMES):
                assert torch.equal(tensor[k], given[source][name]), name
        elif not torch.equal(tensor, given["global"][name]):
            moved.add(f"norm {layer.rpartition('.')[2]}")
    assert moved == ({"router", "norm 1", "norm 4"} if affine else {"router"})


def test_routing_finds_the_model_that_suits_the_images() -> None:
    """One source is sure of what it sees and does not mind noise, the other is neither."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 1))

    def model(weight: float) -> Tensors:
        return Tensors(
            {
                "0.weight": torch.tensor([-weight, weight]).reshape(2, 1, 1, 1),
                "0.bias": torch.zeros(2),
            }
        )

    given = {"global": model(0.2), "sure": model(8.0)}
    rng = np.random.default_rng(1)
    images = np.where(rng.random((4, 1, 12, 12)) < 0.5, -2.0, 2.0).astype(np.float32)
    adapter = Routing(epochs=30, lr=0.05, noise=0.2, beta=0.1, terms=("consistency", "entropy"),
                      dropout=0.0)  # fmt: skip
    adapted, _ = run(adapter, given, network, images)
    losses = [row["total"] for row in adapted.account.losses]
    assert losses[adapted.account.chosen] < 0.8 * losses[0]
    (coefficients,) = adapted.account.coefficients.values()
    assert coefficients["sure"] > 0.6
    assert coefficients["sure"] > coefficients["global"] + 0.05 or coefficients["global"] > 0.5


# --- the first step, by hand


def numpy_loss(
    weights: np.ndarray[Any, Any],
    bias: np.ndarray[Any, Any],
    logits: np.ndarray[Any, Any],
    images: np.ndarray[Any, Any],
) -> float:
    """Mean entropy of a net of two 1x1 convolutions with coefficients shared by both layers.

    weights[layer][source] is (out, in); logits are those of the coefficients.
    """  # fmt: skip
    r = 1 / (1 + np.exp(-logits))
    h = images
    for layer in range(2):
        w = np.einsum("s,soi->oi", r, weights[layer])
        b = np.einsum("s,so->o", r, bias[layer])
        h = np.einsum("oi,bihw->bohw", w, h) + b[None, :, None, None]
        h = np.maximum(h, 0) if layer == 0 else h
    e = np.exp(h - h.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    return float(-(p * np.log(p)).sum(1).mean())


def test_the_first_step_is_adams_on_a_gradient_by_differences() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1)).double()

    given = models(network, ("global", "east"))
    images = np.random.default_rng(2).normal(size=(3, 2, 4, 5))
    lr = 0.01
    adapter = Routing(epochs=1, lr=lr, terms=("entropy",), beta=1.0, granularity="model",
                      selection="last", noise=0.0)  # fmt: skip
    adapted, _ = run(adapter, given, network, images)
    stacked = [
        (
            np.stack([given[s][f"{n}.weight"].numpy()[:, :, 0, 0] for s in given]),
            np.stack([given[s][f"{n}.bias"].numpy() for s in given]),
        )
        for n in ("0", "2")
    ]
    weights, bias = np.stack([w for w, _ in stacked]), np.stack([b for _, b in stacked])
    start = np.full(2, -math.log(1.0))
    gradient = np.zeros(2)
    for k in range(2):
        step = np.zeros(2)
        step[k] = 1e-6
        up, down = (numpy_loss(weights, bias, start + s, images) for s in (step, -step))
        gradient[k] = (up - down) / 2e-6
    expected = start - lr * gradient / (np.abs(gradient) + 1e-8)  # Adam's first step
    assert adapted.model is not None
    np.testing.assert_allclose(adapted.model["0.router.logits"].numpy(), expected, atol=1e-6)
    first, second = adapted.account.losses
    assert first["entropy"] == pytest.approx(numpy_loss(weights, bias, start, images), abs=1e-9)
    assert second["entropy"] == pytest.approx(numpy_loss(weights, bias, expected, images), abs=1e-7)


def test_a_layers_first_step_moves_its_output_bias_by_adams_step_alone() -> None:
    given = models(small)
    adapter = Routing(epochs=1, lr=0.01, selection="last", batch_size=6, dropout=0.0)
    adapted, _ = run(adapter, given, small, IMAGES)
    assert adapted.model is not None
    biases = [t for n, t in adapted.model.items() if n.endswith("router.output.bias")]
    assert len(biases) == 23
    for bias in biases:
        moved = (bias + math.log(2)).abs()  # lr g / (|g| + 1e-8)
        assert torch.all(moved < 0.01 + 1e-6)
        assert moved.max() > 0.005


# --- which state predicts


def test_the_state_with_the_least_loss_predicts() -> None:
    given = models(small)
    wild = Routing(epochs=4, lr=3.0, dropout=0.0)
    adapted, found = run(wild, given, small, IMAGES)
    totals = [row["total"] for row in adapted.account.losses]
    assert [row["step"] for row in adapted.account.losses] == [0, 1, 2, 3, 4]
    assert adapted.account.chosen == totals.index(min(totals))
    last, _ = run(Routing(epochs=4, lr=3.0, dropout=0.0, selection="last"), given, small, IMAGES)
    assert last.account.chosen == 4
    assert last.account.losses == adapted.account.losses
    if adapted.account.chosen == 0:
        _, start = run(Routing(epochs=1, lr=1e-30, dropout=0.0), given, small, IMAGES)
        assert all(torch.equal(found[index], start[index]) for index in found)


def test_episodes_do_not_know_of_each_other_and_online_does() -> None:
    given = models(small)
    options = {"epochs": 2, "lr": 0.05, "batch_size": 3}
    episodic, _ = run(Routing(mode="episodic", **options), given, small, IMAGES)  # type: ignore[arg-type]
    online, _ = run(Routing(mode="online", **options), given, small, IMAGES)  # type: ignore[arg-type]
    assert [row["step"] for row in episodic.account.losses] == [0, 1]
    assert episodic.account.losses[0] == online.account.losses[0]
    assert episodic.account.losses[1] != online.account.losses[1]
    assert episodic.account.steps == online.account.steps == 4


def test_the_noise_is_another_at_every_step_and_the_same_at_every_measurement() -> None:
    given = models(small)
    frozen = Routing(epochs=3, lr=1e-30, dropout=0.0)
    adapted, _ = run(frozen, given, small, IMAGES)
    rows = [{k: v for k, v in row.items() if k != "step"} for row in adapted.account.losses]
    assert rows[0] == rows[1] == rows[2]
    other, _ = run(frozen, given, small, IMAGES, seed=1)
    assert other.account.losses[0]["consistency"] != rows[0]["consistency"]
    assert other.account.losses[0]["entropy"] == pytest.approx(rows[0]["entropy"], abs=1e-6)


def test_terms_may_be_left_out_and_moved_views_are_moved_back() -> None:
    given = models(small)
    adapted, _ = run(Routing(epochs=1, terms=("shape",)), given, small, IMAGES)
    assert adapted.account.losses[0].keys() == {"step", "total", "shape"}
    assert adapted.account.losses[0]["total"] == pytest.approx(
        0.01 * adapted.account.losses[0]["shape"]
    )

    def pointwise() -> nn.Module:  # does not care where a pixel is
        return nn.Sequential(nn.Conv2d(1, 2, 1))

    still = Routing(epochs=1, lr=1e-30, noise=0.0, transforms=True, terms=("consistency",))
    quiet, _ = run(still, models(pointwise), pointwise, IMAGES)
    assert quiet.account.losses[0]["consistency"] < 1e-12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epochs": 0}, "routing.epochs is 0"),
        ({"terms": ()}, r"routing.terms is \(\)"),
        ({"lr": 0.0}, "routing.lr is 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Routing(**options)


def test_what_routing_cannot_do_is_said() -> None:
    given = models(small)
    with pytest.raises(ConfigError, match="routing needs personal models"):
        run(Routing(), {"global": given["global"]}, small, IMAGES)
    with pytest.raises(ConfigError, match="routing needs two models or more"):
        run(Routing(), {"east": given["east"]}, small, IMAGES)
    with pytest.raises(ConfigError, match="neither convolutions nor linear layers"):
        make_routed(nn.Sequential(nn.ReLU()), 2, layer_router(2, 0.0))
    broken = {name: model.map(lambda t: t * float("nan")) for name, model in given.items()}
    with pytest.raises(DivergedError, match="the loss of routing became nan"):
        run(Routing(epochs=1), broken, small, IMAGES)
