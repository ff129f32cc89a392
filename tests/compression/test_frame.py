import numpy as np
import pytest
import torch

from collegium.compression._frame import (
    HEADER_BYTES,
    FlatLayout,
    FrameKind,
    FrameReader,
    read_frame,
    varint,
    words_to_bytes,
    write_frame,
)
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError


def tensors() -> Tensors:
    shared = torch.arange(6.0).reshape(2, 3)
    return Tensors({"z": shared, "b": torch.tensor(7.0), "a": shared, "c": torch.ones(2, 0)})


def test_numbers_stand_by_name_and_tied_ones_once():
    layout = FlatLayout(tensors())
    assert layout.names == ["a", "b", "c"]
    assert layout.starts.tolist() == [0, 6, 7, 7]
    assert layout.flatten(tensors()).tolist() == [0, 1, 2, 3, 4, 5, 7]


def test_restored_tensors_have_names_shapes_dtypes_and_ties():
    like = Tensors({**tensors(), "b": torch.zeros((), dtype=torch.float64)})
    found = FlatLayout(like).restore(np.arange(7, dtype=np.float32))
    assert list(found) == ["z", "b", "a", "c"]
    assert found["a"] is found["z"]
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["b"].dtype == torch.float64
    assert found["c"].shape == (2, 0)


def test_contiguous_float32_is_not_copied():
    vector = FlatLayout(tensors()).vectors(tensors())[1]
    source = tensors()
    view = FlatLayout(source).vectors(source)[0]
    assert view.ctypes.data == source["a"].data_ptr()
    assert vector.tolist() == [7]


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2**31, 2**35 - 1])
def test_whole_numbers_survive(value: int):
    written = varint(value)
    assert len(written) == max(1, -(-value.bit_length() // 7))
    reader = FrameReader(memoryview(written + b"x"))
    assert reader.varint() == value
    assert bytes(reader.take(1)) == b"x"


def test_a_number_without_end_is_refused():
    with pytest.raises(ProtocolError, match="does not end"):
        FrameReader(memoryview(b"\xff" * 20)).varint()
    with pytest.raises(ProtocolError, match="end too soon"):
        FrameReader(memoryview(b"\xff")).varint()


@pytest.mark.parametrize("values", [[], [0], [5], [1, 0], [2**32 - 1, 0, 256]])
def test_words_survive_without_the_zeros_at_their_end(values: list[int]):
    data = words_to_bytes(np.array(values, np.uint32))
    assert len(data) > 4 * len(values) - 4 or not values
    assert FrameReader(memoryview(data)).words().tolist() == values


def test_a_frame_holds_for_its_kind_and_its_tensors_only():
    layout, other = FlatLayout(tensors()), FlatLayout(tensors().without({"b"}))
    data = write_frame(FrameKind.HALF, layout, b"one", b"two")
    assert len(data) == HEADER_BYTES + 6
    kind, reader = read_frame((FrameKind.GOLOMB, FrameKind.HALF), layout, data)
    assert (kind, bytes(reader.take(6)), len(reader)) == (FrameKind.HALF, b"onetwo", 0)
    with pytest.raises(ProtocolError, match="another model"):
        read_frame((FrameKind.HALF,), other, data)
    with pytest.raises(ProtocolError, match="of kind 2, not golomb or groups"):
        read_frame((FrameKind.GOLOMB, FrameKind.GROUPS), layout, data)
    with pytest.raises(ProtocolError, match="3 bytes are too few"):
        read_frame((FrameKind.HALF,), layout, data[:3])
