from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedbn import FedBN
from collegium.algorithms.fedper import FedPer
from collegium.algorithms.ifca import IFCA
from collegium.algorithms.scaffold import Scaffold
from collegium.core.algorithm import Algorithm, NetworkBuilder
from collegium.core.dataset import TensorDataset
from collegium.core.tensors import Tensors
from collegium.diagnostics.drift.recording import FeatureExtractor, RecordingTransport
from collegium.errors import ConfigError
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.requests import Transport
from collegium.tasks import SegmentationTask, SupervisedTask
from collegium.testing.toy import SIZES, ToyFederation, toy_model, toy_network

Taken = dict[tuple[int, str], tuple[Tensors, Tensors]]


def probed(algorithm: Algorithm, root: Path, rounds: int = 3) -> tuple[ToyFederation, Taken]:
    """Run a toy federation under a probe; return it and what the probe took."""
    taken: Taken = {}

    def transport(federation: ToyFederation) -> Transport:
        clients: Mapping[str, Any] = federation.clients()
        return RecordingTransport(
            InProcess(lambda: clients),
            toy_model(0, network=NetworkBuilder(toy_network, algorithm)),
            personal=lambda site, message: algorithm.personal_model(clients[site], message),
            take=lambda number, site, *models: taken.update({(number, site): models}),
        )

    return ToyFederation(algorithm, root, transport).run(rounds), taken


def numbers(model: Mapping[str, Any]) -> dict[str, Any]:
    """The floating-point tensors as float64."""
    return {n: t.double().numpy() for n, t in model.items() if t.is_floating_point()}


def mean_update(taken: Taken, number: int, weights: Mapping[str, float]) -> dict[str, Any]:
    """The mean of local minus global over the sites, by hand."""
    total = sum(weights.values())
    updates = {
        site: {
            name: value - numbers(taken[number, site][0])[name]
            for name, value in numbers(taken[number, site][1]).items()
        }
        for site in weights
    }
    return {
        name: sum(weight / total * updates[site][name] for site, weight in weights.items())
        for name in updates["A"]
    }


@pytest.mark.parametrize("algorithm", [FedAvg(), FedBN(), Scaffold()])
def test_a_run_under_the_probe_is_the_run_without_it_bit_by_bit(
    tmp_path: Path, algorithm: Algorithm
) -> None:
    looked_at, taken = probed(algorithm, tmp_path / "with")
    without = ToyFederation(algorithm, tmp_path / "without").run(3)
    assert looked_at.states() == without.states()
    assert set(taken) == {(number, site) for number in (1, 2, 3) for site in SIZES}


def test_fedavg_adds_the_mean_of_the_updates_to_the_model_received(tmp_path: Path) -> None:
    _, taken = probed(FedAvg(), tmp_path)
    for number in (1, 2):
        moved = mean_update(taken, number, SIZES)
        before, after = (numbers(taken[k, "A"][0]) for k in (number, number + 1))
        assert np.abs(moved["0.weight"]).max() > 1e-4
        for name, update in moved.items():
            np.testing.assert_allclose(before[name] + update, after[name], atol=1e-6)


def test_an_update_is_added_to_the_model_received(tmp_path: Path) -> None:
    _, taken = probed(Scaffold(), tmp_path, 2)
    moved = mean_update(taken, 1, dict.fromkeys(SIZES, 1.0))
    before, after = (numbers(taken[k, "B"][0]) for k in (1, 2))
    assert np.abs(moved["0.weight"]).max() > 1e-4
    for name in ("0.weight", "4.bias"):
        np.testing.assert_allclose(before[name] + moved[name], after[name], atol=1e-6)


@pytest.mark.parametrize(("algorithm", "kept"), [(FedBN(), "1."), (FedPer(), "4.")])
def test_what_stays_at_a_site_completes_both_models(
    tmp_path: Path, algorithm: Algorithm, kept: str
) -> None:
    federation, taken = probed(algorithm, tmp_path, 2)
    moved = mean_update(taken, 1, SIZES)
    start = numbers(toy_model(0))
    for site, client in federation.clients().items():
        newest = client.store.newest("~")
        assert newest is not None
        stored = numbers(client.store.load(newest)["private"])
        first, second = (numbers(taken[2, site][k]) for k in (0, 1))
        after_one = numbers(taken[1, site][1])
        assert stored.keys() == {name for name in start if name.startswith(kept)}
        for name, value in start.items():
            np.testing.assert_array_equal(numbers(taken[1, site][0])[name], value)
            if name.startswith(kept):
                np.testing.assert_array_equal(first[name], after_one[name])
                np.testing.assert_array_equal(second[name], stored[name])
            else:
                np.testing.assert_allclose(first[name], value + moved[name], atol=1e-6)
    weight = f"{kept}weight"
    assert not np.array_equal(numbers(taken[2, "A"][0])[weight], numbers(taken[2, "B"][0])[weight])


def test_several_models_for_a_site_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'train' sends each site models and not one model"):
        probed(IFCA(), tmp_path, 1)


def line(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"l{k}", layer) for k, layer in enumerate(layers)))


def test_the_eye_sees_what_enters_the_head_of_every_patient() -> None:
    def network() -> nn.Module:
        return line(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.9), nn.Linear(4, 1))

    task = SupervisedTask(nn.functional.mse_loss)
    rng = np.random.default_rng(0)
    x, w, b = rng.normal(size=(5, 3)), rng.normal(size=(4, 3)), rng.normal(size=4)
    model = Tensors(network().state_dict()) | Tensors(
        {"l0.weight": torch.tensor(w).float(), "l0.bias": torch.tensor(b).float()}
    )
    inputs = {"image": torch.tensor(x).float(), "label": torch.zeros(5, 1)}
    data = TensorDataset(inputs, patients=["p", "q", "p", "r", "q"])
    seen = FeatureExtractor(network, task).extract(model, data, limit=64)
    np.testing.assert_allclose(seen.rows, np.maximum(x @ w.T + b, 0), atol=1e-6)
    assert seen.patients.tolist() == [0, 1, 0, 2, 1]
    assert len(FeatureExtractor(network, task).extract(model, data, limit=3).rows) == 3


def test_windows_are_spread_evenly_over_a_case() -> None:
    def network() -> nn.Module:
        return line(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1))

    task = SegmentationTask(window=(4, 4), overlap=0.0, batch_size=3)
    image = torch.arange(4.0).repeat_interleave(16).reshape(2, 2, 4, 4)
    image = image.permute(0, 2, 1, 3).reshape(1, 1, 8, 8)  # windows that hold 0, 1, 2 and 3
    model = Tensors(network().state_dict()) | Tensors(
        {"l0.weight": torch.tensor([2.0, -1.0]).reshape(2, 1, 1, 1), "l0.bias": torch.zeros(2)}
    )
    data = TensorDataset({"image": image, "label": torch.zeros(1, 8, 8, dtype=torch.int64)})
    seen = FeatureExtractor(network, task).extract(model, data, limit=2)
    np.testing.assert_allclose(seen.rows, [[2.0, -1.0], [6.0, -3.0]])
    whole = FeatureExtractor(network, task).extract(model, data, limit=9)
    np.testing.assert_allclose(whole.rows[:, 0], [0.0, 2.0, 4.0, 6.0])


def test_a_site_without_cases_shows_nothing() -> None:
    task = SupervisedTask(nn.functional.mse_loss)
    seen = FeatureExtractor(toy_network, task).extract(toy_model(0), TensorDataset({}), limit=4)
    assert (len(seen.rows), seen.count) == (0, 0)
