import pytest
import torch
from torch import nn

from collegium.core.model_parts import find_parts
from collegium.core.payloads import (
    Bits,
    Count,
    Expected,
    Features,
    Index,
    ModelPart,
    Numbers,
    PartSchema,
    Scores,
    Spectra,
    Statistics,
    recorded_numbers,
)
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError


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


def test_some_of_the_model_may_be_left_out_and_nothing_be_added(expected):
    part = ModelPart(some=True, without="head")
    for names in ({"0.weight", "1.bias"}, {"0.bias"}, set()):
        part.check(expected.model.select(names), expected)
    with pytest.raises(ProtocolError, match=r"unexpected 2\.weight"):
        part.check(expected.model.select({"0.weight", "2.weight"}), expected)
    with pytest.raises(ProtocolError, match=r"0\.bias is \(4,\)"):
        part.check(Tensors({"0.bias": torch.zeros(4)}), expected)


def test_part_says_what_it_is():
    assert ModelPart().description == "the model"
    assert ModelPart(some=True).description == "some of the model"
    assert ModelPart(without="norm").description == "the model without norm"
    assert ModelPart(only="trainable").description == "the model's trainable tensors"


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


def test_numbers_may_have_a_least_value(expected):
    Numbers(least=1.0).check({"steps": 1, "coefficients": 2.5}, expected)
    with pytest.raises(ProtocolError, match=r"steps is 0\.5, expected at least 1"):
        Numbers(least=1.0).check({"steps": 0.5}, expected)


def test_numbers_may_have_a_largest_value(expected):
    Numbers(most=1.0).check({"share": 1.0}, expected)
    with pytest.raises(ProtocolError, match=r"share is 1\.5, expected at most 1"):
        Numbers(most=1.0).check({"share": 1.5}, expected)


def test_scores_are_numbers_or_undefined(expected):
    row = {"case": "val-c001", "patient": "val-p001", "dice": 0.5, "hd95": None}
    Scores().check({"global": [row], "personal": []}, expected)
    for wrong in ({"dice": float("inf")}, {"dice": "0.5"}, {"dice": [0.5]}):
        with pytest.raises(ProtocolError, match=r"dice is .*, which no case can have"):
            Scores().check({"global": [{**row, **wrong}]}, expected)


@pytest.mark.parametrize("value", [[], {"global": {}}, 0.5, {"global": 0.5}])
def test_scores_of_another_form_are_refused(expected, value):
    with pytest.raises(ProtocolError, match="expected lists of case scores by kind of model"):
        Scores().check(value, expected)


def test_row_of_scores_that_is_no_row_is_refused(expected):
    with pytest.raises(ProtocolError, match="a row of scores is a str"):
        Scores().check({"global": ["dice"]}, expected)


def test_statistics_are_columns_of_values_or_of_summaries(expected):
    columns = {"1": [0.5, 2], "2": {"edges": [0.0, 1.0, 2.0], "counts": [2, 0]}}
    Statistics().check({"unit": "mL", "cases": 2, "columns": columns}, expected)
    Statistics().check({"unit": "mL", "cases": 0, "columns": {}}, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ["patient"]}, "expected a unit, a number of cases and columns"),
        ({"unit": 1}, "a text as unit"),
        ({"columns": [[1.0]]}, "columns by name"),
        ({"cases": -1}, "expected a count"),
        ({"columns": {"1": [1.0]}}, "column 1 has 1 numbers for 2 cases"),
        ({"columns": {"1": 0.5}}, "column 1 is neither a list of numbers nor a summary"),
        ({"columns": {"1": {"mean": 0.5}}}, "column 1 is neither a list of numbers nor a summary"),
        ({"columns": {"1": [1.0, float("nan")]}}, "column 1 holds values that are no finite"),
        ({"columns": {"1": [1.0, "case_07"]}}, "column 1 holds values that are no finite"),
    ],
)
def test_statistics_of_another_form_are_refused(expected, change, words):
    with pytest.raises(ProtocolError, match=words):
        Statistics().check({"unit": "mL", "cases": 2, "columns": {}, **change}, expected)


def test_features_are_one_finite_tensor(expected):
    Features().check(Tensors({"mean": torch.ones(3, 2)}), expected)
    for wrong, words in (
        (Tensors({}), "expected one tensor, found 0 of them"),
        ([1.0], "expected one tensor"),
        (Tensors({"mean": torch.ones(2, dtype=torch.int64)}), "mean is torch.int64"),
        (Tensors({"mean": torch.tensor([1.0, float("inf")])}), "mean holds NaN or infinite"),
    ):
        with pytest.raises(ProtocolError, match=words):
            Features().check(wrong, expected)


