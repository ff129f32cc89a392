"""Scores and losses of single steps of an adaptation: what they are, and that nothing sees them."""

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation.base import Adapter, Sources
from collegium.adaptation.dsbn import DSBN
from collegium.adaptation.none import NoAdaptation
from collegium.adaptation.outside import ScoredAdaptation, adapt_and_score
from collegium.adaptation.routing import Routing
from collegium.adaptation.tent import Tent
from collegium.adaptation.ttt import TTTAdapter
from collegium.algorithms.ttt import TTT
from collegium.core.algorithm import NetworkBuilder
from collegium.core.dataset import TensorDataset
from collegium.core.randomness import ambient, generator
from collegium.core.tensors import Tensors
from collegium.tasks import ClassificationTask, SegmentationTask

NAMES = ("global", "east", "north")
IMAGES = np.random.default_rng(0).normal(0.3, 1.2, (5, 1, 8, 8)).astype(np.float32)
LABELS = (np.random.default_rng(1).random((5, 8, 8)) > 0.5).astype(np.int64)
TENSORS = {"image": torch.from_numpy(IMAGES), "label": torch.from_numpy(LABELS)}
DATA = TensorDataset(TENSORS)
TASK = SegmentationTask(2)


def bare() -> nn.Module:
    """Convolution, batch normalisation, dropout, convolution: the last is the head."""
    layers = nn.Sequential()
    for name, layer in {
        "body": nn.Conv2d(1, 4, 3, padding=1), "norm": nn.BatchNorm2d(4), "relu": nn.ReLU(),
        "drop": nn.Dropout(0.5), "last": nn.Conv2d(4, 2, 1),
    }.items():  # fmt: skip
        layers.add_module(name, layer)
    return layers


network = NetworkBuilder(bare, TTT())


def sources(build: Any = network, task: Any = TASK) -> Sources:
    models = {}
    for k, name in enumerate(NAMES):
        with ambient(3, "steps", k):
            models[name] = Tensors(build().state_dict()).clone()
    return Sources(models, build, task, seed=2)


def adapted(adapter: Adapter, data: Any = DATA, **kinds: Any) -> ScoredAdaptation:
    return adapt_and_score(adapter, sources(**kinds), data)


def mean_dice(found: ScoredAdaptation) -> tuple[float, float]:
    """Mean and deviation over the cases of what was delivered."""
    scores = [row["dice"] for row in found.scores]
    return float(np.mean(scores)), float(np.std(scores))


LR: dict[str, Any] = {"lr": 0.05}
ITERATIVE: dict[str, Any] = {
    "routing": Routing(epochs=3, radius=1, record_steps=True, **LR),
    "routing, last": Routing(epochs=3, radius=1, selection="last", record_steps=True, **LR),
    "routing, episodic": Routing(epochs=2, mode="episodic", radius=1, record_steps=True, **LR),
    "routing, online": Routing(epochs=2, mode="online", radius=1, record_steps=True, **LR),
    "tent": Tent(steps=2, batch_size=2, record_steps=True, **LR),
    "tent, episodic": Tent(steps=2, batch_size=2, episodic=True, record_steps=True, **LR),
    "ttt": TTTAdapter(steps=2, copies=4, record_steps=True, **LR),
    "ttt, online": TTTAdapter(steps=2, copies=4, online=True, record_steps=True, **LR),
    "dsbn": DSBN(pseudo_labels=2, threshold=0.5, record_steps=True, **LR),
}


@pytest.mark.parametrize("name", ITERATIVE)
def test_recording_steps_changes_no_bit_of_the_adaptation(name: str) -> None:
    recorded = adapted(ITERATIVE[name])
    plain = adapted(replace(ITERATIVE[name], record_steps=False))
    assert plain.by_step is None
    assert plain.scores == recorded.scores
    before, after = (found.result.record.to_dict() for found in (plain, recorded))
    assert ("loss_deviations" in after) == (name in ("routing", "routing, last"))
    assert before == {key: value for key, value in after.items() if key != "loss_deviations"}
    for one, other in [(plain.result.model, recorded.result.model)]:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.keys() == other.keys()
            assert all(one[key].equal(other[key]) for key in one)


@pytest.mark.parametrize("name", ITERATIVE)
def test_every_step_has_a_score_of_all_cases(name: str) -> None:
    adapter: Any = ITERATIVE[name]
    steps = {"routing": "epochs", "dsbn": "pseudo_labels"}.get(name.split(",")[0], "steps")
    found = adapted(adapter).by_step
    assert found is not None
    assert (found["metric"], found["unit"]) == ("dice", "")
    assert found["steps"] == list(range(getattr(adapter, steps) + 1))
    assert found["cases"] == [5] * len(found["steps"])
    assert found["seconds"] == sorted(found["seconds"])


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("routing, last", "epochs"),
        ("ttt", "steps"),
        ("dsbn", "pseudo_labels"),
    ],
)
def test_a_step_s_score_is_that_of_an_adaptation_that_ends_with_it(name: str, field: str) -> None:
    whole = adapted(ITERATIVE[name]).by_step
    assert whole is not None
    changed = set()
    for steps in whole["steps"][1:]:
        shorter = adapted(replace(ITERATIVE[name], record_steps=False, **{field: steps}))
        found = whole["mean"][steps], whole["deviation"][steps]
        assert found == pytest.approx(mean_dice(shorter), abs=1e-12)
        changed.add(found)
    assert (whole["mean"][0], whole["deviation"][0]) not in changed


