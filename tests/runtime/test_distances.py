from typing import Any

import numpy as np
import pytest
import torch

from collegium.core.tensors import Tensors
from collegium.runtime.distances import layer_distances, model_sent_back

TRAINABLE = {"conv.weight", "norm.weight", "head.weight"}


def model(seed: int, *without: str) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"conv.weight": (3, 2), "norm.weight": (2,), "norm.running_mean": (2,)}
    return Tensors(
        (name, torch.randn(shape, generator=rng))
        for name, shape in {**shapes, "head.weight": (1, 2)}.items()
    ).without(without)


def test_a_distance_is_the_norm_of_what_training_added_to_each_trained_tensor() -> None:
    start, end = model(0), model(1)
    found = layer_distances({"model": start}, {"model": end, "num_examples": 3}, TRAINABLE)
    assert list(found) == [f"layer_distance/{key}" for key in start if key in TRAINABLE]
    assert found == {
        f"layer_distance/{name}": pytest.approx(
            np.sqrt(((end[name].numpy().astype(float) - start[name].numpy()) ** 2).sum())
        )
        for name in TRAINABLE
    }


def test_an_update_is_added_to_what_was_sent() -> None:
    start, update = model(0), model(2, "norm.running_mean")
    found = layer_distances({"model": start}, {"model_update": update}, TRAINABLE)
    for name in TRAINABLE:
        norm = np.linalg.norm(update[name].numpy())
        assert found[f"layer_distance/{name}"] == pytest.approx(norm, rel=1e-5)


def test_what_a_site_keeps_to_itself_has_no_distance() -> None:
    start, end = model(0, "norm.weight"), model(1, "norm.weight", "head.weight")
    found = layer_distances({"model": start}, {"model": end}, TRAINABLE)
    assert found.keys() == {"layer_distance/conv.weight"}


def test_tied_weights_have_one_distance() -> None:
    first, second = torch.zeros(2), torch.tensor([3.0, 4.0])
    found = layer_distances(
        {"model": Tensors({"a": first, "b": first})},
        {"model": Tensors({"a": second, "b": second})},
        {"a", "b"},
    )
    assert found == {"layer_distance/a": 5.0}


@pytest.mark.parametrize(
    ("received", "reply"),
    [
        ({}, {"model": model(0)}),
        ({"models": [model(0)]}, {"model": model(0)}),
        ({"model": model(0)}, {"num_examples": 3}),
        ({"model": 3}, {"model": model(0)}),
    ],
)
def test_without_a_model_both_ways_there_is_no_distance(received: Any, reply: Any) -> None:
    assert model_sent_back(received, reply) is None
    assert layer_distances(received, reply, TRAINABLE) == {}
