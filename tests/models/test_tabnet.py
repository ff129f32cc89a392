import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from collegium.core.dataset import TensorDataset
from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.models.factory import build_model
from collegium.models.tabnet import TabNet, sparsemax
from collegium.tasks import SupervisedTask
from collegium.training.loop import LocalTraining, TrainingConfig


def rows(count: int, columns: int = 5) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count))


def tabnet(columns: int = 5, **params: object) -> TabNet:
    with ambient(1, "test"):
        network = build_model("tabnet", in_features=columns, out_features=2, **params)
    assert isinstance(network, TabNet)
    return network


def nearest_on_simplex(z: np.ndarray) -> np.ndarray:
    """The projection by a general solver, and not by the closed form."""
    found = minimize(
        lambda p: ((p - z) ** 2).sum(),
        np.full(len(z), 1 / len(z)),
        jac=lambda p: 2 * (p - z),
        bounds=[(0, 1)] * len(z),
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return np.asarray(found.x)


def threshold(z: np.ndarray) -> np.ndarray:
    """The projection by bisection for tau in sum max(z - tau, 0) = 1."""
    low, high = z.min() - 1, z.max()
    for _ in range(200):
        tau = (low + high) / 2
        low, high = (tau, high) if np.maximum(z - tau, 0).sum() > 1 else (low, tau)
    return np.asarray(np.maximum(z - low, 0))


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_sparsemax_is_the_nearest_point_of_the_simplex(scale: float) -> None:
    z = scale * rows(20, 6).double()
    found = sparsemax(z).numpy()
    for row, scores in zip(found, z.numpy(), strict=True):
        np.testing.assert_allclose(row, nearest_on_simplex(scores), atol=1e-6)


def test_sparsemax_of_large_and_of_equal_scores() -> None:
    assert sparsemax(torch.tensor([[1e6, 1e6, -1e6]])).tolist() == [[0.5, 0.5, 0.0]]
    assert sparsemax(torch.tensor([[3.0, 1.0]])).tolist() == [[1.0, 0.0]]
    assert sparsemax(torch.tensor([[0.5, 0.0]])).tolist() == [[0.75, 0.25]]
    assert bool(sparsemax(torch.tensor([[float("nan"), 0.0]])).isnan().all())


def test_the_gradient_of_sparsemax_is_that_of_its_support() -> None:
    z = torch.tensor([[0.9, 0.6, 0.3, -2.0]], dtype=torch.float64)
    support = np.array([1.0, 1.0, 1.0, 0.0])
    expected = np.diag(support) - np.outer(support, support) / 3
    jacobian = torch.autograd.functional.jacobian(sparsemax, z)
    np.testing.assert_allclose(jacobian[0, :, 0].numpy(), expected, atol=1e-12)


def forward(network: TabNet, x: torch.Tensor, entry: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and masks in training mode, the batch as one virtual batch, by hand."""
    w = {name: tensor.double().numpy() for name, tensor in network.state_dict().items()}

    def norm(values: np.ndarray, name: str) -> np.ndarray:
        unit = (values - values.mean(0)) / np.sqrt(values.var(0) + 1e-5)
        return np.asarray(unit * w[f"{name}.weight"] + w[f"{name}.bias"])

    def transform(values: np.ndarray, name: str) -> np.ndarray:
        layers = ["shared.0", f"{name}.own.0"]
        for number, layer in enumerate(layers):
            both = norm(values @ w[f"{layer}.weight"].T, f"{name}.norms.{number}")
            half = both.shape[1] // 2
            gated = both[:, :half] / (1 + np.exp(-both[:, half:]))
            values = (values + gated) * np.sqrt(0.5) if number else gated
        return values

    f = norm(x.double().numpy(), "norm")
    a = transform(f, "start")[:, 2:]
    prior = np.ones((len(f), max(entry) + 1))
    total, masks = np.zeros((len(f), 2)), []
    for step in range(2):
        h = norm(a @ w[f"attentions.{step}.0.weight"].T, f"attentions.{step}.1")
        masks.append(np.stack([threshold(row) for row in prior * h]))
        prior = prior * (1.5 - masks[-1])
        out = transform(masks[-1][:, entry] * f, f"transformers.{step}")
        total, a = total + np.maximum(out[:, :2], 0), out[:, 2:]
    return total @ w["head.weight"].T, np.stack(masks)


@pytest.mark.parametrize(
    ("groups", "entry"),
    [(None, [0, 1, 2, 3]), ([[3, 1]], [0, 1, 2, 1]), ([[2, 3], [0, 1]], [0, 0, 1, 1])],
)
def test_a_pass_is_the_papers_equations_by_hand(
    groups: list[list[int]] | None, entry: list[int]
) -> None:
    network = tabnet(
        4, groups=groups, n_d=2, n_a=3, n_steps=2, gamma=1.5, n_independent=1, n_shared=1
    )
    with torch.no_grad(), ambient(2, "test"):
        for name, parameter in network.named_parameters():
            if "norm" in name or name.startswith("attentions.0.1"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    x = rows(7, 4)
    logits, masks = forward(network, x, entry)
    np.testing.assert_allclose(network(x).detach().numpy(), logits, atol=1e-4)
    np.testing.assert_allclose(network.masks(x).detach().numpy(), masks, atol=1e-4)
    assert masks.shape == (2, 7, max(entry) + 1)


def test_masks_of_every_step_and_row_are_shares_that_sum_to_one() -> None:
    network = tabnet(n_steps=4).eval()
    masks = network.masks(rows(50)).detach().numpy()
    assert masks.shape == (4, 50, 5)
    np.testing.assert_allclose(masks.sum(-1), 1, atol=1e-5)
    assert masks.min() >= 0
    assert (masks == 0).any()


def test_a_column_is_not_used_again_where_gamma_is_one_and_it_was_used_whole() -> None:
    network = tabnet(2, gamma=1.0, n_steps=2).eval()
    with torch.no_grad():
        for attention in network.attentions:
            attention.get_submodule("0").get_parameter("weight").zero_()
            attention.get_submodule("1").get_parameter("bias").copy_(torch.tensor([5.0, 0.0]))
    masks = network.masks(rows(3, 2))
    # P[1] is 1 - (1, 0) = (0, 1), so that both scores of the second step are 0
    assert masks[:, 0].tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_the_head_is_the_last_map_and_norms_are_found_in_all_transformers() -> None:
    network = tabnet(n_steps=1, n_independent=1, n_shared=1)
    parts = find_parts(network)
    assert parts.head == parts.decoder == {"head.weight"}
    norms = [
        "norm", "start.norms.0", "start.norms.1", "attentions.0.1", "transformers.0.norms.0",
        "transformers.0.norms.1",
    ]  # fmt: skip
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert parts.norm == {f"{norm}.{tensor}" for norm in norms for tensor in tensors}
    linear = {
        "shared.0.weight", "start.own.0.weight", "attentions.0.0.weight",
        "transformers.0.own.0.weight",
    }  # fmt: skip
    assert parts.body == parts.encoder == parts.norm | linear


def test_the_network_has_the_size_that_its_widths_give() -> None:
    # per transformer two own layers 16 -> 32, and four norms of 32; shared 5 -> 32 and 16 -> 32
    transformer = 2 * 16 * 32 + 4 * 2 * 32
    attention = 8 * 5 + 2 * 5
    expected = 2 * 5 + (5 + 16) * 32 + 4 * transformer + 3 * attention + 8 * 2
    assert sum(p.numel() for p in tabnet().parameters()) == expected


@pytest.mark.parametrize("count", [1, 2, 8, 9, 33])
def test_every_number_of_rows_trains(count: int) -> None:
    network = tabnet(2, virtual_batch_size=8)
    network(rows(count, 2)).square().sum().backward()
    gradients = [p.grad for p in network.parameters()]
    assert all(g is not None and bool(g.isfinite().all()) for g in gradients)


def test_sites_of_33_and_20_rows_use_all_of_them_and_learn(cases: Path) -> None:
    folder = cases / "tab09_last_batch_of_one"
    values = json.loads((folder / "case.json").read_text())["right_outcome"]["values"]
    for site, batch, virtual in (("a", 32, 8), ("b", 1024, 128)):
        table = np.loadtxt(folder / f"site_{site}.csv", delimiter=",", skiprows=1, dtype=np.float32)
        data = TensorDataset(
            {"image": torch.from_numpy(table[:, :2]), "label": torch.from_numpy(table[:, 2]).long()}
        )
        assert len(data) == values[f"site_{site}_rows"]
        network = tabnet(2, virtual_batch_size=virtual)
        seen: list[int] = []
        start = Tensors(network.state_dict()).clone()
        network.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(len(x[0])))
        training = LocalTraining(
            network, SupervisedTask(nn.functional.cross_entropy), TrainingConfig(batch_size=batch)
        )
        after, _ = training.fit(start, data, seed=0, path=("test",), lr=1e-3)
        assert sum(seen) == len(table)
        assert not torch.equal(after["head.weight"], start["head.weight"])


def test_all_transformers_may_be_shared_or_none() -> None:
    for independent, shared in ((0, 1), (1, 0), (0, 3)):
        network = tabnet(n_independent=independent, n_shared=shared).eval()
        assert network(rows(3)).shape == (3, 2)
        assert len(network.shared) == shared


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"in_features": 0}, "tabnet.in_features: should be at least 1, not 0"),
        ({"gamma": 0.9}, "tabnet.gamma: should be at least 1, not 0.9"),
        ({"n_steps": 0}, "tabnet.n_steps: should be at least 1, not 0"),
        ({"n_independent": 0, "n_shared": 0}, "model.n_shared is 0"),
        ({"virtual_batch_size": 1}, "tabnet.virtual_batch_size: should be at least 2, not 1"),
        ({"momentum": 0.0}, "tabnet.momentum: should be above 0 and at most 1, not 0.0"),
        (
            {"groups": [[0, 5]]},
            "model.groups names column 5 of 5 for the model 'tabnet': name",
        ),
        ({"groups": [[0, 1], [1]]}, "model.groups names column 1 of 5"),
        ({"groups": [[-1]]}, "model.groups names column -1 of 5"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model("tabnet", **{"in_features": 5, "out_features": 2} | params)
