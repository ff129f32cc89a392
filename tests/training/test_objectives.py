from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collegium.core.dataset import Batch, TensorDataset
from collegium.core.tensors import Tensors
from collegium.tasks import SupervisedTask
from collegium.training.loop import LocalTraining, TrainingConfig
from collegium.training.objectives import LiveNetwork


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
    ).double()


IMAGES = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return network()


def live(module: nn.Module, **options: Any) -> LiveNetwork:
    task = SupervisedTask(nn.functional.mse_loss)
    return LiveNetwork(module, task, dict(module.named_parameters()), lr=0.1, **options)


def in_numpy(module: nn.Module, model: dict[str, Tensor] | None = None) -> tuple[Any, Any]:
    """Prediction and features in evaluation mode."""
    w = {n: t.detach().numpy() for n, t in (model or module.state_dict()).items()}
    z = IMAGES.numpy() @ w["0.weight"].T + w["0.bias"]
    z = (z - w["1.running_mean"]) / np.sqrt(w["1.running_var"] + 1e-5)
    features = z * w["1.weight"] + w["1.bias"]
    return features @ w["3.weight"].T + w["3.bias"], features


def test_a_forward_pass_gives_what_enters_the_head(module: nn.Module) -> None:
    prediction, features = in_numpy(module.eval())
    output = live(module).forward(IMAGES)
    np.testing.assert_allclose(output.prediction.detach(), prediction)
    np.testing.assert_allclose(output.features.detach(), features)


def test_statistics_are_learned_unless_told_otherwise(module: nn.Module) -> None:
    before = {n: b.clone() for n, b in module.named_buffers()}
    found = live(module)
    found.forward(IMAGES, learn_statistics=False)
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())
    found.forward(IMAGES)
    first = module[0](IMAGES).mean(0)  # type: ignore[index]
    np.testing.assert_allclose(module[1].running_mean, 0.1 * first.detach())  # type: ignore[index]
    assert int(dict(module.named_buffers())["1.num_batches_tracked"]) == 1


def test_other_parameters_take_the_place_of_the_networks_own(module: nn.Module) -> None:
    found = live(module.eval())
    doubled = 2 * found.parameters
    prediction, _ = in_numpy(module, dict(module.state_dict()) | dict(doubled))
    np.testing.assert_allclose(found.forward(IMAGES, doubled).prediction.detach(), prediction)
    np.testing.assert_allclose(found.forward(IMAGES).prediction.detach(), in_numpy(module)[0])


def test_the_graph_reaches_through_parameters_that_are_functions(module: nn.Module) -> None:
    """d/dw f(3 w) = 3 f'(3 w)."""
    found = live(module.eval())
    found.forward(IMAGES, 3 * found.parameters).prediction.sum().backward()
    through = module[3].bias.grad.clone()  # type: ignore[index]
    np.testing.assert_allclose(through, [18, 18])  # the bias counts for six examples


def test_a_reference_is_in_evaluation_mode_and_leaves_no_trace(module: nn.Module) -> None:
    module.train()
    module[1].eval()  # type: ignore[index]
    before = {n: t.clone() for n, t in module.state_dict().items()}
    other = Tensors(module.state_dict()).map(lambda t: t + 1 if t.is_floating_point() else t)
    output = live(module).reference(IMAGES, other)
    prediction, features = in_numpy(module, dict(other))
    np.testing.assert_allclose(output.prediction, prediction)
    np.testing.assert_allclose(output.features, features)
    assert not output.features.requires_grad
    assert [layer.training for layer in module.children()] == [True, False, True, True]
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_autocast_gives_float32_computed_in_bfloat16() -> None:
    module = nn.Linear(3, 2)
    found = live(module, precision="bf16").forward(IMAGES.float())
    assert found.prediction.dtype == found.features.dtype == torch.float32
    exact = module(IMAGES.float())
    assert not torch.equal(found.prediction, exact)
    torch.testing.assert_close(found.prediction, exact, atol=0.05, rtol=0.05)


def fit(objective: Callable[[LiveNetwork, Batch], Any] | None) -> tuple[Tensors, float]:
    """One step of gradient descent on one weight w = 1, with the loss (2 w)^2."""
    module = nn.Linear(1, 1, bias=False).double()
    config = TrainingConfig(optimizer="sgd", lr=0.1, batch_size=4)
    local = LocalTraining(module, SupervisedTask(nn.functional.mse_loss), config)
    data = TensorDataset(
        {
            "image": torch.full((4, 1), 2.0, dtype=torch.float64),
            "label": torch.zeros(4, 1, dtype=torch.float64),
        }
    )
    start = Tensors({"weight": torch.ones(1, 1, dtype=torch.float64)})
    model, progress = local.fit(start, data, seed=0, path=("x",), lr=0.1, objective=objective)
    return model, progress.loss


def test_the_sum_is_minimised_and_the_loss_is_reported() -> None:
    def objective(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = network.loss(network.forward(batch["image"]), batch)
        return loss, 3 * network.parameters["weight"].sum()

    model, loss = fit(objective)
    assert loss == pytest.approx(4)
    assert float(model["weight"]) == pytest.approx(1 - 0.1 * (8 + 3))


def test_an_objective_may_add_nothing() -> None:
    model, _ = fit(
        lambda network, batch: (network.loss(network.forward(batch["image"]), batch), None)
    )
    plain, _ = fit(None)
    assert torch.equal(model["weight"], plain["weight"])
    assert float(plain["weight"]) == pytest.approx(0.2)


def test_an_objective_knows_the_learning_rate_of_the_round() -> None:
    seen = []

    def objective(network: LiveNetwork, batch: Batch) -> tuple[Tensor, None]:
        seen.append(network.lr)
        return network.loss(network.forward(batch["image"]), batch), None

    fit(objective)
    assert seen == [0.1]
