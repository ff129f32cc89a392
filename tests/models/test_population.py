from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collegium.adaptation.base import Adapter
from collegium.adaptation.dsbn import DSBN
from collegium.adaptation.tent import Tent
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.core.dataset import TensorDataset
from collegium.core.model_parts import find_parts, undecayed
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.models.factory import build_model
from collegium.models.population import PopulationNorm
from collegium.runtime.federation import initial_model
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.training.loop import Fit, LocalTraining, TrainingConfig
from collegium.training.together import fit_all

NAMES = {"mean", "log_variance", "weight", "bias"}


def layer(**values: float) -> PopulationNorm:
    norm = PopulationNorm(1).double()
    with torch.no_grad():
        for name, value in values.items():
            norm.get_parameter(name).fill_(value)
    return norm


@pytest.mark.parametrize("training", [True, False])
def test_reference_values(newer_golden: Any, training: bool) -> None:
    case = newer_golden["pn"]
    norm = layer(
        mean=case["mu"], log_variance=np.log(case["var"]), weight=case["gamma"], bias=case["beta"]
    ).train(training)
    x = torch.tensor(case["x"], dtype=torch.float64).reshape(3, 1, 1, 1)
    y = norm(x)
    np.testing.assert_allclose(y.detach().flatten(), case["y"], rtol=1e-6)
    y.sum().backward()
    wanted = case["grad_of_sum_y"]
    by_logarithm = {
        "mean": wanted["mu"],
        "log_variance": wanted["var"] * case["var"],  # d var / d log var = var
        "weight": wanted["gamma"],
        "bias": wanted["beta"],
    }
    found = {name: float(p.grad) for name, p in norm.named_parameters() if p.grad is not None}
    assert found.keys() == NAMES
    for name, value in by_logarithm.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_it_is_the_affine_map_of_its_channel(newer_golden: Any) -> None:
    case = newer_golden["pn"]
    norm = layer(
        mean=case["mu"], log_variance=np.log(case["var"]), weight=case["gamma"], bias=case["beta"]
    )
    x, affine = torch.linspace(-3, 3, 7).double()[:, None], case["equivalent_affine"]
    expected = affine["scale"] * x + affine["shift"]
    torch.testing.assert_close(norm(x).detach(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 6), (4, 3, 2, 5, 6)])
def test_channels_are_the_second_axis(shape: tuple[int, ...]) -> None:
    norm, x = PopulationNorm(3), torch.rand(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.mean.copy_(torch.tensor([0.0, 1.0, 2.0]))
        norm.log_variance.copy_(torch.tensor([0.0, 1.0, -1.0]))
    for channel, (mean, log) in enumerate([(0, 0), (1, 1), (2, -1)]):
        expected = (x[:, channel] - mean) / np.sqrt(np.exp(log) + 1e-5)
        torch.testing.assert_close(norm(x)[:, channel].detach(), expected)


def test_a_step_that_would_make_a_variance_negative_leaves_it_positive() -> None:
    norm = layer(log_variance=-50.0)
    assert torch.isfinite(norm(torch.ones(2, 1).double())).all()


def test_all_four_are_parameters_with_the_role_of_a_norm_and_there_are_no_statistics() -> None:
    parts = find_parts(nn.Sequential(nn.Linear(3, 3), PopulationNorm(3), nn.Linear(3, 1)))
    assert parts.norm == {f"1.{name}" for name in NAMES} <= parts.trainable
    assert parts.norm_statistics == frozenset()


def test_a_class_that_names_what_is_not_decayed_is_heeded_at_any_depth() -> None:
    network = nn.Sequential(nn.Sequential(PopulationNorm(3)), nn.Linear(3, 1))
    assert undecayed(network) == {"0.0.mean", "0.0.log_variance"}
    assert undecayed(PopulationNorm(3)) == {"mean", "log_variance"}


@pytest.mark.parametrize(
    ("name", "params", "count"),
    [
        ("unet", {"channels": [4, 8]}, 3),
        ("unet", {"spatial_dims": 3, "channels": [4, 8]}, 3),
        ("iop_unet", {"base": 2}, 18),
        ("densenet", {"blocks": [1, 1]}, 6),
    ],
)
def test_networks_have_it_where_the_setting_says_so(
    name: str, params: dict[str, Any], count: int
) -> None:
    network = build_model(name, in_channels=1, norm="population", **params)
    build_model(name, in_channels=1, norm="population", **params)  # MONAI knows it by now
    kinds = (nn.modules.batchnorm._NormBase, PopulationNorm)
    norms = [layer for layer in network.modules() if isinstance(layer, kinds)]
    assert [*map(type, norms)] == [PopulationNorm] * count
    images = torch.rand(1, 1, *[16] * params.get("spatial_dims", 2))
    network(images).sum().backward()  # one example is enough
    assert all(p.grad is not None for p in network.parameters())


def mlp() -> nn.Module:
    return build_model("mlp", in_features=3, out_features=1, hidden=[4], norm="population")


def site(name: str, shift: float) -> Site:
    rng = torch.Generator().manual_seed(int(shift * 10))
    images, labels = torch.randn(8, 3, generator=rng), torch.randn(8, 1, generator=rng)
    data = TensorDataset({"image": images + shift, "label": labels})
    return Site(name, data, data, data)


def loss(output: Tensor, label: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, label)


SITES = [site("a", 0.0), site("b", 2.0)]
ONE_STEP = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=8)


