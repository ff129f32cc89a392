import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear

from collegium.compression.cer import CER
from collegium.compression.stc import STC
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def flat(tensors: Tensors) -> Any:
    return np.concatenate([tensors[name].numpy().ravel() for name in sorted(tensors)])


def minimiser(g: Any, gamma: float) -> Any:
    """Eq. 4 by its dual, a box-constrained least-squares problem."""
    differences = np.eye(len(g)) - np.eye(len(g), k=1)
    dual = lsq_linear(differences.T, g, (-gamma, gamma), tol=1e-13, max_iter=500)
    return g - differences.T @ dual.x


def small(seed: int = 0) -> Tensors:
    draws = torch.Generator().manual_seed(seed)
    shapes = {"b": (3, 4), "a": (20,), "c": ()}
    return Tensors(
        {
            n: torch.randn(s, generator=draws).cumsum(-1) if s else torch.ones(())
            for n, s in shapes.items()
        }
    )


@pytest.mark.parametrize("then", ["plain", "entropy"])
@pytest.mark.parametrize(
    "name", ["cer_prox_gamma0.1", "cer_prox_gamma0.5", "cer_prox_gamma10.0", "cer_prox_d40"]
)
def test_reference_vectors_with_the_papers_absolute_gamma(
    name: str, then: Any, golden: Callable[[str], dict[str, Any]]
):
    case = golden(name)
    g = Tensors({"g": torch.tensor(case["inputs"]["g"])})
    codec = CER(gamma=case["params"]["gamma"], absolute=True, then=then)
    found = codec.encode(g, rng(), {}).decoded["g"]
    np.testing.assert_allclose(found, case["expected"]["nabla"], atol=2e-6)


def test_the_whole_update_is_smoothed_in_the_order_of_names_by_means_of_its_size():
    update = small()
    g = flat(update).astype(float)
    found = flat(CER(gamma=0.7).encode(update, rng(), {}).decoded)
    np.testing.assert_allclose(found, minimiser(g, 0.7 * np.abs(g).mean()), atol=1e-5)


def test_a_multiple_of_an_update_is_smoothed_to_the_same_multiple(update: Tensors):
    once = CER(gamma=2).encode(update, rng(), {}).decoded
    twice = CER(gamma=2).encode(update * 1024.0, rng(), {}).decoded
    np.testing.assert_allclose(flat(twice), 1024 * flat(once), rtol=1e-5, atol=1e-9)


def test_without_gamma_nothing_is_lost(update: Tensors):
    for then in ("plain", "entropy"):
        found = CER(gamma=0, then=then).encode(update, rng(), {}).decoded
        assert all(torch.equal(found[name], update[name]) for name in update)


@pytest.mark.parametrize("then", ["plain", "entropy", "stc"])
def test_more_smoothing_takes_fewer_bytes(then: Any, update: Tensors):
    sizes = [
        len(CER(gamma=g, then=then).encode(update, rng(), {}).data) for g in (0, 0.3, 1, 3, 10)
    ]
    assert all(later < earlier for earlier, later in pairwise(sizes))


def test_the_range_coder_is_shorter_than_golomb_codes(update: Tensors):
    plain, coded = (len(CER(then=t).encode(update, rng(), {}).data) for t in ("plain", "entropy"))
    assert coded < 0.95 * plain


def test_bfloat16_values_are_the_float32_ones_rounded_in_half_the_bytes(update: Tensors):
    for then in ("plain", "entropy"):
        exact, short = (
            CER(then=then, values=v).encode(update, rng(), {}) for v in ("float32", "bfloat16")
        )
        for name in update:
            assert torch.equal(short.decoded[name], exact.decoded[name].bfloat16().float())
        assert len(short.data) < 0.62 * len(exact.data)


def test_numbers_of_any_size_survive_the_exponents():
    numbers = torch.tensor([0.0, 1e-42, -1e-42, -0.0, 3e38, -3e38, 1e-38, 1.0, 1.0, -7.5])
    update = Tensors({"a": numbers})
    for then in ("plain", "entropy"):
        for values in ("float32", "bfloat16"):
            codec = CER(gamma=0, then=then, values=values)
            data, decoded = codec.encode(update, rng(), {})
            assert torch.equal(codec.decode(data, update)["a"], decoded["a"])
            assert torch.equal(
                decoded["a"], numbers if values == "float32" else numbers.bfloat16().float()
            )


def test_stc_after_cer_is_stc_of_what_cer_gives(update: Tensors):
    smoothed = CER(gamma=0.5).encode(update, rng(), {}).decoded
    expected = STC(p=0.1).encode(smoothed, rng(), {}).decoded
    found = CER(gamma=0.5, then="stc", p=0.1).encode(update, rng(), {}).decoded
    assert all(torch.equal(found[name], expected[name]) for name in update)


def test_what_is_written_one_way_is_read_whatever_comes_then(update: Tensors):
    for then in ("plain", "entropy", "stc"):
        data, decoded = CER(gamma=2, then=then).encode(update, rng(), {})
        found = CER().decode(data, update)
        assert all(torch.equal(found[name], decoded[name]) for name in update)


@pytest.mark.parametrize(
    "wrong", [{"gamma": -1}, {"gamma": math.nan}, {"gamma": math.inf}, {"p": 0}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"CER\.(gamma|p): should be"):
        CER(**wrong)
