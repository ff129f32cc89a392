import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collegium.compression._frame import HEADER_BYTES, FlatLayout
from collegium.compression._ternary import ternarise
from collegium.compression.stc import STC
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

CODINGS: tuple[Any, ...] = ("range", "adaptive", "golomb")


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def encoded(codec: STC, *vectors: Any) -> Any:
    """The decoded vectors, end to end."""
    named = {f"v{i}": torch.tensor(np.asarray(v, np.float32)) for i, v in enumerate(vectors)}
    decoded = codec.encode(Tensors(named), rng(), {}).decoded
    return np.concatenate([tensor.numpy() for tensor in decoded.values()])


def by_hand(vector: Any, k: int) -> Any:
    """STC as the paper states it, in float64; the first of equal magnitudes are kept."""
    kept = np.argsort(-np.abs(vector), kind="stable")[:k]
    result = np.zeros(len(vector))
    result[kept] = np.sign(vector[kept]) * np.abs(vector[kept]).mean()
    return result


def test_the_reference_vector(golden: Callable[[str], dict[str, Any]]):
    case = golden("stc")
    v, expected = np.array(case["inputs"]["v"]), case["expected"]
    found = encoded(STC(p=case["params"]["k"] / len(v)), v)
    np.testing.assert_allclose(found, expected["ternary"], rtol=1e-7)  # the mean is a float32
    np.testing.assert_allclose(v - found, expected["residual"], atol=1e-7)
    layout = FlatLayout(Tensors({"v": torch.zeros(len(v))}))
    ternary = ternarise([v.astype(np.float32)], layout, 0.4, by_tensor=False)
    assert float(ternary.magnitudes[0]) == pytest.approx(expected["mu"], rel=1e-7)
    assert np.abs(found - expected["repo_variant"]).max() > 0.05


@pytest.mark.parametrize("p", [1 / 400, 0.0265, 0.16, 1.0])
@pytest.mark.parametrize("coding", CODINGS)
def test_the_largest_become_their_mean_magnitude(coding: Any, p: float):
    vector = np.random.default_rng(0).standard_normal(30_001).astype(np.float32) ** 3
    found = encoded(STC(p=p, coding=coding), vector[:7], vector[7:19_000], vector[19_000:])
    np.testing.assert_allclose(found, by_hand(vector.astype(float), round(p * 30_001)), rtol=1e-6)


def test_of_equal_magnitudes_the_first_are_kept_across_tensors():
    found = encoded(STC(p=0.5), [1, -2, 1], [1, 1, -1, 0, 0])
    np.testing.assert_array_equal(found, [1.25, -1.25, 1.25, 1.25, 0, 0, 0, 0])


def test_one_number_at_least_is_kept_and_zeros_never_are():
    np.testing.assert_array_equal(encoded(STC(p=1e-6), [0.5, -3, 2]), [0, -3, 0])
    np.testing.assert_array_equal(encoded(STC(p=1), [0.0, -3, 1, 0]), [0, -2, 2, 0])


def test_each_tensor_has_its_share_and_its_mean_where_wanted():
    small, large = np.array([0.1, -0.3, 0.2, 0.05]), np.array([10.0, -20, 40, 5])
    found = encoded(STC(p=0.5, scope="tensor"), small, large)
    np.testing.assert_allclose(found[:4], by_hand(small, 2), rtol=1e-6)
    np.testing.assert_allclose(found[4:], by_hand(large, 2), rtol=1e-6)
    np.testing.assert_allclose(encoded(STC(p=0.5), small, large)[:4], 0)


def test_what_one_coding_wrote_any_other_reads(update: Tensors):
    decoded = [STC(p=0.05, coding=c).encode(update, rng(), {}) for c in CODINGS]
    for data, found in decoded:
        for coding in CODINGS:
            again = STC(coding=coding).decode(data, update)
            assert all(torch.equal(again[name], found[name]) for name in update)
            assert all(torch.equal(again[name], decoded[0].decoded[name]) for name in update)


def test_nothing_but_the_frame_is_sent_for_zeros(update: Tensors):
    for coding in CODINGS:
        assert len(STC(coding=coding).encode(update * 0.0, rng(), {}).data) == HEADER_BYTES


def entropies(decoded: Tensors) -> tuple[float, float]:
    """Bytes for positions and signs by the density of the whole, and by that of each tensor."""

    def bits(kept: int, size: int) -> float:
        parts = [part for part in (kept, size - kept) if part]
        return -sum(part * math.log2(part / size) for part in parts)

    counts = [(int(t.count_nonzero()), t.numel()) for t in decoded.values() if t.numel()]
    kept, size = map(sum, zip(*counts, strict=True))
    return (bits(kept, size) + kept) / 8, (sum(bits(k, n) for k, n in counts) + kept) / 8


@pytest.mark.parametrize("p", [0.0025, 0.0265, 0.16])
def test_bytes_stay_near_the_entropy(p: float):
    """At random places; an update of a network takes less, see the benchmark."""
    shapes = {"a": (64, 64, 3, 3), "b": (128, 256, 3, 3), "c": (64,), "d": (300, 900)}
    draws = Tensors({n: torch.randn(s, generator=rng()) for n, s in shapes.items()})
    data = {c: STC(p=p, coding=c).encode(draws, rng(), {}) for c in CODINGS}
    globally, by_tensor = entropies(data["range"].decoded)
    assert len(data["range"].data) < 1.03 * by_tensor
    assert len(data["golomb"].data) < 1.05 * globally
    assert len(data["adaptive"].data) < 1.05 * globally


@pytest.mark.parametrize("p", [0, -0.1, 1.5, math.nan])
def test_a_share_that_cannot_be_is_refused(p: float):
    with pytest.raises(ConfigError, match=r"STC\.p: should be"):
        STC(p=p)
