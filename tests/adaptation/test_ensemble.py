from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation._mean_output import MeanOutput
from collegium.adaptation.average import Average
from collegium.adaptation.base import Sources
from collegium.adaptation.ensemble import Ensemble
from collegium.adaptation.none import NoAdaptation
from collegium.core.dataset import TensorDataset, UnlabelledDataset
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import SegmentationTask

IMAGES = np.random.default_rng(0).normal(size=(5, 1, 6, 7)).astype(np.float32)
WEIGHTS = {  # of class 1, and its bias; class 0 has logit 0
    "global": (3.0, 0.3),
    "east": (1.0, -0.5),
    "north": (-2.0, 0.5),
    "south": (1.5, -1.0),
}


def network() -> nn.Module:
    return nn.Conv2d(1, 2, 1)


def model(weight: float, bias: float) -> Tensors:
    return Tensors(
        {
            "weight": torch.tensor([0.0, weight]).reshape(2, 1, 1, 1),
            "bias": torch.tensor([0.0, bias]),
        }
    )


def sources(*names: str) -> Sources:
    models = {name: model(*WEIGHTS[name]) for name in names or WEIGHTS}
    return Sources(models, network, SegmentationTask(2))


def run(adapter: Any, given: Sources) -> dict[str, np.ndarray]:
    """The predictions by the name of the model, each once."""
    cases = UnlabelledDataset(TensorDataset({"image": torch.from_numpy(IMAGES)}))
    found: dict[str, dict[int, np.ndarray]] = {}

    def deliver(name: str, index: int, prediction: torch.Tensor) -> None:
        assert index not in found.setdefault(name, {})
        found[name][index] = prediction.numpy()

    adapter.adapt(given, cases, deliver)
    return {name: np.concatenate([by[i] for i in range(len(IMAGES))]) for name, by in found.items()}


def by_hand(*names: str) -> np.ndarray:
    logits = [WEIGHTS[name][0] * IMAGES[:, 0] + WEIGHTS[name][1] for name in names]
    return np.asarray(np.mean(logits, axis=0) > 0, dtype=np.int64)


def test_none_predicts_with_the_global_model() -> None:
    found = run(NoAdaptation(batch_size=2), sources())
    assert found.keys() == {""}
    np.testing.assert_array_equal(found[""], by_hand("global"))


def test_an_ensemble_averages_the_logits_of_the_personal_models() -> None:
    votes = np.mean([by_hand(name) for name in ("east", "north", "south")], axis=0) > 0.5
    expected = by_hand("east", "north", "south")
    assert (votes != expected).any()  # it is no vote
    np.testing.assert_array_equal(run(Ensemble(), sources())[""], expected)


def test_an_ensemble_may_count_the_global_model_in() -> None:
    expected = by_hand("east", "north", "south", "global")
    assert (expected != by_hand("east", "north", "south")).any()
    np.testing.assert_array_equal(run(Ensemble(with_global=True), sources())[""], expected)
    with pytest.raises(ConfigError, match="ensemble starts from the global model"):
        run(Ensemble(with_global=True), sources("east", "north"))


def test_average_lets_every_personal_model_predict_for_itself() -> None:
    found = run(Average(), sources())
    assert found.keys() == {"east", "north", "south"}
    for name, prediction in found.items():
        np.testing.assert_array_equal(prediction, by_hand(name))


@pytest.mark.parametrize("adapter", [Average(), Ensemble()])
def test_without_personal_models_there_is_nothing_to_combine(adapter: Any) -> None:
    with pytest.raises(ConfigError, match="needs personal models"):
        run(adapter, sources("global"))


def test_the_mean_output_takes_the_sizes_that_its_members_take() -> None:
    member = network()
    member.strides = (2, 2)  # type: ignore[assignment]
    assert MeanOutput([member, member]).strides == (2, 2)
    assert not hasattr(MeanOutput([network()]), "strides")