def test_without_a_step_an_episode_predicts_as_tent_does() -> None:
    found = adapted(ITERATIVE["tent, episodic"])
    assert found.by_step is not None
    assert (found.by_step["mean"][0], found.by_step["deviation"][0]) == pytest.approx(
        mean_dice(found)
    )


def test_predictions_after_tent_s_steps_are_those_by_hand(
    outside: Any, by_hand: Any, in_numpy: Any
) -> None:
    """Scale and shift of the network in numpy, moved by torch's Adam on the entropy by hand."""
    given = outside.sources(by_hand.network)
    labels = np.random.default_rng(5).integers(0, 2, (5, 4, 4))
    data = TensorDataset(
        {"image": torch.from_numpy(outside.images), "label": torch.from_numpy(labels)}
    )
    tent = Tent(lr=0.3, steps=2, batch_size=5, episodic=True, record_steps=True)
    found = adapt_and_score(tent, given, data).by_step
    assert found is not None
    module = by_hand.network()
    module.load_state_dict(dict(given.models["global"]))
    module.train()  # the statistics of the batch
    adam = torch.optim.Adam([module.norm.weight, module.norm.bias], lr=0.3)
    for step in range(3):
        logits = module(torch.from_numpy(outside.images))
        guess = logits.argmax(1).numpy()
        both = (guess * labels).sum((1, 2))
        dice = 2 * both / (guess.sum((1, 2)) + labels.sum((1, 2)))
        assert found["mean"][step] == pytest.approx(dice.mean())
        assert found["deviation"][step] == pytest.approx(dice.std())
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        adam.zero_grad()
        entropy.backward()
        adam.step()


def test_labels_change_the_scores_of_steps_and_nothing_else() -> None:
    other = TensorDataset({"image": TENSORS["image"], "label": 1 - TENSORS["label"]})
    one, two = adapted(ITERATIVE["routing"]), adapted(ITERATIVE["routing"], other)
    assert one.result.record.to_dict() == two.result.record.to_dict()
    assert one.by_step is not None
    assert two.by_step is not None
    assert one.by_step["mean"] != two.by_step["mean"]


def test_the_time_of_looking_is_none_of_the_adaptation_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one second whenever it is read, and by a hundred while one looks."""
    now = itertools.count()
    looked = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: next(now) + looked[0])

    class Slow(SegmentationTask):
        """Scores slowly."""

        def scores(self, *args: Any, **kinds: Any) -> Any:
            looked[0] += 100.0
            return super().scores(*args, **kinds)

    found = adapted(ITERATIVE["routing"], task=Slow(2))
    assert found.by_step is not None
    assert found.by_step["seconds"][-1] < 100
    assert found.seconds < 100
    assert found.by_step["seconds"] == [1.0, 2.0, 3.0, 4.0]


def test_an_adapter_without_steps_records_none() -> None:
    assert adapted(NoAdaptation()).by_step is None


def test_a_step_at_which_no_case_has_a_score_has_no_mean() -> None:
    empty = TensorDataset({"image": torch.zeros(2, 1, 8, 8), "label": torch.zeros(2, 8, 8).long()})

    def always_background() -> nn.Module:
        layer: Any = nn.Conv2d(1, 2, 1)
        nn.init.zeros_(layer.weight)
        layer.bias.data = torch.tensor([1.0, 0.0])
        return nn.Sequential(nn.BatchNorm2d(1), layer)

    tent = Tent(lr=1e-9, record_steps=True)
    found = adapted(tent, empty, build=always_background).by_step
    assert found is not None
    assert (found["mean"], found["deviation"], found["cases"]) == ([None] * 2, [None] * 2, [0, 0])


def test_a_metric_of_all_cases_together_has_no_deviation() -> None:
    def classifier() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    data = TensorDataset({"image": TENSORS["image"], "label": torch.tensor([0, 1, 0, 1, 1])})
    task = ClassificationTask(2, metric="balanced_accuracy")
    found = adapted(Tent(record_steps=True, batch_size=5, **LR), data, build=classifier, task=task)
    assert found.by_step is not None
    assert found.by_step["metric"] == "balanced_accuracy"
    assert found.by_step["deviation"] == [None, None]
    delivered = [row["balanced_accuracy"] for row in found.scores]
    assert found.by_step["mean"][0] == pytest.approx(np.mean(delivered))


# --- deviations of the losses


def plain() -> nn.Module:
    """Without batch normalisation, so that no case depends on the others."""
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1)).double()


def double_data(**more: Any) -> TensorDataset:
    images = torch.from_numpy(IMAGES).double()
    return TensorDataset({"image": images, "label": TENSORS["label"], **more})


def maps_of_the_equal_mix(images: torch.Tensor) -> np.ndarray:
    """Softmax maps of the network whose weights are the mean of all models'."""
    given, module = sources(plain), plain()
    module.load_state_dict(
        {key: sum(m[key] for m in given.models.values()) / 3 for key in module.state_dict()}
    )
    with torch.no_grad():
        return np.asarray(module(images).softmax(1))


