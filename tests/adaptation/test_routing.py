"""IOP-FL's routing: its steps against numbers by hand, its choices, and what it leaves behind."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation._routed_layers import replace_layers, router_factory
from collegium.adaptation.base import Sources
from collegium.adaptation.routing import Routing, routed_network
from collegium.core.dataset import TensorDataset, UnlabelledDataset
from collegium.core.randomness import ambient, generator
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DivergedError
from collegium.models.files import export_model, import_model
from collegium.models.unet import IOPUNet
from collegium.tasks import SegmentationTask, SupervisedTask

NAMES = ("global", "east", "north")


def models(network: Callable[[], nn.Module], names: Any = NAMES) -> dict[str, Tensors]:
    found = {}
    for k, name in enumerate(names):
        with ambient(3, "routing test", k):
            found[name] = Tensors(network().state_dict()).clone()
    return found


def routed_names(network: Callable[[], nn.Module]) -> set[str]:
    layers = replace_layers(network(), 2, router_factory(2, 0.0))
    return {f"{name}.{kind}" for name in layers for kind in ("weight", "bias")}


def run(
    adapter: Routing, given: dict[str, Tensors], network: Any, images: Any, seed: int = 0
) -> Any:
    found: dict[int, torch.Tensor] = {}
    cases = UnlabelledDataset(TensorDataset({"image": torch.as_tensor(images)}))
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
    """One model averages its surroundings and sees squares in noise, the other sees only edges."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="replicate"))

    def model(kernel: np.ndarray[Any, Any]) -> Tensors:
        weight = torch.tensor(np.stack([-kernel, kernel])[:, None], dtype=torch.float32)
        return Tensors({"0.weight": weight, "0.bias": torch.zeros(2)})

    edges = np.full((3, 3), -0.5)
    edges[1, 1] = 4.0
    given = {"global": model(edges), "fits": model(np.full((3, 3), 1 / 3))}
    rng = np.random.default_rng(1)
    truth = np.zeros((6, 16, 16))
    for square in truth:
        top, left = rng.integers(2, 7, 2)
        square[top : top + 8, left : left + 8] = 1
    images = ((2 * truth - 1) + rng.normal(0, 0.7, truth.shape))[:, None].astype(np.float32)

    def accuracy(adapter: Routing) -> tuple[float, dict[str, float]]:
        adapted, found = run(adapter, given, network, images)
        (coefficients,) = adapted.record.coefficients.values()
        return float(np.mean([found[k].numpy() == truth[k] for k in range(6)])), coefficients

    before, equal = accuracy(Routing(epochs=1, lr=1e-30))
    after, coefficients = accuracy(Routing(epochs=20, lr=0.05, beta=0.1, radius=2, dropout=0.0))
    assert equal == pytest.approx({"global": 0.5, "fits": 0.5})
    assert coefficients["fits"] > 0.8
    assert coefficients["global"] < 0.2
    assert after > before + 0.05


# --- the first step, by hand


