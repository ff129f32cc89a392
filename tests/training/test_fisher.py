from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from collegium.algorithms.fedavg import FedAvg
from collegium.core.dataset import Batch, TensorDataset, unchanged
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DivergedError, ProtocolError
from collegium.runtime.client import ClientRuntime
from collegium.tasks import SupervisedTask
from collegium.testing.toy import TRAINING, toy_model, toy_network, toy_site
from collegium.training.fisher import (
    diagonal_fisher,
    mean_information,
    pack_mask,
    residual_information,
    top_mask,
    unflatten,
    unpack_mask,
)
from collegium.training.loop import LocalTraining

Array = np.ndarray[Any, Any]
PATH = ("here",)


def training_of(module: nn.Module, loss: Callable[..., torch.Tensor]) -> LocalTraining:
    return LocalTraining(module, SupervisedTask(loss), TRAINING)


def fisher_of(
    module: nn.Module, loss: Callable[..., torch.Tensor], data: TensorDataset, **options: Any
) -> list[Tensors]:
    model = Tensors(module.state_dict()).clone()
    options = {"seed": 3, "path": PATH, **options}
    return diagonal_fisher(training_of(module, loss), model, data, **options)


def first_output(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient by the weights of a linear layer is the input."""
    return output.sum()


def rows(values: Any) -> TensorDataset:
    image = torch.as_tensor(values, dtype=torch.float64)
    return TensorDataset({"image": image, "label": torch.zeros(len(image))})


def linear(features: int) -> nn.Module:
    return nn.Linear(features, 1, bias=False).double()


class Classifier:
    """Batch normalisation and a linear layer under cross-entropy, differentiated by hand."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.x, self.y = rng.normal(0.3, 2.0, (7, 3)), rng.integers(0, 2, 7)
        layers = OrderedDict(norm=nn.BatchNorm1d(3), head=nn.Linear(3, 2))
        self.module = nn.Sequential(layers).double()
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                if tensor.is_floating_point():
                    low, high = (0.5, 2.0) if name == "norm.running_var" else (-1.0, 1.0)
                    tensor.copy_(torch.from_numpy(rng.uniform(low, high, tuple(tensor.shape))))
        self.data = TensorDataset(
            {"image": torch.from_numpy(self.x), "label": torch.from_numpy(self.y)}
        )

    def gradients(self, x: Array, y: int) -> dict[str, Array]:
        w = {name: tensor.numpy() for name, tensor in self.module.state_dict().items()}
        normal = (x - w["norm.running_mean"]) / np.sqrt(w["norm.running_var"] + 1e-5)
        hidden = w["norm.weight"] * normal + w["norm.bias"]
        logits = w["head.weight"] @ hidden + w["head.bias"]
        error = np.exp(logits - logits.max())
        error = error / error.sum() - np.eye(2)[y]
        back = w["head.weight"].T @ error
        return {
            "norm.weight": back * normal,
            "norm.bias": back,
            "head.weight": np.outer(error, hidden),
            "head.bias": error,
        }


def test_fisher_is_the_mean_square_of_the_gradients_of_single_samples() -> None:
    case = Classifier()
    [found] = fisher_of(case.module, functional.cross_entropy, case.data)
    single = [case.gradients(x, int(y)) for x, y in zip(case.x, case.y, strict=True)]
    assert list(found) == list(single[0])
    for name, tensor in found.items():
        expected = np.mean([gradients[name] ** 2 for gradients in single], axis=0)
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, err_msg=name)
        of_the_batch = np.mean([gradients[name] for gradients in single], axis=0) ** 2
        assert not np.allclose(tensor.numpy(), of_the_batch, rtol=0.01), name


def test_model_and_statistics_stay_as_they_are() -> None:
    case = Classifier()
    before = Tensors(case.module.state_dict()).clone()
    fisher_of(case.module, functional.cross_entropy, case.data)
    assert all(torch.equal(t, before[name]) for name, t in case.module.state_dict().items())
    assert all(p.grad is None for p in case.module.parameters())


