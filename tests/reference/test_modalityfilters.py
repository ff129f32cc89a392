"""The method against its equations, filter by filter, on a small network in plain torch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collegium.algorithms._filters import combined, filters_of, judged
from collegium.algorithms.modalityfilters import ModalityFilters
from collegium.core.dataset import TensorDataset
from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.models.factory import build_model
from collegium.runtime.federation import Federation
from collegium.tasks import SegmentationTask
from collegium.testing.conformance import ON_EVERY_KIND, Conformance
from collegium.testing.toy import Kind, toy_workers

OWNED = {"A": [0, 1], "B": [0, 2], "C": [1]}
SIZES = {"A": 5, "B": 8, "C": 11}
FILTERS = {"hidden": 3, "head": 1}
LR = 0.1


class Fused(nn.Module):
    """The mean of an encoder for each present feature, and a small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(
            {f"modality_{k}": nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)) for k in range(3)}
        )
        self.hidden, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        there = x != 0
        total = x.new_zeros(len(x), 2)
        for k, encoder in enumerate(self.encoders.values()):
            if there[:, k].any():
                total[there[:, k]] += encoder(x[there[:, k], k : k + 1])
        hidden = self.norm(self.hidden(total / there.sum(1, keepdim=True)))
        result: Tensor = self.head(hidden.tanh())
        return result


def network() -> nn.Module:
    return Fused().double()


def sites(federation: Any) -> list[Site]:
    """The sites of the federation without the features that they lack."""
    for name, kept in OWNED.items():
        for data in (federation.data[name], federation.validation[name]):
            data.x[:, [k for k in range(3) if k not in kept]] = 0
    found: list[Site] = federation.sites()
    return found


@pytest.fixture
def public() -> TensorDataset:
    rng = np.random.default_rng(5)
    x = rng.normal(0.5, 1.5, (7, 3))
    y = x @ np.array([[-1.0], [0.5], [1.0]])
    return TensorDataset({"image": torch.tensor(x), "label": torch.tensor(y)})


def trained(start: dict[str, Any], x: Any, y: Any) -> dict[str, Any]:
    """The network after one step of gradient descent on all rows, by plain torch."""
    module = network()
    module.load_state_dict({name: torch.as_tensor(value) for name, value in start.items()})
    module.train()
    nn.functional.mse_loss(module(torch.as_tensor(x)), torch.as_tensor(y)).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(LR * parameter.grad)
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


class ByHand:
    """The server, its clients and their filters, filter by filter."""

    def __init__(self, start: dict[str, Any], method: ModalityFilters) -> None:
        self.model, self.method = start, method
        places = [(layer, f) for layer, count in FILTERS.items() for f in range(count)]
        self.v = {(site, *place): 1.0 for site in OWNED for place in places}
        self.count = {(site, *place): method.patience for site in OWNED for place in places}
        self.own = {site: dict(start) for site in OWNED}

    def received(self, site: str) -> dict[str, Any]:
        model = {name: value.copy() for name, value in self.model.items()}
        for layer, count in FILTERS.items():
            for f in range(count):
                if self.count[site, layer, f] <= 0:
                    for kind in ("weight", "bias"):
                        model[f"{layer}.{kind}"][f] = self.own[site][f"{layer}.{kind}"][f]
        return model

    def round(self, number: int, data: Any, public: Any) -> None:
        method, old = self.method, self.model
        self.own = {
            site: trained(self.received(site), data[site].x, data[site].y) for site in OWNED
        }
        new = {name: value.copy() for name, value in old.items()}
        for name, value in old.items():
            if "encoders" in name:
                k = int(name.split(".")[1][-1])
                models = [self.own[site][name] for site in OWNED if k in OWNED[site]]
                new[name] = np.mean(models, axis=0) if value.dtype == float else np.max(models, 0)
            elif "norm" in name:
                weights = np.array([SIZES[site] for site in OWNED]) / sum(SIZES.values())
                models = [self.own[site][name] for site in OWNED]
                mean = np.tensordot(weights, np.stack(models), 1)
                new[name] = (1 - method.retain) * mean + method.retain * value
                if value.dtype != float:
                    new[name] = np.max(models, 0)
        for layer, count in FILTERS.items():
            for f in range(count):
                v = [self.v[site, layer, f] for site in OWNED]
                for kind in ("weight", "bias"):
                    values = [self.own[site][f"{layer}.{kind}"][f] for site in OWNED]
                    if sum(v) > 0:
                        mean = sum(a * b for a, b in zip(v, values, strict=True)) / sum(v)
                        own = old[f"{layer}.{kind}"][f]
                        new[f"{layer}.{kind}"][f] = (1 - method.retain) * mean + method.retain * own
        self.model = trained(new, public["image"], public["label"])
        if number > method.warm_up:
            self.judge(old, new)

    def judge(self, old: dict[str, Any], averaged: dict[str, Any]) -> None:
        method = self.method
        for site, layer, f in self.v:
            key, name = (site, layer, f), f"{layer}.weight"
            a = (self.model[name] - averaged[name])[f].ravel()
            b = (self.own[site][name] - old[name])[f].ravel()
            if self.count[key] > 0:
                cos01 = (1 + a @ b / np.sqrt((a @ a) * (b @ b))) / 2
                if cos01 < 0.5:
                    self.count[key] -= 1
                elif cos01 > 0.5:
                    self.count[key] = method.patience
                ratio = np.sqrt((a @ a) / (b @ b)) * SIZES[site] / sum(SIZES.values())
                self.v[key] = method.momentum * self.v[key] + (1 - method.momentum) * ratio
            if self.count[key] <= 0:
                self.v[key] = 0.0


