import json

import pytest
import torch
from torch import nn

from collegium.algorithms.ditto import Ditto
from collegium.algorithms.fedavg import FedAvg
from collegium.core.dataset import Batch, TensorDataset
from collegium.core.message import pack
from collegium.core.model_parts import find_parts
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.participation import SKIPPING
from collegium.runtime.requests import Request
from collegium.testing.conformance import conformance_checks
from collegium.testing.toy import (
    REGRESSION,
    SIZES,
    ShuffledTransport,
    SwappedNames,
    ToyClients,
    ToyFederation,
    toy_federation,
    toy_model,
    toy_network,
    toy_site,
)
from collegium.training.loop import TrainingConfig


def inputs(name: str) -> Batch:
    """The training data of a toy site."""
    train = toy_site(name).train
    assert isinstance(train, TensorDataset)
    return train.inputs


def test_toy_sites_have_their_sizes_and_keep_their_data():
    for name, count in SIZES.items():
        site = toy_site(name)
        assert (len(site.train), len(site.val), len(site.test)) == (count, 4, 4)
        assert torch.equal(inputs(name)["image"], inputs(name)["image"])
    a, b = (inputs(name)["image"][:4] for name in "AB")
    assert not torch.equal(a, b)


def test_toy_labels_are_a_linear_function_of_the_site():
    image, label = inputs("C")["image"], inputs("C")["label"]
    solution = torch.linalg.lstsq(image, label).solution
    assert torch.allclose(image @ solution, label, atol=1e-4)


def test_toy_network_has_norm_and_head():
    parts = find_parts(toy_network())
    assert parts.head == {"4.weight", "4.bias"}
    assert len(parts.norm) == 5
    assert not torch.equal(toy_model(0)["0.weight"], toy_model(1)["0.weight"])


def test_wire_shuffles_and_logs_every_reply(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path, ShuffledTransport).run(2)
    wire = federation.server.transport
    assert isinstance(wire, ShuffledTransport)
    asked = [request.client for request, _ in wire.log]
    assert wire.count == len(asked) == 3 * (2 + 2 + 1)  # rounds, evaluations, test
    assert asked[:3] != ["A", "B", "C"] or asked[3:6] != ["A", "B", "C"]
    assert {frozenset(message) for request, message in wire.log if request.method == "train"} == {
        frozenset({"model", "num_examples", "progress"})
    }


@pytest.mark.parametrize("number", [0, 4])
def test_wire_dies_at_the_request_it_is_told(tmp_path, number):
    def die(count: int) -> None:
        if count == number:
            raise KeyboardInterrupt

    federation = ToyFederation(FedAvg(), tmp_path, lambda f: ShuffledTransport(f, before=die))
    with pytest.raises(KeyboardInterrupt):
        federation.run(2)
    assert len(federation.server.transport.log) == number  # type: ignore[attr-defined]


def test_wire_loses_a_client_in_one_round(tmp_path):
    federation = ToyFederation(
        FedAvg(), tmp_path, lambda f: ShuffledTransport(f, lose={2: "B"}), participation=SKIPPING
    )
    federation.run(2)
    trained = [
        (request.round, request.client)
        for request, _ in federation.server.transport.log  # type: ignore[attr-defined]
        if request.method == "train"
    ]
    assert sorted(trained) == [(1, "A"), (1, "B"), (1, "C"), (2, "A"), (2, "C")]


def test_renamed_clients_answer_for_the_next(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path, SwappedNames)
    payload = pack({"model": toy_model(0)})
    requests = [Request(c, 0, 0, "train", "train", payload) for c in "ABC"]
    counts = {}
    for response in federation.server.transport.exchange(requests):
        message = federation.server._open_response(response, "train", 0)
        assert message is not None
        counts[response.client] = message["num_examples"]
    assert counts == {"A": SIZES["B"], "B": SIZES["C"], "C": SIZES["A"]}


def test_toy_worker_builds_whichever_client_is_asked_for(tmp_path):
    clients = ToyClients()
    training = {"optimizer": "sgd", "lr": 0.5}
    kind = REGRESSION.name
    key = json.dumps(["ditto", {"lam": 0.5}, training, str(tmp_path), kind, None, "B"])
    client = clients[key].client
    assert client.id == "B"
    assert client.algorithm == Ditto(lam=0.5)
    assert client.training.config == TrainingConfig(optimizer="sgd", lr=0.5)
    assert client.root == tmp_path / "clients" / "B"
    assert clients[key].client is client


def test_states_differ_where_a_bit_does(tmp_path):
    first = ToyFederation(FedAvg(), tmp_path / "a").run(1).states()
    second = ToyFederation(FedAvg(), tmp_path / "b").run(1).states()
    assert first == second
    assert "server/000001.state" in first
    training = TrainingConfig(optimizer="sgd", lr=0.050001, batch_size=4)
    third = ToyFederation(FedAvg(), tmp_path / "c", training=training).run(1).states()
    assert third["server/000001.state"] != first["server/000001.state"]


def test_every_check_says_which_rule_it_holds_an_algorithm_to():
    checks = conformance_checks()
    assert len(checks) == 21
    assert all(rule.endswith(".") and "\n\n" not in rule for rule in checks.values())


def test_toy_federation_may_have_other_clients(tmp_path):
    federation = ToyFederation(FedAvg(), tmp_path, names=("C", "A"))
    assert federation.server.clients == ["A", "C"]
    assert set(toy_federation(("B",)).clients(FedAvg(), seed=7, root=tmp_path)) == {"B"}
    assert isinstance(federation.server.transport, InProcess)
    assert isinstance(toy_network(), nn.Sequential)
