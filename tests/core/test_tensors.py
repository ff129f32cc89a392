from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collegium.core import tensors as module
from collegium.core.tensors import Mean, Tensors, mean, require_same_names
from collegium.errors import ProtocolError


def tied(*numbers: float) -> Tensors:
    shared = torch.tensor(numbers)
    return Tensors({"a": shared, "b": shared, "c": torch.tensor([1.0])})


def untied(*numbers: float) -> Tensors:
    return Tensors(
        {"a": torch.tensor(numbers), "b": torch.tensor(numbers), "c": torch.tensor([1.0])}
    )


def test_arithmetic_acts_on_every_tensor():
    a = Tensors({"w": torch.tensor([1.0, 2.0]), "v": torch.tensor([[3.0]])})
    b = Tensors({"v": torch.tensor([[10.0]]), "w": torch.tensor([0.5, -2.0])})
    result = 2 * (a + b) - b * 0.5
    assert result["w"].tolist() == [2.75, 1.0]
    assert result["v"].tolist() == [[21.0]]


def test_operands_are_left_as_they_are():
    a, b = Tensors({"w": torch.tensor([1.0])}), Tensors({"w": torch.tensor([2.0])})
    _ = a + b, a - b, 3 * a, a.clone(), a | b
    assert (float(a["w"]), float(b["w"])) == (1.0, 2.0)


def test_integers_keep_the_maximum_and_are_never_scaled():
    a = Tensors({"n": torch.tensor(7), "flag": torch.tensor([True, False])})
    b = Tensors({"n": torch.tensor(40), "flag": torch.tensor([False, False])})
    for result in (a + b, a - b, b - a, 0.5 * (a + b)):
        assert result["n"].dtype == torch.int64
        assert int(result["n"]) == 40
        assert result["flag"].tolist() == [True, False]


def test_arithmetic_keeps_ties_of_both_operands():
    result = 2 * (tied(1.0, 2.0) - tied(0.5, 0.5))
    assert result["a"] is result["b"]
    assert result["a"].tolist() == [1.0, 3.0]


def test_tied_and_untied_operands_give_each_name_its_own_value():
    other = Tensors({"a": torch.tensor([1.0]), "b": torch.tensor([5.0]), "c": torch.tensor([0.0])})
    result = tied(10.0) + other
    assert (float(result["a"]), float(result["b"])) == (11.0, 15.0)


def test_numbers_are_counted_once_per_tie():
    assert untied(1.0, 2.0).numel() == 5
    assert tied(1.0, 2.0).numel() == 3
    assert list(tied(1.0, 2.0).distinct()) == ["a", "c"]


def test_views_of_one_memory_are_not_ties():
    memory = torch.arange(6.0)
    model = Tensors({"a": memory, "b": memory[:3], "c": memory.reshape(2, 3)})
    assert model.numel() == 6 + 3 + 6


def test_empty_tensors_are_not_ties():
    result = Tensors({"a": torch.empty(0), "b": torch.empty(0), "c": torch.ones(1)})
    assert list((2 * result).distinct()) == ["a", "b", "c"]


def test_clone_shares_no_memory_but_its_own_ties():
    model = tied(1.0)
    copy = model.clone()
    model["a"].add_(1)
    assert float(copy["a"]) == 1.0
    assert copy["a"] is copy["b"]


def test_select_without_and_overlay_keep_the_order_of_names():
    model = Tensors({name: torch.tensor(float(i)) for i, name in enumerate("dcba")})
    assert list(model.select(["a", "d"])) == ["d", "a"]
    assert list(model.without({"c"})) == ["d", "b", "a"]
    overlay = model | Tensors({"c": torch.tensor(9.0), "z": torch.tensor(8.0)})
    assert {name: float(t) for name, t in overlay.items()} == {
        "d": 0, "c": 9, "b": 2, "a": 3, "z": 8,
    }  # fmt: skip


def test_dot_leaves_integers_out_and_sums_in_float64():
    a = Tensors({"w": torch.tensor([1e8, 1.0]), "n": torch.tensor(5)})
    b = Tensors({"w": torch.tensor([1.0, 0.25]), "n": torch.tensor(5)})
    assert a.dot(b) == 100000000.25


def test_tensors_cannot_be_assigned():
    with pytest.raises(TypeError):
        Tensors({"w": torch.ones(1)})["w"] = torch.zeros(1)  # type: ignore[index]


def test_repr_says_how_large_it_is():
    assert repr(tied(1.0, 2.0)) == "Tensors(3 names, 3 numbers)"


def test_differing_names_are_listed():
    a = {name: torch.ones(1) for name in ("x", "y")}
    b = {name: torch.ones(1) for name in ("y", "z")}
    with pytest.raises(
        ProtocolError, match=r"^here: tensor names differ: missing x; unexpected z$"
    ):
        require_same_names(a, b, "here")
    with pytest.raises(ProtocolError, match="missing x"):
        _ = Tensors(a) + Tensors(b)


