import pytest
import torch

from collegium.compression.half import Half
from collegium.compression.identity import Identity
from collegium.compression.session.groups import (
    NO_CODECS,
    RESEND_REQUEST,
    Codecs,
    is_lossless,
    map_groups,
    on_device,
    origin,
    tensor_groups,
)
from collegium.compression.stc import STC
from collegium.core.message import unpack
from collegium.core.tensors import Tensors


def group(value: float) -> Tensors:
    return Tensors({"w": torch.full((2,), value)})


PARTS = {
    "model": group(1.0),
    "models": [group(2.0), {"deep": group(3.0)}],
    "by/name": group(4.0),
    "count": 7,
}


def test_coding_is_true_where_there_is_a_codec():
    assert not NO_CODECS
    assert Codecs(up=Half())
    assert Codecs(down=Half())


def test_description_holds_names_and_hyperparameters():
    found = Codecs(STC(p=0.5), Half("bfloat16")).describe()
    assert found["up"] == {"name": "STC", "p": 0.5, "scope": "model", "coding": "range"}
    assert found["down"] == {"name": "Half", "format": "bfloat16"}
    assert NO_CODECS.describe() == {}


def test_groups_are_found_at_any_depth_by_path_but_not_below_a_slash():
    found = tensor_groups(PARTS)
    assert {path: float(g["w"][0]) for path, g in found.items()} == {
        "model": 1.0, "models/0": 2.0, "models/1/deep": 3.0,
    }  # fmt: skip


def test_every_group_can_be_replaced_and_everything_else_stays():
    doubled = map_groups(PARTS, lambda path, g: g if path is None else 2.0 * g)
    assert float(doubled["models"][1]["deep"]["w"][0]) == 6.0
    assert float(doubled["by/name"]["w"][0]) == 4.0
    assert doubled["count"] == 7


def test_parts_move_to_a_device_whole():
    moved = on_device(PARTS, torch.device("meta"))
    assert moved["by/name"]["w"].device.type == "meta"
    assert moved["models"][1]["deep"]["w"].device.type == "meta"


@pytest.mark.parametrize(
    ("path", "base", "expected"),
    [
        ("model", "model", "model"),
        ("model", "models/1", "models/1"),
        ("update", "model", None),
        ("model", None, None),
    ],
)
def test_part_was_made_from_its_namesake_or_from_one_of_a_list(path, base, expected):
    assert origin(path, base) == expected


def test_only_the_identity_is_exact():
    assert is_lossless(None)
    assert is_lossless(Identity())
    assert not is_lossless(Half())


def test_cry_for_everything_is_an_error_that_says_nothing_of_the_site():
    assert unpack(RESEND_REQUEST) == {
        "error": {"kind": "ProtocolError", "text": "the site lost what it held; send all"}
    }
