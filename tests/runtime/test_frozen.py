"""Frozen parts are not trained, by any method, and travel once at the most."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collegium.compression.half import Half
from collegium.compression.session.groups import Codecs, tensor_groups
from collegium.core.algorithm import NetworkBuilder
from collegium.core.dataset import TensorDataset
from collegium.core.message import unpack
from collegium.core.model_parts import find_parts
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.models.standardised import Standardised
from collegium.models.tables import MLP
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation, initial_model
from collegium.runtime.ledger import read_ledger
from collegium.runtime.server import ServerRuntime
from collegium.tasks import SupervisedTask
from collegium.testing.conformance import Conformance
from collegium.testing.toy import TRAINING, ToyFederation, toy_model
from collegium.training.loop import Fit, LocalTraining, TrainingConfig
from collegium.training.together import fit_all

FROZEN = {"0.weight", "0.bias"} | {
    f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}
"""The first two layers of the toy's network, a linear one and batch normalisation."""

HEAD = "4.weight"

RECIPE = replace(TRAINING, freeze=("0", "1"))
METHODS = ["fedavg", "fedprox", "ditto", "fedbn", "scaffold", "iopfl", "apfl", "fedamp"]
RULES = [
    "it_learns",
    "order_does_not_matter",
    "repeated_requests",
    "evaluation_changes_nothing",
    "what_is_sent",
    "rounds_at_home",
]


class FrozenConformance(Conformance):
    """The conformance suite on a network whose first layers are frozen."""

    def _federation(self, *args: Any, **options: Any) -> ToyFederation:
        return super()._federation(*args, training=RECIPE, **options)


@pytest.mark.parametrize("name", METHODS)
def test_methods_keep_their_rules_and_leave_frozen_parts_alone(name: str, tmp_path: Path) -> None:
    method = ALGORITHMS.load(name)()
    suite = FrozenConformance(method, tmp_path, InProcess(dict))
    for rule in RULES:
        getattr(suite, f"check_{rule}")()
    federation, start = suite._reference, toy_model(0).select(FROZEN)
    assert federation.server.parts.frozen >= FROZEN
    found, moved = 0, False
    for file in federation.root.rglob("*.state"):
        for group in tensor_groups(unpack(file.read_bytes())).values():
            moved |= any(not torch.equal(t, toy_model(0)[n]) for n, t in group.items() if n == HEAD)
            for tensor_name in FROZEN.intersection(group):
                held, wanted, found = group[tensor_name], start[tensor_name], found + 1
                if held.any():  # otherwise it is the update of one
                    torch.testing.assert_close(held, wanted, rtol=1e-6, atol=0)
    assert found > 0 or name == "fedamp"  # whose clients send what is trained, and keep it
    assert moved


def table_network() -> nn.Module:
    """A network with 264 kB in its body, and 1 kB in its head."""
    return MLP(3, 1, hidden=[256, 256], norm="none")


def site(name: str) -> Site:
    rng = torch.Generator().manual_seed(ord(name))
    samples = {"image": torch.randn(8, 3, generator=rng), "label": torch.randn(8, 1, generator=rng)}
    data = TensorDataset(samples)
    return Site(name, data, data, data)


BODY = 4 * (3 * 256 + 256 + 256 * 256 + 256)
"""The bytes of the body."""


def trained(
    tmp_path: Path, *, freeze: Collection[str] = ("body",), start: Any = None, **options: Any
) -> tuple[ServerRuntime, list[dict[str, tuple[int, int]]]]:
    """Two rounds of FedAvg; the server, and in each round what each client was sent and sent."""
    recipe = TrainingConfig(optimizer="sgd", lr=0.01, batch_size=4, freeze=tuple(freeze))
    federation = Federation(
        {name: site(name) for name in "AB"}, table_network, SupervisedTask(nn.functional.mse_loss),
        recipe, start=start,
    )  # fmt: skip
    method = ALGORITHMS.load(options.pop("method", "fedavg"))()

    def clients() -> Any:
        return federation.clients(method, seed=1, root=tmp_path, **options)

    server = federation.server(method, InProcess(clients), seed=1, root=tmp_path, **options)
    traffic = []
    server.begin()
    for _ in range(2):
        server.transport = InProcess(clients)  # sites start anew
        server.advance()
        stats = server.client_stats
        traffic.append({name: (s.bytes_down, s.bytes_up) for name, s in stats.items()})
    return server, traffic


@pytest.mark.parametrize("codecs", [Codecs(), Codecs(up=Half(), down=Half())])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto"])
def test_what_both_sides_draw_never_travels(tmp_path: Path, method: str, codecs: Codecs) -> None:
    server, traffic = trained(tmp_path, method=method, codecs=codecs)
    assert all(max(down, up) < BODY / 20 for sent in traffic for down, up in sent.values())
    _, before = trained(tmp_path / "all", freeze=(), method=method)
    assert all(min(down, up) > BODY for sent in before for down, up in sent.values())
    frozen = server.initial_model.select(server.parts.frozen)
    assert frozen.numel() * 4 == BODY
    assert all(torch.equal(server.state["model"][name], t) for name, t in frozen.items())
    assert not torch.equal(
        server.state["model"]["head.weight"], server.initial_model["head.weight"]
    )