def test_long_lists_of_names_are_cut():
    many = {f"layer{i}": torch.ones(1) for i in range(9)}
    with pytest.raises(ProtocolError) as caught:
        require_same_names(many, {})
    assert str(caught.value) == (
        "tensor names differ: missing layer0, layer1, layer2, layer3, layer4 ..."
    )


@pytest.mark.parametrize("long", [1, 1000])  # by the compiled loops, and by torch
def test_mean_equals_numpy_in_float64_to_the_last_bit(monkeypatch, long):
    monkeypatch.setattr(module, "LONG_TENSOR", long)
    monkeypatch.setattr(module, "LARGE_MODEL", long)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((5, 9)).astype(np.float32) for _ in range(11)]
    weights = [*(int(w) for w in rng.integers(1, 1000, 9)), 0.1, 1 / 3]
    total = np.zeros((5, 9))
    for array, weight in zip(arrays, weights, strict=True):
        total += array.astype(np.float64) * weight
    expected = (total / sum(weights)).astype(np.float32)
    found = mean([Tensors({"w": torch.from_numpy(array)}) for array in arrays], weights)["w"]
    assert found.dtype == torch.float32
    assert found.numpy().tobytes() == expected.tobytes()


numbers = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(numbers, st.integers(0, 10_000)), min_size=1, max_size=9).filter(
        lambda pairs: sum(weight for _, weight in pairs) > 0
    )
)
def test_mean_is_the_exact_mean_rounded_to_float32(pairs):
    exact = sum(Fraction(value) * weight for value, weight in pairs) / sum(w for _, w in pairs)
    found = mean(
        [Tensors({"w": torch.tensor([value])}) for value, _ in pairs], [w for _, w in pairs]
    )["w"]
    ulp = np.spacing(np.float32(max(abs(float(exact)), 1e-30)))
    size = max(abs(value) for value, _ in pairs)
    assert abs(float(found[0]) - float(exact)) <= 0.5000001 * float(ulp) + 1e-14 * size


def test_mean_does_not_depend_on_how_operands_fall_into_groups():
    models = [Tensors({"w": torch.tensor([0.1 * i, 1e6 / (i + 1)])}) for i in range(9)]
    expected = mean(models)
    for size in (1, 2, 3, 9, 20):
        running = Mean()
        running.GROUP = size
        for model in models:
            running.add(model)
        assert torch.equal(running.result()["w"], expected["w"])


def test_mean_of_integers_is_the_largest_of_those_with_a_say():
    running = Mean()
    for count, weight in ((3, 1), (99, 0), (7, 5), (5, 1), (6, 2), (4, 1)):
        running.add(Tensors({"n": torch.tensor(count), "w": torch.ones(1)}), weight)
    assert int(running.result()["n"]) == 7
    assert running.result()["n"].dtype == torch.int64


def test_mean_keeps_ties():
    result = mean([tied(1.0, 2.0), tied(3.0, 6.0)], [1, 3])
    assert result["a"] is result["b"]
    assert result["a"].tolist() == [2.5, 5.0]


@pytest.mark.parametrize("first", [tied, untied])
def test_mean_does_not_depend_on_who_comes_with_ties(first):
    """The first operand's ties decide, whatever later groups of operands look like."""
    second = untied if first is tied else tied
    models = [make(float(i)) for i, make in enumerate([first] * 4 + [second] * 4)]
    result = mean(models)
    assert float(result["a"]) == float(result["b"]) == 3.5
    assert (result["a"] is result["b"]) == (first is tied)


def test_mean_counts_a_first_operand_of_weight_zero_as_nothing():
    result = mean([untied(9.0), tied(1.0), tied(2.0)], [0, 1, 1])
    assert float(result["a"]) == float(result["b"]) == 1.5


def test_mean_of_half_precision_does_not_overflow():
    model = Tensors({"w": torch.tensor([60000.0], dtype=torch.float16)})
    result = mean([model, model, model], [1000, 1000, 2000])["w"]
    assert result.dtype == torch.float16
    assert float(result) == 60000.0


def test_mean_of_one_operand_is_that_operand_to_the_bit():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean([Tensors({"w": values})], [7])["w"], values)


def test_mean_of_nothing_says_so():
    with pytest.raises(ProtocolError, match="no client sent a reply"):
        Mean().result()
    with pytest.raises(ProtocolError, match="every client reported 0 examples"):
        mean([tied(1.0)], [0])


def test_mean_names_who_sent_the_wrong_shape():
    running = Mean()
    running.add(Tensors({"w": torch.ones(2)}), source="client 'A'")
    with pytest.raises(ProtocolError, match=r"client 'B': w has shape \(3,\), not \(2,\)"):
        running.add(Tensors({"w": torch.ones(3)}), source="client 'B'")


def test_mean_wants_as_many_weights_as_operands():
    with pytest.raises(ValueError, match="zip"):
        mean([tied(1.0)], [1, 2])
