"""Local training of several sites in one loop, beside the loop of each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collegium.core.dataset import TensorDataset
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DivergedError
from collegium.models.factory import build_model
from collegium.models.ghost import GhostBatchNorm
from collegium.tasks import SupervisedTask
from collegium.training.loop import Fit, LocalTraining, TrainingConfig
from collegium.training.together import check_together, clip_each, fit_all

SITES = 3


class Tied(nn.Module):
    """A network in which two layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.second.weight = self.first.weight

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.head(self.second(torch.tanh(self.first(features))))
        return output


class FixedBody(nn.Module):
    """A network whose body is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        for parameter in (*self.body.parameters(), *self.norm.parameters()):
            parameter.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.body(features)))
        return output


def mlp(**options: Any) -> nn.Module:
    return build_model("mlp", in_features=5, out_features=2, hidden=[8, 4], **options)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: build_model("logistic", in_features=5, out_features=2),
    "mlp without norm": lambda: mlp(norm="none"),
    "mlp": mlp,
    "tabnet": lambda: build_model("tabnet", in_features=5, out_features=2),
    "batch norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)
    ),
    "ghost batch norm": lambda: nn.Sequential(
        nn.Linear(5, 6), GhostBatchNorm(6, virtual_batch_size=4), nn.Tanh(), nn.Linear(6, 2)
    ),
    "tied": Tied,
    "fixed body": FixedBody,
}

RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    "clipped": {"optimizer": "sgd", "lr": 0.1, "clip_norm": 0.05},
}


def calls(
    network: nn.Module,
    counts: tuple[int, ...] = (20, 20, 20),
    state: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    **recipe: Any,
) -> list[Fit]:
    """The fits of sites that start from the same model, each with its own data."""
    config = TrainingConfig(**{"batch_size": 8, "local_steps": 6, **recipe})
    local = LocalTraining(network.to(dtype), SupervisedTask(nn.functional.cross_entropy), config)
    random, fits = torch.Generator().manual_seed(3), []
    for site, count in enumerate(counts):
        data = TensorDataset({
            "image": torch.randn(count, 5, generator=random).to(dtype),
            "label": torch.randint(2, (count,), generator=random),
        })  # fmt: skip
        model, kept = Tensors(network.state_dict()).clone(), None if state is None else dict(state)
        fits.append(Fit(local, model, data, 0, ("site", site), config.lr, None, None, kept))
    return fits


def distance(first: Tensors, second: Tensors) -> float:
    assert list(first) == list(second)
    return max(float((first[n].double() - second[n].double()).abs().max()) for n in first)


def models(fits: list[Fit]) -> list[Tensors]:
    found = []
    for outcome in fit_all(fits):
        assert not isinstance(outcome, Exception), outcome
        found.append(outcome[0])
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_sites_together_train_as_each_alone_up_to_rounding(name, recipe):
    """In double precision; statistics of normalisation layers are part of the model.

    Adam divides gradients of biases before a normalisation, which are 0 but for rounding, by their
    own size, and attention divides by small variances: both enlarge what is rounded otherwise.
    """
    torch.manual_seed(0)
    fits = calls(NETWORKS[name](), **RECIPES[recipe])
    for fit, outcome in zip(fits, fit_all(fits), strict=True):
        assert not isinstance(outcome, Exception), outcome
        (model, progress), (expected, as_expected) = outcome, fit.alone()
        assert distance(model, expected) < 1e-9
        assert progress.steps == as_expected.steps == 6
        assert progress.loss == pytest.approx(as_expected.loss, rel=1e-9)
        assert distance(model, fit.model) > 1e-4


def test_single_precision_differs_by_rounding():
    torch.manual_seed(0)
    fits = calls(mlp(), dtype=torch.float32, **RECIPES["sgd"])
    for fit, model in zip(fits, models(fits), strict=True):
        assert distance(model, fit.alone()[0]) < 1e-6


def test_the_same_fits_give_the_same_bits():
    torch.manual_seed(0)
    fits = calls(mlp(), dtype=torch.float32)
    first, second = models(fits), models(fits)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(first, second, strict=True) for n in a)


@pytest.mark.parametrize("recipe", ["momentum", "adam"])
def test_states_of_optimisers_are_kept_for_every_site(recipe):
    torch.manual_seed(0)
    network = mlp(norm="none")
    together, apart = (calls(network, state={}, **RECIPES[recipe]) for _ in range(2))
    for _ in range(2):
        found = models(together)
        expected = [fit.alone()[0] for fit in apart]
        assert max(map(distance, found, expected)) < 1e-12
        for ours, theirs in zip(together, apart, strict=True):
            assert ours.optimizer_state
            assert theirs.optimizer_state
            assert ours.optimizer_state.keys() == theirs.optimizer_state.keys()
            for name, tensors in ours.optimizer_state.items():
                assert distance(tensors, theirs.optimizer_state[name]) < 1e-12


def test_sites_whose_optimisers_took_different_numbers_of_steps_train_apart():
    fits = calls(mlp(), state={}, dtype=torch.float32)
    fits[0].alone()  # its state has six steps from now on
    alone = replace(fits[0], optimizer_state=dict(fits[0].optimizer_state or {})).alone()[0]
    found = models(fits)[0]
    assert all(torch.equal(found[name], alone[name]) for name in alone)


@pytest.mark.parametrize("counts", [(20, 12, 5), (9, 20, 9)])
def test_only_batches_of_equal_sizes_share_a_loop(counts):
    """A site with other batches than all the others has the bits of its own loop."""
    torch.manual_seed(0)
    fits = calls(mlp(), counts, local_steps=None, local_epochs=2, dtype=torch.float32)
    found, alone = models(fits), fits[1].alone()[0]
    assert all(torch.equal(found[1][name], alone[name]) for name in alone)
    assert max(map(distance, found, [fit.alone()[0] for fit in fits])) < 1e-4


def test_single_examples_are_normalised_by_the_running_statistics():
    torch.manual_seed(0)
    fits = calls(NETWORKS["batch norm"](), (1, 1, 1), local_steps=None, **RECIPES["sgd"])
    for fit, model in zip(fits, models(fits), strict=True):
        assert distance(model, fit.alone()[0]) < 1e-12
        assert torch.equal(model["2.running_mean"], fit.model["2.running_mean"])


def test_a_site_that_diverges_leaves_the_others_alone():
    torch.manual_seed(0)
    fits = calls(mlp(norm="none"), **RECIPES["sgd"])
    data = fits[1].data.batch(range(20), ())
    data["image"].fill_(float("inf"))
    fits[1] = replace(fits[1], data=TensorDataset(data))
    first, second, third = fit_all(fits)
    assert isinstance(second, DivergedError)
    assert "at step 1 (lr 0.1)" in str(second)
    for fit, outcome in ((fits[0], first), (fits[2], third)):
        assert not isinstance(outcome, Exception), outcome
        assert distance(outcome[0], fit.alone()[0]) < 1e-12


def test_a_wrong_model_fails_at_its_site_alone():
    fits = calls(mlp())
    fits[2] = replace(fits[2], model=Tensors())
    outcomes = fit_all(fits)
    assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, False, True]


def test_gradients_are_clipped_site_by_site():
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 2, 2))]
    parameters[0].grad = torch.tensor([[3.0, 0, 0], [0.3, 0, 0]])
    parameters[1].grad = torch.tensor([[[4.0, 0], [0, 0]], [[0, 0.4], [0, 0]]])
    clip_each(parameters, 1.0)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([[0.6, 0, 0], [0.3, 0, 0]]))
    torch.testing.assert_close(
        parameters[1].grad, torch.tensor([[[0.8, 0], [0, 0]], [[0, 0.4], [0, 0]]])
    )


@pytest.mark.parametrize(
    ("network", "recipe", "says"),
    [
        (lambda: nn.Conv2d(1, 1, 3), {}, "has convolutions, which are slower together"),
        (lambda: mlp(dropout=0.5), {}, "has dropout, whose draws would be others"),
        (mlp, {"precision": "bf16"}, "set training.precision to fp32"),
        (mlp, {"compile": "on"}, "training.compile to off"),
    ],
)
def test_what_cannot_be_done_together_is_refused(network, recipe, says):
    with pytest.raises(ConfigError, match=says):
        check_together(network(), TrainingConfig(**recipe))


def test_a_network_that_draws_is_refused_by_every_fit():
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name for it)
            return super().forward(input + torch.rand_like(input))

    for outcome in fit_all(calls(Noisy(5, 2))):
        assert isinstance(outcome, ConfigError)
        assert "the sites cannot train together (vmap: " in str(outcome)
