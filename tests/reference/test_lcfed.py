import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage, signal
from torch import nn

from collegium.algorithms._calibration import NAME, OWN, attach_calibration, peaks, smooth
from collegium.algorithms.lcfed import LCFed
from collegium.core.model_parts import find_parts, fix_roles
from collegium.errors import ConfigError
from collegium.models.factory import build_model

ROUNDS = 2
SHARED = ["calibration.site.weight", "calibration.squeeze.weight", "calibration.excite.weight"]
EMBEDDING = f"calibration.{OWN}.embedding"
FUSE = f"calibration.{OWN}.fuse.weight"
BIAS = f"calibration.{OWN}.fuse.bias"
ACTIVE = f"calibration.{OWN}.active"


def relu(z: Any) -> Any:
    return np.where(z.real > 0, z, 0)


def sigmoid(z: Any) -> Any:
    return 1 / (1 + np.exp(-z))


def selected(model: Any, pooled: list[Any]) -> Any:
    """The attention from the pooled features (B, C) of each kind."""
    site = model["calibration.site.weight"] @ relu(model[EMBEDDING])
    total: Any = 0
    for p in pooled:
        row = np.concatenate([p, np.broadcast_to(site, p.shape)], axis=1)
        hidden = relu(row @ model["calibration.squeeze.weight"].T)
        total = total + hidden @ model["calibration.excite.weight"].T
    return sigmoid(total)


def entering(by_hand: Any, model: Any, x: Any, *, training: bool) -> Any:
    """Return what enters the head of the network of `numpy_rounds` after the selection."""
    found = by_hand.features(model, x, training=training)
    return found * (1 + selected(model, [found, found]))


def train(by_hand: Any, model: Any, data: Any, batches: Any, lr: float, *, head: bool) -> Any:
    """Steps of the head under the body's running statistics, or of all the rest."""
    model = dict(model)
    names = by_hand.HEAD if head else (by_hand.PARAMETERS - by_hand.HEAD) | {*SHARED, EMBEDDING}
    for rows in batches:
        x, y = data.x[rows], data.y[rows]

        def objective(now: Any, x: Any = x, y: Any = y) -> Any:
            z = entering(by_hand, now, x, training=not head)
            return ((z @ now["norm.weight"].T + now["norm.bias"] - y) ** 2).mean()

        slopes = by_hand.slopes(objective, model, names)
        _, _, buffers = by_hand.gradient(model, type(data)(x, y), batch_statistics=not head)
        model |= buffers | {n: model[n] - lr * slope for n, slope in slopes.items()}
    return model


def as_numpy(model: Any) -> dict[str, Any]:
    return {name: tensor.numpy().copy() for name, tensor in model.items()}


def added_to(module: nn.Module) -> Any:
    return module.get_submodule(NAME)


def network_of(federation: Any, sites: int = 3) -> nn.Module:
    module: nn.Module = federation.normed()
    fix_roles(module)
    attach_calibration(module, sites)
    return module


def test_heads_are_trained_first_and_then_the_body_under_the_selection(
    federation: Any, by_hand: Any
) -> None:
    recipe = replace(federation.recipe, lr=0.02)
    outcome = federation.run(LCFed(head_steps=3, calibration_epochs=0), recipe, rounds=ROUNDS)
    first = next(message for request, message, _ in outcome.log if request.method == "train")
    start = as_numpy(first["model"])
    stays = by_hand.HEAD | {name for name in start if f".{OWN}." in name}
    shared = {name: value for name, value in start.items() if name not in stays}
    own = {name: {n: start[n] for n in stays} for name in federation.names}
    for t in range(1, ROUNDS + 1):
        lr, models = 0.02 * 0.8 ** (t - 1), []
        for name, steps in {"A": 2, "B": 4, "C": 6}.items():
            data, model = federation.data[name], shared | own[name]
            split = min(3, steps - 1)
            batches = federation.batches(name, t, steps=split, stream="head")
            model = train(by_hand, model, data, batches, lr, head=True)
            batches = federation.batches(name, t, steps=steps - split)
            model = train(by_hand, model, data, batches, lr, head=False)
            own[name] = {n: model[n] for n in stays}
            models.append({n: model[n] for n in shared})
        counter = max(m["conv.num_batches_tracked"] for m in models)
        shared = {n: sum(m[n] for m in models) / 3 for n in shared}
        shared["conv.num_batches_tracked"] = counter
        found = outcome.server[t]["model"].select(shared)
        by_hand.assert_same(found, shared, f"round {t}")
        for name in federation.names:
            by_hand.assert_same(outcome.clients[t][name]["private"], own[name], f"{t} {name}")


