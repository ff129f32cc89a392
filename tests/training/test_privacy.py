"""Noise on the gradients of single cases and on updates, and what it costs."""

import math

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import nn

from collegium.core.dataset import TensorDataset
from collegium.core.model_parts import set_memory_format
from collegium.core.randomness import seed_of
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import ClassificationTask, SegmentationTask, SupervisedTask
from collegium.training.loop import LocalTraining, TrainingConfig
from collegium.training.privacy import (
    CaseNoise,
    Generators,
    PrivacyConfig,
    add_steps,
    epsilon_of,
    private_update,
)
from collegium.training.private_steps import check_case_gradients, check_statistics

HUGE = 1e9
PATH = ("client", "A", 1, "fit")


def noise_of(noise: float, max_grad_norm: float, rate: float) -> CaseNoise:
    return CaseNoise(noise, max_grad_norm, rate, Generators(5, PATH))


def fit(module, task, config, data, private):
    local = LocalTraining(module, task, config)
    return local.fit(local.current(), data, seed=5, path=PATH, lr=config.lr, private=private)


def rows(count: int, seed: int = 0) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=random)
    return TensorDataset({"image": inputs, "label": inputs @ torch.tensor([[1.0], [-2.0], [3.0]])})


def squares(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output - label) ** 2).mean()


def test_a_step_clips_each_case_and_adds_noise_as_computed_by_hand():
    """A linear model y = w x without bias: the gradient of case i is 2 (w x_i - y_i) x_i."""
    data, clip, noise, lr, batch = rows(10), 1.5, 0.7, 0.1, 4
    module = nn.Linear(3, 1, bias=False)
    w = module.weight.detach().clone()
    config = TrainingConfig(optimizer="sgd", lr=lr, batch_size=batch, local_steps=1)
    model, _ = fit(module, SupervisedTask(squares), config, data, noise_of(noise, clip, 0.4))

    def draws(purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed_of(5, *PATH, "privacy", purpose))

    taken = torch.rand(10, generator=draws("sample")) < 0.4
    assert 0 < taken.sum() < 10
    x, y = data.inputs["image"][taken], data.inputs["label"][taken]
    gradients = 2 * (x @ w.T - y) * x
    norms = gradients.norm(dim=1, keepdim=True)
    assert (norms > clip).any()
    clipped = (gradients * (clip / norms).clamp(max=1)).sum(0)
    noised = clipped + torch.normal(0.0, noise * clip, (1, 3), generator=draws("noise"))
    torch.testing.assert_close(model["weight"], w - lr * noised / batch, rtol=1e-5, atol=1e-6)


def test_without_noise_and_with_a_norm_that_clips_nothing_training_is_the_plain_one():
    data = rows(12)
    config = TrainingConfig(optimizer="adam", lr=0.05, batch_size=12, local_epochs=6)
    found = []
    for private in (None, noise_of(0.0, HUGE, 1.0)):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
        found.append(fit(module, SupervisedTask(squares), config, data, private))
    (plain, first), (clipped, second) = found
    assert first.steps == second.steps == 6
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    for name in plain:
        torch.testing.assert_close(plain[name], clipped[name], rtol=0, atol=1e-6)


def test_several_samples_of_a_case_are_clipped_together():
    """Each case gives two samples, which are the same: their mean is the gradient of one."""

    class Twice(TensorDataset):
        def batch(self, indices, rngs):
            return super().batch([i for i in indices for _ in range(2)], rngs)

    config = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=6, local_steps=3)
    found = []
    for kind in (TensorDataset, Twice):
        torch.manual_seed(1)
        data = kind(rows(9).inputs)
        model, _ = fit(
            nn.Linear(3, 1), SupervisedTask(squares), config, data, noise_of(1.0, 0.5, 2 / 3)
        )
        found.append(model)
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name])


def test_a_step_without_cases_is_noise_alone():
    module, config = (
        nn.Linear(3, 1, bias=False),
        TrainingConfig(optimizer="sgd", lr=1.0, batch_size=1, local_steps=1),
    )
    w = module.weight.detach().clone()
    model, progress = fit(
        module, SupervisedTask(squares), config, rows(5), noise_of(2.0, 0.5, 1e-9)
    )
    generator = torch.Generator().manual_seed(seed_of(5, *PATH, "privacy", "noise"))
    noise = torch.normal(0.0, 1.0, (1, 3), generator=generator)
    torch.testing.assert_close(model["weight"], w - noise / (1e-9 * 5), rtol=1e-4, atol=0)
    assert (progress.loss, progress.steps) == (0.0, 1)


