from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation.base import Sources
from collegium.adaptation.ttt import TTTAdapter
from collegium.algorithms.ttt import TTT
from collegium.core.algorithm import NetworkBuilder
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DivergedError
from collegium.models.unet import IOPUNet

LR = 0.05
HEAD = ("rotation.weight", "rotation.bias")
ENCODER = ("body.weight", "body.bias", "norm.weight", "norm.bias")


def bare() -> nn.Module:
    """Convolution 3x3, batch normalisation, ReLU, convolution 1x1: the last is the head."""
    layers = nn.Sequential()
    for name, layer in {
        "body": nn.Conv2d(1, 3, 3, padding=1), "norm": nn.BatchNorm2d(3), "relu": nn.ReLU(),
        "drop": nn.Dropout(0.5), "last": nn.Conv2d(3, 2, 1),
    }.items():  # fmt: skip
        layers.add_module(name, layer)
    return layers.double()


network = NetworkBuilder(bare, TTT())


def ttt(**fields: Any) -> TTTAdapter:
    return TTTAdapter(**{"lr": LR, "copies": 6, **fields})


def features(model: Any, images: Any) -> Any:
    """What enters the last layer, (B, 3, H, W); right for complex numbers too."""
    padded = np.pad(images[:, 0], ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    maps = np.einsum("bhwij,cij->bchw", windows, model["body.weight"][:, 0])
    keys = ("body.bias", "norm.running_mean", "norm.running_var", "norm.weight", "norm.bias")
    bias, mean, variance, scale, shift = (model[key][:, None, None] for key in keys)
    maps = scale * (maps + bias - mean) / np.sqrt(variance + 1e-5) + shift
    return np.where(maps.real > 0, maps, 0)


def rotation_loss(model: Any, images: Any, turns: Any) -> Any:
    """The mean cross-entropy of telling how far each image is turned."""
    turned = np.stack([np.rot90(x, k, (1, 2)) for x, k in zip(images, turns, strict=True)])
    pooled = features(model, turned).mean((2, 3))
    logits = pooled @ model["rotation.weight"].T + model["rotation.bias"]
    return (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(turns)), turns]).mean()


def classes(model: Any, image: Any) -> Any:
    weight, bias = model["last.weight"][:, :, 0, 0], model["last.bias"][:, None, None]
    logits = np.einsum("oi,bihw->bohw", weight, features(model, image)) + bias
    return logits.argmax(1)


def descended(by_hand: Any, model: Any, drawn: Any) -> Any:
    images, turns = (tensor.numpy() for tensor in drawn)
    names = (*ENCODER, *HEAD)
    slopes = by_hand.slopes(lambda now: rotation_loss(now, images, turns), model, names)
    return model | {name: model[name] - LR * slopes[name] for name in names}


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_updates_and_predictions_equal_those_by_hand(
    outside: Any, by_hand: Any, in_numpy: Any, online: bool, steps: int
) -> None:
    adapter = ttt(online=online, steps=steps)
    sources = outside.sources(network, seed=11)
    start = model = in_numpy(sources.models["global"])
    expected, losses = [], []
    for index, image in enumerate(outside.images):
        model = model if online else start
        rng = generator(11, "ttt", index)
        for step in range(steps):
            drawn = adapter._copies(torch.from_numpy(image[None]), rng)
            if step == 0:
                losses.append(float(rotation_loss(model, *(t.numpy() for t in drawn))))
            model = descended(by_hand, model, drawn)
        expected.append(classes(model, image[None]))
    found, adapted = outside.adapt(adapter, sources)
    assert np.array_equal(np.stack(found[""]), np.stack(expected)), "predicted after the step"
    rows = adapted.record.losses
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["rotation"] for row in rows] == pytest.approx(losses, rel=1e-9)
    assert adapted.record.steps == 5 * steps
    if online:
        for name, tensor in model.items():
            np.testing.assert_allclose(adapted.model[name], tensor, atol=1e-9, rtol=0)
        still = set(model) - {*ENCODER, *HEAD}
        assert all(torch.equal(adapted.model[n], sources.models["global"][n]) for n in still)
    else:
        assert adapted.model is None
        assert any("no adapted model is kept" in note for note in adapted.record.notes)


def test_the_first_case_is_the_same_and_later_ones_are_not_when_online(outside: Any) -> None:
    sources = outside.sources(network)
    one, other = (
        [row["total"] for row in outside.adapt(ttt(online=online), sources)[1].record.losses]
        for online in (False, True)
    )
    assert one[0] == other[0]
    assert all(a != b for a, b in zip(one[1:], other[1:], strict=True))


def test_a_case_does_not_depend_on_those_before_it(outside: Any) -> None:
    sources = outside.sources(network)
    before = outside.adapt(ttt(), sources)
    outside.images[:4] = 0.0
    after = outside.adapt(ttt(), sources)
    assert before[1].record.losses[4] == after[1].record.losses[4]
    assert np.array_equal(before[0][""][4], after[0][""][4])
    assert before[1].record.losses[3] != after[1].record.losses[3]


def test_the_same_bits_come_again_whatever_the_labels(outside: Any) -> None:
    sources = outside.sources(network)
    first, second = (outside.adapt(ttt(online=True), sources, k)[1] for k in (0, 1))
    assert first.record == second.record
    assert all(torch.equal(first.model[name], second.model[name]) for name in first.model)
    other = outside.adapt(ttt(online=True), replace(sources, seed=1))[1]
    assert other.record.losses != first.record.losses


