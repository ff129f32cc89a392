import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms._amplitude_norm import (
    NORM,
    AmplitudeNorm,
    amplitudes_of,
    attach_amplitude_norm,
)
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.harmofl import AMPLITUDE, HarmoFL
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import ConfigError, ProtocolError
from collegium.training.loop import TrainingConfig

ROUNDS = 3


def perturbed(by_hand: Any, model: Any, data: Any, batches: Any, lr: float, alpha: float) -> Any:
    """Local steps by the gradient of the same batch at w + alpha g / ||g||."""
    model, losses = dict(model), []
    for rows in batches:
        batch = type(data)(data.x[rows], data.y[rows])
        loss, g, buffers = by_hand.gradient(model, batch)
        length = np.sqrt(sum((value**2).sum() for value in g.values()))
        ahead = model | {n: model[n] + alpha * g[n] / length for n in g}
        _, second, _ = by_hand.gradient(ahead, batch)
        model |= buffers | {n: model[n] - lr * second[n] for n in second}
        losses.append(loss)
    return model, losses


@pytest.mark.parametrize(
    ("weighting", "shares"), [("uniform", [1, 1, 1]), ("examples", [5, 8, 11])]
)
def test_steps_take_the_gradient_at_the_perturbed_weights(
    federation: Any, by_hand: Any, weighting: Any, shares: Any
) -> None:
    method = HarmoFL(alpha=0.3, amplitudes="none", weighting=weighting)
    outcome = federation.run(method, rounds=ROUNDS)
    w = federation.initial()
    for t in range(1, ROUNDS + 1):
        models = []
        for name in federation.names:
            model, losses = perturbed(
                by_hand, w, federation.data[name], federation.batches(name, t),
                0.1 * 0.8 ** (t - 1), 0.3,
            )  # fmt: skip
            models.append(model)
            reported = outcome.progress(name)[t - 1]["loss"]
            assert reported == pytest.approx(np.mean(losses), rel=1e-9)
        w = by_hand.average(models, shares)
        by_hand.assert_same(outcome.server[t]["model"], w, f"round {t}")


def test_rows_of_a_table_get_the_mean_size_of_their_sites(federation: Any, by_hand: Any) -> None:
    """|mean| of a row becomes A, the mean over sites of the mean over rows; its sign stays."""
    outcome = federation.run(HarmoFL(alpha=0.2), rounds=2)
    mean = np.mean([abs(federation.data[n].x.mean(1)).mean() for n in federation.names])
    w = federation.initial()
    for t in (1, 2):
        models = []
        for name in federation.names:
            x, y = federation.data[name]
            own = x.mean(1, keepdims=True)
            data = type(federation.data[name])(x - own + np.sign(own) * mean, y)
            batches = federation.batches(name, t)
            lr = 0.1 * 0.8 ** (t - 1)
            models.append(perturbed(by_hand, w, data, batches, lr, 0.2)[0])
        w = by_hand.average(models, [1, 1, 1])
        found = outcome.server[t]["model"]
        by_hand.assert_same(found.without({AMPLITUDE}), w, f"round {t}")
        np.testing.assert_allclose(found[AMPLITUDE], [[[mean]]], rtol=1e-12)


@pytest.mark.parametrize(("shape", "radius"), [((7, 10), 2), ((6, 5), 0), ((5, 6, 7), 1)])
def test_amplitudes_are_replaced_in_the_window_and_phases_kept(shape: Any, radius: int) -> None:
    rng = np.random.default_rng(0)
    images, other = rng.normal(size=(3, 2, *shape)), rng.normal(size=(1, 2, *shape))
    axes = tuple(range(2, images.ndim))
    norm = AmplitudeNorm(2, len(shape), radius).double()
    norm.amplitude = amplitudes_of(torch.tensor(other), radius)
    found = norm.normalise(torch.tensor(images)).numpy()
    spectrum, wanted = np.fft.fftn(images, axes=axes), np.fft.fftn(other, axes=axes)
    low = np.ones(shape, dtype=bool)
    for axis, size in enumerate(shape):
        frequency = abs(np.fft.fftfreq(size) * size) <= radius + 1e-9
        low &= frequency.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    changed = np.where(low, abs(wanted) * np.exp(1j * np.angle(spectrum)), spectrum)
    np.testing.assert_allclose(found, np.fft.ifftn(changed, axes=axes).real, atol=1e-12)


def test_amplitudes_do_not_depend_on_the_number_of_pixels() -> None:
    flat = torch.full((1, 1, 4, 4), -3.0)
    larger = torch.full((1, 1, 8, 6), -3.0)
    assert amplitudes_of(flat, 0).equal(amplitudes_of(larger, 0))
    assert amplitudes_of(flat, 0).tolist() == [[[3.0]]]


def image_site(name: str, count: int, level: float) -> Site:
    rng = torch.Generator().manual_seed(count)
    images = torch.randn(count, 1, 6, 6, generator=rng, dtype=torch.float64) + level
    data = TensorDataset({"image": images, "label": images.mean((1, 2, 3))[:, None]})
    return Site(name, data, data, data)


def image_network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 1))