def test_it_is_taken_at_the_model_that_is_given() -> None:
    case = Classifier()
    model = Tensors(case.module.state_dict()).clone()
    [expected] = fisher_of(case.module, functional.cross_entropy, case.data)
    with torch.no_grad():
        for parameter in case.module.parameters():
            parameter.zero_()
    training = training_of(case.module, functional.cross_entropy)
    [found] = diagonal_fisher(training, model, case.data, seed=3, path=PATH)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_that_lie_around_do_not_count() -> None:
    case = Classifier()
    [expected] = fisher_of(case.module, functional.cross_entropy, case.data)
    functional.cross_entropy(
        case.module(case.data.inputs["image"]), torch.ones(7).long()
    ).backward()
    [found] = fisher_of(case.module, functional.cross_entropy, case.data)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_reference_values_of_information_residual_and_mask(
    golden: Callable[[str], dict[str, Any]],
) -> None:
    case = golden("fim_residual_mask")
    expected, atol = case["expected"], case["atol"]
    simulated = torch.tensor(case["inputs"]["per_sample_grads_simulated"], dtype=torch.float64)
    calls: list[int] = []

    def two_versions(sample: Batch, rng: torch.Generator) -> Batch:
        start = 2 * len(calls)
        calls.append(start)
        return {"image": simulated[start : start + 2], "label": sample["label"].expand(2)}

    own, other = fisher_of(
        linear(8), first_output, rows(case["inputs"]["per_sample_grads"]),
        views=(unchanged, two_versions),
    )  # fmt: skip
    np.testing.assert_allclose(own["weight"][0], expected["F"], atol=atol)
    np.testing.assert_allclose(other["weight"][0], expected["F_bar"], atol=atol)
    assert not np.allclose(own["weight"][0], expected["wrong_batch_gradient_F"], atol=1e-3)
    eps = case["params"]["eps"] / np.mean(expected["F"])
    delta = case["params"]["delta_percent"]
    for normaliser, key, mask in (
        ("max", "residual", "mask"),
        ("source", "residual_source_normalised", "mask_source"),
        ("absolute", "abs_difference", "mask_absolute"),
    ):
        residual = residual_information(own, other, normaliser, eps)  # type: ignore[arg-type]
        np.testing.assert_allclose(residual["weight"][0], expected[key], atol=atol)
        assert top_mask(residual, delta)["weight"][0].int().tolist() == expected[mask]
        assert not np.allclose(residual["weight"][0], expected["literal_eq1"], atol=1e-3)


def test_all_views_see_the_same_samples_and_draw_from_generators_of_their_own() -> None:
    seen: dict[str, list[Any]] = {"first": [], "second": []}

    def view(name: str) -> Callable[[Batch, torch.Generator], Batch]:
        def look(sample: Batch, rng: torch.Generator) -> Batch:
            seen[name].append((sample["image"].tolist(), float(torch.rand((), generator=rng))))
            return sample

        return look

    data = rows(np.random.default_rng(1).normal(size=(9, 4)))
    fisher_of(linear(4), first_output, data, views=(view("first"), view("second")), limit=5)
    images, numbers = zip(*seen["first"], strict=True), zip(*seen["second"], strict=True)
    (first, drawn), (second, redrawn) = tuple(images), tuple(numbers)
    assert first == second
    assert len({str(image) for image in first}) == 5
    assert len({*drawn, *redrawn}) == 10


@pytest.mark.parametrize(("limit", "count"), [(None, 9), (100, 9), (4, 4), (1, 1)])
def test_limit_bounds_the_samples_and_the_path_draws_them(limit: int | None, count: int) -> None:
    values = np.random.default_rng(1).normal(size=(9, 4))

    def drawn(path: str) -> tuple[int, ...]:
        [fisher] = fisher_of(linear(4), first_output, rows(values), limit=limit, path=(path,))
        [chosen] = [
            subset
            for subset in combinations(range(9), count)
            if np.allclose(fisher["weight"][0], (values[list(subset)] ** 2).mean(0), rtol=1e-9)
        ]
        return chosen

    assert drawn("a") == drawn("a")
    assert (len({drawn(path) for path in "abcd"}) > 1) == (count < 9)


def test_tied_weights_have_one_sum_and_frozen_ones_none() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight
            self.unused, self.still = nn.Linear(1, 1, bias=False), nn.Linear(2, 2, bias=False)
            self.still.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.two(self.one(x)) + self.still(x)
            return out

    torch.manual_seed(0)
    module = Twice()
    [found] = fisher_of(
        module, first_output,
        TensorDataset({"image": torch.tensor([[1.0, 2.0]]), "label": torch.zeros(1)}),
    )  # fmt: skip
    assert list(found) == ["one.weight", "two.weight", "unused.weight"]
    assert found["one.weight"] is found["two.weight"]
    w, x = module.one.weight.detach().numpy(), np.array([1.0, 2.0])
    gradient = np.outer(w.T @ np.ones(2), x) + np.outer(np.ones(2), w @ x)  # both uses
    np.testing.assert_allclose(found["one.weight"].numpy(), gradient**2, rtol=1e-5)
    assert found["unused.weight"].tolist() == [[0.0]]
    assert found.numel() == 5


def test_no_examples_and_numbers_out_of_range_are_sentences() -> None:
    with pytest.raises(ConfigError, match="no training examples"):
        fisher_of(linear(2), first_output, rows(np.zeros((0, 2))))
    with pytest.raises(DivergedError, match=r"loss of a training sample is nan .* lower training"):
        fisher_of(linear(2), first_output, rows([[1.0, float("nan")]]))
    large = TensorDataset({"image": torch.tensor([[1e25, 0.0]]), "label": torch.zeros(1)})
    with pytest.raises(DivergedError, match="squared gradient of a training sample is too large"):
        fisher_of(nn.Linear(2, 1, bias=False), first_output, large)


