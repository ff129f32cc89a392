import json
import math
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from safetensors.torch import save as save_tensors

from collegium.core.message import MARK, Held, Message, NotHeldError, pack, tensors_in, unpack
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_subnormal=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_plain_values_come_back_as_they_went(value):
    assert unpack(pack({"value": value})) == {"value": value}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_every_dtype_comes_back_bit_by_bit(dtype):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    scalar = torch.tensor(1).to(dtype)
    found = unpack(pack([Tensors({"t": tensor, "s": scalar, "e": tensor[:0]})]))[0]
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        "t": (dtype, (2, 2)), "s": (dtype, ()), "e": (dtype, (0, 2)),
    }  # fmt: skip
    assert torch.equal(found["t"], tensor)
    assert torch.equal(found["s"], scalar)


def test_nan_infinity_and_negative_zero_survive():
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    found = unpack(pack(Tensors({"w": values})))["w"]
    assert found.numpy().tobytes() == values.numpy().tobytes()


def test_groups_keep_their_names_and_order():
    value = {"models": [Tensors({"b": torch.ones(1), "a": torch.zeros(1)}), Tensors()], "n": (1, 2)}
    found = unpack(pack(value))
    assert [list(model) for model in found["models"]] == [["b", "a"], []]
    assert found["n"] == [1, 2]


def test_ties_within_and_between_groups_are_stored_once_and_come_back():
    weight = torch.randn(100, generator=torch.Generator().manual_seed(0))
    a = Tensors({"x": weight, "y": weight})
    data = pack({"first": a, "second": [Tensors({"z": weight})]})
    found = unpack(data)
    assert found["first"]["x"] is found["first"]["y"] is found["second"][0]["z"]
    assert len(load(data)) == 1
    assert len(data) < 100 * 4 + 400


def test_views_are_stored_with_what_they_show_and_no_more():
    memory = torch.arange(1000.0)
    views = Tensors(
        {"slice": memory[3:5], "turned": memory[:4].reshape(2, 2).T, "step": memory[:6:2]}
    )
    data = pack(views)
    found = unpack(data)
    assert found["slice"].tolist() == [3, 4]
    assert found["turned"].tolist() == [[0, 2], [1, 3]]
    assert found["step"].tolist() == [0, 2, 4]
    assert len(data) < 1000


def test_one_memory_under_two_shapes_is_stored_twice():
    memory = torch.arange(6.0)
    found = unpack(pack(Tensors({"flat": memory, "square": memory.reshape(2, 3)})))
    assert found["flat"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["square"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_equal_values_give_equal_bytes_whatever_their_memory_looks_like():
    a = torch.arange(6.0).reshape(2, 3)
    b = torch.arange(6.0).reshape(2, 3).T.contiguous().T
    assert pack({"m": Tensors({"w": a})}) == pack({"m": Tensors({"w": b})})


@pytest.mark.parametrize("shape", [(1,), (1, 1), (5,), (2, 3)])
def test_an_expanded_tensor_is_stored_with_every_number(shape):
    expanded = torch.tensor(2.5).expand(shape)
    data = pack({"x": Tensors({"a": expanded})})
    assert data == pack({"x": Tensors({"a": torch.full(shape, 2.5)})})
    assert torch.equal(unpack(data)["x"]["a"], torch.full(shape, 2.5))


def test_parameters_are_packed_without_their_graph():
    found = unpack(pack(Tensors({"w": torch.nn.Parameter(torch.ones(2))})))["w"]
    assert not found.requires_grad
    assert found.tolist() == [1, 1]


def test_an_empty_tensor_of_numpy_is_packed():
    """Its strides are 0, which torch refuses to show as bytes."""
    for shape in ((0,), (3, 0), (0, 2)):
        empty = torch.from_numpy(np.zeros(shape)).float()
        found = unpack(pack(Tensors({"e": empty, "w": torch.ones(2)})))
        assert found["e"].shape == shape
        assert found["w"].tolist() == [1, 1]


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16,
    torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64, torch.int64,
    torch.uint64,
]  # fmt: skip


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=12
    ),
    word=st.text(max_size=20),
)
@settings(deadline=None)
def test_packed_bytes_are_those_that_the_library_writes(shapes, word):
    tensors = [torch.arange(math.prod(shape)).reshape(shape).to(kind) for kind, shape in shapes]
    indices = [[f"w{index}", index] for index in range(len(tensors))]
    nesting = json.dumps({"m": {MARK: indices}, "word": word}, separators=(",", ":"))
    written = save_tensors({str(i): t for i, t in enumerate(tensors)}, {"nesting": nesting})
    model = Tensors({f"w{index}": tensor for index, tensor in enumerate(tensors)})
    assert pack({"m": model, "word": word}) == written


def test_packing_takes_the_memory_of_the_message_once():
    code = """if True:
        import pathlib, torch
        from collegium.core.message import pack
        from collegium.core.tensors import Tensors
        def peak():
            status = pathlib.Path("/proc/self/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
        model = Tensors({f"w{k}": torch.full((1_000_000,), float(k)) for k in range(25)})
        pack(Tensors({"w": torch.ones(1)}))
        before = peak()
        data = pack(model)
        print((peak() - before) / len(data))
    """
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 0.5 < float(found.stdout) < 1.2


