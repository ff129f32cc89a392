import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation.base import (
    AdaptationRecord,
    AdaptationResult,
    Adapter,
    LayerSpread,
    Sources,
    case_batches,
    case_windows,
    optimizer_step,
    predict_batch,
)
from collegium.core.dataset import Example, TensorDataset, UnlabelledDataset
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DivergedError
from collegium.tasks import SegmentationTask

TASK = SegmentationTask(2)


class Cases:
    """Cases of given shapes; the images of case i hold i."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def example(self, index: int) -> Example:
        image = torch.full(self.shapes[index], float(index))
        return Example(f"c{index}", f"p{index}", {"image": image}, None)


def test_neighbours_of_one_shape_are_joined_up_to_the_size() -> None:
    cases = Cases((1, 1, 4, 4), (1, 1, 4, 4), (1, 1, 4, 4), (1, 1, 2, 4), (1, 1, 4, 4))
    found = [(indices, example.batch["image"]) for indices, example in case_batches(cases, 2)]
    assert [indices for indices, _ in found] == [[0, 1], [2], [3], [4]]
    assert [tuple(image.shape) for _, image in found] == [
        (2, 1, 4, 4), (1, 1, 4, 4), (1, 1, 2, 4), (1, 1, 4, 4),
    ]  # fmt: skip
    assert found[0][1][:, 0, 0, 0].tolist() == [0.0, 1.0]


def test_the_slices_of_a_volume_are_not_joined_with_another_case() -> None:
    cases = Cases((1, 1, 4, 4), (3, 1, 4, 4), (1, 1, 4, 4))
    assert [indices for indices, _ in case_batches(cases, 8)] == [[0], [1], [2]]


def test_a_vector_has_company_where_there_are_two() -> None:
    def indices(count: int, size: int) -> list[list[int]]:
        return [found for found, _ in case_batches(Cases(*[(1, 3)] * count), size)]

    assert indices(5, 4) == [[0, 1, 2, 3, 4]]
    assert indices(6, 4) == [[0, 1, 2, 3], [4, 5]]
    assert indices(5, 1) == [[0, 1], [2, 3, 4]]
    assert indices(1, 4) == [[0]]
    images = Cases((1, 1, 4, 4), (1, 1, 4, 4), (1, 1, 4, 4))
    assert [found for found, _ in case_batches(images, 1)] == [[0], [1], [2]]


class Half(nn.Module):
    """Class 1 where the image is above one half."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(images, 0.5), images], dim=1)


def test_predictions_of_joined_cases_are_taken_apart_again() -> None:
    cases = Cases((1, 1, 2, 2), (1, 1, 2, 2), (3, 1, 2, 2))
    found = {
        index: prediction
        for indices, example in case_batches(cases, 4)
        for index, prediction in predict_batch(TASK, Half(), indices, example)
    }
    assert sorted(found) == [0, 1, 2]
    assert found[0].tolist() == [[[0, 0], [0, 0]]]
    assert found[1].tolist() == [[[1, 1], [1, 1]]]
    assert tuple(found[2].shape) == (3, 2, 2)


def test_an_adapter_sees_no_label() -> None:
    data = TensorDataset(
        {
            "image": torch.zeros(2, 1, 2, 2),
            "label": torch.ones(2, 2, 2, dtype=torch.int64),
            "mask": torch.ones(2, 2, 2, dtype=torch.bool),
        }
    )
    cases = UnlabelledDataset(data)
    assert len(cases) == 2
    assert cases.example(1).batch.keys() == {"image", "mask"}


def network() -> nn.Module:
    return nn.Conv2d(1, 2, 1)


def test_loading_a_model_leaves_torchs_generator_alone() -> None:
    model = Tensors(network().state_dict()).map(torch.ones_like)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    module = Sources({"global": model}, network, TASK).load(model)
    assert torch.equal(torch.rand(2), expected)
    assert not module.training
    assert all(torch.equal(tensor, model[name]) for name, tensor in module.state_dict().items())


def test_a_missing_model_is_reported() -> None:
    model = Tensors(network().state_dict())
    alone = Sources({"north": model, "east": model}, network, TASK)
    assert alone.personal == ["east", "north"]
    with pytest.raises(ConfigError, match=r"tent starts from the global model, but .* north, east"):
        alone.require_global("tent")
    with pytest.raises(ConfigError, match="ensemble needs personal models, but no site shared one"):
        Sources({"global": model}, network, TASK).require_personal("ensemble")


