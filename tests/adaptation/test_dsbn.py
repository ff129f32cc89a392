from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation.base import Sources, mean_model
from collegium.adaptation.dsbn import DSBN
from collegium.core.dataset import Example
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import SegmentationTask, SupervisedTask

BATCHES = (slice(0, 2), slice(2, 4), slice(4, 5))
SOURCES = ("global", "east", "north")


def network() -> nn.Module:
    layers = nn.Sequential()
    for name, layer in {
        "first": nn.Conv2d(1, 3, 1), "norm": nn.BatchNorm2d(3), "relu": nn.ReLU(),
        "second": nn.Conv2d(3, 2, 1), "bn": nn.BatchNorm2d(2), "last": nn.Conv2d(2, 2, 1),
    }.items():  # fmt: skip
        layers.add_module(name, layer)
    return layers.double()


def moments(by_batch: Any) -> tuple[Any, Any]:
    """Mean and unbiased variance of the channels over all images and pixels."""
    everything = np.concatenate(by_batch).swapaxes(0, 1)
    everything = everything.reshape(len(everything), -1)
    return everything.mean(1), everything.var(1, ddof=1)


def own(maps: Any) -> tuple[Any, Any]:
    """Mean and variance of one batch, as it is normalised in training."""
    return maps.mean((0, 2)), maps.var((0, 2))


class Layers:
    """What enters the two normalisations, batch by batch."""

    def __init__(self, by_hand: Any, model: Any, images: Any) -> None:
        self.by_hand, self.model = by_hand, model
        self.first = [
            by_hand.convolve(model, "first", images[rows].reshape(-1, 1, 16)) for rows in BATCHES
        ]

    def second(self, statistics: Any = None) -> list[Any]:
        """With each batch's own statistics before it, or with those given."""
        return [
            self.by_hand.convolve(
                self.model,
                "second",
                self.by_hand.relu(
                    self.by_hand.normalise(self.model, "norm", maps, *(statistics or own(maps)))
                ),
            )
            for maps in self.first
        ]

    def logits(self, first: Any, second: Any) -> Any:
        """Of all images, with the statistics given."""
        maps = np.concatenate(self.second(first))
        maps = self.by_hand.normalise(self.model, "bn", maps, *second)
        return self.by_hand.convolve(self.model, "last", maps)


def statistics(model: Any, layer: str) -> tuple[Any, Any]:
    return model[f"{layer}.running_mean"], model[f"{layer}.running_var"]


def assert_near(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(mine), theirs, rtol=1e-9, atol=1e-12)


def test_one_pass_gives_the_statistics_of_all_images(
    outside: Any, by_hand: Any, in_numpy: Any
) -> None:
    sources = outside.sources(network)
    given = sources.models["global"]
    found, adapted = outside.adapt(DSBN(batch_size=2), sources)
    layers = Layers(by_hand, in_numpy(given), outside.images)
    first, second = moments(layers.first), moments(layers.second())
    assert_near(statistics(adapted.model, "norm"), first)
    assert_near(statistics(adapted.model, "bn"), second)
    expected = layers.logits(first, second).argmax(1).reshape(5, 4, 4)
    assert np.array_equal(np.concatenate(found[""]), expected), "predicted in evaluation mode"
    changed = {n for n, t in adapted.model.items() if not torch.equal(t, given[n])}
    assert changed == {f"{n}.running_{kind}" for n in ("norm", "bn") for kind in ("mean", "var")}
    assert list(adapted.record.sources) == ["global"]
    assert adapted.record.steps == 0


@pytest.mark.parametrize("passes", [2, 3])
def test_as_many_passes_as_layers_are_exact(
    outside: Any, by_hand: Any, in_numpy: Any, passes: int
) -> None:
    sources = outside.sources(network)
    model = outside.adapt(DSBN(batch_size=2, passes=passes), sources)[1].model
    layers = Layers(by_hand, in_numpy(sources.models["global"]), outside.images)
    first = moments(layers.first)
    assert_near(statistics(model, "norm"), first)
    assert_near(statistics(model, "bn"), moments(layers.second(first)))
    once = outside.adapt(DSBN(batch_size=2), sources)[1].model
    assert np.abs(np.asarray(model["bn.running_mean"] - once["bn.running_mean"])).max() > 1e-3