def test_residuals_are_symmetric_and_between_0_and_1() -> None:
    rng = np.random.default_rng(5)
    own, other = (
        Tensors({"a": torch.from_numpy(rng.gamma(0.1, size=(4, 5))), "b": torch.zeros(3)})
        for _ in range(2)
    )
    eps = 1e-9
    found, turned = residual_information(own, other, eps=eps), residual_information(other, own)
    assert float(found["a"].min()) >= 0
    assert float(found["a"].max()) <= 1
    assert found["b"].tolist() == [0.0, 0.0, 0.0]
    f, g = own["a"].numpy(), other["a"].numpy()
    floor = eps * f.sum() / 23
    expected = np.abs(f - g) / np.maximum(np.maximum(f, g), floor)
    np.testing.assert_allclose(found["a"].numpy(), expected, rtol=1e-12)
    big = f + g > 1
    np.testing.assert_allclose(turned["a"].numpy()[big], expected[big], rtol=1e-9)
    assert mean_information(own) == pytest.approx(f.sum() / 23)


def test_the_floor_keeps_parameters_that_do_nothing_out_of_the_first_ranks() -> None:
    own = Tensors({"w": torch.tensor([4.0, 1e-12, 2.0])})
    other = Tensors({"w": torch.tensor([2.0, 9e-12, 2.0])})
    assert top_mask(residual_information(own, other), 33)["w"].tolist() == [True, False, False]
    bare = residual_information(own, other, eps=1e-30)
    assert top_mask(bare, 33)["w"].tolist() == [False, True, False]


def test_where_there_is_no_information_nothing_changes() -> None:
    zero = Tensors({"w": torch.zeros(3)})
    for normaliser in ("max", "source", "absolute"):
        assert residual_information(zero, zero, normaliser)["w"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("percent", [0, 1, 12.5, 33, 50, 99.9, 100])
def test_mask_takes_the_largest_over_all_tensors_and_of_equals_the_first(percent: float) -> None:
    rng = np.random.default_rng(6)
    flat = rng.integers(0, 5, 40).astype(np.float32)  # many ties
    values = Tensors({"a": torch.from_numpy(flat[:24].reshape(4, 6)), "b": torch.tensor(flat[24:])})
    found = top_mask(values, percent)
    first = np.argsort(-flat, kind="stable")[: round(percent / 100 * 40)]
    expected = np.isin(np.arange(40), first)
    marks = np.concatenate([found["a"].numpy().ravel(), found["b"].numpy()])
    assert marks.tolist() == expected.tolist()
    assert found["a"].shape == (4, 6)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
def test_packed_mask_has_a_bit_for_each_parameter_and_comes_back(count: int) -> None:
    marks = torch.from_numpy(np.random.default_rng(count).random(count) < 0.5)
    like = Tensors({"a": torch.zeros(1), "b": torch.zeros(count - 1)})
    mask = unflatten(marks, like)
    packed = pack_mask(mask)
    assert packed["bits"].numpy().tolist() == np.packbits(marks.numpy()).tolist()
    assert len(packed["bits"]) == -(-count // 8)
    unpacked = unpack_mask(packed, like)
    assert all(torch.equal(unpacked[name], mask[name]) for name in like)


def test_masks_of_tied_weights_stay_tied() -> None:
    weight = torch.tensor([3.0, 1.0])
    values = Tensors({"a": weight, "b": weight, "c": torch.tensor([2.0, 0.0])})
    mask = top_mask(values, 50)
    assert mask["a"] is mask["b"]
    assert [mask["a"].tolist(), mask["c"].tolist()] == [[True, False], [True, False]]
    again = unpack_mask(pack_mask(mask), values)
    assert again["a"] is again["b"]


def test_a_client_names_its_estimates(tmp_path: Any) -> None:
    local = training_of(toy_network(), functional.mse_loss)
    site = toy_site("A")
    runtime = ClientRuntime(site, FedAvg(), local, make_model=local.current, seed=7, root=tmp_path)
    runtime._path = ("client", "A", 1, "train", 0)
    [found] = runtime.fisher(toy_model(0), limit=3)
    path = ("client", "A", 1, "train", 0, "fisher")
    [expected] = diagonal_fisher(local, toy_model(0), site.train, seed=7, path=path, limit=3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    [other] = runtime.fisher(toy_model(0), limit=3, stream="again")
    assert not torch.equal(other["0.weight"], expected["0.weight"])
    with pytest.raises(ProtocolError, match="used twice"):
        runtime.fisher(toy_model(0))


def test_bits_do_not_depend_on_what_ran_before() -> None:
    case = Classifier()

    def run(before: Sequence[int]) -> Tensors:
        for seed in before:
            torch.manual_seed(seed)
            case.module.train()
        [found] = fisher_of(case.module, functional.cross_entropy, case.data, limit=4)
        return found

    first, second = run([]), run([1, 2])
    assert all(torch.equal(first[name], second[name]) for name in first)
