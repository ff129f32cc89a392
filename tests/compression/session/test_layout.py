import pytest
import torch

from collegium.compression.session.layout import ModelLayout
from collegium.core.tensors import Tensors

SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (3, 2), "b.mean": (3,)}
TRAINABLE = {"a.weight", "a.bias", "b.weight", "tied.weight"}


def model(fill: float = 0.0) -> Tensors:
    """A model whose last weight is its first one."""
    items = {name: torch.full(shape, fill) for name, shape in SHAPES.items()}
    count = torch.zeros((), dtype=torch.int64)
    return Tensors({**items, "count": count, "tied.weight": items["a.weight"]})


@pytest.fixture
def layout() -> ModelLayout:
    return ModelLayout(model(), TRAINABLE | {"count"})


def test_codecs_take_trainable_floating_point_tensors(layout):
    assert layout.codable(model()) == ["a.bias", "a.weight", "b.weight", "tied.weight"]
    assert layout.codable(model().select({"b.weight", "b.mean", "count"})) == ["b.weight"]
    assert layout.codable(Tensors({"windows": torch.zeros(2)})) == []


@pytest.mark.parametrize(
    "other", [torch.zeros(2), torch.zeros(3, 2).double(), torch.zeros(3, 2, dtype=torch.uint8)]
)
def test_tensor_of_another_form_is_not_taken(layout, other):
    assert "b.weight" not in layout.codable(model() | Tensors({"b.weight": other}))


def test_twins_are_taken_together_or_not_at_all(layout):
    equal = model() | Tensors({"tied.weight": torch.zeros(2, 3)})
    assert "tied.weight" in layout.codable(equal)
    different = model() | Tensors({"tied.weight": torch.ones(2, 3)})
    assert layout.codable(different) == ["a.bias", "b.weight"]
    assert "a.weight" in layout.codable(model().without({"tied.weight"}))


def test_aligned_tensors_are_tied_as_the_model_s_are_and_not_otherwise(layout):
    one = torch.ones(3, 2)
    part = Tensors({
        "a.weight": torch.ones(2, 3), "tied.weight": torch.ones(2, 3), "b.weight": one,
    })  # fmt: skip
    found = layout.align(part, ["a.weight", "b.weight", "tied.weight"])
    assert found["a.weight"] is found["tied.weight"]
    assert len(found.distinct()) == 2
    flat = torch.zeros(6)
    shared = Tensors({"a.weight": flat.view(2, 3), "b.weight": flat.view(2, 3)})
    untied = ModelLayout(
        Tensors({"a.weight": torch.ones(2, 3), "b.weight": torch.ones(2, 3)}), TRAINABLE
    )
    assert len(shared.distinct()) == 1
    assert len(untied.align(shared, list(shared)).distinct()) == 2


def test_joined_part_has_the_model_s_order_and_what_else_there_is_at_its_end(layout):
    rest = Tensors({"extra": torch.ones(1), "count": torch.ones(1), "b.mean": torch.ones(3)})
    coded = Tensors({"b.weight": torch.ones(3, 2), "a.bias": torch.ones(2)})
    assert list(layout.join(rest, coded)) == ["a.bias", "b.weight", "b.mean", "count", "extra"]


def test_mask_has_one_bit_per_trainable_name_in_sorted_order(layout):
    # a.bias 1, a.weight 2, b.weight 4, tied.weight 8
    assert layout.mask(["a.bias", "b.weight", "tied.weight"]) == f"{1 + 4 + 8:x}"
    assert layout.unmask("d") == ["a.bias", "b.weight", "tied.weight"]


@pytest.mark.parametrize("mask", ["", "0", "-1", "10", "x", None, 3, ["1"]])
def test_what_is_no_mask_is_refused(layout, mask):
    with pytest.raises((ValueError, TypeError)):
        layout.unmask(mask)
