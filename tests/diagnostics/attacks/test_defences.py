"""Defences by the words that name them."""

import math

import pytest
import torch

from collegium.compression.stc import STC
from collegium.core.tensors import Tensors
from collegium.diagnostics.attacks.defences import Defence, defence_of, defended
from collegium.errors import ConfigError

GRADIENT = Tensors({"a": torch.full((3,), 2.0), "b": torch.full((2, 2), 1.0)})  # norm 4


def norm(tensors: Tensors) -> float:
    return math.sqrt(tensors.dot(tensors))


def test_a_defence_is_named_by_its_steps_in_order() -> None:
    assert defence_of("none") == Defence()
    assert defence_of("noise 0.1") == Defence(noise=0.1)
    assert defence_of("clip 2 + noise 0.5") == Defence(clip=2.0, noise=0.5)
    assert defence_of("clip 2+dp 1.1") == Defence(clip=2.0, multiplier=1.1)
    assert defence_of("clip 2 + stc") == Defence(clip=2.0, codec=STC())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("noise", "no number after 'noise'; write the norm of the noise over"),
        ("noise -1", "no number after 'noise'"),
        ("clip 0", "no number after 'clip'; write the largest norm"),
        ("dp x", "no number after 'dp'; write the noise multiplier"),
        ("dp 1", "cannot be made; join"),
        ("noise 1 + clip 1", "cannot be made; join"),
        ("clip 1 + noise 1 + dp 1", "cannot be made; join"),
        ("zip", "zip"),
    ],
)
def test_a_defence_that_cannot_be_meant_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        defence_of(name)


def test_clipping_makes_a_norm_no_larger() -> None:
    assert norm(defended(GRADIENT, "clip 1", seed=0)) == pytest.approx(1.0, rel=1e-6)
    assert defended(GRADIENT, "clip 9", seed=0)["a"].tolist() == [2.0] * 3
    left = defended(GRADIENT, "clip 1 + noise 0.5", seed=0)
    noise = left - GRADIENT * 0.25
    assert norm(noise) == pytest.approx(0.5, rel=1e-5)


def test_differential_privacy_has_noise_of_the_multiplier_times_the_norm_on_each_number() -> None:
    large = Tensors({"a": torch.full((100, 100), 0.04)})  # norm 4
    noise = defended(large, "clip 2 + dp 1.5", seed=0)["a"] - 0.02
    assert float(noise.std()) == pytest.approx(3.0, rel=0.03)
    assert abs(float(noise.mean())) < 0.1


@pytest.mark.parametrize("name", ["noise 0.3", "clip 2 + noise 2", "clip 2 + dp 1.5"])
def test_the_norm_of_the_noise_is_what_an_attacker_expects(name: str) -> None:
    large = Tensors({"a": torch.linspace(-1, 1, 10_000)})
    left, size = defended(large, name, seed=0), norm(large)
    clean = large * (min(2.0, size) / size) if "clip" in name else large
    assert defence_of(name).noise_norm(left) == pytest.approx(norm(left - clean), rel=0.03)
    assert defence_of("none").noise_norm(large) == 0
