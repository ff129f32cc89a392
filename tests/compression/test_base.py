"""Tests that hold for every codec."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from collegium.compression._frame import HEADER_BYTES, FlatLayout, FrameKind, write_frame
from collegium.compression.base import Codec
from collegium.compression.cer import CER
from collegium.compression.dadaquant import DAdaQuant
from collegium.compression.half import Half
from collegium.compression.identity import Identity
from collegium.compression.stc import STC
from collegium.core.message import pack, unpack
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError

CODECS: dict[str, Codec] = {
    "identity": Identity(),
    "half": Half(),
    "bfloat16": Half(format="bfloat16"),
    "stc": STC(p=0.1),
    "stc of tensors": STC(p=0.1, scope="tensor"),
    "stc in golomb code": STC(p=0.02, coding="golomb"),
    "stc in adaptive code": STC(p=0.3, coding="adaptive"),
    "stc of everything": STC(p=1),
    "dadaquant": DAdaQuant(minimum=3),
    "dadaquant by l2": DAdaQuant(minimum=200, norm="l2"),
    "cer": CER(),
    "cer, plain": CER(gamma=3, then="plain"),
    "cer, bfloat16": CER(values="bfloat16"),
    "cer, plain bfloat16": CER(then="plain", values="bfloat16"),
    "cer without smoothing": CER(gamma=0),
    "cer and stc": CER(then="stc"),
    "cer and stc in runs": CER(gamma=8, then="stc", p=0.5),
}
LOSSY = {name: codec for name, codec in CODECS.items() if name != "identity"}


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def empty_like(tensors: Tensors) -> Tensors:
    """Tensors of the same shapes and of other content."""
    return tensors.map(lambda tensor: torch.full_like(tensor, math.nan))


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
class TestEveryCodec:
    def test_the_receiver_decodes_what_the_sender_knows(self, codec: Codec, update: Tensors):
        before = update.clone()
        data, decoded = codec.encode(update, rng(), {})
        assert_same(codec.decode(data, empty_like(update)), decoded)
        assert_same(update, before)

    def test_the_same_update_gives_the_same_bytes(self, codec: Codec, update: Tensors):
        assert codec.encode(update, rng(), {}).data == codec.encode(update, rng(), {}).data

    def test_what_is_lost_is_less_than_what_there_was(self, codec: Codec, update: Tensors):
        decoded = codec.encode(update, rng(), {}).decoded
        lost = update - decoded
        assert lost.dot(lost) < update.dot(update)
        assert decoded.dot(update) > 0

    def test_the_order_of_the_names_does_not_matter(self, codec: Codec, update: Tensors):
        turned = Tensors(reversed(list(update.items())))
        data, decoded = codec.encode(update, rng(), {})
        assert codec.encode(turned, rng(), {}).data == data
        found = codec.decode(data, empty_like(turned))
        assert list(found) == list(turned)
        assert all(torch.equal(found[name], decoded[name]) for name in update)

    def test_layouts_in_memory_and_dtypes_survive(self, codec: Codec, update: Tensors):
        mixed = Tensors(
            {
                "channels last": update["middle.weight"].to(memory_format=torch.channels_last),
                "double": update["head.weight"].double(),
                "half": update["up.weight"].half(),
                "part": update["down.1.weight"][:, ::2],
            }
        )
        data, decoded = codec.encode(mixed, rng(), {})
        found = codec.decode(data, empty_like(mixed))
        for name, tensor in mixed.items():
            assert found[name].dtype == decoded[name].dtype == tensor.dtype
            assert torch.equal(found[name], decoded[name])

    def test_tied_weights_travel_once_and_stay_tied(self, codec: Codec, update: Tensors):
        tied = update | Tensors({"tie": update["head.weight"]})
        data, decoded = codec.encode(tied, rng(), {})
        assert len(data) == len(codec.encode(update, rng(), {}).data)
        for found in (decoded, codec.decode(data, tied)):
            assert found["tie"].data_ptr() == found["head.weight"].data_ptr()

    @pytest.mark.parametrize("shapes", [{}, {"a": (0,)}, {"a": (1,)}, {"a": (), "b": (2, 0)}])
    def test_next_to_nothing_is_sent_too(self, codec: Codec, shapes: dict[str, Any]):
        little = Tensors({name: torch.ones(shape) for name, shape in shapes.items()})
        data, decoded = codec.encode(little, rng(), {})
        assert_same(codec.decode(data, empty_like(little)), decoded)

    def test_an_update_of_zeros_stays_one(self, codec: Codec, update: Tensors):
        zeros = update * 0.0
        data, decoded = codec.encode(zeros, rng(), {})
        assert_same(codec.decode(data, update), decoded)
        assert decoded.dot(decoded) == 0

    def test_every_damaged_byte_is_noticed(self, codec: Codec, update: Tensors):
        data = codec.encode(update, rng(), {}).data
        draws = np.random.default_rng(3)
        places = {0, 1, HEADER_BYTES, len(data) - 1, *draws.integers(len(data), size=40).tolist()}
        for place in places & set(range(len(data))):
            damaged = bytearray(data)
            damaged[place] ^= 1 << int(draws.integers(8))
            with pytest.raises(ProtocolError):
                codec.decode(bytes(damaged), update)
        for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(data) // 2, len(data) - 1):
            if length < len(data):
                with pytest.raises(ProtocolError):
                    codec.decode(data[:length], update)
        with pytest.raises(ProtocolError):
            codec.decode(data + b"\0", update)

    def test_bytes_made_to_do_harm_do_none(self, codec: Codec, update: Tensors):
        data = codec.encode(update, rng(), {}).data
        layout, draws = FlatLayout(update), np.random.default_rng(4)
        for attempt in range(60):
            forged = bytearray(data[HEADER_BYTES:])
            for _ in range(draws.integers(1, 4)):
                if forged:
                    near = 12 if attempt % 2 else len(forged)
                    forged[draws.integers(min(near, len(forged)))] = draws.integers(256)
            forged = forged[: draws.integers(len(forged) + 1)] if attempt % 3 == 0 else forged
            try:
                found = codec.decode(write_frame(FrameKind(data[0]), layout, bytes(forged)), update)
            except ProtocolError:
                continue
            assert found.keys() == update.keys()
            assert all(found[name].shape == update[name].shape for name in update)

    def test_bytes_of_another_model_are_refused(self, codec: Codec, update: Tensors):
        data = codec.encode(update, rng(), {}).data
        turned = update.map(lambda t: t.transpose(0, 1) if t.ndim > 1 else t)
        renamed = Tensors((f"net.{name}", tensor) for name, tensor in update.items())
        for other in (turned, renamed, update.without({"head.scale"})):
            with pytest.raises(ProtocolError, match="made for another model"):
                codec.decode(data, other)

    def test_counters_are_refused(self, codec: Codec):
        with pytest.raises(ProtocolError, match=r"steps holds torch\.int64.*counters"):
            codec.encode(Tensors({"steps": torch.arange(3)}), rng(), {})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", LOSSY.values(), ids=LOSSY)
def test_numbers_that_are_not_finite_are_refused(codec: Codec, bad: float, update: Tensors):
    weight = update["up.weight"].clone()
    weight[2, 3] = bad
    with pytest.raises(ProtocolError, match=r"NaN.*lower the learning\s+rate"):
        codec.encode(update | Tensors({"up.weight": weight}), rng(), {})


def test_the_codec_of_the_sender_must_be_that_of_the_receiver(update: Tensors):
    with pytest.raises(ProtocolError, match="use the same codec on both sides"):
        Half().decode(STC().encode(update, rng(), {}).data, update)


def test_what_a_codec_loses_is_fed_back_where_it_is_biased():
    feedback = {type(codec).__name__: codec.feedback for codec in CODECS.values()}
    expected = {"Identity": False, "Half": False, "STC": True, "DAdaQuant": False, "CER": True}
    assert feedback == expected
    assert not CER(feedback=False).feedback


def test_a_codec_that_plans_nothing_gives_no_options():
    state: dict[str, Any] = {}
    assert STC().plan(state, {}) == {}
    assert state == {}


def test_hyperparameters_can_travel_and_make_the_codec_again():
    for codec in CODECS.values():
        stored = unpack(pack(codec.hyperparameters()))
        assert type(codec)(**stored) == codec


def test_with_feedback_nothing_is_lost_for_good():
    update = Tensors({"weight": torch.randn(40, 50, generator=rng())})
    codec, residual, arrived = STC(p=0.1), update * 0.0, update * 0.0
    for _ in range(60):
        target = update + residual
        decoded = codec.encode(target, rng(), {}).decoded
        residual, arrived = target - decoded, arrived + decoded
    lost = 60.0 * update - arrived
    without = 60.0 * (update - codec.encode(update, rng(), {}).decoded)
    assert lost.dot(lost) < 0.03 * without.dot(without)
    assert (lost - residual).dot(lost - residual) < 1e-8 * arrived.dot(arrived)