def test_a_network_sees_images_of_one_mean_in_training_and_in_prediction(federation: Any) -> None:
    sites = [image_site("A", 4, 3.0), image_site("B", 6, 9.0)]
    recipe = TrainingConfig(optimizer="sgd", lr=0.01, batch_size=3)
    outcome = federation.run(
        HarmoFL(), recipe, rounds=1, network=lambda: image_network().double(), sites=sites
    )
    levels = [float(site.train.example(i).image.mean().abs()) for site in sites for i in range(4)]
    means = [abs(site.train.inputs["image"].mean((1, 2, 3))).mean() for site in sites]  # type: ignore[attr-defined]
    assert len(set(levels)) == 8
    expected = float(sum(means)) / 2
    assert outcome.server[1]["model"][AMPLITUDE].tolist() == [[[pytest.approx(expected)]]]
    network = image_network().double()
    seen: list[torch.Tensor] = []
    attach_amplitude_norm(network, 0)
    network[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network.load_state_dict(dict(outcome.deployed["global"]))
    for site in sites:
        network(site.test.example(0).image)
    for images in seen:
        np.testing.assert_allclose(images.mean((1, 2, 3)), expected, rtol=1e-9)


def test_amplitudes_are_sent_once_and_by_sites_with_examples(federation: Any) -> None:
    sites = federation.sites()
    empty = TensorDataset({key: value[:0] for key, value in sites[1].train.inputs.items()})
    sites[1] = replace(sites[1], train=empty)
    outcome = federation.run(HarmoFL(), rounds=2, sites=sites)
    replies = outcome.replies("measure")
    assert ["amplitude" in reply for reply in replies] == [True, False, True]
    mean = np.mean([abs(federation.data[n].x.mean(1)).mean() for n in "AC"])
    np.testing.assert_allclose(outcome.server[2]["model"][AMPLITUDE], [[[mean]]], rtol=1e-12)
    assert all(reply.keys() == {"model", "num_examples", "progress"} or not reply["num_examples"]
               for reply in outcome.replies("train"))  # fmt: skip


def test_without_both_it_is_fedavg_bit_by_bit(federation: Any) -> None:
    method = HarmoFL(alpha=0.0, amplitudes="none", weighting="examples")
    outcome = federation.run(method)
    expected = federation.run(FedAvg()).server[3]["model"]
    assert all(outcome.server[3]["model"][name].equal(t) for name, t in expected.items())
    assert outcome.replies("measure") == []
    assert "amplitude" not in method.all_sends()


def test_running_statistics_learn_from_the_unperturbed_pass_alone(federation: Any) -> None:
    replies = federation.run(HarmoFL(), rounds=1).replies("train")
    counts = [int(reply["model"]["conv.num_batches_tracked"]) for reply in replies]
    assert counts == [2, 4, 6]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 2, 3), (3, 5, 5)),
        (nn.Conv3d(2, 2, 3), (2, 5, 5, 5)),
        (nn.Linear(9, 2), (1, 5, 5)),
    ],
)
def test_the_layer_has_the_channels_and_axes_of_the_first_layer(layer: Any, shape: Any) -> None:
    network = nn.Sequential(layer, nn.Conv2d(4, 2, 1))
    HarmoFL(radius=2).extend(network)
    assert network.state_dict()[AMPLITUDE].shape == shape


def test_a_copy_of_a_network_has_a_layer_of_its_own() -> None:
    network = image_network()
    attach_amplitude_norm(network, 0)
    other = copy.deepcopy(network)
    other.get_submodule(NORM).amplitude.fill_(5.0)  # type: ignore[operator]
    seen: list[torch.Tensor] = []
    other[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    other(torch.ones(1, 1, 6, 6))
    np.testing.assert_allclose(seen[0], 5.0, rtol=1e-6)


def test_networks_whose_images_are_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match="Flatten has no convolution or linear layer, so that"):
        HarmoFL().extend(nn.Flatten())
    network = image_network()
    network.add_module(NORM, nn.Identity())
    with pytest.raises(ConfigError, match="Sequential has something named 'amplitude_norm', so"):
        HarmoFL().extend(network)


def test_images_of_other_channels_than_the_first_layer_takes_are_refused() -> None:
    class Answering:
        state: dict[str, Any]
        initial_model = Tensors({AMPLITUDE: torch.zeros(3, 1, 1)})

        def __init__(self) -> None:
            self.state = {}

        def ask(self, method: Any) -> Any:
            from collegium.core.algorithm import Replies

            part = Tensors({"amplitude": torch.zeros(1, 1, 1)})
            return Replies(iter([("a", Message.of(amplitude=part, num_examples=2))]))

    server: Any = Answering()
    with pytest.raises(ConfigError, match="HarmoFL found 3 channels and 2 axes in the network's"):
        HarmoFL().setup(server)


def test_a_window_larger_than_the_images_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than images of 4 x 4 pixels have"):
        amplitudes_of(torch.ones(1, 1, 4, 4), 2)
    norm = AmplitudeNorm(1, 2, 2)
    with pytest.raises(ProtocolError, match="bring the images of all sites to one size"):
        norm.normalise(torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alpha": -0.1}, r"HarmoFL\.alpha: should be at least 0"),
        ({"radius": -1}, r"HarmoFL\.radius: should be at least 0"),
        ({"amplitudes": "high"}, r"HarmoFL\.amplitudes: should be 'low' or 'none'"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HarmoFL(**fields)