def losses_by_hand(clean: np.ndarray, moved: np.ndarray, radius: int) -> dict[str, np.ndarray]:
    """The terms of every case: maps by pixel, (5, 8, 8)."""
    foreground = np.pad(clean[:, 1], ((0, 0), (radius, radius), (radius, radius)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(
        foreground, (2 * radius + 1, 2 * radius + 1), (1, 2)
    )
    return {
        "consistency": ((clean - moved) ** 2).sum(1),
        "shape": windows.max((3, 4)) - windows.min((3, 4)),
        "entropy": -(clean * np.log(clean)).sum(1),
    }


@pytest.mark.parametrize("field_of_view", [False, True])
def test_deviations_of_the_losses_are_those_over_cases_by_hand(field_of_view: bool) -> None:
    inside = np.ones((5, 8, 8), bool)
    if field_of_view:  # columns, so that the window's edge is the same by hand
        inside[:, :, 5:] = False
        inside[3] = False
    data = double_data(mask=torch.from_numpy(inside)) if field_of_view else double_data()
    adapter = Routing(
        epochs=1, batch_size=5, radius=1, beta=0.5, record_steps=True, field_of_view=field_of_view
    )
    given = replace(sources(plain), seed=4)
    record = adapt_and_score(adapter, given, data).result.record
    images = torch.from_numpy(IMAGES).double()
    noise = torch.randn(images.shape, generator=generator(4, "routing", "selection", 0)).double()
    clean, moved = map(maps_of_the_equal_mix, (images, images + 0.5 * noise))
    columns = 5 if field_of_view else 8
    terms = losses_by_hand(clean[..., :columns], moved[..., :columns], radius=1)
    by_case = {name: maps.mean((1, 2)) for name, maps in terms.items()}
    by_case["total"] = by_case["consistency"] + 0.5 * (by_case["shape"] + by_case["entropy"])
    counted = [0, 1, 2, 4] if field_of_view else [0, 1, 2, 3, 4]
    mean, deviation = record.losses[0], record.loss_deviations[0]
    assert mean == pytest.approx({"step": 0} | {n: v[counted].mean() for n, v in by_case.items()})
    assert deviation == pytest.approx(
        {"step": 0} | {n: v[counted].std() for n, v in by_case.items()}
    )
    assert [row["step"] for row in record.loss_deviations] == [0, 1]


def test_cases_weigh_in_a_deviation_as_they_do_in_the_mean() -> None:
    """One case counts with 10 columns of pixels, the other with 30: variance 3/16 (a - b)^2."""
    images = torch.from_numpy(np.random.default_rng(7).normal(size=(2, 1, 8, 40)))
    mask = torch.zeros(2, 8, 40, dtype=torch.bool)
    mask[0, :, :10], mask[1, :, :30] = True, True
    labels = torch.zeros(2, 8, 40).long()
    adapter = Routing(
        epochs=1, batch_size=2, terms=("entropy",), record_steps=True, field_of_view=True
    )
    data = TensorDataset({"image": images, "label": labels, "mask": mask})
    record = adapt_and_score(adapter, sources(plain), data).result.record
    maps = maps_of_the_equal_mix(images)
    entropy = -(maps * np.log(maps)).sum(1)
    a, b = entropy[0, :, :10].mean(), entropy[1, :, :30].mean()
    assert record.loss_deviations[0]["entropy"] == pytest.approx(np.sqrt(3) / 4 * abs(a - b))


def test_a_case_alone_has_no_deviation() -> None:
    one = TensorDataset({"image": torch.from_numpy(IMAGES[:1]), "label": TENSORS["label"][:1]})
    record = adapted(ITERATIVE["routing"], one).result.record
    assert {
        value for row in record.loss_deviations for key, value in row.items() if key != "step"
    } == {0.0}


def test_regions_of_one_case_belong_together() -> None:
    """Each region is an image of two classes; a case's loss is the mean over its regions."""
    labels = torch.from_numpy(np.random.default_rng(3).integers(0, 3, (5, 8, 8)))
    data = TensorDataset({"image": torch.from_numpy(IMAGES).double(), "label": labels})
    task = SegmentationTask(3, regions={"whole": [1, 2], "core": [2]})
    adapter = Routing(epochs=1, batch_size=5, terms=("entropy",), record_steps=True)
    given = sources(plain, task)
    record = adapt_and_score(adapter, given, data).result.record
    module = plain()
    module.load_state_dict(
        {key: sum(m[key] for m in given.models.values()) / 3 for key in module.state_dict()}
    )
    with torch.no_grad():
        p = module(torch.from_numpy(IMAGES).double()).sigmoid().numpy()
    entropy = -(p * np.log(p) + (1 - p) * np.log1p(-p)).mean((1, 2, 3))
    assert record.loss_deviations[0]["entropy"] == pytest.approx(entropy.std())