def test_the_network_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    kept = {name: {*vars(layer)} for name, layer in module.named_modules()}
    fit(module, SupervisedTask(squares), TrainingConfig(lr=0.1), rows(9), noise_of(1, 1, 0.5))
    assert {name: {*vars(layer)} for name, layer in module.named_modules()} == kept
    assert isinstance(module[1], nn.ReLU)
    assert module[1].inplace
    assert all({*vars(p)} <= {"grad"} for p in module.parameters())
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in module.modules())


def test_epsilon_is_that_of_the_accountant_stepped_one_by_one():
    history: list = []
    for noise, rate, steps in [(1.1, 0.1, 30), (1.1, 0.1, 12), (0.8, 0.2, 5)]:
        history = add_steps(history, noise, rate, steps)
    assert history == [[1.1, 0.1, 42], [0.8, 0.2, 5]]
    accountant = RDPAccountant()
    for noise, rate, steps in [(1.1, 0.1, 42), (0.8, 0.2, 5)]:
        for _ in range(steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
    assert epsilon_of(history, 1e-5) == accountant.get_epsilon(1e-5)


def test_epsilon_of_full_batches_is_that_of_the_gaussian_mechanism():
    """With all cases in each step RDP(a) = T a / (2 s^2): Mironov, 2017, Corollary 3.

    Converted as in Balle et al., 2020, Theorem 21, and minimised over the same orders.
    """
    s, count, delta = 4.0, 20, 1e-5
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    wanted = min(
        count * a / (2 * s**2) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    )
    assert epsilon_of([[s, 1.0, count]], delta) == pytest.approx(wanted, rel=1e-9)


def test_steps_without_noise_cost_everything():
    assert epsilon_of([[0.0, 0.5, 3]], 1e-5) == math.inf
    assert epsilon_of([], 1e-5) == 0


def test_the_noise_for_an_epsilon_reaches_it():
    config = PrivacyConfig(target_epsilon=3.0, max_grad_norm=1.0)
    noise = config.noise_for(0.1, 200)
    assert 2.9 < epsilon_of([[noise, 0.1, 200]], 1e-5) <= 3.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "either noise_multiplier or target_epsilon"),
        ({"noise_multiplier": 1.0}, "give max_grad_norm"),
        ({"noise_multiplier": 1.0, "target_epsilon": 2.0, "max_grad_norm": 1.0}, "either"),
        ({"noise_multiplier": -1.0, "max_grad_norm": 1.0}, "noise_multiplier"),
        ({"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1.0}, "delta"),
        ({"target_epsilon": 1.0}, "give max_grad_norm"),
    ],
)
def test_settings_that_protect_nothing_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        PrivacyConfig(**settings)


def test_an_epsilon_that_no_noise_reaches_is_refused():
    config = PrivacyConfig(target_epsilon=1e-9, max_grad_norm=1.0, delta=1e-12)
    with pytest.raises(ConfigError, match="no noise reaches"):
        config.noise_for(1.0, 10)


