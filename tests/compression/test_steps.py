import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collegium.compression._frame import FrameKind, FrameReader, varint
from collegium.compression._steps import read_steps, write_steps
from collegium.errors import ProtocolError

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False).map(
    lambda x: x + 0.0
)  # a process of ours may flush subnormal numbers to zero
STEPS = st.lists(st.tuples(FLOATS, st.integers(1, 60)), max_size=40)
KINDS = (FrameKind.STEPS, FrameKind.CODED_STEPS)


@settings(deadline=None, max_examples=100)
@given(steps=STEPS, kind=st.sampled_from(KINDS), short=st.booleans())
def test_what_is_written_is_read(steps: list[tuple[float, int]], kind: FrameKind, short: bool):
    values = np.array([value for value, _ in steps], np.float32)
    if short:
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) + np.float32(0)
    flat = np.repeat(values, [length for _, length in steps]).astype(np.float32)
    data = write_steps(flat, kind, short=short)
    found = read_steps(FrameReader(memoryview(data)), kind, len(flat))
    assert found.tobytes() == flat.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_long_steps_take_a_few_bytes_each(kind: FrameKind):
    draws = np.random.default_rng(0)
    flat = np.repeat(draws.standard_normal(1000).astype(np.float32), draws.integers(200, 400, 1000))
    assert len(write_steps(flat, kind, short=False)) < 5.5 * 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 11, 2**34])
def test_a_number_of_steps_that_cannot_be_is_refused(kind: FrameKind, count: int):
    with pytest.raises(ProtocolError, match=f"{count} steps in 10 numbers"):
        read_steps(FrameReader(memoryview(b"\0" + varint(count) + bytes(50))), kind, 10)


def test_a_value_that_is_not_finite_and_a_late_first_step_are_refused():
    infinite = np.array([np.inf], "<f4").tobytes() + b"\3\0\0\0\0"
    late = np.array([1], "<f4").tobytes() + b"\3\1"
    for rest in (infinite, late):
        with pytest.raises(ProtocolError, match="a step is out of range"):
            read_steps(FrameReader(memoryview(b"\0\1" + rest)), FrameKind.STEPS, 10)
