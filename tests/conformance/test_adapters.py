"""Rules that every adapter keeps, whatever it does."""

from typing import Any

import pytest
import torch
from torch import nn

from collegium.adaptation.base import AdaptationResult, Sources
from collegium.core.dataset import Example
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.experiment.config.registry import ADAPTERS
from collegium.models.unet import IOPUNet
from collegium.tasks import SegmentationTask

TASK = SegmentationTask(2, window=(32, 32))
SHAPES = [(1, 1, 32, 32), (1, 1, 32, 32), (1, 1, 24, 32), (3, 1, 32, 32), (1, 1, 40, 48)]
QUICK: dict[str, dict[str, Any]] = {
    "routing": {"epochs": 2},
    "ttt": {"copies": 4, "steps": 1},
    "dsbn": {"pseudo_labels": 1},
}
"""Settings with which an adapter is quick, or does more than by default."""


def network() -> nn.Module:
    return IOPUNet(1, 2, base=4)


class Site:
    """Cases of several kinds: joined ones, a smaller one, slices of a volume, a larger one."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.images = [torch.randn(shape, generator=rng) for shape in SHAPES]

    def __len__(self) -> int:
        return len(self.images)

    def example(self, index: int) -> Example:
        batch = {"image": self.images[index].clone()}
        return Example(f"case {index}", f"patient {index}", batch, None)


class Models(dict[str, Tensors]):
    """Models that count how many were looked at, and that must not change."""

    def unchanged(self) -> Tensors:
        return Tensors(
            (f"{source}/{name}", tensor.clone())
            for source, model in self.items() for name, tensor in model.items()
        )  # fmt: skip


def models(make: Any) -> Models:
    found = Models()
    for k, name in enumerate(("global", "east", "north")):
        with ambient(0, "adapter test", k):
            module = make()
            module.train()
            for _ in range(3):  # running statistics of their own
                module(torch.randn(4, 1, 32, 32) + k)
        found[name] = Tensors(module.state_dict()).clone()
    return found


def make_network(name: str) -> Any:
    if name != "ttt":
        return network
    from collegium.algorithms.ttt import TTT

    def extended() -> nn.Module:
        module = network()
        TTT().extend(module)
        return module

    return extended


def run(
    name: str, given: Models, make: Any, seed: int = 0
) -> tuple[dict[Any, Any], AdaptationResult]:
    adapter = ADAPTERS.load(name)(**QUICK.get(name, {}))
    predictions: dict[Any, torch.Tensor] = {}

    def deliver(model: str, index: int, prediction: torch.Tensor) -> None:
        assert (model, index) not in predictions, "a prediction was delivered twice"
        predictions[model, index] = prediction.clone()

    adapted = adapter.adapt(Sources(given, make, TASK, seed=seed), Site(), deliver)
    return predictions, adapted


@pytest.fixture(scope="module", params=ADAPTERS.names())
def done(request) -> tuple[str, Any, Models, dict[Any, Any], AdaptationResult]:
    make = make_network(request.param)
    given = models(make)
    return request.param, make, given, *run(request.param, given, make)


def test_every_case_is_predicted_once_by_every_model_at_full_size(done) -> None:
    _, _, _, predictions, _ = done
    by_model = {model for model, _ in predictions}
    assert sorted(predictions) == sorted((m, i) for m in by_model for i in range(len(SHAPES)))
    for (_, index), prediction in predictions.items():
        shape = SHAPES[index]
        assert tuple(prediction.shape) == (shape[0], *shape[2:])
        assert set(prediction.unique().tolist()) <= {0, 1}


def test_the_same_models_and_images_give_the_same_bits(done) -> None:
    name, make, given, predictions, adapted = done
    torch.rand(5)  # what was drawn before does not matter
    again, other = run(name, given, make)
    assert all(torch.equal(predictions[key], again[key]) for key in predictions)
    assert adapted.record.losses == other.record.losses
    assert adapted.record.coefficients == other.record.coefficients
    if adapted.model is not None and other.model is not None:
        assert all(torch.equal(adapted.model[n], other.model[n]) for n in adapted.model)


def test_the_deployed_models_and_torchs_generator_stay_unchanged(done) -> None:
    name, make, given, _, _ = done
    before = given.unchanged()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(name, given, make)
    assert torch.equal(torch.rand(3), expected)
    after = given.unchanged()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_the_record_names_deployed_sources(done) -> None:
    _, _, given, _, adapted = done
    record = adapted.record
    assert record.sources
    assert set(record.sources) <= set(given)
    assert all(list(values) == list(record.sources) for values in record.coefficients.values())
    assert all("step" in row and "total" in row for row in record.losses)
    steps = [row["step"] for row in record.losses]
    assert steps == sorted(set(steps))
    assert record.chosen is None or record.chosen in steps


def test_the_adapted_model_is_plain_tensors(done) -> None:
    _, _, _, _, adapted = done
    if adapted.model is not None:
        assert isinstance(adapted.model, Tensors)
        assert all(torch.isfinite(t).all() for t in adapted.model.values() if t.is_floating_point())
        assert not any(tensor.requires_grad for tensor in adapted.model.values())