def test_the_update_of_a_site_is_clipped_and_noised_as_computed_by_hand():
    start = Tensors({"a": torch.zeros(2), "b": torch.ones(1), "count": torch.tensor(3)})
    end = Tensors(
        {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([5.0]), "count": torch.tensor(4)}
    )
    generators = Generators(1, ("x",))
    clipped = private_update(start, end, ["a", "b"], noise=0.0, max_norm=1.0, generators=generators)
    torch.testing.assert_close(clipped["a"], torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(clipped["b"], torch.tensor([1.8]))
    assert clipped["count"] == 4
    noised = private_update(start, end, ["a", "b"], noise=0.5, max_norm=2.0, generators=generators)
    random = torch.Generator().manual_seed(seed_of(1, "x", "privacy", "noise"))
    first, second = torch.randn(2, generator=random), torch.randn(1, generator=random)
    torch.testing.assert_close(noised["a"], torch.tensor([1.2, 0.0]) + first)
    torch.testing.assert_close(noised["b"], torch.tensor([2.6]) + second)


def test_tied_weights_of_an_update_stay_tied():
    tied = torch.tensor([3.0, 4.0])
    start = Tensors({"a": torch.zeros(2), "b": torch.zeros(2)})
    found = private_update(
        start, Tensors({"a": tied, "b": tied}), ["a", "b"],
        noise=1.0, max_norm=2.5, generators=Generators(1, ()),
    )  # fmt: skip
    assert found["a"].equal(found["b"])
    plain = private_update(
        start, Tensors({"a": tied, "b": tied}), ["a", "b"],
        noise=0.0, max_norm=2.5, generators=Generators(1, ()),
    )  # fmt: skip
    torch.testing.assert_close(plain["a"], torch.tensor([1.5, 2.0]))


def images(count: int = 3, size: int = 16) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    image = torch.randn(count, 1, size, size, generator=random)
    return {"image": image, "label": (image[:, 0] > 0).long()}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("unet", {"channels": (4, 8), "norm": "instance", "num_res_units": 1}),
        ("iop_unet", {"base": 4, "norm": "group"}),
    ],
)
def test_networks_for_images_have_gradients_of_single_cases(name, settings):
    """`check_case_gradients` compares each with torch's of the case alone."""
    from collegium.core.quick_layers import use_quick_layers
    from collegium.models.factory import build_model

    module = build_model(name, in_channels=1, out_channels=2, **settings)
    use_quick_layers(module)
    check_statistics(module, images())
    check_case_gradients(module, SegmentationTask(), images())


@pytest.mark.parametrize(
    ("conv", "shape"), [(nn.Conv2d, (6, 8)), (nn.Conv3d, (4, 6, 8)), (nn.ConvTranspose2d, (6, 8))]
)
@pytest.mark.parametrize("choice", ["contiguous", "channels_last"])
def test_convolutions_have_gradients_of_single_cases_in_any_order_of_memory(conv, shape, choice):
    """Opacus alone reads inputs that are channels-last in the wrong order."""
    module = nn.Sequential(
        conv(2, 4, 3, padding=1), nn.ReLU(), conv(4, 3, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.LazyLinear(2),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    batch = {
        "image": torch.randn(3, 2, *shape, generator=generator), "label": torch.tensor([0, 1, 1])
    }  # fmt: skip
    module(batch["image"])
    set_memory_format(module, choice)
    check_case_gradients(module, ClassificationTask(2), batch)
    assert not any(layer._forward_pre_hooks for layer in module.modules())


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm2d(3), "BatchNorm2d, a batch normalisation, .* group or instance"),
        (nn.BatchNorm2d(3, affine=False), "BatchNorm2d"),
        (nn.InstanceNorm2d(3, affine=True, track_running_stats=True), "InstanceNorm2d"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "InstanceNorm2d|running_mean"),
    ],
)
def test_layers_that_learn_statistics_are_refused_by_name(layer, words):
    module = nn.Sequential(nn.Conv2d(1, 3, 3), layer, nn.Conv2d(3, 2, 1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigError, match=words):
        check_statistics(module, images())
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())


class Centred(nn.Module):
    """A network that takes the mean of the batch away, in no layer of a known type."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, rows):
        return self.layer(rows - rows.mean(0))


class Direct(nn.Module):
    """A network that uses the weights of a layer without calling it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, rows):
        return rows @ self.layer.weight.T + self.layer.bias


@pytest.mark.parametrize("kind", [Centred, Direct])
def test_networks_whose_gradients_are_not_those_of_single_cases_are_refused(kind):
    batch = {"image": torch.randn(3, 4), "label": torch.tensor([0, 1, 1])}
    with pytest.raises(ConfigError, match=r"training.privacy: .*layer"):
        check_case_gradients(kind(), ClassificationTask(2), batch)


def test_a_frozen_batch_normalisation_is_none_of_training():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[1].requires_grad_(False)
    batch = {"image": torch.randn(3, 4), "label": torch.tensor([0, 1, 1])}
    check_statistics(module, batch)
    check_case_gradients(module, ClassificationTask(2), batch)
