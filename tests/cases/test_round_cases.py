"""The field cases about weights of a round: sites without examples or without validation."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Replies
from collegium.core.dataset import TensorDataset
from collegium.core.message import Message
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import ProtocolError
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.training.loop import TrainingConfig


def replies(path: Path) -> Replies:
    found = json.loads(path.read_text("utf-8"))
    return Replies(
        (
            r["site"],
            Message.of(model=Tensors({"w": torch.tensor(r["w"])}), num_examples=r["num_examples"]),
        )
        for r in found
    )


def test_spl03_round_without_any_example_is_an_error(folder):
    with pytest.raises(ProtocolError, match="every client reported 0 examples"):
        replies(folder / "round1_all_zero.json").mean("model")


def test_spl03_site_without_examples_has_no_say_and_is_named(folder, values, caplog):
    with caplog.at_level(logging.WARNING):
        model = replies(folder / "round2_one_zero.json").mean("model")
    assert model["w"].tolist() == values["round2"]
    (record,) = caplog.records
    assert "client 'b'" in record.getMessage()
    assert "does not count" in record.getMessage()


def test_spl03_failed_round_leaves_the_model_as_it_was(tmp_path):
    empty = TensorDataset({"image": torch.zeros(0, 2), "label": torch.zeros(0, 1)})
    sites = [Site(name, empty, empty, empty) for name in ("a", "b")]
    with pytest.raises(ProtocolError, match="the model stays as it was"):
        simulate(
            FedAvg(), sites, lambda: nn.Linear(2, 1), SupervisedTask(nn.functional.mse_loss),
            rounds=1, output=tmp_path,
        )  # fmt: skip
    assert [path.name for path in (tmp_path / "server").glob("*.state")] == ["000000.state"]


class Stated(SupervisedTask):
    """A task whose score of a case is what its label says."""

    def scores(self, prediction, example, metrics=None):
        return {"negative_loss": float(example.batch["label"])}


def test_spl02_weights_and_validation_count_cases(values, tmp_path):
    """Every site drifts to a point of its own, so that the mean shows the weights."""
    sites = {}
    scores = {"a": 0.5, "b": 1.0, "c": 0.0}
    for index, name in enumerate("abc"):
        train, val = values["train"][index], values["val"][index]

        def data(count: int, label: float = 0.0, index: int = index) -> TensorDataset:
            rows = torch.eye(3)[index].repeat(count, 1)
            return TensorDataset({"image": rows, "label": torch.full((count, 1), label)})

        sites[name] = Site(name, data(train), data(val, scores[name]), data(0))
    training = TrainingConfig(optimizer="sgd", lr=1.0, batch_size=100)
    task = Stated(lambda output, label: -output.mean())  # one step adds 1 to the site's own weight
    network = lambda: nn.Linear(3, 1, bias=False)  # noqa: E731
    federation = Federation(sites, network, task, training)
    clients = federation.clients(FedAvg(), seed=0, root=tmp_path)
    run = federation.run(FedAvg(), InProcess(lambda: clients), rounds=1, seed=0, root=tmp_path)
    run.execute()
    step = run.server.state["model"]["weight"] - run.server.initial_model["weight"]
    assert step[0].tolist() == pytest.approx(values["weights"], abs=1e-6)
    best = run.best()
    assert best is not None
    assert best["score"] == pytest.approx(values["weighted_val_example"], abs=1e-6)
    first = run.records()[0]
    assert first.scores["global"] == {"a": 0.5, "b": 1.0, "c": None}


def test_spl02_site_with_one_case_and_no_validation_trains_along(values):
    counts = dict(zip("abc", zip(values["train"], values["val"], strict=True), strict=True))
    x = torch.arange(40.0).reshape(-1, 2) / 40
    data: dict[str, Any] = {
        name: [TensorDataset({"image": x[:n], "label": x[:n, :1]}) for n in (*pair, 1)]
        for name, pair in counts.items()
    }
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    result = simulate(
        FedAvg(), [Site(name, *splits) for name, splits in data.items()], lambda: network,
        SupervisedTask(nn.functional.mse_loss), rounds=2,
        training=replace(TrainingConfig(), batch_size=3),
    )  # fmt: skip
    assert {len(rows["global"]) for rows in result.scores.values()} == {1}
    assert all(record.scores["global"]["c"] is None for record in result.records)
    assert all(loss is not None for record in result.records for loss in record.losses.values())