def numpy_maps(state: Any, weights: Any, biases: Any, images: Any) -> Any:
    """The softmax maps of two routed 1x1 convolutions with a ReLU between them, (B, 2, pixels).

    weights[layer] is (sources, out, in), biases[layer] (sources, out); state holds the routers.
    """
    maps = images.reshape(*images.shape[:2], -1)
    for name, weight, bias in zip(("0", "2"), weights, biases, strict=True):
        at = f"{name}.router"
        if f"{at}.logits" in state:
            logits = np.repeat(state["0.router.logits"][None], len(maps), 0)
        else:
            pooled = maps.mean(2)
            hidden = pooled @ state[f"{at}.hidden.weight"].T + state[f"{at}.hidden.bias"]
            logits = hidden @ state[f"{at}.output.weight"].T + state[f"{at}.output.bias"]
        r = 1 / (1 + np.exp(-logits))
        own = np.einsum("bs,soi->boi", r, weight)
        maps = np.einsum("boi,bip->bop", own, maps) + (r @ bias)[:, :, None]
        maps = np.where(maps.real > 0, maps, 0) if name == "0" else maps
    powers = np.exp(maps - maps.real.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_the_first_step_is_adams_on_the_gradient_by_hand(
    granularity: Literal["layer", "model"], by_hand: Any, in_numpy: Any
) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1)).double()

    given = models(network)
    weights = [
        np.stack([m[f"{n}.weight"].numpy()[:, :, 0, 0] for m in given.values()]) for n in "02"
    ]
    biases = [np.stack([m[f"{n}.bias"].numpy() for m in given.values()]) for n in "02"]
    images = np.random.default_rng(2).normal(size=(3, 2, 4, 5))
    drawn = torch.randn(images.shape, generator=generator(0, "routing", "epoch", 1, 0))
    noisy = images + 0.5 * drawn.double().numpy()

    def loss(state: Any) -> Any:
        clean, moved = (numpy_maps(state, weights, biases, x) for x in (images, noisy))
        entropy = -(clean * np.log(clean)).sum(1).mean()
        return ((clean - moved) ** 2).sum(1).mean() + 0.3 * entropy

    adapter = Routing(epochs=1, lr=0.01, terms=("consistency", "entropy"), beta=0.3,
                      granularity=granularity, selection="last", dropout=0.0)  # fmt: skip
    adapted, _ = run(adapter, given, network, images)
    assert adapted.model is not None
    routers = {n: t for n, t in in_numpy(adapted.model).items() if ".router." in n}
    start = dict(routers)
    for name in routers:
        if name.endswith("logits") or name.endswith("output.bias"):
            start[name] = np.full(3, -math.log(2))
        elif name.endswith("output.weight"):
            start[name] = np.zeros_like(routers[name])
    names = [n for n in start if n != "2.router.logits"]  # the same numbers as in layer 0
    gradients = by_hand.slopes(loss, start, names)
    for name, gradient in gradients.items():
        if ".hidden." in name:  # behind weights of 0: this layer starts to learn in the second step
            assert np.all(gradient == 0)
            continue
        assert np.any(np.abs(gradient) > 1e-5)
        expected = start[name] - 0.01 * gradient / (np.abs(gradient) + 1e-8)
        np.testing.assert_allclose(routers[name], expected, rtol=0, atol=1e-7)


# --- which state predicts


def test_the_state_with_the_least_loss_predicts() -> None:
    given = models(small)
    wild = Routing(epochs=4, lr=3.0, dropout=0.0)
    adapted, found = run(wild, given, small, IMAGES)
    totals = [row["total"] for row in adapted.record.losses]
    assert [row["step"] for row in adapted.record.losses] == [0, 1, 2, 3, 4]
    assert adapted.record.chosen == totals.index(min(totals))
    last, _ = run(Routing(epochs=4, lr=3.0, dropout=0.0, selection="last"), given, small, IMAGES)
    assert last.record.chosen == 4
    assert last.record.losses == adapted.record.losses
    if adapted.record.chosen == 0:
        _, start = run(Routing(epochs=1, lr=1e-30, dropout=0.0), given, small, IMAGES)
        assert all(torch.equal(found[index], start[index]) for index in found)


def test_episodes_do_not_know_of_each_other_and_online_does() -> None:
    given = models(small)
    options = {"epochs": 2, "lr": 0.05, "batch_size": 3}
    episodic, _ = run(Routing(mode="episodic", **options), given, small, IMAGES)  # type: ignore[arg-type]
    online, _ = run(Routing(mode="online", **options), given, small, IMAGES)  # type: ignore[arg-type]
    assert [row["step"] for row in episodic.record.losses] == [0, 1]
    assert episodic.record.losses[0] == online.record.losses[0]
    assert episodic.record.losses[1] != online.record.losses[1]
    assert episodic.record.steps == online.record.steps == 4


def test_the_noise_is_another_at_every_step_and_the_same_at_every_measurement() -> None:
    given = models(small)
    frozen = Routing(epochs=3, lr=1e-30, dropout=0.0)
    adapted, _ = run(frozen, given, small, IMAGES)
    rows = [{k: v for k, v in row.items() if k != "step"} for row in adapted.record.losses]
    assert rows[0] == rows[1] == rows[2]
    other, _ = run(frozen, given, small, IMAGES, seed=1)
    assert other.record.losses[0]["consistency"] != rows[0]["consistency"]
    assert other.record.losses[0]["entropy"] == pytest.approx(rows[0]["entropy"], abs=1e-6)


