from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation.base import Sources
from collegium.adaptation.tent import Tent
from collegium.core.dataset import Example, TensorDataset, UnlabelledDataset
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DataError, DivergedError
from collegium.tasks import SegmentationTask, SupervisedTask

LR, BETA = 0.03, 0.8


def entropy(by_hand: Any, model: Any, images: Any) -> Any:
    """The mean entropy over batch and pixels, with the batch's own statistics."""
    logits = by_hand.logits(model, images, batch_statistics=True)
    powers = np.exp(logits)
    p = powers / powers.sum(1, keepdims=True)
    return -(p * np.log(p)).sum(1).mean()


class Adam:
    """Adam on scale and shift by hand."""

    def __init__(self, by_hand: Any) -> None:
        self.by_hand, self.count = by_hand, 0
        self.first = dict.fromkeys(by_hand.AFFINE, 0.0)
        self.second = dict.fromkeys(by_hand.AFFINE, 0.0)

    def step(self, model: Any, images: Any) -> dict[str, Any]:
        self.count += 1
        gradient = self.by_hand.slopes(
            lambda now: entropy(self.by_hand, now, images), model, self.by_hand.AFFINE
        )
        moved = dict(model)
        for name, slope in gradient.items():
            self.first[name] = BETA * self.first[name] + (1 - BETA) * slope
            self.second[name] = 0.999 * self.second[name] + 0.001 * slope**2
            mean = self.first[name] / (1 - BETA**self.count)
            root = np.sqrt(self.second[name] / (1 - 0.999**self.count))
            moved[name] = model[name] - LR * mean / (root + 1e-8)
        return moved


def tent(**fields: Any) -> Tent:
    return Tent(lr=LR, beta=BETA, **{"batch_size": 2, **fields})


BATCHES = (slice(0, 2), slice(2, 4), slice(4, 5))


@pytest.mark.parametrize("steps", [1, 2])
def test_online_updates_and_predictions_equal_those_by_hand(
    outside: Any, by_hand: Any, in_numpy: Any, steps: int
) -> None:
    sources = outside.sources(by_hand.network)
    model, adam = in_numpy(sources.models["global"]), Adam(by_hand)
    expected, losses = [], []
    for rows in BATCHES:
        images = outside.images[rows]
        expected += [*by_hand.classes(model, images, batch_statistics=True)]
        for _ in range(steps):
            losses.append(float(entropy(by_hand, model, images)))
            model = adam.step(model, images)
    found, adapted = outside.adapt(tent(steps=steps), sources)
    assert np.array_equal(np.concatenate(found[""]), expected), "predicted before the step"
    assert [row["total"] for row in adapted.record.losses] == pytest.approx(losses, rel=1e-9)
    assert adapted.record.steps == 3 * steps
    assert adapted.model is not None
    for name in by_hand.AFFINE:
        np.testing.assert_allclose(adapted.model[name], model[name], atol=1e-6, rtol=0)
        assert np.abs(model[name] - in_numpy(sources.models["global"])[name]).max() > 1e-2


def test_episodic_batches_all_start_from_the_deployed_model(
    outside: Any, by_hand: Any, in_numpy: Any
) -> None:
    sources = outside.sources(by_hand.network)
    start = in_numpy(sources.models["global"])
    found, adapted = outside.adapt(tent(episodic=True), sources)
    expected = [
        case
        for rows in BATCHES
        for case in by_hand.classes(start, outside.images[rows], batch_statistics=True)
    ]
    assert np.array_equal(np.concatenate(found[""]), expected)
    losses = [float(entropy(by_hand, start, outside.images[rows])) for rows in BATCHES]
    assert [row["total"] for row in adapted.record.losses] == pytest.approx(losses, rel=1e-9)
    last = Adam(by_hand).step(start, outside.images[BATCHES[-1]])
    assert adapted.model is not None
    for name in by_hand.AFFINE:
        np.testing.assert_allclose(adapted.model[name], last[name], atol=1e-6, rtol=0)


