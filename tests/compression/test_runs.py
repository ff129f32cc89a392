from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collegium.compression._entropy import RangeEncoder
from collegium.compression._runs import read_runs, write_runs
from collegium.errors import ProtocolError


def words_of(data: bytes) -> Any:
    return np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint32)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1]), st.integers(1, 40)), max_size=60))
def test_what_is_written_is_read(runs: list[tuple[int, int]]):
    vector = np.repeat([sign for sign, _ in runs], [length for _, length in runs]).astype(int)
    positions = np.flatnonzero(vector).astype(np.int32)
    negative = vector[positions] < 0
    found, signs = read_runs(words_of(write_runs(positions, negative)), len(vector))
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(signs, negative)


def test_long_runs_take_a_few_bits_each():
    draws = np.random.default_rng(0)
    lengths = draws.integers(200, 400, 1000)
    vector = np.repeat(draws.integers(-1, 2, 1000), lengths)
    positions = np.flatnonzero(vector).astype(np.int32)
    assert len(write_runs(positions, vector[positions] < 0)) * 8 < 20 * 1000


def forged(gaps: list[int], lengths: list[int], count: int) -> Any:
    encoder = RangeEncoder()
    encoder.numbers(np.array([count]))
    encoder.classified(np.array(gaps, np.int64))
    encoder.classified(np.array(lengths, np.int64))
    encoder.bits(np.zeros(len(gaps), np.bool_))
    return words_of(encoder.finish())


@pytest.mark.parametrize(
    ("gaps", "lengths", "count"),
    [([0, 50], [20, 31], 2), ([3], [0], 1), ([2**31 - 1], [2**31 - 1], 1), ([], [], 101)],
)
def test_runs_out_of_range_are_refused(gaps: list[int], lengths: list[int], count: int):
    with pytest.raises(ProtocolError, match="damaged"):
        read_runs(forged(gaps, lengths, count), 100)
