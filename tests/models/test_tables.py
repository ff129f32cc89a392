import math
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.core.seals import read_json
from collegium.errors import ConfigError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.models.factory import build_model
from collegium.models.tables import MLP, Logistic
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.run import Run
from collegium.runtime.server import ServerRuntime
from collegium.tasks import SupervisedTask
from collegium.testing.toy import TRAINING, toy_model, toy_site
from collegium.training.loop import LocalTraining


def rows(count: int, columns: int) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count))


def weights(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}


def test_logistic_regression_is_one_linear_map_and_all_of_it_is_head() -> None:
    with ambient(1, "test"):
        network = Logistic(4, 3)
    x, w = rows(5, 4), weights(network)
    expected = x.double().numpy() @ w["head.weight"].T + w["head.bias"]
    np.testing.assert_allclose(network(x).detach().numpy(), expected, atol=1e-6)
    parts = find_parts(network)
    assert parts.head == parts.decoder == parts.names == {"head.weight", "head.bias"}
    assert parts.body == parts.encoder == parts.norm == frozenset()


def test_the_perceptron_is_linear_normalised_and_rectified_layer_by_layer() -> None:
    with ambient(1, "test"):
        network = MLP(4, 2, hidden=[5, 3])
    x, w = rows(6, 4), weights(network)
    y = x.double().numpy()
    for layer in ("body.0", "body.4"):
        y = y @ w[f"{layer}.weight"].T
        y = np.maximum((y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5), 0)
    expected = y @ w["head.weight"].T + w["head.bias"]
    np.testing.assert_allclose(network(x).detach().numpy(), expected, atol=1e-5)


def test_the_perceptron_without_norm_has_biases_instead() -> None:
    with ambient(1, "test"):
        network = MLP(4, 2, hidden=[5], norm="none")
    x, w = rows(6, 4), weights(network)
    y = np.maximum(x.double().numpy() @ w["body.0.weight"].T + w["body.0.bias"], 0)
    expected = y @ w["head.weight"].T + w["head.bias"]
    np.testing.assert_allclose(network(x).detach().numpy(), expected, atol=1e-6)
    assert find_parts(network).norm == frozenset()


def test_the_parts_of_the_perceptron_are_its_last_layer_and_its_norms() -> None:
    parts = find_parts(MLP(4, 2, hidden=[5, 3]))
    assert parts.head == parts.decoder == {"head.weight", "head.bias"}
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert parts.norm == {f"body.{layer}.{tensor}" for layer in (1, 5) for tensor in tensors}
    assert parts.body == parts.encoder == parts.norm | {"body.0.weight", "body.4.weight"}


def test_dropout_acts_in_training_only() -> None:
    network, x = MLP(4, 2, dropout=0.5), rows(8, 4)
    with ambient(1, "test"):
        assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


def test_a_batch_of_one_row_trains() -> None:
    network = MLP(4, 2)
    network(rows(1, 4)).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("logistic", {"in_features": 0}, "logistic.in_features: should be at least 1, not 0"),
        ("logistic", {"out_features": 0}, "logistic.out_features: should be at least 1, not 0"),
        ("mlp", {"hidden": []}, r"mlp.hidden: should be at least 1 long, not \[\]"),
        ("mlp", {"norm": "layer"}, "mlp.norm: should be 'batch', 'population' or 'none'"),
        ("mlp", {"dropout": 1.0}, "mlp.dropout: should be at least 0 and below 1, not 1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    name: str, params: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(name, **{"in_features": 2, "out_features": 2} | params)


def test_columns_of_the_table_have_to_be_told() -> None:
    with pytest.raises(ConfigError, match="'mlp' needs the parameter 'in_features'"):
        build_model("mlp", out_features=2)


PRIVATE = {"fedavg": None, "fedbn": "norm", "fedper": "head", "fedrep": "head"}
"""By algorithm the part that it keeps at the sites."""


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        *product(["mlp", "tabnet"], PRIVATE),
        ("logistic", "fedavg"),  # it is all head, and has no norm
        ("logistic", "fedbn"),
    ],
)
def test_a_federation_moves_what_it_shares_of_a_network(
    name: str, algorithm: str, tmp_path: Path
) -> None:
    private = PRIVATE[algorithm]
    network = partial(build_model, name, in_features=3, out_features=1)
    initial = partial(toy_model, network=network)
    method, task = ALGORITHMS.load(algorithm)(), SupervisedTask(nn.functional.mse_loss)
    clients = {
        site: ClientRuntime(
            toy_site(site), method, LocalTraining(network(), task, TRAINING), seed=7,
            make_model=partial(initial, 0), root=tmp_path / site,
        )
        for site in ("A", "B", "C")
    }  # fmt: skip
    server = ServerRuntime(
        method, tuple(clients), initial, find_parts(network()), InProcess(lambda: clients),
        tmp_path / "server", seed=7,
    )  # fmt: skip
    Run(server, 2, "negative_loss").execute()
    scores = read_json(tmp_path / "server" / "test.json")
    rows = [row for site in scores.values() for cases in site.values() for row in cases]
    assert set(scores) == set(clients)
    assert rows
    assert all(math.isfinite(row["negative_loss"]) for row in rows)
    parts, before, after = find_parts(network()), initial(0), server.state["model"]
    moved = {n for n in parts.trainable if not torch.equal(before[n], after[n])}
    assert moved == parts.trainable - (getattr(parts, private) if private else set())