def test_with_one_batch_online_and_episodic_are_the_same(outside: Any, by_hand: Any) -> None:
    sources = outside.sources(by_hand.network)
    results = [
        outside.adapt(tent(batch_size=5, episodic=episodic), sources)[1].model
        for episodic in (False, True)
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    apart = outside.adapt(tent(), sources)[1].model
    assert not torch.equal(apart["norm.weight"], results[0]["norm.weight"])


def test_nothing_but_scale_and_shift_moves_and_statistics_are_gone(
    outside: Any, by_hand: Any
) -> None:
    sources = outside.sources(by_hand.network)
    given = sources.models["global"]
    adapted = outside.adapt(tent(), sources)[1].model
    assert {n for n, t in adapted.items() if not torch.equal(t, given[n])} == {*by_hand.AFFINE}
    gone = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(given) - set(adapted) == gone


def test_the_same_bits_come_again_whatever_the_labels(outside: Any, by_hand: Any) -> None:
    sources = outside.sources(by_hand.network)
    first, second = (outside.adapt(tent(), sources, labels)[1] for labels in (0, 1))
    assert first.record == second.record
    assert all(torch.equal(first.model[name], second.model[name]) for name in first.model)


def test_a_case_larger_than_the_window_is_learnt_from_window_by_window(by_hand: Any) -> None:
    """Four windows of 4x4 in an image of 8x8, two in a batch: two steps."""
    image = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()

    class Large:
        def __len__(self) -> int:
            return 1

        def example(self, index: int) -> Example:
            return Example("c", "p", {"image": image}, None)

    network = by_hand.network
    task = SegmentationTask(2, window=(4, 4), overlap=0.0)
    model = Tensors(network().state_dict()).clone()
    sources = Sources({"global": model}, network, task)
    record = tent().adapt(sources, Large(), lambda *_: None).record
    assert record.steps == 2
    now = {name: tensor.numpy() for name, tensor in model.items()}
    windows = [image[:, :, i : i + 4, j : j + 4].numpy() for i in (0, 4) for j in (0, 4)]
    for row, pair in zip(record.losses, (windows[:2], windows[2:]), strict=True):
        expected = float(entropy(by_hand, now, np.concatenate(pair)))
        assert row["entropy"] == pytest.approx(expected, rel=1e-9)
        now = Adam(by_hand).step(now, np.concatenate(pair)) if row["step"] == 0 else now


def test_images_that_make_the_loss_infinite_are_reported(outside: Any, by_hand: Any) -> None:
    outside.images[3] = np.nan
    with pytest.raises(DivergedError, match="the loss of tent became nan"):
        outside.adapt(tent(), outside.sources(by_hand.network))


def test_a_network_without_batch_normalisation_is_refused(outside: Any) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 1), nn.GroupNorm(1, 2)).double()

    words = "tent adapts batch normalisation, and Sequential has none; choose another adapter"
    with pytest.raises(ConfigError, match=words):
        Tent().check(network())
    with pytest.raises(ConfigError, match=words):
        outside.adapt(Tent(), outside.sources(network))


def test_batch_normalisation_without_scale_and_shift_is_refused() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, affine=False))

    sources = Sources({"global": Tensors(network().state_dict())}, network, SegmentationTask(2))
    cases = UnlabelledDataset(TensorDataset({"image": torch.zeros(2, 1, 4, 4)}))
    with pytest.raises(ConfigError, match="tent trains scale and shift, and the network's batch"):
        Tent().adapt(sources, cases, lambda *_: None)


def test_without_a_global_model_it_refuses(outside: Any, by_hand: Any) -> None:
    with pytest.raises(ConfigError, match="tent starts from the global model"):
        outside.adapt(Tent(), outside.sources(by_hand.network, ("east", "north")))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr": 0.0}, r"Tent\.lr: should be above 0, not 0\.0"),
        ({"beta": 1.0}, r"Tent\.beta: should be at least 0 and below 1, not 1\.0"),
        ({"steps": 0}, r"Tent\.steps: should be at least 1, not 0"),
        ({"batch_size": 0}, r"Tent\.batch_size: should be at least 1, not 0"),
        ({"lr": float("nan")}, r"Tent\.lr: should be finite and above 0, not nan"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Tent(**fields)


def vectors() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def of_vectors(count: int) -> tuple[Sources, TensorDataset]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(5)).double()
    sources = Sources(
        {"global": Tensors(vectors().state_dict()).clone()},
        vectors,
        SupervisedTask(nn.functional.cross_entropy),
    )
    return sources, TensorDataset({"image": inputs})


@pytest.mark.parametrize(("size", "joined"), [(2, [2, 3]), (4, [5]), (1, [2, 3])])
def test_no_vector_is_alone_in_a_batch(size: int, joined: list[int]) -> None:
    sources, data = of_vectors(5)
    found: dict[int, torch.Tensor] = {}
    record = (
        Tent(lr=1e-30, batch_size=size)
        .adapt(
            sources, UnlabelledDataset(data), lambda name, k, output: found.__setitem__(k, output)
        )
        .record
    )
    assert record.steps == len(joined)
    weights = {name: tensor.numpy() for name, tensor in sources.models["global"].items()}
    images = np.concatenate([data.example(k).batch["image"].numpy() for k in range(5)])
    hidden = images @ weights["0.weight"].T + weights["0.bias"]
    expected = []
    for batch in np.split(hidden, np.cumsum(joined)[:-1]):
        normal = (batch - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-5)
        expected.append(normal @ weights["2.weight"].T + weights["2.bias"])
    assert sorted(found) == [0, 1, 2, 3, 4]
    outputs = np.concatenate([found[k].numpy() for k in range(5)])
    np.testing.assert_allclose(outputs, np.concatenate(expected), rtol=1e-9)


def test_a_site_with_a_single_vector_gets_advice() -> None:
    sources, data = of_vectors(1)
    with pytest.raises(
        DataError, match=r"a batch held one value per channel .*more or larger cases"
    ):
        Tent().adapt(sources, UnlabelledDataset(data), lambda *_: None)
