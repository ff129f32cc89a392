"""Adapters on overlapping regions: every region is a question of its own, inside or outside."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation._losses import class_logits, shape_map
from collegium.adaptation.base import Adapter, Sources
from collegium.adaptation.dsbn import DSBN
from collegium.adaptation.routing import Routing
from collegium.adaptation.tent import Tent
from collegium.core.dataset import TensorDataset, UnlabelledDataset
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import SegmentationTask, SupervisedTask

REGIONS = {"whole": (1, 2), "core": (2,)}
IMAGES = np.random.default_rng(0).normal(size=(2, 1, 6, 6)).astype(np.float32)


def network(regions: int = 2) -> nn.Module:
    torch.manual_seed(regions)
    return nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, regions, 1))


def adapt(adapter: Adapter, task: Any, regions: int = 2) -> Any:
    models = {name: Tensors(network(regions).state_dict()).clone() for name in ("global", "a")}
    cases = UnlabelledDataset(TensorDataset({"image": torch.from_numpy(IMAGES)}))
    sources = Sources(models, lambda: network(regions), task)
    return adapter.adapt(sources, cases, lambda *_: None)


def inside(regions: int = 2) -> Any:
    """The sigmoid of each region with the statistics of the images, (2, regions, 6, 6)."""
    with torch.no_grad():
        return network(regions).train()(torch.from_numpy(IMAGES)).double().sigmoid().numpy()


def entropy(probabilities: Any) -> float:
    return float(
        -(
            probabilities * np.log(probabilities) + (1 - probabilities) * np.log(1 - probabilities)
        ).mean()
    )


@pytest.mark.parametrize("regions", [REGIONS, {"whole": (1, 2)}])
def test_tent_descends_on_the_mean_entropy_of_the_regions(regions: Any) -> None:
    adapted = adapt(Tent(), SegmentationTask(3, regions=regions), len(regions))
    (row,) = adapted.record.losses
    assert row["entropy"] == pytest.approx(entropy(inside(len(regions))), rel=1e-5)
    start = network(len(regions)).state_dict()
    moved = {name for name in start if ".running" not in name and "num_batches" not in name
             and not torch.equal(adapted.model[name], start[name])}  # fmt: skip
    assert moved == {"1.weight", "1.bias"}


def test_routing_measures_every_region() -> None:
    adapted = adapt(Routing(epochs=1, radius=1, noise=0.0), SegmentationTask(3, regions=REGIONS))
    probabilities, first = inside(), adapted.record.losses[0]
    assert first["consistency"] == pytest.approx(0, abs=1e-12)
    assert first["entropy"] == pytest.approx(entropy(probabilities), rel=1e-4)
    ranges = []
    for image in probabilities.reshape(4, 6, 6):
        padded = [np.pad(image, 1, constant_values=value) for value in (-np.inf, np.inf)]
        views = [np.lib.stride_tricks.sliding_window_view(p, (3, 3)) for p in padded]
        ranges.append(views[0].max((2, 3)) - views[1].min((2, 3)))
    assert first["shape"] == pytest.approx(np.mean(ranges), rel=1e-4)


def test_the_outside_of_a_region_is_its_background() -> None:
    logits = torch.randn(2, 3, 4, 4)
    task = SegmentationTask(4, regions={"a": (1,), "b": (2,), "c": (3,)})
    maps = class_logits(logits, task, "x").softmax(dim=1)
    torch.testing.assert_close(maps[:, 1].reshape(2, 3, 4, 4), logits.sigmoid())
    assert shape_map(maps, 1).shape == (6, 4, 4)
    assert class_logits(logits, SegmentationTask(3), "x") is logits


def test_pseudo_labels_of_regions_are_those_that_are_sure() -> None:
    adapted = adapt(DSBN(pseudo_labels=1, threshold=0.6), SegmentationTask(3, regions=REGIONS))
    (row,) = adapted.record.losses
    with torch.no_grad():
        module = network().eval()
        measured = adapt(DSBN(), SegmentationTask(3, regions=REGIONS)).model
        module.load_state_dict(dict(measured))
        probabilities = module(torch.from_numpy(IMAGES)).double().sigmoid().numpy()
    confidence = np.maximum(probabilities, 1 - probabilities)
    assert row["confident"] == pytest.approx((confidence >= 0.6).mean())
    assert row["total"] == pytest.approx(-np.log(confidence[confidence >= 0.6]).mean(), rel=1e-4)


@pytest.mark.parametrize("adapter", [Tent(), DSBN(pseudo_labels=1), Routing(epochs=1, radius=1)])
def test_one_number_that_is_no_region_is_refused(adapter: Adapter) -> None:
    task = SupervisedTask(lambda output, label: (output - label).square().mean())
    with pytest.raises(ConfigError, match="learns from class probabilities, but the network's"):
        adapt(adapter, task, 1)