def test_reference_values(newer_golden: Any) -> None:
    case = newer_golden["fedmepd_filters"]
    n, count = case["n"], int(case["count0"])
    stood = {
        "weight": Tensors({"f": torch.full((2,), case["v0"]).double()}),
        "patience": Tensors({"f": torch.full((2,), count)}),
    }
    found = [
        judged(
            stood, Tensors({"f": torch.tensor(case["server_update"])}),
            Tensors({"f": torch.tensor(update)}), share=n[client] / sum(n), momentum=0.95,
            patience=case["patience"],
        )
        for client, update in enumerate(case["client_update"])
    ]  # fmt: skip
    for step in case["steps"]:
        standing = found[step["client"]]
        assert int(standing["patience"]["f"][step["filter"]]) == step["count"]
        v = float(standing["weight"]["f"][step["filter"]])
        assert v == pytest.approx(step["v"], rel=1e-6)
    values = [torch.tensor(row).double()[:, None] for row in case["decoder_filter_value"]]
    weights = [standing["weight"]["f"] for standing in found]
    own = torch.tensor(case["server_filter_value"]).double()[:, None]
    for retain, key in ((0.0, "aggregated"), (0.3, "after_retain_0p3")):
        mean = combined(own, values, weights, retain)
        np.testing.assert_allclose(mean[:, 0], case[key], rtol=1e-6)


def test_filters_that_did_not_move_or_are_private_are_not_judged() -> None:
    old = {
        "weight": Tensors({"f": torch.tensor([0.5, 0.5, 0.0, 0.5]).double()}),
        "patience": Tensors({"f": torch.tensor([2, 2, 0, 2])}),
    }
    server = Tensors({"f": torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])})
    client = Tensors({"f": torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])})
    new = judged(old, server, client, share=0.5, momentum=0.9, patience=3)
    assert new["patience"]["f"].tolist() == [2, 2, 0, 2]  # at right angles nothing is counted
    np.testing.assert_allclose(new["weight"]["f"], [0.5, 0.5, 0.0, 0.9 * 0.5 + 0.1 * 0.5 / 2])


def test_a_filter_that_nobody_shares_stays_the_servers() -> None:
    own, none = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 1.0]).double()
    values = [torch.tensor([[5.0], [6.0]]), torch.tensor([[7.0], [10.0]])]
    assert combined(own, values, [none, none], 0.5).tolist() == [[1.0], [5.0]]


@pytest.mark.parametrize(
    "method",
    [
        ModalityFilters(warm_up=0, patience=1, momentum=0.5),
        ModalityFilters(warm_up=1, patience=2, retain=0.0),
        ModalityFilters(warm_up=9),
    ],
)
def test_rounds_follow_the_equations(
    federation: Any, public: TensorDataset, method: ModalityFilters
) -> None:
    rounds = 5
    there = sites(federation)
    outcome = federation.run(
        method, federation.full_batch, rounds=rounds, network=network, sites=there, public=public
    )
    hand = ByHand(federation.initial(network=network), method)
    for t in range(1, rounds + 1):
        hand.round(t, federation.data, public.inputs)
        for name, value in hand.model.items():
            np.testing.assert_allclose(
                outcome.server[t]["model"][name], value, rtol=1e-7, atol=1e-12, err_msg=name
            )
        for site, layer, f in hand.v:
            standing = outcome.server[t]["filters"][site]
            found = float(standing["weight"][f"{layer}.weight"][f])
            assert found == pytest.approx(hand.v[site, layer, f], rel=1e-7)
            left = int(standing["patience"][f"{layer}.weight"][f])
            assert left == hand.count[site, layer, f]
    private = [key for key, left in hand.count.items() if left == 0]
    assert bool(private) is (method.warm_up < rounds)
    assert len(private) < len(hand.count)


