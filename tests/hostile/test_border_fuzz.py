"""Whatever bytes and values arrive, the border lets a checked reply in or refuses it."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collegium.algorithms.fedavg import FedAvg
from collegium.core.message import pack
from collegium.core.model_parts import find_parts
from collegium.core.payloads import Expected
from collegium.core.tensors import Tensors
from collegium.errors import ClientError, ProtocolError
from collegium.runtime.border import Border
from collegium.tasks import ClassificationTask, metrics_of
from collegium.testing.kinds import KINDS

NETWORK = KINDS["rows with classes"].network()
MODEL = Tensors(NETWORK.state_dict()).clone()
TASK = ClassificationTask(2)
EXPECTED = Expected(
    MODEL, find_parts(NETWORK), {}, metrics=metrics_of(TASK), headline=TASK.metric
)  # fmt: skip
ORIGIN = ["A", 1, 0, "train"]
HONEST = {"model": MODEL, "num_examples": 3, "progress": {"loss": 0.5, "steps": 2}}
ENVELOPE = pack({"reply": HONEST, "of": ORIGIN})


def opened(data: bytes) -> dict[str, Any] | None:
    """The parts of a reply; None if it was refused."""
    border = Border(FedAvg(), EXPECTED, {"A": 9}, None)
    try:
        return border.open(data, "A", ORIGIN, lambda reply, _: reply, ())
    except ClientError:
        return None


def check_safe(reply: dict[str, Any] | None) -> None:
    """Check that what was let in is of the declared parts, finite and bounded."""
    if reply is None:
        return
    assert reply.keys() <= FedAvg().all_sends().keys()
    assert 0 <= reply.get("num_examples", 0) <= 9
    for name, tensor in reply.get("model", {}).items():
        assert (tensor.shape, tensor.dtype) == (MODEL[name].shape, MODEL[name].dtype)
        assert torch.isfinite(tensor.double()).all()


def test_an_honest_reply_is_let_in() -> None:
    reply = opened(ENVELOPE)
    assert reply is not None
    assert reply["num_examples"] == 3
    assert all(torch.equal(reply["model"][name], tensor) for name, tensor in MODEL.items())


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes(data: bytes) -> None:
    assert opened(data) is None


@given(st.lists(st.tuples(st.integers(0, len(ENVELOPE) - 1), st.integers(0, 7)), max_size=8))
@settings(max_examples=300, deadline=None)
def test_an_honest_reply_with_flipped_bits(flips: list[tuple[int, int]]) -> None:
    data = bytearray(ENVELOPE)
    for place, bit in flips:
        data[place] ^= 1 << bit
    check_safe(opened(bytes(data)))


@given(st.integers(0, len(ENVELOPE)), st.integers(0, len(ENVELOPE)), st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_an_honest_reply_with_a_piece_cut_out(start: int, end: int, instead: bytes) -> None:
    check_safe(opened(ENVELOPE[:start] + instead + ENVELOPE[end:]))


NAMES = st.sampled_from(["model", "num_examples", "progress", "scores", "personal", "patients"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_subnormal=False)
    | st.text(max_size=10)
    | st.sampled_from([10**400, -(10**30), float("nan"), float("inf")])
    | st.sampled_from([Tensors({}), MODEL, MODEL.map(lambda t: t[..., :0] if t.ndim else t)])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_values_in_the_place_of_parts(parts: dict[str, Any]) -> None:
    try:
        data = pack({"reply": {**HONEST, **parts}, "of": ORIGIN})
    except (ProtocolError, ValueError):  # what cannot be written does not arrive
        return
    check_safe(opened(data))
