from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collegium.compression._entropy import CLASSES, RangeDecoder, RangeEncoder, classify
from collegium.errors import ProtocolError

BORDERS = np.unique(
    [*range(600), *(2**e + k for e in range(3, 31) for k in (-1, 0, 1)), 2**31 - 2, 2**31 - 1]
)


def decoder_of(encoder: RangeEncoder) -> RangeDecoder:
    data = encoder.finish()
    padded = data + bytes(-len(data) % 4)
    return RangeDecoder(np.frombuffer(padded, "<u4").astype(np.uint32))


def entropy(values: Any) -> float:
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def test_classes_rise_with_the_numbers_and_leave_a_quarter_of_an_octave_open():
    classes, large, widths = classify(BORDERS)
    assert (np.diff(classes) >= 0).all()
    assert classes.max() == CLASSES - 1
    octave = np.floor(np.log2(BORDERS[large].astype(np.float64)))
    np.testing.assert_array_equal(widths, octave - 2)


NUMBERS = st.lists(st.integers(0, 20) | st.integers(0, 2**31 - 1), max_size=80)


@settings(deadline=None, max_examples=100)
@given(numbers=NUMBERS, symbols=st.lists(st.integers(0, 300), max_size=80))
def test_what_is_written_is_read(numbers: list[int], symbols: list[int]):
    many, few = np.array(numbers, np.int64), np.array(symbols, np.int64)
    weights = np.bincount(few, minlength=1).astype(np.float64) + 0.3
    encoder = RangeEncoder()
    encoder.numbers(many)
    encoder.classified(many)
    encoder.counted(few)
    encoder.symbols(few, weights)
    encoder.uniform(few, 301)
    encoder.bits(few % 2 == 1)
    decoder = decoder_of(encoder)
    np.testing.assert_array_equal(decoder.numbers(len(many)), many)
    np.testing.assert_array_equal(decoder.classified(len(many)), many)
    np.testing.assert_array_equal(decoder.counted(len(few)), few)
    np.testing.assert_array_equal(decoder.symbols(len(few), weights), few)
    np.testing.assert_array_equal(decoder.uniform(len(few), 301), few)
    np.testing.assert_array_equal(decoder.bits(len(few)), few % 2 == 1)


@pytest.mark.parametrize("spread", [0.3, 3, 40])
def test_counted_numbers_take_their_entropy_and_little_more(spread: float):
    values = np.abs(np.random.default_rng(0).standard_normal(50_000) * spread).astype(np.int32)
    encoder = RangeEncoder()
    encoder.counted(values)
    assert len(encoder.finish()) * 8 < 1.005 * entropy(values) + 1000


@pytest.mark.parametrize("mean", [2, 60, 5000])
def test_classed_numbers_take_the_entropy_of_what_they_are_drawn_from(mean: float):
    draws = np.random.default_rng(0).geometric(1 / mean, 50_000) - 1
    p = 1 / mean
    each = (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / p
    encoder = RangeEncoder()
    encoder.classified(draws)
    assert len(encoder.finish()) * 8 < 1.01 * 50_000 * each + 1000


def test_a_single_kind_of_number_takes_no_room():
    encoder = RangeEncoder()
    encoder.counted(np.full(100_000, 7))
    assert len(encoder.finish()) < 20


@settings(deadline=None, max_examples=150)
@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=12), count=st.integers(0, 2000))
def test_any_words_give_numbers_in_range_or_an_error(words: list[int], count: int):
    for read in ("numbers", "classified", "counted", "bits"):
        decoder = RangeDecoder(np.array(words, np.uint32))
        try:
            found = getattr(decoder, read)(count)
        except ProtocolError:
            continue
        assert len(found) == count
        assert found.min(initial=0) >= 0


@pytest.mark.parametrize(
    ("table", "text"),
    [([3, 4], "a table counts 7 numbers, not 10"), ([], "a table counts 0 numbers, not 10")],
)
def test_a_table_that_does_not_fit_is_refused(table: list[int], text: str):
    encoder = RangeEncoder()
    encoder.table(np.array(table, np.int64))
    with pytest.raises(ProtocolError, match=text):
        decoder_of(encoder).counted(10)


def test_a_table_that_is_too_long_or_empty_is_refused():
    encoder = RangeEncoder()
    encoder.table(np.ones(CLASSES + 1, np.int64))
    with pytest.raises(ProtocolError, match=f"a table has {CLASSES + 1} counts"):
        decoder_of(encoder).classified(CLASSES + 1)
    with pytest.raises(ProtocolError, match="a table of counts is empty"):
        decoder_of(RangeEncoder()).symbols(3, np.zeros(2))
