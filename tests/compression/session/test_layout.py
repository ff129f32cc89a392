import pytest
import torch

from collegium.compression.session import Form
from collegium.core.tensors import Tensors

SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (3, 2), "b.mean": (3,)}
TRAINABLE = {"a.weight", "a.bias", "b.weight", "tied.weight"}


def model(fill: float = 0.0) -> Tensors:
    """A model whose last weight is its first one."""
    items = {name: torch.full(shape, fill) for name, shape in SHAPES.items()}
    count = torch.zeros((), dtype=torch.int64)
    return Tensors({**items, "count": count, "tied.weight": items["a.weight"]})


@pytest.fixture
def form() -> Form:
    return Form(model(), TRAINABLE | {"count"})


def test_codecs_take_trainable_floating_point_tensors(form):
    assert form.codable(model()) == ["a.bias", "a.weight", "b.weight", "tied.weight"]
    assert form.codable(model().select({"b.weight", "b.mean", "count"})) == ["b.weight"]
    assert form.codable(Tensors({"windows": torch.zeros(2)})) == []


@pytest.mark.parametrize(
    "other", [torch.zeros(2), torch.zeros(3, 2).double(), torch.zeros(3, 2, dtype=torch.uint8)]
)
def test_tensor_of_another_form_is_not_taken(form, other):
    assert "b.weight" not in form.codable(model() | Tensors({"b.weight": other}))


def test_twins_are_taken_together_or_not_at_all(form):
    equal = model() | Tensors({"tied.weight": torch.zeros(2, 3)})
    assert "tied.weight" in form.codable(equal)
    different = model() | Tensors({"tied.weight": torch.ones(2, 3)})
    assert form.codable(different) == ["a.bias", "b.weight"]
    assert "a.weight" in form.codable(model().without({"tied.weight"}))


def test_aligned_tensors_are_tied_as_the_model_s_are_and_not_otherwise(form):
    one = torch.ones(3, 2)
    part = Tensors({
        "a.weight": torch.ones(2, 3), "tied.weight": torch.ones(2, 3), "b.weight": one,
    })  # fmt: skip
    found = form.aligned(part, ["a.weight", "b.weight", "tied.weight"])
    assert found["a.weight"] is found["tied.weight"]
    assert len(found.distinct()) == 2
    flat = torch.zeros(6)
    shared = Tensors({"a.weight": flat.view(2, 3), "b.weight": flat.view(2, 3)})
    untied = Form(Tensors({"a.weight": torch.ones(2, 3), "b.weight": torch.ones(2, 3)}), TRAINABLE)
    assert len(shared.distinct()) == 1
    assert len(untied.aligned(shared, list(shared)).distinct()) == 2


def test_joined_part_has_the_model_s_order_and_what_else_there_is_at_its_end(form):
    rest = Tensors({"extra": torch.ones(1), "count": torch.ones(1), "b.mean": torch.ones(3)})
    coded = Tensors({"b.weight": torch.ones(3, 2), "a.bias": torch.ones(2)})
    assert list(form.joined(rest, coded)) == ["a.bias", "b.weight", "b.mean", "count", "extra"]


def test_mask_has_one_bit_per_trainable_name_in_sorted_order(form):
    # a.bias 1, a.weight 2, b.weight 4, tied.weight 8
    assert form.mask(["a.bias", "b.weight", "tied.weight"]) == f"{1 + 4 + 8:x}"
    assert form.unmask("d") == ["a.bias", "b.weight", "tied.weight"]


@pytest.mark.parametrize("mask", ["", "0", "-1", "10", "x", None, 3, ["1"]])
def test_what_is_no_mask_is_refused(form, mask):
    with pytest.raises((ValueError, TypeError)):
        form.unmask(mask)