def test_fedavg_averages_all_four_parameters() -> None:
    task = SupervisedTask(loss)
    model = simulate(FedAvg(), SITES, mlp, task, rounds=1, training=ONE_STEP, seed=3).model
    assert model is not None
    network = mlp()
    network.load_state_dict(dict(initial_model(mlp, 3)))
    batches = [each.train.batch(range(8), [torch.Generator()] * 8) for each in SITES]
    pooled = {key: torch.cat([batch[key] for batch in batches]) for key in ("image", "label")}
    loss(network(pooled["image"]), pooled["label"]).backward()  # sites of equal size, one step each
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(model[name], parameter.detach() - 0.1 * parameter.grad)
        assert parameter.grad.any()


def test_fedbn_keeps_all_four_at_home() -> None:
    task = SupervisedTask(loss)
    simulated = simulate(FedBN(), SITES, mlp, task, rounds=1, training=ONE_STEP, seed=3)
    a, b = (simulated.personal[name] for name in ("a", "b"))
    differing = {name for name in a if not torch.equal(a[name], b[name])}
    assert differing == {f"body.1.{name}" for name in NAMES}


def local(weight_decay: float) -> LocalTraining:
    torch.manual_seed(0)
    config, network = replace(ONE_STEP, weight_decay=weight_decay), mlp()
    with torch.no_grad():
        for name in ("mean", "log_variance"):
            network.get_parameter(f"body.1.{name}").fill_(0.4)
    return LocalTraining(network, SupervisedTask(loss), config)


def trained(training: LocalTraining, *, together: bool) -> Tensors:
    model, path = training.current(), ("p",)
    calls = [
        Fit(training, model, site(name, shift).train, 0, path, 0.1, 1, None, None)
        for name, shift in (("a", 0.0), ("b", 2.0))
    ]
    outcome = fit_all(calls)[0] if together else calls[0].alone()
    assert not isinstance(outcome, Exception)
    return outcome[0]


@pytest.mark.parametrize("together", [False, True])
def test_weight_decay_leaves_mean_and_variance_alone(together: bool) -> None:
    start = local(0.0).current()
    plain, decayed = (trained(local(d), together=together) for d in (0.0, 0.5))
    for name, tensor in plain.items():
        exempt = name in {"body.1.mean", "body.1.log_variance"}
        expected = tensor if exempt else tensor - 0.1 * 0.5 * start[name]  # one step of SGD
        torch.testing.assert_close(decayed[name], expected)
        assert exempt or not start[name].any() or not torch.equal(tensor, decayed[name])


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_the_optimizer_has_a_second_group_only_where_something_is_exempt(kind: Any) -> None:
    config, network = TrainingConfig(optimizer=kind, weight_decay=0.1), mlp()
    named = dict(network.named_parameters())
    groups = config.build_optimizer(named, 0.1, undecayed(network)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(5, 0.1), (2, 0)]
    (group,) = config.build_optimizer(named, 0.1).param_groups
    assert len(group["params"]) == 7


@pytest.mark.parametrize("adapter", [Tent(), DSBN()])
def test_adapters_of_batch_normalisation_refuse_it(adapter: Adapter) -> None:
    with pytest.raises(ConfigError, match="adapts batch normalisation, and"):
        adapter.check(build_model("iop_unet", in_channels=1, base=2, norm="population"))