def test_the_size_of_a_batch_does_not_matter_once_passes_suffice(outside: Any) -> None:
    sources = outside.sources(network)
    one, other = (
        outside.adapt(DSBN(batch_size=size, passes=2), sources)[1].model for size in (1, 5)
    )
    assert all(torch.allclose(one[name], other[name], atol=1e-12) for name in one)


def test_scale_and_shift_may_be_the_mean_of_the_personal_models(
    outside: Any, by_hand: Any, in_numpy: Any
) -> None:
    sources = outside.sources(network, SOURCES)
    adapted = outside.adapt(DSBN(affine="mean", batch_size=2), sources)[1]
    east, north = (in_numpy(sources.models[name]) for name in SOURCES[1:])
    mixed = in_numpy(sources.models["global"])
    for name in ("norm.weight", "norm.bias", "bn.weight", "bn.bias"):
        mixed[name] = (east[name] + north[name]) / 2
        assert_near([adapted.model[name]], [mixed[name]])
    layers = Layers(by_hand, mixed, outside.images)
    assert_near(statistics(adapted.model, "bn"), moments(layers.second()))
    assert torch.equal(adapted.model["last.weight"], sources.models["global"]["last.weight"])
    assert list(adapted.record.sources) == ["global", "east", "north"]


def gaussian_distance(mine: Any, theirs: Any) -> float:
    """Both Kullback-Leibler divergences together, by numerical integration of their definition."""
    x = np.linspace(-80, 80, 400_001)
    divergences = []
    for pair in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True):
        first, second = (
            -((x - mean) ** 2) / (2 * (variance + 1e-5)) - np.log(2 * np.pi * (variance + 1e-5)) / 2
            for mean, variance in pair
        )
        integrand = (np.exp(first) - np.exp(second)) * (first - second)
        divergences.append(np.trapezoid(integrand, x))
    return float(np.mean(divergences))


def test_scale_and_shift_may_be_those_of_the_nearest_model(
    outside: Any, by_hand: Any, in_numpy: Any
) -> None:
    sources = outside.sources(network, SOURCES)
    adapted = outside.adapt(DSBN(affine="nearest", batch_size=2), sources)[1]
    distances, found = {}, {}
    for name in SOURCES[1:]:
        theirs = in_numpy(sources.models[name])
        mixed = in_numpy(sources.models["global"]) | {
            f"{layer}.{kind}": theirs[f"{layer}.{kind}"]
            for layer in ("norm", "bn") for kind in ("weight", "bias")
        }  # fmt: skip
        layers = Layers(by_hand, mixed, outside.images)
        found[name] = mixed, moments(layers.first), moments(layers.second())
        distances[name] = np.mean([
            gaussian_distance(found[name][1], statistics(theirs, "norm")),
            gaussian_distance(found[name][2], statistics(theirs, "bn")),
        ])  # fmt: skip
    nearest = min(distances, key=distances.__getitem__)
    said = ", ".join(f"{name} {value:.3g}" for name, value in distances.items())
    assert adapted.record.notes == [
        f"Scale and shift are those of {nearest}, whose statistics are nearest ({said})."
    ]
    assert list(adapted.record.sources) == ["global", nearest]
    mixed, first, second = found[nearest]
    assert_near([adapted.model["bn.weight"], adapted.model["norm.bias"]],
                [mixed["bn.weight"], mixed["norm.bias"]])  # fmt: skip
    assert_near(statistics(adapted.model, "norm"), first)
    assert_near(statistics(adapted.model, "bn"), second)


def test_the_nearest_model_does_not_depend_on_which_comes_last(outside: Any) -> None:
    sources = outside.sources(network, SOURCES)
    models = dict(sources.models)
    swapped = replace(sources, models={**models, "east": models["north"], "north": models["east"]})
    one, other = (outside.adapt(DSBN(affine="nearest"), s)[1] for s in (sources, swapped))
    assert one.record.sources[1] != other.record.sources[1]
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)


