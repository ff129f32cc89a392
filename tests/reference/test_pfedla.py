from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.algorithms import _pfedla_hypernetworks as hypernetworks
from collegium.algorithms.pfedla import PFedLA
from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.runtime.participation import SKIPPING

NAMES = ("A", "B", "C")
LAYERS = (
    ("bn_in.weight",),
    (
        "conv.weight", "conv.bias", "conv.running_mean", "conv.running_var",
        "conv.num_batches_tracked",
    ),
    ("norm.weight", "norm.bias"),
)  # fmt: skip
"""Of the network of `numpy_rounds`."""

SMALL: dict[str, Any] = {"hypernetwork_lr": 0.3, "embedding": 3, "hidden": 8}


def shares_by_hand(network: Any, own: int, names: Any = NAMES) -> Any:
    """The weights (layers, clients) of a hypernetwork; right for complex numbers too."""

    def relu(x: Any) -> Any:
        return x * (x.real > 0)

    features = network["embedding"]
    for k in "012":
        features = relu(network[f"{k}.weight"] @ features + network[f"{k}.bias"])
    rows = np.stack(
        [
            relu(network[f"to.{name}.weight"] @ features + network[f"to.{name}.bias"])
            for name in names
        ],
        axis=1,
    )
    total = rows.sum(1, keepdims=True)
    alone = np.eye(len(names))[own][None]
    return np.where(total.real > 0, rows / np.where(total.real > 0, total, 1.0), alone)


def mixed_by_hand(models: Any, shares: Any) -> Any:
    """A model whose layers are means of those of all models; counters are the maximum."""
    model = {}
    for row, names in zip(shares, LAYERS, strict=True):
        for name in names:
            stacked = np.stack([one[name] for one in models])
            is_number = stacked.dtype.kind == "f"
            model[name] = np.tensordot(row, stacked, axes=1) if is_number else stacked.max(0)
    return model


def gap(models: Any, shares: Any, *, trained: Any, layers: Any, moving: Any) -> Any:
    """Half the squared distance between a mixed model and a trained one."""
    mixed = mixed_by_hand(models, shares)
    names = [n for layer in layers for n in LAYERS[layer] if n in moving]
    return sum(((mixed[name] - trained[name]) ** 2).sum() for name in names) / 2


def drawn(federation: Any) -> Any:
    """The hypernetwork with which all clients begin."""
    random = generator(federation.seed, "server", 0, "hypernetworks")
    network = hypernetworks.initial(NAMES, 3, embedding=3, hidden=8, rng=random)
    return {name: tensor.numpy().copy() for name, tensor in network.items()}


@pytest.mark.parametrize("kept", [0, 1])
def test_rounds_follow_the_equations(federation: Any, by_hand: Any, kept: int) -> None:
    outcome = federation.run(PFedLA(**SMALL, kept_layers=kept), rounds=4)
    networks = [drawn(federation)] * 3
    models = [federation.initial()] * 3
    start = networks[0]
    np.testing.assert_allclose(shares_by_hand(start, 0), np.full((3, 3), 1 / 3))
    for number in (1, 2, 3, 4):
        learnt, trained = [], []
        for own, name in enumerate(NAMES):
            shares = shares_by_hand(networks[own], own)
            most = sorted(range(3), key=lambda layer: -round(shares[layer, own], 9))
            layers = sorted(most[kept if number > 1 else 0 :])
            mixed = models[own] | {
                n: value
                for n, value in mixed_by_hand(models, shares).items()
                if any(n in LAYERS[layer] for layer in layers)
            }
            model, _ = by_hand.train(
                mixed,
                federation.data[name],
                federation.batches(name, number),
                0.1 * 0.8 ** (number - 1),
            )
            to_trained = partial(
                gap, models, trained=model, layers=layers, moving=by_hand.PARAMETERS
            )
            slopes = by_hand.slopes(
                lambda phi, own=own, f=to_trained: f(shares_by_hand(phi, own)),
                networks[own],
                networks[own],
            )
            learnt.append({n: value - 0.3 * slopes[n] for n, value in networks[own].items()})
            trained.append(model)
        networks, models = learnt, trained
        state = outcome.server[number]
        for own, name in enumerate(NAMES):
            by_hand.assert_same(state["models"][name], models[own], f"round {number}, {name}")
            by_hand.assert_same(
                state["hypernetworks"][name], networks[own], f"round {number}, {name}"
            )
    assert max(abs(shares_by_hand(networks[0], 0) - 1 / 3).flat) > 0.01
    for inner in ("embedding", "0.weight", "1.bias", "2.weight"):
        assert max(abs(network[inner] - start[inner]).max() for network in networks) > 1e-6


