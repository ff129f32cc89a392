"""Datasets of PyTorch as a site's data."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from collegium import ClassificationTask, Ditto, SegmentationTask, TrainingConfig, simulate
from collegium.core.randomness import generator
from collegium.data.torch_dataset import TorchDataset
from collegium.errors import ConfigError, DataError


class Listed(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Noisy(Dataset[Any]):
    """Adds noise from torch's global generator, as random transforms do."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 2, 2), float(index)) + torch.rand(1, 2, 2), index % 2


def test_pairs_and_mappings_become_batches() -> None:
    image = torch.arange(12.0).view(3, 2, 2)
    pairs = TorchDataset(Listed([(image, 1), (image + 1, 0)]))
    batch = pairs.batch([1, 0], [generator(0, "a"), generator(0, "b")])
    assert torch.equal(batch["image"], torch.stack([image + 1, image]))
    assert batch["label"].tolist() == [0, 1]
    assert batch["label"].dtype == torch.int64
    item = {"image": image.numpy(), "label": torch.ones(1, 2, 2, dtype=torch.uint8),
            "mask": torch.tensor([[[1, 0], [1, 1]]]), "patient": "p7", "case": "scan3"}  # fmt: skip
    example = TorchDataset(Listed([item])).example(0)
    assert (example.case, example.patient) == ("scan3", "p7")
    assert example.batch["label"].shape == (1, 2, 2)
    assert example.batch["mask"].tolist() == [[[True, False], [True, True]]]
    real = TorchDataset(Listed([(image, 0.5)])).example(0)
    assert real.batch["label"].dtype == torch.float32


def test_random_transforms_depend_on_the_sample_alone() -> None:
    data, state = TorchDataset(Noisy()), torch.random.get_rng_state()
    rngs = [generator(0, "x", index) for index in range(2)]
    first = data.batch([0, 1], rngs)
    again = data.batch([1], [generator(0, "x", 1)])
    assert torch.equal(first["image"][1:], again["image"])
    other = data.batch([1], [generator(0, "y", 1)])
    assert not torch.equal(first["image"][1:], other["image"])
    assert torch.equal(data.example(2).image, data.example(2).image)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (torch.zeros(3), "item 0 of a dataset is a Tensor"),
        ((torch.zeros(3), 1, 2), "pair of image and label"),
        ({"image": torch.zeros(3), "target": 1}, "has the keys image, target"),
    ],
)
def test_other_items_are_refused_in_one_sentence(item: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        TorchDataset(Listed([item])).example(0)


def of_site(place: int, count: int = 24) -> tuple[Dataset[Any], ...]:
    images = torch.randn(count, 1, 8, 8, generator=generator(place, "images"))
    labels = (images.mean((1, 2, 3)) > 0).long()
    return tuple(TensorDataset(images[rows], labels[rows]) for rows in
                 (slice(0, 12), slice(12, 18), slice(18, None)))  # fmt: skip


def test_ditto_trains_on_torch_datasets_and_a_module() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sites = {name: of_site(place) for place, name in enumerate(("a", "b"))}
    result = simulate(
        Ditto(), sites=sites, model=model, task=ClassificationTask(2), rounds=3,
        training=TrainingConfig(lr=0.05, local_epochs=2, batch_size=4),
    )  # fmt: skip
    assert result.personal.keys() == {"a", "b"}
    assert [len(scores["personal"]) for scores in result.scores.values()] == [6, 6]
    losses = [record.losses["a"] for record in result.records if record.round]
    assert losses[-1] < losses[0]  # type: ignore[operator]
    for name, tensor in model.state_dict().items():  # the module given is left as it was
        assert torch.equal(tensor, start[name])


def test_training_starts_from_the_weights_of_the_module() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        model[1].weight.fill_(0.25)  # type: ignore[operator]
    result = simulate(
        Ditto(), {"a": of_site(0)}, model, ClassificationTask(2), rounds=1,
        training=TrainingConfig(lr=1e-12, optimizer="sgd", local_steps=1),
    )  # fmt: skip
    assert result.model is not None
    assert result.model["1.weight"] == pytest.approx(0.25)


def test_segmentations_are_scored_at_full_size() -> None:
    images = torch.randn(8, 1, 8, 8, generator=generator(3, "images"))
    data = TensorDataset(images, (images > 1).long())
    result = simulate(
        Ditto(), {"a": (data, data, data)}, lambda: nn.Conv2d(1, 2, 3, padding=1),
        SegmentationTask(("background", "bright")), rounds=1,
        training=TrainingConfig(local_steps=1),
    )  # fmt: skip
    assert len(result.scores["a"]["global"]) == 8


def test_sites_and_models_that_do_not_suit_are_refused() -> None:
    from collegium import IFCA

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    task = ClassificationTask(2)
    with pytest.raises(ConfigError, match="site 'a' has 2 sets of data; give three"):
        simulate(Ditto(), {"a": of_site(0)[:2]}, model, task, rounds=1)
    with pytest.raises(ConfigError, match="IFCA starts from several initial models"):
        simulate(IFCA(), {"a": of_site(0)}, model, task, rounds=1)