def test_without_a_global_model_the_body_is_the_mean_of_the_personal_ones(
    outside: Any, in_numpy: Any
) -> None:
    sources = outside.sources(network, ("east", "north"))
    counted = {
        name: Tensors({**model, "bn.num_batches_tracked": torch.tensor(7 + k)})
        for k, (name, model) in enumerate(sources.models.items())
    }
    sources = replace(sources, models=counted)
    adapted = outside.adapt(DSBN(), sources)[1]
    east, north = (in_numpy(model) for model in counted.values())
    for name in ("first.weight", "last.bias", "norm.weight"):
        assert_near([adapted.model[name]], [(east[name] + north[name]) / 2])
    assert int(adapted.model["bn.num_batches_tracked"]) == 8
    assert list(adapted.record.sources) == ["east", "north"]
    assert int(mean_model(counted, ["east"])["bn.num_batches_tracked"]) == 7


THRESHOLD, LR = 0.8, 0.02


def cross_entropy(by_hand: Any, model: Any, images: Any, labels: Any) -> Any:
    """The mean over the sure pixels; right for complex numbers too."""
    logits = by_hand.logits(model, images, batch_statistics=False)
    logs = np.log(np.exp(logits).sum(1)) - np.where(labels == 1, logits[:, 1], logits[:, 0])
    return logs[labels >= 0].mean()


def test_pseudo_labels_move_scale_and_shift_as_by_hand(
    outside: Any, by_hand: Any, in_numpy: Any
) -> None:
    """One batch, so that an epoch is a step; the labels of the first stage stay."""
    sources = outside.sources(by_hand.network)
    settings: dict[str, Any] = {"threshold": THRESHOLD, "lr": LR, "batch_size": 5}
    model = in_numpy(outside.adapt(DSBN(batch_size=5), sources)[1].model)
    adapted = outside.adapt(DSBN(pseudo_labels=2, **settings), sources)[1]
    powers = np.exp(by_hand.logits(model, outside.images, batch_statistics=False))
    sureness = powers.max(1) / powers.sum(1)
    labels = np.where(sureness >= THRESHOLD, powers.argmax(1), -1)
    assert 0.1 < (labels == -1).mean() < 0.9, "some are sure, some are not"
    first = dict.fromkeys(by_hand.AFFINE, 0.0)
    second = dict.fromkeys(by_hand.AFFINE, 0.0)
    for step in (1, 2):
        value = cross_entropy(by_hand, model, outside.images, labels)
        row = adapted.record.losses[step - 1]
        assert row["step"] == step - 1
        assert row["total"] == pytest.approx(float(value), rel=1e-6)
        assert row["confident"] == pytest.approx((labels >= 0).mean(), rel=1e-6)
        slopes = by_hand.slopes(
            lambda now: cross_entropy(by_hand, now, outside.images, labels), model, by_hand.AFFINE
        )
        for name, slope in slopes.items():
            first[name] = 0.9 * first[name] + 0.1 * slope
            second[name] = 0.999 * second[name] + 0.001 * slope**2
            root = np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
            model[name] = model[name] - LR * first[name] / (1 - 0.9**step) / root
    assert adapted.record.steps == 2
    for name, expected in model.items():
        np.testing.assert_allclose(adapted.model[name], expected, atol=1e-6, rtol=0, err_msg=name)


def test_a_threshold_that_nothing_reaches_teaches_nothing(outside: Any, by_hand: Any) -> None:
    sources = outside.sources(by_hand.network)
    adapted = outside.adapt(DSBN(pseudo_labels=3, threshold=1.0), sources)[1]
    plain = outside.adapt(DSBN(), sources)[1]
    assert all(torch.equal(adapted.model[name], plain.model[name]) for name in plain.model)
    assert adapted.record.steps == 0
    assert adapted.record.notes == ["No prediction reached the threshold 1: nothing was learnt."]


@pytest.mark.parametrize("affine", ["global", "mean", "nearest"])
def test_the_same_bits_come_again_whatever_the_labels(
    outside: Any, by_hand: Any, affine: Any
) -> None:
    sources = outside.sources(by_hand.network, SOURCES)
    adapter = DSBN(affine=affine, pseudo_labels=2, threshold=0.6)
    (first, one), (second, other) = (outside.adapt(adapter, sources, k) for k in (0, 1))
    assert one.record == other.record
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)
    assert all(np.array_equal(a, b) for a, b in zip(first[""], second[""], strict=True))