def test_sites_predict_with_the_mixture_of_all_models_sent_last(
    federation: Any, by_hand: Any
) -> None:
    outcome = federation.run(PFedLA(**SMALL), rounds=3)
    state = outcome.server[3]
    models = [{n: t.numpy() for n, t in state["models"][name].items()} for name in NAMES]
    [shown] = [
        payload["model"]
        for request, payload, _ in outcome.log
        if request.method == "evaluate" and request.round == 3 and request.client == "B"
    ]
    network = {n: t.numpy() for n, t in state["hypernetworks"]["B"].items()}
    by_hand.assert_same(shown, mixed_by_hand(models, shares_by_hand(network, 1)))
    assert outcome.deployed == {}


@pytest.mark.parametrize("number", [1, 2])
def test_the_step_moves_the_mixture_towards_what_was_trained(number: int) -> None:
    """Two clients with one weight each, 0 and 2; the first trains from 1 towards the second."""
    clients = ("A", "B")
    network = hypernetworks.initial(
        clients, 1, embedding=5, hidden=6, rng=torch.Generator().manual_seed(number)
    )
    w = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    [[own, other]] = hypernetworks.weights(network, clients, "A").tolist()
    assert (own, other) == (0.5, 0.5)
    for trained, nearer in ((1.5, True), (0.5, False)):
        update = trained - 1.0
        moved = hypernetworks.step(network, clients, "A", w * update, lr=0.005)
        [[_, after]] = hypernetworks.weights(moved, clients, "A").tolist()
        assert (after > other) is nearer
        assert abs(2 * after - trained) < abs(2 * other - trained)