@pytest.mark.parametrize("codecs", [Codecs(), Codecs(up=Half(), down=Half())])
def test_what_a_site_cannot_draw_travels_once(tmp_path: Path, codecs: Codecs) -> None:
    def start(model: Tensors, added: Collection[str]) -> Tensors:
        return 2.0 * model

    server, (first, second) = trained(tmp_path, start=start, codecs=codecs)
    for down, up in first.values():
        assert BODY < down < 1.1 * BODY
        assert up < BODY / 20
    assert all(max(down, up) < BODY / 20 for down, up in second.values())
    drawn = initial_model(table_network, 1)
    for name in server.parts.frozen:
        assert torch.equal(server.state["model"][name], 2.0 * drawn[name])


def test_the_result_is_that_of_sending_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out, _ = trained(tmp_path / "left out")
    for side in ("server", "federation"):
        monkeypatch.setattr(f"collegium.runtime.{side}.Held", lambda tensors: None)
    sent, traffic = trained(tmp_path / "sent")
    assert all(min(both) > BODY for clients in traffic for both in clients.values())
    for name, tensor in sent.state["model"].items():
        assert torch.equal(left_out.state["model"][name], tensor)


@pytest.mark.parametrize("codecs", [Codecs(), Codecs(up=Half(), down=Half())])
def test_the_ledger_counts_what_leaves(tmp_path: Path, codecs: Codecs) -> None:
    trained(tmp_path, codecs=codecs)
    lines = read_ledger(tmp_path / "clients" / "A" / "ledger.jsonl")
    assert len(lines) == 2
    head = 257 * 4
    for line in lines:
        found = line["parts"]["model"]["bytes"]
        assert head // 2 <= found < head // 2 + 20 if codecs else found == head
        names = [name for name, _, _ in line["parts"]["model"]["tensors"]]
        assert names == ["head.weight", "head.bias"]
        assert line["bytes"] < BODY / 20


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["enkoder"], "training.freeze: the network has no role and no submodule or tensor 'enko"),
        (["norm_statistics"], "training.freeze: 'norm_statistics' has no parameters; leave it out"),
        (["body", "head"], "training.freeze: body, head is the whole network, and nothing is left"),
    ],
)
def test_what_cannot_be_frozen_is_refused(freeze: list[str], message: str) -> None:
    build = NetworkBuilder(lambda: MLP(3, 1), ALGORITHMS.load("fedavg")(), freeze=freeze)
    with pytest.raises(ConfigError, match=message):
        build()


def frozen_of(network: nn.Module, *layers: nn.Module) -> frozenset[str]:
    for layer in layers:
        layer.requires_grad_(False)
    return find_parts(network).frozen


def test_buffers_are_frozen_with_their_layer_or_with_what_is_around_it() -> None:
    plain = nn.BatchNorm1d(4, affine=False)
    block = nn.Sequential(nn.Linear(3, 4), plain, nn.Linear(4, 4))
    network = nn.Sequential(block, nn.BatchNorm1d(4), nn.Linear(4, 1))
    assert frozen_of(network) == frozenset()
    linear = {"0.0.weight", "0.0.bias"}
    assert frozen_of(network, block[0]) == linear  # the statistics stand beside a trained layer
    statistics = {f"0.1.{name}" for name, _ in plain.named_buffers()}
    assert frozen_of(network, block[2]) == linear | statistics | {"0.2.weight", "0.2.bias"}
    assert frozen_of(network, network[1]) > {"1.running_mean", "1.weight"}


def test_what_stands_beside_a_trained_part_is_not_frozen() -> None:
    network = Standardised(MLP(3, 1, norm="none"), 3)
    frozen = frozen_of(network, network.network.get_submodule("body"))
    assert frozen == {n for n in network.state_dict() if n.startswith("network.body.")}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("affine", [True, False])
def test_frozen_statistics_stay_as_they_are(affine: bool, together: bool) -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine))
    network = nn.Sequential(first, nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 1))
    first.requires_grad_(False)
    local = LocalTraining(
        network, SupervisedTask(nn.functional.mse_loss), TrainingConfig(batch_size=4)
    )
    start = local.current()
    fits = [
        Fit(local, start, site(name).train, 0, ("p",), 0.01, 1, None, None) for name in ("A", "B")
    ]
    outcomes = fit_all(fits) if together else [fit.alone() for fit in fits]
    for outcome in outcomes:
        assert not isinstance(outcome, Exception)
        model, _ = outcome
        moved = {name for name in start if not torch.equal(start[name], model[name])}
        assert not {name for name in moved if name.startswith("0.")}
        assert {"1.running_mean", "1.num_batches_tracked", "2.weight"} <= moved


def test_a_second_network_of_its_own_weights_has_the_frozen_ones_of_the_first() -> None:
    method = ALGORITHMS.load("superfed")()
    torch.manual_seed(0)
    build = NetworkBuilder(partial(MLP, 3, 1, hidden=[4], norm="none"), method, freeze=["body"])
    network = build()
    assert torch.equal(*(network.get_parameter(n) for n in ("body.0.weight", SECOND_BODY)))
    assert not torch.equal(*(network.get_parameter(n) for n in ("head.weight", SECOND_HEAD)))
    assert {"body.0.weight", SECOND_BODY} <= find_parts(network).frozen


SECOND_BODY, SECOND_HEAD = "second.network.body.0.weight", "second.network.head.weight"