def test_larger_images_are_measured_window_by_window() -> None:
    image = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()

    class Large:
        def __len__(self) -> int:
            return 1

        def example(self, index: int) -> Example:
            return Example("c", "p", {"image": image}, None)

    model = Tensors(network().state_dict()).clone()
    task = SegmentationTask(2, window=(4, 4), overlap=0.5)
    adapter = DSBN(batch_size=2)
    adapted = adapter.adapt(Sources({"global": model}, network, task), Large(), lambda *_: None)
    cuts = [image[0, 0, i : i + 4, j : j + 4].numpy() for i in (0, 2, 4) for j in (0, 2, 4)]
    weight, bias = (model[f"first.{kind}"].numpy().ravel() for kind in ("weight", "bias"))
    entering = weight[:, None] * np.stack(cuts).ravel() + bias[:, None]
    expected = entering.mean(1), entering.var(1, ddof=1)
    assert adapted.model is not None
    assert_near(statistics(adapted.model, "norm"), expected)


class Vectors:
    """Five cases that are vectors."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return 5

    def example(self, index: int) -> Example:
        return Example("c", "p", {"image": self.inputs[index : index + 1]}, None)


def test_a_vector_alone_in_its_batch_is_no_trouble() -> None:
    """Five cases in batches of two: torch refuses to normalise one vector by itself."""
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).double()

    def vectors() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()

    model = Tensors(vectors().state_dict()).clone()
    sources = Sources({"global": model}, vectors, SupervisedTask(nn.functional.cross_entropy))
    adapted = DSBN(batch_size=2).adapt(sources, Vectors(inputs), lambda *_: None)
    assert adapted.model is not None
    expected = inputs.numpy().mean(0), inputs.numpy().var(0, ddof=1)
    assert_near(statistics(adapted.model, "0"), expected)


def test_pseudo_labels_need_classes() -> None:
    def regression() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))

    models = {"global": Tensors(regression().state_dict()).clone()}
    sources = Sources(models, regression, SupervisedTask(nn.functional.mse_loss))
    adapter = DSBN(batch_size=2, pseudo_labels=1)
    with pytest.raises(ConfigError, match=r"has the shape \(2, 1\); choose the adapter none"):
        adapter.adapt(sources, Vectors(torch.randn(5, 3)), lambda *_: None)


def test_a_network_without_batch_normalisation_is_refused(outside: Any) -> None:
    def bare() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2)).double()

    words = "dsbn adapts batch normalisation, and Sequential has none; choose another adapter"
    with pytest.raises(ConfigError, match=words):
        DSBN().check(bare())
    with pytest.raises(ConfigError, match=words):
        outside.adapt(DSBN(), outside.sources(bare))


def test_batch_normalisation_without_scale_and_shift_has_nothing_to_learn(outside: Any) -> None:
    def bare() -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.Conv2d(1, 2, 1)).double()

    sources = outside.sources(bare)
    adapted = outside.adapt(DSBN(), sources)[1]
    assert_near([adapted.model["0.running_mean"]], [[outside.images.mean()]])
    with pytest.raises(ConfigError, match="the network's batch normalisation has none"):
        outside.adapt(DSBN(pseudo_labels=1), sources)


@pytest.mark.parametrize("affine", ["mean", "nearest"])
def test_scale_and_shift_of_personal_models_need_some(outside: Any, affine: Any) -> None:
    assert DSBN(affine=affine).needs == ("personal",)
    with pytest.raises(ConfigError, match="dsbn needs personal models, but no site shared one"):
        outside.adapt(DSBN(affine=affine), outside.sources(network))
    assert DSBN().needs == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"affine": "best"}, r"DSBN\.affine: should be 'global', 'mean' or 'nearest', not 'best'"),
        ({"passes": 0}, r"DSBN\.passes: should be at least 1, not 0"),
        ({"batch_size": 0}, r"DSBN\.batch_size: should be at least 1, not 0"),
        ({"pseudo_labels": -1}, r"DSBN\.pseudo_labels: should be at least 0, not -1"),
        ({"threshold": 1.5}, r"DSBN\.threshold: should be at least 0 and at most 1, not 1\.5"),
        ({"threshold": float("nan")}, r"DSBN\.threshold: should be finite and .*, not nan"),
        ({"lr": 0.0}, r"DSBN\.lr: should be above 0, not 0\.0"),
        ({"lr": float("inf")}, r"DSBN\.lr: should be finite and above 0, not inf"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DSBN(**fields)