def test_terms_may_be_left_out_and_moved_views_are_moved_back() -> None:
    given = models(small)
    adapted, _ = run(Routing(epochs=1, terms=("shape",)), given, small, IMAGES)
    assert adapted.record.losses[0].keys() == {"step", "total", "shape"}
    assert adapted.record.losses[0]["total"] == pytest.approx(
        0.01 * adapted.record.losses[0]["shape"]
    )
    whole, _ = run(Routing(epochs=1, beta=0.2), given, small, IMAGES)
    for row in whole.record.losses:
        total = row["consistency"] + 0.2 * (row["shape"] + row["entropy"])
        assert row["total"] == pytest.approx(total, rel=1e-5)

    def pointwise() -> nn.Module:  # does not care where a pixel is
        return nn.Sequential(nn.Conv2d(1, 2, 1))

    still = Routing(epochs=1, lr=1e-30, noise=0.0, transforms=True, terms=("consistency",))
    quiet, _ = run(still, models(pointwise), pointwise, IMAGES)
    assert quiet.record.losses[0]["consistency"] < 1e-12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epochs": 0}, "Routing.epochs: should be at least 1, not 0"),
        ({"terms": ()}, r"Routing.terms: should be one or more terms, not \(\)"),
        ({"lr": 0.0}, "Routing.lr: should be above 0, not 0.0"),
        ({"radius": -1}, "Routing.radius: should be at least 0, not -1"),
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
    broken = {name: model.map(lambda t: t * float("nan")) for name, model in given.items()}
    with pytest.raises(DivergedError, match="the loss of routing became nan"):
        run(Routing(epochs=1), broken, small, IMAGES)


# --- what it leaves behind, and where else it works


@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_the_adapted_network_can_be_kept_in_a_file_and_predict_again(
    granularity: Literal["layer", "model"], tmp_path: Path
) -> None:
    given = models(small)
    adapter = Routing(epochs=1, lr=0.1, batch_size=6, granularity=granularity, selection="last")
    adapted, found = run(adapter, given, small, IMAGES)
    assert adapted.model is not None
    export_model(adapted.model, tmp_path / "adapted.safetensors")
    module = routed_network(small(), import_model(tmp_path / "adapted.safetensors")).eval()
    again = module(torch.from_numpy(IMAGES)).argmax(dim=1)
    assert all(torch.equal(again[k], found[k][0]) for k in range(6))
    with pytest.raises(ConfigError, match="holds no routers"):
        routed_network(small(), given["global"])
    with pytest.raises(ConfigError, match="does not belong to IOPUNet"):
        routed_network(IOPUNet(1, 2, base=4), adapted.model)


def test_the_same_seed_gives_the_same_bits() -> None:
    given = models(small)
    adapter = Routing(epochs=2, lr=0.1, transforms=True)
    (first, found), (second, again) = (run(adapter, given, small, IMAGES) for _ in range(2))
    assert first.record == second.record
    assert first.model.keys() == second.model.keys()
    assert all(torch.equal(first.model[name], second.model[name]) for name in first.model)
    assert all(torch.equal(found[index], again[index]) for index in range(6))


def test_without_a_global_model_the_rest_is_the_mean_of_the_personal_ones() -> None:
    given = models(small)
    del given["global"]
    adapted, _ = run(Routing(epochs=1), given, small, IMAGES)
    assert adapted.model is not None
    assert adapted.record.sources == ["east", "north"]
    scales = [n for n in given["east"] if n not in routed_names(small) and n.endswith("weight")]
    assert scales
    for name in scales:
        mean = (given["east"][name] + given["north"][name]) / 2
        torch.testing.assert_close(adapted.model[name], mean)


