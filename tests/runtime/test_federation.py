"""Sites whose masks annotate some of the classes only: whose loss is which, and what is refused."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.local import Local
from collegium.algorithms.pooled import Pooled
from collegium.core.algorithm import Algorithm
from collegium.core.dataset import TensorDataset
from collegium.data.site import Site
from collegium.errors import CheckpointError, ConfigError
from collegium.runtime.simulation import Simulated, simulate
from collegium.tasks import SegmentationTask, SupervisedTask
from collegium.training.loop import TrainingConfig

CLASSES = ("background", "liver", "spleen", "kidney")
SIZES, LR = {"a": 3, "b": 5, "c": 4}, 0.5
LABELLED: dict[str, Any] = {"a": ("liver",), "b": ("kidney", "spleen"), "c": None}
RECIPE = TrainingConfig(optimizer="sgd", lr=LR, batch_size=100)


def data(site: str) -> tuple[Any, Any]:
    """Images (n, 2, 4, 4), and labels that hold what the site annotates."""
    rng = np.random.default_rng(ord(site))
    x, y = rng.normal(size=(SIZES[site], 2, 4, 4)), rng.integers(4, size=(SIZES[site], 4, 4))
    known = [CLASSES.index(name) for name in LABELLED[site] or CLASSES]
    return x, np.where(np.isin(y, known), y, 0)


def sites(**labelled: Any) -> list[Site]:
    found = []
    for name in SIZES:
        x, y = data(name)
        own = TensorDataset({"image": torch.tensor(x), "label": torch.tensor(y)})
        found.append(Site(name, own, own, own, labelled=(LABELLED | labelled)[name]))
    return found


def run(network: nn.Module, algorithm: Algorithm | None = None, **options: Any) -> Simulated:
    named = {"rounds": 1, "training": RECIPE, "task": SegmentationTask(CLASSES, "ce"), **options}
    return simulate(algorithm or FedAvg(), named.pop("sites", None) or sites(), network, **named)


def trained(site: str, weight: Any, bias: Any) -> tuple[Any, Any]:
    """One step of gradient descent on the mean of -log of the summed probability of a pixel."""
    x, y = data(site)
    known = [CLASSES.index(name) for name in LABELLED[site] or CLASSES[1:]]
    z = np.einsum("oc,bchw->bohw", weight, x) + bias[:, None, None]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    slope = p.copy()
    group = [c for c in range(4) if c not in known]  # the background and what is not annotated
    for c in range(4):
        mine = (y == c) if c in known else ~np.isin(y, known)
        share = 1 if c in known else p[:, c] / p[:, group].sum(1)
        slope[:, c] -= mine * share
    slope /= y.size
    by_weight = np.einsum("bohw,bchw->oc", slope, x)
    return weight - LR * by_weight, bias - LR * slope.sum((0, 2, 3))


def test_every_site_trains_on_the_loss_of_what_it_annotates() -> None:
    network = nn.Conv2d(2, 4, 1).double()
    assert network.bias is not None
    weight, bias = network.weight.detach().numpy()[:, :, 0, 0], network.bias.detach().numpy()
    own = {name: trained(name, weight, bias) for name in SIZES}
    found = run(network)
    assert found.model is not None
    for tensor, k in ((found.model["weight"][:, :, 0, 0], 0), (found.model["bias"], 1)):
        mean = sum(SIZES[name] * own[name][k] for name in SIZES) / 12
        np.testing.assert_allclose(tensor, mean, rtol=1e-6, atol=1e-9)
    alone = run(network, Local())
    for name in SIZES:
        np.testing.assert_allclose(
            alone.personal[name]["weight"][:, :, 0, 0], own[name][0], rtol=1e-6, atol=1e-9
        )


def test_every_site_has_scores_of_what_it_annotates() -> None:
    rows = {
        site: kinds["global"] for site, kinds in run(nn.Conv2d(2, 4, 1).double()).scores.items()
    }
    for site, labelled in LABELLED.items():
        for name in CLASSES[1:]:
            known = labelled is None or name in labelled
            assert {row[f"dice_{name}"] is None for row in rows[site]} == {not known}
        for row in rows[site]:
            own = [row[f"dice_{name}"] for name in labelled or CLASSES[1:]]
            assert row["dice"] == pytest.approx(np.mean(own))


def test_it_is_said_once_which_sites_have_the_marginal_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        run(nn.Conv2d(2, 4, 1).double(), rounds=2)
    (said,) = [text for text in caplog.messages if "marginal" in text]
    assert said.startswith(
        "masks annotate some classes only (a: liver; b: kidney, spleen): the loss there is the "
        "marginal loss"
    )
    caplog.clear()
    whole = dict.fromkeys(SIZES, CLASSES[1:])
    with caplog.at_level(logging.WARNING):
        run(nn.Conv2d(2, 4, 1).double(), sites=sites(**whole))
    assert caplog.messages == []


def test_labelled_classes_that_are_all_leave_the_bits_as_they_are() -> None:
    network = nn.Conv2d(2, 4, 1).double()
    found = run(network, sites=sites(**dict.fromkeys(SIZES, CLASSES[1:]))).model
    plain = run(network, sites=sites(**dict.fromkeys(SIZES))).model
    assert found is not None
    assert plain is not None
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    some = run(network).model
    assert some is not None
    assert not torch.equal(some["bias"], plain["bias"])


def test_sites_that_annotate_something_else_do_not_train_in_one_loop_by_one_loss() -> None:
    """A linear layer over the channels has no convolution, so that sites may train together."""

    class Pixels(nn.Linear):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return super().forward(image.movedim(1, -1)).movedim(-1, 1)

    network = Pixels(2, 4).double()
    recipe = TrainingConfig(optimizer="sgd", lr=LR, batch_size=3, local_steps=2)  # equal shapes
    apart = run(network, training=recipe).model
    together = run(network, training=recipe, together=True).model
    assert apart is not None
    assert together is not None
    for name in apart:
        torch.testing.assert_close(apart[name], together[name], rtol=1e-9, atol=1e-12)


def test_what_has_no_loss_for_some_of_the_classes_is_refused() -> None:
    network = nn.Conv2d(2, 4, 1).double()
    with pytest.raises(ConfigError, match="no site that trains has labelled kidney: nothing can"):
        run(network, sites=sites(b=("spleen",), c=("liver",)))
    with pytest.raises(ConfigError, match="Pooled has one loss for the data of all sites, and"):
        run(network, Pooled())
    task = SupervisedTask(nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="the loss of SupervisedTask has no form for that"):
        run(network, task=task)
    with pytest.raises(ConfigError, match="site 'a': labelled names 'lung', which is no structure"):
        run(network, sites=sites(a=("lung",)))


def test_a_run_with_other_labelled_classes_is_not_continued(tmp_path: Any) -> None:
    network = nn.Conv2d(2, 4, 1).double()
    run(network, output=tmp_path)
    with pytest.raises(CheckpointError, match=r"holds a run with other settings \(labelled\)"):
        run(network, sites=sites(a=("liver", "spleen")), output=tmp_path)
