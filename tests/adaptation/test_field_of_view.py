"""Adapters whose losses count the field of view alone."""

from typing import Any

import numpy as np
import pytest
import torch

from collegium.adaptation.dsbn import DSBN
from collegium.adaptation.routing import Routing
from collegium.adaptation.tent import Tent
from collegium.errors import ConfigError

NAMES = ("global", "A", "B")


def adapters(**fields: Any) -> list[Any]:
    return [
        Tent(batch_size=2, **fields),
        DSBN(pseudo_labels=2, threshold=0.5, batch_size=2, **fields),
        Routing(epochs=2, radius=1, batch_size=2, **fields),
    ]


def outcome(outside: Any, by_hand: Any, adapter: Any, inside: Any = None) -> tuple[Any, Any, Any]:
    """Adapted tensors, predictions and losses."""
    sources = outside.sources(by_hand.network, NAMES)
    found, adapted = outside.adapt(adapter, sources, inside=inside)
    return adapted.model, found, adapted.record.losses


def equal(one: Any, other: Any) -> bool:
    return bool(
        one[0].keys() == other[0].keys()
        and all(torch.equal(tensor, other[0][name]) for name, tensor in one[0].items())
        and all(np.array_equal(a, b) for a, b in zip(one[1][""], other[1][""], strict=True))
        and one[2] == other[2]
    )


@pytest.mark.parametrize("place", range(3), ids=["tent", "dsbn", "routing"])
def test_a_whole_field_of_view_and_none_are_all_pixels(
    outside: Any, by_hand: Any, place: int
) -> None:
    adapter, plain = adapters(field_of_view=True)[place], adapters()[place]
    usual = outcome(outside, by_hand, plain)
    for inside in (None, np.ones((5, 4, 4), bool)):
        found = outcome(outside, by_hand, adapter, inside)
        for name, tensor in usual[0].items():
            torch.testing.assert_close(found[0][name], tensor, rtol=1e-9, atol=1e-12)
    half = np.zeros((5, 4, 4), bool)
    half[:, :2] = True
    assert equal(outcome(outside, by_hand, plain, half), usual), "off, a mask changes nothing"
    assert not equal(outcome(outside, by_hand, adapter, half), usual)


@pytest.mark.parametrize("place", range(3), ids=["tent", "dsbn", "routing"])
def test_nothing_is_learnt_where_nothing_is_inside(outside: Any, by_hand: Any, place: int) -> None:
    adapter = adapters(field_of_view=True)[place]
    sources = outside.sources(by_hand.network, NAMES)
    nowhere = np.zeros((5, 4, 4), bool)
    found, adapted = outside.adapt(adapter, sources, inside=nowhere)
    assert adapted.record.steps == 0
    assert len(found[""]) == 5
    assert all(bool(torch.isfinite(tensor).all()) for tensor in adapted.model.values())


def test_tent_descends_the_entropy_of_the_pixels_inside(
    outside: Any, by_hand: Any, in_numpy: Any
) -> None:
    inside = np.random.default_rng(3).random((5, 4, 4)) < 0.4
    sources = outside.sources(by_hand.network)
    images, mask = outside.images[:2], inside[:2].reshape(-1, 16)

    def entropy(model: Any) -> Any:
        powers = np.exp(by_hand.logits(model, images, batch_statistics=True))
        p = powers / powers.sum(1, keepdims=True)
        return -(p * np.log(p)).sum(1)[mask].mean()

    start = in_numpy(sources.models["global"])
    slopes = by_hand.slopes(entropy, start, by_hand.AFFINE)
    adapter = Tent(lr=0.03, batch_size=2, field_of_view=True)
    inside[2:] = False  # nothing is learnt from the other cases
    _, adapted = outside.adapt(adapter, sources, inside=inside)
    assert adapted.record.losses[0]["entropy"] == pytest.approx(float(entropy(start)), rel=1e-9)
    for name in by_hand.AFFINE:  # the first step of Adam goes by the sign of the gradient
        moved = start[name] - 0.03 * np.sign(slopes[name])
        np.testing.assert_allclose(adapted.model[name], moved, rtol=1e-5)


def test_dsbn_without_pseudo_labels_has_no_loss_to_limit() -> None:
    with pytest.raises(ConfigError, match="field_of_view limits the pseudo-labels of dsbn"):
        DSBN(field_of_view=True)


def test_weights_of_routing_replace_terms_and_beta() -> None:
    released = Routing(weights={"entropy": 10.0, "consistency": 0.1})
    assert released.term_weights == {"consistency": 0.1, "entropy": 10.0}
    with pytest.raises(ConfigError, match=r"routing\.weights replaces terms and beta"):
        Routing(weights={"entropy": 1.0}, beta=0.5)
    with pytest.raises(ConfigError, match="one or more weights above 0"):
        Routing(weights={"entropy": 0.0})