def test_after_the_last_round_each_site_trains_its_convolution_with_the_heads_of_all(
    federation: Any, by_hand: Any
) -> None:
    epochs, lr = 5, 0.02
    recipe = replace(federation.full_batch, lr=lr, local_epochs=3)
    outcome = federation.run(LCFed(calibration_epochs=epochs), recipe, rounds=1)
    heads = {
        name: as_numpy(outcome.clients[1][name]["private"].select(by_hand.HEAD))
        for name in federation.names
    }
    for name in federation.names:
        before = as_numpy(outcome.server[1]["model"] | outcome.clients[1][name]["private"])
        after = as_numpy(outcome.clients[2][name]["private"])
        assert after[ACTIVE] == 1.0
        others = [heads[other] for other in federation.names if other != name]
        for number, head in enumerate(others):
            for kind in ("weight", "bias"):
                placed = after[f"calibration.{OWN}.heads.{number}.{kind}"]
                np.testing.assert_array_equal(placed, head[f"norm.{kind}"])
        x, y = federation.data[name]
        f = entering(by_hand, before, x, training=False)

        def prediction(head: Any, f: Any = f) -> Any:
            return sigmoid(f @ head["norm.weight"].T + head["norm.bias"])

        own = prediction(heads[name])
        u = np.sqrt(np.mean([(prediction(head) - own) ** 2 for head in others], axis=0))
        assert (u > 0).all()  # one pixel, so that each disagreement is the largest
        z = np.concatenate([2 * f, f * (1 + own)], axis=1)
        weight, bias = before[FUSE][:, :, 1, 1], before[BIAS]
        for _ in range(epochs):
            error = 2 * (z @ weight.T + bias - y) / len(y)
            weight, bias = weight - lr * error.T @ z, bias - lr * error.sum(0)
        np.testing.assert_allclose(after[FUSE][:, :, 1, 1], weight, rtol=1e-8)
        np.testing.assert_allclose(after[BIAS], bias, rtol=1e-8)
        for key in by_hand.HEAD | {EMBEDDING}:
            np.testing.assert_array_equal(after[key], before[key])


def test_the_calibrated_head_predicts(federation: Any, by_hand: Any) -> None:
    recipe = replace(federation.full_batch, lr=0.02, local_epochs=3)
    outcome = federation.run(LCFed(), recipe, rounds=1)
    model = outcome.server[1]["model"] | outcome.clients[2]["A"]["private"]
    network = network_of(federation).eval()
    network.load_state_dict(dict(model))
    x, _ = federation.data["A"]
    numbers = as_numpy(model)
    f = entering(by_hand, numbers, x, training=False)
    own = sigmoid(f @ numbers["norm.weight"].T + numbers["norm.bias"])
    z = np.concatenate([2 * f, f * (1 + own)], axis=1)
    expected = z @ numbers[FUSE][:, :, 1, 1].T + numbers[BIAS]
    with torch.no_grad():
        np.testing.assert_allclose(network(torch.tensor(x)), expected, rtol=1e-9)
        network.load_state_dict(dict(model) | {ACTIVE: torch.zeros(())})
        plain = f @ numbers["norm.weight"].T + numbers["norm.bias"]
        np.testing.assert_allclose(network(torch.tensor(x)), plain, rtol=1e-9)


@pytest.mark.parametrize("shape", [(50, 40), (33,), (9, 35, 8)])
def test_peaks_and_their_smoothing_are_scipys(shape: Any) -> None:
    u = np.random.default_rng(0).random((2, 3, *shape)) ** 4
    u[1, 2] = 0.0
    found = peaks(torch.tensor(u)).numpy()
    places = np.arange(31) - 15
    kernel = np.exp(-(places**2) / (2 * 6.0**2))
    smoothed = smooth(torch.tensor(u)).numpy()
    for b in range(2):
        for c in range(3):
            relative = u[b, c] / max(u[b, c].max(), 1e-300)
            around = ndimage.maximum_filter(relative, 31, mode="constant", cval=-1.0)
            expected = (relative == around) & (relative > 0.2)
            np.testing.assert_array_equal(found[b, c], expected)
            rows = u[b, c]
            for axis in range(len(shape)):
                rows = ndimage.convolve1d(rows, kernel, axis, mode="constant")
            np.testing.assert_allclose(smoothed[b, c], rows, rtol=1e-9)
    assert found[1, 2].sum() == 0
    assert found[0, 0].sum() >= 1


