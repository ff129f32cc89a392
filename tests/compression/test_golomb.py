import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collegium.compression import _golomb
from collegium.compression._frame import FrameReader
from collegium.errors import ProtocolError


def kept_at_random(density: float, total: int) -> tuple[Any, Any]:
    draws = np.random.default_rng(1)
    positions = np.flatnonzero(draws.random(total) < density).astype(np.int32)
    return positions, draws.random(len(positions)) < 0.5


def reader_of(code: bytes) -> FrameReader:
    return FrameReader(memoryview(code))


def bits_by_hand(positions: Any, negative: Any, b: int) -> str:
    """The code by its definition, bit by bit."""
    written, last = "", -1
    for position, sign in zip(positions.tolist(), negative.tolist(), strict=True):
        gap, last = position - last - 1, position
        low = format(gap % 2**b, f"0{b}b")[::-1] if b else ""  # low bits first
        written += "1" * (gap >> b) + "0" + low + str(int(sign))
    return written


def expected_bits(b: int, density: float) -> float:
    """Expected bits of a geometric gap without its sign (Sattler et al. 2019, Eq. 14)."""
    return float(b + 1 / (1 - (1 - density) ** (2**b)))


def test_parameter_and_length_are_those_of_the_reference(golden: Callable[[str], dict[str, Any]]):
    case = golden("stc_golomb_bits_p0.01")
    density = case["params"]["p"]
    assert _golomb.parameter(density) == case["expected"]["b_star"]
    found = expected_bits(_golomb.parameter(density), density)
    assert found == pytest.approx(case["expected"]["bits"], abs=case["atol"])


@pytest.mark.parametrize("density", [1e-5, 0.0025, 0.0265, 0.16, 0.5, 0.9, 1.0])
def test_the_parameter_is_the_best_of_all(density: float):
    bits = [expected_bits(b, density) for b in range(25)]
    assert bits[_golomb.parameter(density)] == pytest.approx(min(bits), rel=1e-3)


@pytest.mark.parametrize("density", [0.0025, 0.16])
def test_the_code_is_what_the_definition_says(density: float):
    positions, negative = kept_at_random(density, 40_000)
    code = _golomb.write_positions(positions, negative, 40_000, adaptive=False)
    assert code[0] == _golomb.parameter(len(positions) / 40_000)
    expected = bits_by_hand(positions, negative, code[0])
    found = "".join(format(byte, "08b")[::-1] for byte in code[1:])
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {"0"}
    assert len(found) - len(expected) < 8


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.0265, 0.16, 0.5])
def test_the_length_is_within_five_percent_of_the_entropy(density: float, adaptive: bool):
    total = 400_000
    positions, negative = kept_at_random(density, total)
    code = _golomb.write_positions(positions, negative, total, adaptive=adaptive)
    p = len(positions) / total
    entropy = total * (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) + len(positions)
    assert len(code) * 8 < 1.05 * entropy


def test_the_parameter_follows_regions_of_different_density():
    sparse, dense = kept_at_random(0.001, 300_000)[0], kept_at_random(0.5, 3_000)[0]
    positions = np.concatenate([sparse, dense + np.int32(300_000)])
    negative = np.zeros(len(positions), np.bool_)
    fixed, followed = (
        len(_golomb.write_positions(positions, negative, 303_000, adaptive=adaptive))
        for adaptive in (False, True)
    )
    assert followed < 0.6 * fixed


GAPS = st.lists(st.integers(0, 50) | st.integers(0, 10**7), max_size=150)


@settings(deadline=None, max_examples=150)
@given(gaps=GAPS, adaptive=st.booleans(), signed=st.booleans(), room=st.integers(0, 10**6))
def test_what_is_written_is_read(gaps: list[int], adaptive: bool, signed: bool, room: int):
    positions = np.cumsum(np.array(gaps, np.int64) + 1).astype(np.int32) - np.int32(1)
    negative = np.arange(len(gaps)) % 3 == 1
    total = int(positions[-1]) + 1 + room if gaps else room
    code = _golomb.write_positions(positions, negative, total, adaptive=adaptive, signed=signed)
    found, signs = _golomb.read_positions(
        reader_of(code), len(gaps), total, adaptive=adaptive, signed=signed
    )
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(signs, negative & signed)


def test_the_largest_gaps_there_are_survive():
    positions = np.array([2**31 - 3, 2**31 - 2], np.int32)
    negative = np.array([True, False])
    for adaptive in (False, True):
        code = _golomb.write_positions(positions, negative, 2**31 - 1, adaptive=adaptive)
        found, signs = _golomb.read_positions(reader_of(code), 2, 2**31 - 1, adaptive=adaptive)
        np.testing.assert_array_equal(found, positions)
        np.testing.assert_array_equal(signs, negative)


@settings(deadline=None, max_examples=100)
@given(
    code=st.binary(max_size=32),
    count=st.integers(0, 300),
    total=st.integers(0, 10**5),
    adaptive=st.booleans(),
)
def test_any_bytes_give_positions_in_range_or_an_error(
    code: bytes, count: int, total: int, adaptive: bool
):
    try:
        found, _ = _golomb.read_positions(reader_of(code), count, total, adaptive=adaptive)
    except ProtocolError:
        return
    assert (np.diff(found) > 0).all()
    assert len(found) == 0 or 0 <= found[0] <= found[-1] < total