def test_numbers_that_a_message_cannot_hold_are_named():
    with pytest.raises(ProtocolError, match=r"cannot hold numbers of type torch\.complex128"):
        pack(Tensors({"w": torch.ones(1, dtype=torch.complex128)}))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.ones(1), "Tensor"),
        ({"a": {1, 2}}, "set"),
        ({1: "a"}, "dict"),
        ({MARK: []}, "dict"),
        ([object()], "object"),
    ],
)
def test_what_cannot_travel_is_named(value, kind):
    with pytest.raises(ProtocolError, match=f"cannot hold a {kind};"):
        pack(value)


def test_every_cut_is_found():
    data = pack({"m": Tensors({"w": torch.arange(20.0)}), "n": 3})
    for end in range(len(data)):
        with pytest.raises(ProtocolError, match=f"^{end} bytes are damaged or not a message"):
            unpack(data[:end])


@pytest.mark.parametrize(
    "nesting",
    [
        {MARK: [["w", 5]]},
        {MARK: 3},
        {MARK: [["w"]]},
        {MARK: [[["x"], 0]]},
        {"deep": [{MARK: [["w", "absent"]]}]},
    ],
)
def test_nesting_that_refers_to_nothing_is_damage(nesting):
    data = save_tensors({"0": torch.ones(1)}, metadata={"nesting": json.dumps(nesting)})
    with pytest.raises(ProtocolError, match="damaged or not a message"):
        unpack(data)


@pytest.mark.parametrize("header", [b"[]", b'{"__metadata__": []}', b"{}", b"\xff\xfe", b"3"])
def test_foreign_header_is_damage(header):
    with pytest.raises(ProtocolError, match="damaged or not a message"):
        unpack(struct.pack("<Q", len(header)) + header)


def test_file_of_another_program_is_not_a_message():
    with pytest.raises(ProtocolError, match="KeyError"):
        unpack(save_tensors({"w": torch.ones(1)}))


def test_absent_part_names_the_sender_and_what_there_is():
    message = Message({"model": 1, "n": 2}, "client 'A', round 3, train")
    with pytest.raises(
        ProtocolError, match=r"^client 'A', round 3, train: no part 'w' \(has: model, n\)$"
    ):
        message["w"]
    with pytest.raises(ProtocolError, match=r"^the message: no part 'w' \(has: nothing\)$"):
        Message.of()["w"]


def test_message_is_a_mapping_of_its_parts():
    message = Message.of(a=1, b=2)
    assert dict(message) == {"a": 1, "b": 2}
    assert "a" in message
    assert "c" not in message


def test_tensors_in_gives_paths_and_ties_once():
    weight = torch.ones(2)
    value = {"m": Tensors({"x": weight, "y": weight}), "l": [Tensors({"z": torch.ones(1)}), 3]}
    assert [path for path, _ in tensors_in(value)] == ["m.x", "l[0].z"]


BIG = torch.arange(10_000, dtype=torch.float32)


def test_what_the_receiver_holds_is_left_out_and_comes_back_in_its_place():
    held = Held(Tensors({"a": BIG, "b": torch.zeros(2), "n": torch.tensor(3)}))
    model = Tensors({"x": torch.ones(2), "a": BIG.clone(), "n": torch.tensor(3)})
    update = Tensors({"a": torch.zeros(10_000), "x": torch.ones(2)})
    data = pack({"model": model, "update": [update]}, held)
    assert len(data) < 1000
    found = unpack(data, held=Held(held.tensors.clone()))  # the same tensors in other memory
    assert list(found["model"]) == ["x", "a", "n"]
    for group, wanted in ((found["model"], model), (found["update"][0], update)):
        assert group.keys() == wanted.keys()
        assert all(torch.equal(group[name], wanted[name]) for name in wanted)
        assert all(group[name].dtype == wanted[name].dtype for name in wanted)


@pytest.mark.parametrize(
    "tensor", [BIG + 1, BIG.double(), BIG.reshape(100, 100), torch.full((10_000,), float("nan"))]
)
def test_a_tensor_that_differs_from_the_one_held_is_sent(tensor):
    held = Held(Tensors({"a": BIG}))
    found = unpack(pack(Tensors({"a": tensor}), held), held=held)["a"]
    assert found.dtype == tensor.dtype
    assert found.numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("other", [None, Held(Tensors({"a": BIG + 1})), Held(Tensors({"b": BIG}))])
def test_a_receiver_that_holds_something_else_says_so(other):
    with pytest.raises(NotHeldError, match="leaves out tensors that are not held here"):
        unpack(pack(Tensors({"x": BIG}), Held(Tensors({"a": BIG}))), held=other)


@pytest.mark.parametrize(("name", "index"), [("a", -3), ("b", -1), ("b", -2), ("a", 0)])
def test_a_message_that_leaves_out_what_nobody_holds_is_damaged(name, index):
    held = Held(Tensors({"a": BIG}))
    nesting = json.dumps({"model": {MARK: [[name, index]]}})
    data = save_tensors({}, {"nesting": nesting, "held": held.digest})
    with pytest.raises(ProtocolError, match="damaged or not a message"):
        unpack(data, held=held)
