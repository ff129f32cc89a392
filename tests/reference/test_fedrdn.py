from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms._site_norm import attach_site_norm, normalised, statistics_of
from collegium.algorithms.fedrdn import FedRDN
from collegium.core.dataset import TensorDataset
from collegium.core.randomness import generator
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.runtime.simulation import simulate
from collegium.tasks import SegmentationTask
from collegium.training.batches import plan_batches
from collegium.training.loop import TrainingConfig

SIZES, LR = {"A": 3, "B": 5}, 0.1


def image(pixels: Any) -> torch.Tensor:
    return torch.tensor(pixels, dtype=torch.float64)[None, None]


@pytest.mark.parametrize(
    ("pooled", "key"), [(True, "std_pooled_biased"), (False, "std_mean_of_images_unbiased")]
)
def test_statistics_are_the_reference_values(newer_golden: Any, pooled: bool, key: str) -> None:
    case = newer_golden["fedrdn"]
    for site in ("site0", "site1"):
        images = [image(pixels) for pixels in case[f"{site}_images"]]
        mean, deviation = statistics_of(images, pooled=pooled)
        assert float(mean) == pytest.approx(case["stats"][site]["mean"], rel=1e-12)
        assert float(deviation) == pytest.approx(case["stats"][site][key], rel=1e-12)


@pytest.mark.parametrize("pooled", [True, False])
def test_all_slices_of_a_volume_count(pooled: bool) -> None:
    """A case that is processed slice by slice has its slices where others have one image."""
    drawn = np.random.default_rng(0)
    volumes = [drawn.normal(size=(slices, 2, 3, 4)) for slices in (5, 2)]
    mean, deviation = statistics_of([torch.tensor(one) for one in volumes], pooled=pooled)
    for channel in range(2):
        pixels = [one[:, channel].ravel() for one in volumes]
        together = np.concatenate(pixels)
        means = together.mean() if pooled else np.mean([one.mean() for one in pixels])
        spread = together.std() if pooled else np.mean([one.std(ddof=1) for one in pixels])
        assert float(mean[channel]) == pytest.approx(means, rel=1e-12)
        assert float(deviation[channel]) == pytest.approx(spread, rel=1e-12)


def test_normalised_images_are_the_reference_values(newer_golden: Any) -> None:
    case, x = newer_golden["fedrdn"], image(newer_golden["fedrdn"]["x"])
    means = [torch.tensor([[case["stats"][s]["mean"]]]) for s in ("site0", "site1")]
    spread = [
        torch.tensor([[case["stats"][s]["std_pooled_biased"]]], dtype=torch.float64)
        for s in ("site0", "site1")
    ]
    for found, key in (
        (normalised(x, means[0], spread[0]), "x_by_site0"),
        (normalised(x, means[1], spread[1]), "x_by_site1"),
        (normalised(x, means[0], spread[1]), "x_mean0_std1_independent_draw"),
    ):
        np.testing.assert_allclose(found[0, 0], case[key], rtol=1e-9)


def cases() -> dict[str, tuple[Any, Any]]:
    rng = np.random.default_rng(4)
    found = {}
    for place, (name, count) in enumerate(SIZES.items()):
        x = rng.normal(3 * place, 1 + place, size=(count, 2, 4, 4))
        found[name] = (x, (x[:, 0] > 3 * place).astype(np.int64))
    return found


def softmax(logits: Any) -> Any:
    exp = np.exp(logits - logits.max(1, keepdims=True))
    return exp / exp.sum(1, keepdims=True)


def statistics(x: Any) -> Any:
    flat = x.reshape(len(x), x.shape[1], -1)
    return flat.mean(2).mean(0), flat.std(2, ddof=1).mean(0)


@pytest.mark.parametrize("draw", ["pair", "independent"])
@pytest.mark.parametrize("per", ["image", "batch"])
def test_a_round_by_hand(draw: Any, per: Any, tmp_path: Any) -> None:
    """A convolution of one pixel under cross-entropy, full batches."""
    data = cases()
    sites = []
    for name, (x, y) in data.items():
        own = TensorDataset({"image": torch.tensor(x), "label": torch.tensor(y)})
        sites.append(Site(name, own, own, own))
    network = nn.Conv2d(2, 2, 1).double()
    outcome = simulate(
        FedRDN(draw=draw, per=per), sites, network, SegmentationTask(2, "ce"), rounds=1, seed=3,
        output=tmp_path / "run", training=TrainingConfig(optimizer="sgd", lr=LR, batch_size=100),
    )  # fmt: skip
    weight = network.weight.detach().numpy()[:, :, 0, 0]
    bias = network.bias.detach().numpy()  # type: ignore[union-attr]
    table = sorted(
        [[m.tolist(), s.tolist()] for m, s in map(statistics, (x for x, _ in data.values()))]
    )
    trained = []
    for name, (x, y) in data.items():
        path = ("client", name, 1, "train", 0)
        (batch,) = plan_batches(len(x), 100, epochs=1, steps=None, seed=3, path=(*path, "fit"))
        order = [index for _, index in batch]
        x, y = x[order], y[order]
        random, count = generator(3, *path, "sites"), len(x) if per == "image" else 1
        first = torch.randint(2, (count,), generator=random).tolist()
        second = torch.randint(2, (count,), generator=random).tolist() if draw != "pair" else first
        mu = np.array([table[j][0] for j in first])[:, :, None, None]
        sigma = np.array([table[j][1] for j in second])[:, :, None, None]
        seen = (x - mu) / sigma
        logits = np.einsum("oc,bchw->bohw", weight, seen) + bias[:, None, None]
        slope = softmax(logits)
        for k in range(2):
            slope[:, k] -= y == k
        slope /= y.size
        by_weight = np.einsum("bohw,bchw->oc", slope, seen)
        trained.append((weight - LR * by_weight, bias - LR * slope.sum((0, 2, 3))))
    assert outcome.model is not None
    for found, k in ((outcome.model["weight"][:, :, 0, 0], 0), (outcome.model["bias"], 1)):
        wanted = (3 * trained[0][k] + 5 * trained[1][k]) / 8
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)
    for name, (x, _) in data.items():
        personal = outcome.personal[name]
        assert personal is not None
        np.testing.assert_allclose(
            personal["site_norm.statistics"], np.stack(statistics(x)), rtol=1e-9
        )
        np.testing.assert_allclose(personal["weight"], outcome.model["weight"])
    mean = np.mean([np.stack(statistics(x)) for x, _ in data.values()], axis=0)
    np.testing.assert_allclose(outcome.model["site_norm.statistics"], mean, rtol=1e-9)


def test_in_evaluation_mode_alone_the_network_normalises() -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 1))
    images = torch.randn(2, 1, 3, 3)
    plain = network(images)
    attach_site_norm(network)
    network.get_buffer("site_norm.statistics").copy_(torch.tensor([[1.0], [2.0]]))
    assert torch.equal(network.train()(images), plain)
    torch.testing.assert_close(network.eval()(images), network[0]((images - 1) / 2))


def test_images_that_are_z_scored_are_refused(tmp_path: Any) -> None:
    x = torch.randn(4, 1, 8, 8)
    x = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
    own = TensorDataset({"image": x, "label": (x[:, 0] > 0).long()})
    sites = [Site(name, own, own, own) for name in "AB"]
    with pytest.raises(ConfigError, match="the images have mean 0 and deviation 1 at every site"):
        simulate(
            FedRDN(), sites, nn.Conv2d(1, 2, 1), SegmentationTask(2, "ce"), rounds=1,
            output=tmp_path / "run",
        )  # fmt: skip