def test_a_site_keeps_its_private_filters_and_takes_the_shared_ones(
    federation: Any, public: TensorDataset
) -> None:
    method = ModalityFilters(warm_up=0, patience=1, momentum=0.5)
    outcome = federation.run(
        method, federation.full_batch, rounds=4, network=network, sites=sites(federation),
        public=public,
    )  # fmt: skip
    requests = [e for e in outcome.log if e[0].method == "evaluate" and e[0].round == 4]
    for request, parts, _ in requests:
        standing = outcome.server[4]["filters"][request.client]["patience"]
        assert parts["shared"].keys() == {"hidden.weight", "head.weight"}
        for layer, left in standing.items():
            assert parts["shared"][layer].tolist() == (left > 0).tolist()
    sent = {e[0].client: e[2]["model"] for e in outcome.log if e[0].method == "train"}
    for name, owned in OWNED.items():
        assert {n.split(".")[1] for n in sent[name] if "encoders" in n} == {
            f"modality_{k}" for k in owned
        }
        assert {n for n in sent[name] if "encoders" not in n} == {
            n for n in outcome.server[4]["model"] if "encoders" not in n
        }
    assert outcome.deployed["global"].keys() == outcome.server[4]["model"].keys()
    assert all(e[2]["scores"].keys() == {"global", "personal"} for e in requests)


def test_biases_follow_filters_and_other_tensors_are_none() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2, bias=False))
    parts, model = find_parts(module), Tensors(module.state_dict())
    assert filters_of(model, parts, parts.names) == {
        "0.weight": ["0.weight", "0.bias"], "2.weight": ["2.weight"],
    }  # fmt: skip
    assert filters_of(model, parts, {"2.weight", "1.weight"}) == {"2.weight": ["2.weight"]}


def test_transposed_convolutions_and_data_without_masks_are_refused(
    federation: Any, public: TensorDataset
) -> None:
    with pytest.raises(
        ConfigError, match=r"network's model\.2\.0\.conv is a transposed convolution"
    ):
        ModalityFilters().extend(build_model("unet", channels=[2, 4], in_channels=1))
    ModalityFilters().extend(build_model("modality_unet", channels=[2, 4], in_channels=1))
    there = {site.name: site for site in federation.sites()}
    unlabelled = TensorDataset({"image": public.inputs["image"]})
    for data, words in ((None, "there are none"), (unlabelled, "name their labels")):
        runtime = Federation(there, network, federation.task, federation.recipe, public=data)
        with pytest.raises(ConfigError, match=words):
            runtime.check(ModalityFilters())


# --- the U-Net, on the conformance suite


def images(name: str, count: int, seed: int) -> dict[str, Tensor]:
    with ambient(seed, f"modalities of {name}"):
        found = torch.randn(count, 3, 8, 8)
    label = (found.sum(1) > 0.5).long()
    found[:, [k for k in range(3) if k not in OWNED.get(name, range(3))]] = 0
    return {"image": found, "label": label}


IMAGES = Kind(
    "images that lack modalities", "segmentation",
    lambda: build_model("modality_unet", in_channels=3, out_channels=2, channels=(2, 4)),
    lambda: SegmentationTask(2, metrics=("dice",)), images,
)  # fmt: skip


@pytest.mark.slow
def test_it_keeps_the_rules_on_images_that_lack_modalities(tmp_path: Any) -> None:
    workers = toy_workers()
    try:
        method = ModalityFilters(warm_up=0, patience=1)
        suite = Conformance(method, tmp_path, workers, kind=IMAGES)
        for rule in ("interrupted_requests", "repeated_requests", "absent_client", *ON_EVERY_KIND):
            getattr(suite, f"check_{rule}")()
    finally:
        workers.close()
