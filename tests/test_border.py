import pytest
import torch
from torch import nn

from collegium.border import Count, Expected, Index, ModelPart, Numbers, Scores
from collegium.errors import ProtocolError
from collegium.models.parts import find_parts
from collegium.tensors import Tensors


@pytest.fixture(scope="module")
def expected() -> Expected:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return Expected(Tensors(network.state_dict()), find_parts(network), {"clusters": 3})


def changed(expected: Expected, name: str, tensor: torch.Tensor) -> Tensors:
    return expected.model | Tensors({name: tensor})


def test_model_with_every_name_shape_and_dtype_passes(expected):
    ModelPart().check(expected.model.clone(), expected)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("0.bias", torch.tensor([0, float("nan"), 0]), "0.bias holds NaN or infinite values"),
        ("0.bias", torch.tensor([0, float("inf"), 0]), "0.bias holds NaN or infinite values"),
        ("0.bias", torch.zeros(4), r"0.bias is \(4,\) torch.float32, expected \(3,\)"),
        ("0.bias", torch.zeros(1, 3), r"0.bias is \(1, 3\)"),
        ("0.bias", torch.zeros(3).double(), r"0.bias is \(3,\) torch.float64, expected"),
        ("1.num_batches_tracked", torch.tensor(1.0), r"is \(\) torch.float32, exp.* torch.int64"),
        ("9.bias", torch.zeros(3), "unexpected 9.bias"),
    ],
)  # fmt: skip
def test_wrong_tensor_is_named(expected, name, tensor, words):
    with pytest.raises(ProtocolError, match=words):
        ModelPart().check(changed(expected, name, tensor), expected)


def test_missing_tensor_is_named(expected):
    with pytest.raises(ProtocolError, match=r"tensor names differ: missing 2\.weight$"):
        ModelPart().check(expected.model.without({"2.weight"}), expected)


def test_something_else_than_tensors_is_refused(expected):
    with pytest.raises(ProtocolError, match="expected tensors, found dict"):
        ModelPart().check({"0.bias": [0, 0, 0]}, expected)


def test_part_of_the_model_is_that_and_no_more(expected):
    norm = {f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var")} | {
        "1.num_batches_tracked"
    }
    part = ModelPart(without="norm")
    assert part.names(expected.parts) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    part.check(expected.model.without(norm), expected)
    with pytest.raises(ProtocolError, match=r"unexpected 1\.bias, 1\.num_batches_tracked"):
        part.check(expected.model, expected)
    assert ModelPart(only="trainable", without="head").names(expected.parts) == {
        "0.weight", "0.bias", "1.weight", "1.bias",
    }  # fmt: skip


def test_part_says_what_it_is():
    assert ModelPart().says == "the model"
    assert ModelPart(without="norm").says == "the model without norm"
    assert ModelPart(only="trainable").says == "the model's trainable tensors"


@pytest.mark.parametrize("value", [0, 7, 10**12])
def test_count_passes(expected, value):
    Count().check(value, expected)


@pytest.mark.parametrize("value", [-1, 1.0, True, "3", None])
def test_what_is_no_count_is_shown(expected, value):
    with pytest.raises(ProtocolError, match="expected a count, found"):
        Count().check(value, expected)


def test_index_lies_below_the_value_of_its_field(expected):
    part = Index(below="clusters")
    for value in (0, 1, 2):
        part.check(value, expected)
    for wrong in (3, -1, True, 1.0):
        with pytest.raises(ProtocolError, match=r"whole number below 3 \(clusters\)"):
            part.check(wrong, expected)


def test_numbers_are_finite(expected):
    Numbers().check({"loss": 0.5, "steps": 3}, expected)
    with pytest.raises(ProtocolError, match="loss is nan, not a finite number"):
        Numbers().check({"loss": float("nan")}, expected)
    with pytest.raises(ProtocolError, match="steps is '3'"):
        Numbers().check({"steps": "3"}, expected)
    with pytest.raises(ProtocolError, match="expected named numbers, found list"):
        Numbers().check([1.0], expected)


def test_scores_are_numbers_or_undefined(expected):
    row = {"case": "c001", "patient": "p001", "dice": 0.5, "hd95": None}
    Scores().check({"global": [row], "personal": []}, expected)
    for wrong in ({"dice": float("inf")}, {"dice": "0.5"}, {"dice": [0.5]}):
        with pytest.raises(ProtocolError, match="neither a finite number nor undefined"):
            Scores().check({"global": [{**row, **wrong}]}, expected)


@pytest.mark.parametrize("value", [[], {"global": {}}, 0.5, {"global": 0.5}])
def test_scores_of_another_form_are_refused(expected, value):
    with pytest.raises(ProtocolError, match="expected lists of case scores by kind of model"):
        Scores().check(value, expected)


def test_row_of_scores_that_is_no_row_is_refused(expected):
    with pytest.raises(ProtocolError, match="a row of scores is a str"):
        Scores().check({"global": ["dice"]}, expected)