def test_a_layer_whose_weights_are_all_0_is_the_clients_own() -> None:
    network = hypernetworks.initial(
        NAMES, 2, embedding=3, hidden=4, rng=torch.Generator().manual_seed(0)
    )
    bias = {f"to.{name}.bias": torch.tensor([-1e6, 0.0], dtype=torch.float64) for name in NAMES}
    network = network | Tensors(bias)
    found = hypernetworks.weights(network, NAMES, "B")
    assert found[0].tolist() == [0.0, 1.0, 0.0]
    np.testing.assert_allclose(found[1], [1 / 3] * 3)
    products = torch.tensor([[5.0, 1.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    same = hypernetworks.step(network, NAMES, "B", products, lr=1.0)
    assert all(same[name].equal(tensor) for name, tensor in network.items())


def test_kept_layers_are_not_sent_down_but_in_a_clients_first_round(federation: Any) -> None:
    outcome = federation.run(
        PFedLA(**SMALL, kept_layers=2), rounds=3, lose={1: "B"}, participation=SKIPPING
    )
    sent = {
        (request.client, request.round): {*payload["model"]}
        for request, payload, _ in outcome.log
        if request.method == "train"
    }
    every = {name for names in LAYERS for name in names}
    assert sent["A", 1] == sent["B", 2] == every
    for key in (("A", 2), ("C", 3), ("B", 3)):
        assert sent[key] in [{*layer} for layer in LAYERS]
    assert all({*reply["model"]} == every for reply in outcome.replies("train"))
    state = outcome.clients[3]["A"]["model"]
    assert all(tensor.equal(outcome.server[3]["models"]["A"][n]) for n, tensor in state.items())


def test_a_client_that_comes_back_keeps_its_layers(federation: Any) -> None:
    outcome = federation.run(
        PFedLA(**SMALL, kept_layers=2), rounds=3, lose={2: "B"}, participation=SKIPPING
    )
    [names] = [
        {*payload["model"]}
        for request, payload, _ in outcome.log
        if request.method == "train" and (request.client, request.round) == ("B", 3)
    ]
    assert names in [{*layer} for layer in LAYERS]


def test_what_a_site_keeps_at_home_is_part_of_its_personal_model() -> None:
    own, mixed = (
        Tensors({n: torch.tensor(k) for n in names}) for k, names in ((1, "ab"), (2, "b"))
    )
    client: Any = SimpleNamespace(state={"model": own})
    found = PFedLA(kept_layers=1).personal_model(client, Message.of(model=mixed))
    assert {name: int(tensor) for name, tensor in found.items()} == {"a": 1, "b": 2}


def test_a_missing_client_keeps_its_model_and_its_hypernetwork(federation: Any) -> None:
    outcome = federation.run(PFedLA(**SMALL), rounds=3, lose={3: "B"}, participation=SKIPPING)
    before, after = outcome.server[2], outcome.server[3]
    for key in ("models", "hypernetworks"):
        for name, same in (("A", False), ("B", True)):
            tensors = after[key][name].items()
            assert all(t.equal(before[key][name][n]) for n, t in tensors) is same


def test_names_decide_nothing(federation: Any) -> None:
    sites = federation.sites()
    turned = [
        type(site)(name, site.train, site.val, site.test)
        for site, name in zip(sites, ("C", "A", "B"), strict=True)
    ]
    full = {"training": federation.full_batch, "rounds": 4}
    first = federation.run(PFedLA(**SMALL), sites=sites, **full).server[4]["models"]
    second = federation.run(PFedLA(**SMALL), sites=turned, **full).server[4]["models"]
    for old, new in zip("ABC", "CAB", strict=True):
        for name, tensor in first[old].items():
            np.testing.assert_allclose(second[new][name], tensor, rtol=1e-9, atol=1e-12)


class Tied(nn.Module):
    """A network whose last layer has the weights of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.last(self.first(x)))
        return out


def test_tied_weights_stay_tied_and_count_once(federation: Any) -> None:
    recipe = replace(federation.recipe, lr=0.01)
    outcome = federation.run(PFedLA(**SMALL), recipe, network=lambda: Tied().double(), rounds=3)
    for payload in (p["model"] for r, p, _ in outcome.log if r.method == "train"):
        assert payload["first.weight"].data_ptr() == payload["last.weight"].data_ptr()
    before, state = outcome.server[2], outcome.server[3]
    sent = {r.client: p["model"] for r, p, _ in outcome.log if r.method == "train" and r.round == 3}
    names = (("first.weight", "first.bias"), ("last.bias",), ("head.weight", "head.bias"))
    moved = {n: state["models"]["A"][n] - sent["A"][n] for group in names for n in group}
    products = torch.tensor(
        [
            [sum(float((moved[n] * before["models"][j][n]).sum()) for n in group) for j in NAMES]
            for group in names
        ],
        dtype=torch.float64,
    )
    expected = hypernetworks.step(before["hypernetworks"]["A"], NAMES, "A", products, lr=0.3)
    for name, tensor in expected.items():
        np.testing.assert_allclose(state["hypernetworks"]["A"][name], tensor, rtol=1e-9, atol=1e-12)


def test_a_single_site_and_keeping_every_layer_are_refused() -> None:
    parts = find_parts(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    with pytest.raises(ConfigError, match="there is one site only"):
        PFedLA().check_setup(["A"], parts)
    with pytest.raises(ConfigError, match="kept_layers is 2, and the network has 2 layers"):
        PFedLA(kept_layers=2).check_setup(["A", "B"], parts)
    PFedLA(kept_layers=1).check_setup(["A", "B"], parts)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hypernetwork_lr": 0.0}, r"PFedLA\.hypernetwork_lr: should be above 0"),
        ({"hidden": 0}, r"PFedLA\.hidden: should be "),
        ({"embedding": 0}, r"PFedLA\.embedding: should be "),
        ({"kept_layers": -1}, r"PFedLA\.kept_layers: should be at least 0"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PFedLA(**fields)