def found_in(copy: np.ndarray, slices: np.ndarray, *, mirrored: bool = True) -> set[int]:
    """The slices of which a copy is a window, perhaps mirrored along the last axis."""
    found = set()
    for number, whole in enumerate(slices):
        windows = np.lib.stride_tricks.sliding_window_view(whole, copy.shape)
        for side in (copy, copy[..., ::-1]) if mirrored else (copy,):
            if (windows == side).all(tuple(range(-copy.ndim, 0))).any():
                found.add(number)
    return found


@pytest.mark.parametrize(
    ("shape", "crop", "sides"),
    [
        ((3, 2, 9, 7), 4, (4, 4)),
        ((1, 1, 9, 7), None, (7, 7)),
        ((1, 1, 5, 7), 128, (5, 5)),
        ((1, 1, 6, 8, 5), 4, (4, 4, 4)),
        ((1, 1, 6, 8, 3), None, (6, 6, 3)),
    ],
)
def test_copies_are_windows_of_slices(shape: Any, crop: Any, sides: Any) -> None:
    image = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    copies, turns = ttt(copies=40, crop=crop)._copies(image, generator(0, "test"))
    assert tuple(copies.shape) == (40, shape[1], *sides)
    assert set(turns.tolist()) == {0, 1, 2, 3}
    slices = [found_in(copy.numpy(), image.numpy()) for copy in copies]
    assert all(len(found) == 1 for found in slices)
    assert set.union(*slices) == set(range(shape[0]))
    plain, _ = ttt(copies=40, crop=crop, flips=False)._copies(image, generator(0, "test"))
    assert all(found_in(copy.numpy(), image.numpy(), mirrored=False) for copy in plain)
    assert not all(found_in(copy.numpy(), image.numpy(), mirrored=False) for copy in copies)


def test_vectors_have_copies_too() -> None:
    """They are whole, since what has no plane cannot be cropped to anything less than a ring."""
    vectors = torch.randn(1, 8)
    copies, _ = ttt(copies=5, flips=False, crop=None)._copies(vectors, generator(0, "test"))
    assert torch.equal(copies, vectors.repeat(5, 1))


def test_only_the_declared_encoder_and_the_rotation_head_move(outside: Any) -> None:
    def make() -> nn.Module:
        return NetworkBuilder(lambda: IOPUNet(1, 2, base=4), TTT())().double()

    given = Tensors(make().state_dict()).clone()
    sources = Sources({"global": given}, make, outside.task)
    adapted = outside.adapt(ttt(online=True), sources)[1].model
    moved = {n for n, t in adapted.items() if not torch.equal(t, given[n])}
    parameters = {n for n, _ in make().named_parameters()}
    assert moved == {n for n in parameters if n.startswith(("down", "bottleneck", "rotation"))}


def test_a_head_that_knows_nothing_is_named_as_the_reason(outside: Any) -> None:
    sources = outside.sources(network)
    model = sources.models["global"]
    knows_nothing = Tensors(
        (name, torch.zeros_like(tensor) if name in HEAD else tensor)
        for name, tensor in model.items()
    )
    adapted = outside.adapt(ttt(), replace(sources, models={"global": knows_nothing}))[1]
    assert adapted.record.losses[0]["total"] == pytest.approx(np.log(4), rel=1e-12)
    assert any("hardly better than chance," in note for note in adapted.record.notes)


def test_distinguishable_rotations_are_learnt_online(outside: Any) -> None:
    """Every image is brighter towards its top."""
    outside.images += np.linspace(9, 0, 4)[:, None]
    adapter = ttt(online=True, steps=40, copies=16)
    record = outside.adapt(adapter, outside.sources(network))[1].record
    assert record.losses[-1]["total"] < 0.6 < 1 < record.losses[0]["total"]
    assert not any("chance," in note for note in record.notes)


def test_models_without_the_head_are_refused(outside: Any) -> None:
    words = "the global model has no rotation head.* train it with the algorithm ttt, or choose"
    with pytest.raises(ConfigError, match=words):
        outside.adapt(ttt(), outside.sources(bare))
    with pytest.raises(ConfigError, match="Sequential has no rotation head; train it with"):
        ttt().check(bare())
    ttt().check(network())


def test_without_a_global_model_it_refuses(outside: Any) -> None:
    with pytest.raises(ConfigError, match="ttt starts from the global model"):
        outside.adapt(ttt(), outside.sources(network, ("east", "north")))


def test_images_that_make_the_loss_infinite_are_reported(outside: Any) -> None:
    outside.images[1] = np.nan
    with pytest.raises(DivergedError, match="the loss of ttt became nan"):
        outside.adapt(ttt(), outside.sources(network))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr": 0.0}, r"TTTAdapter\.lr: should be above 0, not 0\.0"),
        ({"lr": float("nan")}, r"TTTAdapter\.lr: should be finite and above 0, not nan"),
        ({"steps": 0}, r"TTTAdapter\.steps: should be at least 1, not 0"),
        ({"copies": 0}, r"TTTAdapter\.copies: should be at least 1, not 0"),
        ({"crop": 0}, r"TTTAdapter\.crop: should be at least 1, not 0"),
        ({"batch_size": 0}, r"TTTAdapter\.batch_size: should be at least 1, not 0"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TTTAdapter(**fields)