def spectra(windows: torch.Tensor, *size: int) -> Tensors:
    return Tensors({"windows": windows, "size": torch.tensor(size, dtype=torch.int64)})


def test_spectra_are_windows_of_amplitudes_and_the_size_of_the_images(expected):
    Spectra().check(spectra(torch.ones(5, 2, 3, 3), 96, 128), expected)
    Spectra().check(spectra(torch.zeros(1, 1, 1, 1, 1), 8, 8, 8), expected)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(5, 2, 3, 3), "expected tensors named windows and size"),
        (Tensors({"windows": torch.ones(5, 2, 3, 3)}), "expected tensors named windows and size"),
        (spectra(torch.ones(5, 2, 3, 3, dtype=torch.int64), 9, 9), "torch.int64, not images"),
        (spectra(torch.ones(5, 2, 3, 5), 9, 9), r"windows is \(5, 2, 3, 5\) .* one odd length"),
        (spectra(torch.ones(5, 2, 4, 4), 9, 9), "one odd length"),
        (spectra(torch.ones(5, 2)), "one odd length"),
        (spectra(torch.ones(5, 2, 3, 3), 9), "size does not give the pixels along each axis"),
        (spectra(-torch.ones(5, 2, 3, 3), 9, 9), "NaN, infinite or negative"),
        (spectra(torch.full((5, 2, 3, 3), float("nan")), 9, 9), "NaN, infinite or negative"),
        (spectra(torch.full((5, 2, 3, 3), float("inf")), 9, 9), "NaN, infinite or negative"),
    ],
)
def test_spectra_of_another_form_are_refused(expected, value, words):
    with pytest.raises(ProtocolError, match=words):
        Spectra().check(value, expected)


def bits(*values: int, dtype: torch.dtype = torch.uint8) -> Tensors:
    return Tensors({"bits": torch.tensor(values, dtype=dtype)})


def test_bits_are_as_many_as_trainable_parameters(expected):
    """The network has 6 + 3, 3 + 3 and 3 + 1 of them: 19."""
    Bits().check(bits(255, 0, 0b11100000), expected)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, 2, 3], "expected a tensor named bits"),
        (Tensors({"mask": torch.zeros(3, dtype=torch.uint8)}), "expected a tensor named bits"),
        (bits(1, 2), r"bits is \(2,\) torch.uint8, expected \(3,\) torch.uint8 for 19 parameters"),
        (bits(1, 2, 3, 4), r"bits is \(4,\) torch.uint8"),
        (bits(1, 2, 32, dtype=torch.int64), r"bits is \(3,\) torch.int64"),
        (bits(0, 0, 0b00010000), "marks more than the 19 parameters there are"),
        (bits(0, 0, 1), "marks more than the 19 parameters there are"),
    ],
)
def test_bits_of_another_form_are_refused(expected, value, words):
    with pytest.raises(ProtocolError, match=words):
        Bits().check(value, expected)


def test_bits_of_whole_bytes_have_nothing_to_fill():
    network = nn.Linear(4, 2, bias=False)
    expected = Expected(Tensors(network.state_dict()), find_parts(network), {})
    Bits().check(bits(0b00010001), expected)


def test_recorded_are_the_numbers_that_say_so():
    sends: dict[str, PartSchema] = {
        "rates": Numbers(record=True),
        "progress": Numbers(),
        "num_examples": Count(),
    }
    reply = {"rates": {"a.b": 0.5, "c": 1}, "progress": {"loss": 2.0}, "num_examples": 3}
    assert recorded_numbers(sends, reply) == {"rates/a.b": 0.5, "rates/c": 1.0}


class Adapted(nn.Module):
    """Layers with an adapter each, whose names stand in the middle of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({"lora": nn.Linear(2, 2), "lora_too": nn.Linear(2, 2)})
        self.last = nn.ModuleDict({"lora": nn.Linear(2, 2)})


def test_part_may_be_limited_to_a_name_wherever_it_stands():
    parts = find_parts(Adapted())
    adapters = {
        f"{layer}.lora.{kind}" for layer in ("first", "last") for kind in ("weight", "bias")
    }
    assert ModelPart(only="lora").names(parts) == adapters
    assert ModelPart(without="lora").names(parts) == {
        "first.lora_too.weight", "first.lora_too.bias",
    }  # fmt: skip
    assert ModelPart(only="first.lora_too").names(parts) == ModelPart(without="lora").names(parts)
    assert ModelPart(only="last", without="bias").names(parts) == {"last.lora.weight"}


def test_a_name_that_no_tensor_has_is_refused():
    with pytest.raises(ConfigError, match="no role and no submodule or tensor 'lor'; roles are"):
        ModelPart(without="lor").names(find_parts(Adapted()))