def test_maps_weigh_features_before_the_convolution() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1)).double()
    fix_roles(module)
    attach_calibration(module, 3)
    own = added_to(module).own
    for head in own.heads:
        head.weight.data.normal_()
    features = torch.randn(1, 2, 20, 30).double()
    logits = module[1](features)

    def softmax(values: Any) -> Any:
        return (values.exp() / values.exp().sum(1, keepdim=True)).detach().numpy()

    p = softmax(logits)
    gaps = [softmax(head(features)) - p for head in own.heads]
    u = np.sqrt((gaps[0] ** 2 + gaps[1] ** 2) / 2)
    maps = [smooth(peaks(torch.tensor(u))).numpy(), smooth(torch.tensor(p)).numpy()]
    f = features.numpy()
    weighted = [f * (1 + m[:, c : c + 1]) for c in range(2) for m in maps]
    stacked, weight = np.concatenate(weighted, axis=1)[0], own.fuse.weight.detach().numpy()
    expected = [
        sum(signal.correlate2d(a, w, "same") for a, w in zip(stacked, weight[k], strict=True))
        + own.fuse.bias[k].item()
        for k in range(2)
    ]
    found = own.calibrated(features, logits)
    np.testing.assert_allclose(found[0].detach(), expected, rtol=1e-9)


def test_peaks_below_a_fifth_of_the_largest_are_left_out() -> None:
    u = torch.zeros(1, 1, 100, dtype=torch.float64)
    u[0, 0, [5, 45, 85]] = torch.tensor([2.0, 0.5, 0.3], dtype=torch.float64)
    assert peaks(u)[0, 0].nonzero().flatten().tolist() == [5, 45]


def test_the_disagreement_is_the_root_of_the_mean_square() -> None:
    """Of gaps of 0.4 and 0.12 both are peaks; by their squares the second would be none."""
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1, bias=False)).double()
    fix_roles(module)
    attach_calibration(module, 2)
    own = added_to(module).own
    own.heads[0].weight.data.fill_(1.0)
    own.fuse.weight.data.zero_()
    own.fuse.bias.data.zero_()
    own.fuse.weight.data[0, 0, 1, 1] = 1.0  # the features under the map of disagreement
    features = torch.zeros(1, 1, 1, 100, dtype=torch.float64)
    large, small = (np.log((0.5 + gap) / (0.5 - gap)) for gap in (0.4, 0.12))
    features[0, 0, 0, 10], features[0, 0, 0, 60] = large, small
    found = own.calibrated(features, 0 * features)[0, 0, 0]
    np.testing.assert_allclose(found[[10, 60]].detach(), [2 * large, 2 * small], rtol=1e-9)


def test_channels_are_selected_by_mean_and_maximum_over_space() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 1)).double()
    fix_roles(module)
    attach_calibration(module, 2)
    x = torch.randn(2, 3, 4, 5).double()
    model = as_numpy({n: t.detach() for n, t in module.state_dict().items()})
    attention = selected(model, [x.numpy().mean((2, 3)), x.numpy().max((2, 3))])
    expected = x.numpy() * (1 + attention[:, :, None, None])
    found = added_to(module).selected(x)
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["unet", "iop_unet"])
def test_networks_for_images_predict_before_and_after_the_calibration(name: str) -> None:
    torch.manual_seed(0)
    module = build_model(name, in_channels=1, out_channels=2).eval()
    fix_roles(module)
    images = torch.randn(1, 1, 64, 64)
    attach_calibration(module, 4)
    with torch.no_grad():
        plain = module(images)
        other = copy.deepcopy(module)
        added_to(other).own.active.fill_(1.0)
        calibrated = other(images)
        assert module(images).equal(plain)
    assert plain.shape == calibrated.shape == (1, 2, 64, 64)
    assert not calibrated.allclose(plain)


def test_what_stays_and_what_leaves(federation: Any, by_hand: Any) -> None:
    outcome = federation.run(LCFed(), rounds=1)
    for reply in outcome.replies("train"):
        assert reply["model"].keys() == (by_hand.NAMES - by_hand.HEAD) | {*SHARED}
    assert [reply["head"].keys() for reply in outcome.replies("send_head")] == [by_hand.HEAD] * 3
    assert all(reply.keys() == {"progress"} for reply in outcome.replies("calibrate"))
    without = federation.run(LCFed(calibration_epochs=0), rounds=1)
    assert without.replies("send_head") == []
    assert "head" not in LCFed(calibration_epochs=0).all_sends()


def test_the_number_of_sites_has_to_be_right(federation: Any) -> None:
    parts = find_parts(federation.normed())
    LCFed(sites=3).check_setup(["a", "b", "c"], parts)
    with pytest.raises(ConfigError, match=r"LCFed's sites is 3, and 2 take part; set sites to 2"):
        LCFed(sites=3).check_setup(["a", "b"], parts)


def test_a_network_that_has_the_name_already_is_refused(federation: Any) -> None:
    module = federation.normed()
    module.add_module(NAME, nn.Identity())
    with pytest.raises(ConfigError, match="has something named 'calibration'; rename it"):
        LCFed().extend(module)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sites": 1}, r"LCFed\.sites: should be at least 2"),
        ({"head_steps": -1}, r"LCFed\.head_steps: should be at least 0"),
        ({"calibration_epochs": -1}, r"LCFed\.calibration_epochs: should be at least 0"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LCFed(**fields)