def test_rows_can_be_classified_but_have_no_shape() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    given, rows = models(network), np.random.default_rng(3).normal(size=(8, 9))
    cases = UnlabelledDataset(TensorDataset({"image": torch.from_numpy(rows.astype(np.float32))}))
    sources = Sources(given, network, SupervisedTask(nn.functional.cross_entropy))
    found: dict[int, torch.Tensor] = {}

    def deliver(name: str, index: int, prediction: torch.Tensor) -> None:
        found[index] = prediction

    with pytest.raises(ConfigError, match="the shape loss needs images or volumes"):
        Routing(epochs=1).adapt(sources, cases, deliver)
    adapter = Routing(epochs=3, lr=0.05, terms=("consistency", "entropy"), batch_size=8)
    adapted = adapter.adapt(sources, cases, deliver)
    assert sorted(found) == list(range(8))
    assert {prediction.shape for prediction in found.values()} == {(1, 3)}
    assert list(adapted.record.coefficients) == ["0", "3"]
    losses = [row["total"] for row in adapted.record.losses]
    assert losses[adapted.record.chosen or 0] < losses[0]


# --- how the cases differ


@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_spread_and_weight_variation_are_those_of_weights_made_by_hand(
    granularity: Literal["layer", "model"], in_numpy: Any
) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1)).double()

    given = models(network)
    images = np.random.default_rng(4).normal(size=(7, 2, 4, 5)) + np.arange(7)[:, None, None, None]
    adapter = Routing(epochs=3, lr=0.2, terms=("entropy",), granularity=granularity, dropout=0.0)
    adapted, _ = run(adapter, given, network, images)
    state, record = in_numpy(adapted.model), adapted.record
    assert list(record.spreads) == list(record.coefficients) == ["0", "2"]
    maps = images.reshape(7, 2, -1)
    for name in ("0", "2"):
        weights = np.stack([given[s][f"{name}.weight"].numpy()[:, :, 0, 0] for s in NAMES])
        biases = np.stack([given[s][f"{name}.bias"].numpy() for s in NAMES])
        logits = np.repeat(state.get(f"{name}.router.logits", np.zeros(3))[None], 7, 0)
        if granularity == "layer":
            hidden = maps.mean(2) @ state[f"{name}.router.hidden.weight"].T
            hidden = hidden + state[f"{name}.router.hidden.bias"]
            logits = hidden @ state[f"{name}.router.output.weight"].T
            logits = logits + state[f"{name}.router.output.bias"]
        r = 1 / (1 + np.exp(-logits))
        own, equal = np.einsum("bs,soi->boi", r, weights), weights.mean(0)
        varied = np.array([np.linalg.norm(w - equal) / np.linalg.norm(equal) for w in own])
        spread = record.spreads[name]
        for k, source in enumerate(NAMES):
            assert record.coefficients[name][source] == pytest.approx(r[:, k].mean(), rel=1e-9)
            assert spread.deviations[source] == pytest.approx(r[:, k].std(), rel=1e-6, abs=1e-12)
        assert varied.mean() > 0.01
        assert spread.variation == pytest.approx(varied.mean(), rel=1e-9)
        assert spread.variation_deviation == pytest.approx(varied.std(), rel=1e-6, abs=1e-12)
        assert (varied.std() > 1e-3) == (granularity == "layer")
        maps = np.einsum("boi,bip->bop", own, maps) + (r @ biases)[:, :, None]
        maps = np.where(maps > 0, maps, 0)


def test_layers_are_listed_in_the_order_in_which_the_network_calls_them() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.unused, self.first = (nn.Conv2d(1, c, 1) for c in (2, 1, 1))

        def forward(self, images: torch.Tensor) -> Any:
            return self.last(self.first(images))

    adapted, _ = run(Routing(epochs=1), models(Backwards), Backwards, IMAGES)
    assert list(adapted.record.spreads) == list(adapted.record.coefficients) == ["first", "last"]


def test_weights_of_the_terms_are_those_given() -> None:
    adapter = Routing(epochs=1, weights={"entropy": 10.0, "consistency": 0.1})
    adapted, _ = run(adapter, models(small), small, IMAGES)
    for row in adapted.record.losses:
        assert row.keys() == {"step", "total", "consistency", "entropy"}
        total = 10 * row["entropy"] + 0.1 * row["consistency"]
        assert row["total"] == pytest.approx(total, rel=1e-5)
    with pytest.raises(ConfigError, match=r"routing.weights replaces terms and beta; give either"):
        Routing(weights={"entropy": 1.0}, beta=0.5)
    with pytest.raises(ConfigError, match="one or more weights above 0"):
        Routing(weights={"entropy": 0.0})