def test_the_server_s_own_models_are_no_personal_ones() -> None:
    models = {name: filled(value) for name, value in MODELS.items()}
    every = Sources(models, network, TASK, server=("cluster-1", "cluster-2"))
    assert every.require_personal("ensemble") == ["north", "south"]
    started, names = every.starting_model()
    assert names == ["cluster-1", "cluster-2"]
    assert {float(tensor.mean()) for tensor in started.values()} == {1.5}  # of 1 and 2
    clusters = Sources(
        {name: model for name, model in models.items() if name.startswith("cluster")},
        network, TASK, server=("cluster-1", "cluster-2"),
    )  # fmt: skip
    assert clusters.require_personal("ensemble") == ["cluster-1", "cluster-2"]
    by_folder = Sources({**models, "global": filled(9.0)}, network, TASK)
    assert by_folder.personal == sorted(MODELS)
    assert by_folder.starting_model()[1] == ["global"]


MODELS = {"north": 5.0, "south": 7.0, "cluster-1": 1.0, "cluster-2": 2.0}


def filled(value: float) -> Tensors:
    return Tensors(network().state_dict()).map(lambda tensor: torch.full_like(tensor, value))


def test_a_step_goes_down_the_gradient_and_never_on_a_loss_that_is_not_finite() -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    optimizer_step(optimizer, (weight**2).sum(), "tent")
    np.testing.assert_allclose(weight.detach(), [2.0 - 0.25 * 4.0])
    with pytest.raises(DivergedError, match="the loss of tent became nan; lower its lr"):
        optimizer_step(optimizer, (weight * float("nan")).sum(), "tent")
    np.testing.assert_allclose(weight.detach(), [1.0])


def test_hyperparameters_are_the_fields() -> None:
    @dataclass(frozen=True)
    class Mine(Adapter):
        lr: float = 0.5

        def adapt(self, sources, cases, deliver):
            return AdaptationResult(AdaptationRecord([]))

    assert Mine().hyperparameters() == {"lr": 0.5}
    assert Mine.needs == ("global",)


def test_a_record_is_written_as_plain_numbers() -> None:
    record = AdaptationRecord(
        ["global", "north"], 4, [{"step": 0, "total": 1.5}], 0,
        {"first": {"north": 0.25, "global": 0.75}}, ["a note"],
    )  # fmt: skip
    data = json.loads(json.dumps(record.to_dict()))
    assert data["coefficients"] == {
        "layers": ["first"], "sources": ["global", "north"], "values": [[0.75, 0.25]],
    }  # fmt: skip
    assert (data["steps"], data["chosen"], data["notes"]) == (4, 0, ["a note"])
    assert AdaptationRecord(["global"]).to_dict()["coefficients"] is None


def test_spreads_are_written_if_there_are_any() -> None:
    record = AdaptationRecord(
        ["global", "north"], coefficients={"last": {"north": 0.2, "global": 0.7}},
        spreads={"last": LayerSpread({"north": 0.02, "global": 0.07}, 0.3, 0.03)},
    )  # fmt: skip
    data = json.loads(json.dumps(record.to_dict()))["coefficients"]
    assert data == {
        "layers": ["last"], "sources": ["global", "north"], "values": [[0.7, 0.2]],
        "deviations": [[0.07, 0.02]], "variation": [0.3], "variation_deviation": [0.03],
    }  # fmt: skip


@pytest.mark.parametrize("side", [3, 10])
def test_masks_are_cut_as_images_are(side: int) -> None:
    """The image is its mask, so that windows and padding must agree."""
    inside = torch.rand(3, side, side, generator=torch.Generator().manual_seed(0)) < 0.5
    data = TensorDataset({"image": inside.unsqueeze(1).float(), "mask": inside})
    task = SegmentationTask(2, window=(4, 4), overlap=0.25, batch_size=5)
    found = [*case_windows(task, network(), UnlabelledDataset(data), 2, field_of_view=True)]
    assert sum(len(window.images) for window in found) == (3 if side == 3 else 27)
    for window in found:
        assert window.inside is not None
        assert torch.equal(window.images[:, 0].bool(), window.inside)
    plain = [*case_windows(task, network(), UnlabelledDataset(data), 2)]
    assert all(window.inside is None for window in plain)
