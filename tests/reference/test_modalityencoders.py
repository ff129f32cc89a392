"""The method against the mean over owners, and against plain torch on a small network."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collegium.algorithms._modalities import encoders_of, owned_modalities
from collegium.algorithms.distance import on
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.modalityencoders import ModalityEncoders
from collegium.core.algorithm import Replies
from collegium.core.dataset import Example, TensorDataset
from collegium.core.message import Message
from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.models.factory import build_model
from collegium.tasks import SegmentationTask
from collegium.testing.conformance import ON_EVERY_KIND, Conformance
from collegium.testing.toy import Kind, toy_workers

OWNED = {"A": [0, 1], "B": [0, 2], "C": [1]}
SIZES = {"A": 5, "B": 8, "C": 11}
ROUNDS = 2


class Fused(nn.Module):
    """The mean of an encoder for each present feature, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(
            {f"modality_{k}": nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)) for k in range(3)}
        )
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        there = x != 0
        total = x.new_zeros(len(x), 2)
        for k, encoder in enumerate(self.encoders.values()):
            if there[:, k].any():
                total[there[:, k]] += encoder(x[there[:, k], k : k + 1])
        result: Tensor = self.head(total / there.sum(1, keepdim=True))
        return result


def network() -> nn.Module:
    return Fused().double()


def sites(federation: Any, owned: dict[str, list[int]] = OWNED) -> list[Site]:
    """The sites of the federation without the features that they lack."""
    for name, kept in owned.items():
        for data in (federation.data[name], federation.validation[name]):
            data.x[:, [k for k in range(3) if k not in kept]] = 0
    found: list[Site] = federation.sites()
    return found


def trained(module: nn.Module, start: Tensors, data: Any, epochs: int) -> dict[str, Tensor]:
    """The network after passes over all rows at once, by plain torch."""
    module.load_state_dict(dict(start))
    module.train()
    x, y = torch.tensor(data.x), torch.tensor(data.y)
    for _ in range(epochs):
        module.zero_grad(set_to_none=True)
        nn.functional.mse_loss(module(x), y).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def of_encoder(name: str) -> int | None:
    """Which modality's encoder a tensor belongs to."""
    return int(name.split(".")[1].removeprefix("modality_")) if "encoders" in name else None


def expected(start: Tensors, models: dict[str, dict[str, Tensor]], *, uniform: bool) -> Any:
    """The new model of the server: encoders by owners, the rest by examples or all alike."""
    new = {}
    for name, old in start.items():
        k = of_encoder(name)
        members = [site for site in models if k is None or k in OWNED[site]]
        weights = np.array([1.0 if uniform or k is not None else SIZES[site] for site in members])
        values = np.stack([models[site][name].numpy() for site in members] or [old.numpy()])
        if not members:
            new[name] = old.numpy()
        elif old.is_floating_point():
            new[name] = np.tensordot(weights / weights.sum(), values, 1)
        else:
            new[name] = values.max(0)
    return new


class Answered:
    """A server whose clients have already returned their models."""

    def __init__(self, module: nn.Module, start: Tensors, replies: list[Tensors]) -> None:
        self.parts = find_parts(module)
        self.state: dict[str, Any] = {"model": start}
        self._replies = [
            (f"c{k}", Message.of(model=model, num_examples=k + 1))
            for k, model in enumerate(replies)
        ]

    def ask(self, method: Any, **items: Any) -> Replies:
        return Replies(iter(self._replies))


def of_encoders(values: Any) -> tuple[nn.Module, Tensors]:
    module = nn.ModuleDict({f"modality_{k}": nn.Linear(1, 1) for k in range(len(values))})
    tensors = {
        f"modality_{k}.{name}": torch.full_like(module.get_parameter(f"modality_{k}.{name}"), value)
        for k, value in enumerate(values)
        for name in ("weight", "bias")
    }
    return module, Tensors(tensors)


def test_reference_values(newer_golden: Any) -> None:
    case = newer_golden["fedmepd_encoders"]
    owns, values = case["owns"], case["encoder_value"]
    module, start = of_encoders([-1.0] * 3)
    replies = [
        of_encoders(row)[1].select(
            [f"modality_{k}.{n}" for k in range(3) if mask[k] for n in ("weight", "bias")]
        )
        for mask, row in zip(owns, values, strict=True)
    ]
    server: Any = Answered(module, start, replies)
    ModalityEncoders(decoder="private").round(server)
    _, wanted = of_encoders(case["uniform_over_owners"])
    assert all(torch.equal(server.state["model"][n], wanted[n]) for n in wanted)


def test_an_encoder_without_owners_stays_and_one_owner_gives_its_own() -> None:
    module, start = of_encoders([-1.0, -2.0])
    server: Any = Answered(module, start, [of_encoders([5.0, 6.0])[1].select(
        ["modality_1.weight", "modality_1.bias"]), Tensors()])  # fmt: skip
    ModalityEncoders(decoder="private").round(server)
    found = {name: float(tensor) for name, tensor in server.state["model"].items()}
    assert found == {
        "modality_0.weight": -1.0, "modality_0.bias": -1.0,
        "modality_1.weight": 6.0, "modality_1.bias": 6.0,
    }  # fmt: skip


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_rounds_follow_the_equations(federation: Any, weighting: Any) -> None:
    outcome = federation.run(
        ModalityEncoders(weighting=weighting), federation.full_batch, rounds=ROUNDS,
        network=network, sites=sites(federation),
    )  # fmt: skip
    module = network()
    start = Tensors({n: torch.tensor(v) for n, v in federation.initial(network=network).items()})
    for t in range(1, ROUNDS + 1):
        models = {
            name: trained(module, start, federation.data[name], 1) for name in federation.names
        }
        for name, model in models.items():  # what a site lacks has not moved
            lacked = [n for n in model if of_encoder(n) not in (None, *OWNED[name])]
            assert len(lacked) > 6
            assert all(torch.equal(model[n], start[n]) for n in lacked)
        wanted = expected(start, models, uniform=weighting == "uniform")
        found = outcome.server[t]["model"]
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
        start = found


def test_private_decoders_stay_at_their_sites(federation: Any) -> None:
    outcome = federation.run(
        ModalityEncoders(decoder="private"), federation.full_batch, rounds=ROUNDS,
        network=network, sites=sites(federation),
    )  # fmt: skip
    module = network()
    initial = {n: torch.tensor(v) for n, v in federation.initial(network=network).items()}
    shared, own = Tensors(initial), dict.fromkeys(OWNED, Tensors())
    for t in range(1, ROUNDS + 1):
        models = {
            name: trained(module, shared | own[name], federation.data[name], 1) for name in OWNED
        }
        own = {
            name: Tensors({n: model[n] for n in ("head.weight", "head.bias")})
            for name, model in models.items()
        }
        wanted = expected(shared, models, uniform=True)
        shared = outcome.server[t]["model"]
        for name in wanted:
            if of_encoder(name) is not None:
                np.testing.assert_allclose(shared[name], wanted[name], rtol=1e-9)
            else:
                assert torch.equal(shared[name], initial[name])
        for name in OWNED:
            kept = outcome.clients[t][name]["private"]
            assert kept.keys() == own[name].keys()
            assert all(torch.allclose(kept[n], own[name][n], rtol=1e-9) for n in kept)
            own[name] = kept
    assert outcome.deployed == {}
    assert all(reply["scores"].keys() == {"personal"} for reply in outcome.replies("evaluate"))


@pytest.mark.parametrize("decoder", ["shared", "private"])
def test_encoders_of_absent_modalities_do_not_leave(federation: Any, decoder: Any) -> None:
    outcome = federation.run(
        ModalityEncoders(decoder=decoder), network=network, sites=sites(federation), rounds=2
    )
    requests = [entry for entry in outcome.log if entry[0].method == "train"]
    assert len(requests) == 6
    for request, _, reply in requests:
        assert reply.keys() == {"model", "num_examples", "progress"}
        assert {of_encoder(name) for name in reply["model"]} == {
            *OWNED[request.client], *([None] if decoder == "shared" else []),
        }  # fmt: skip
    for owned in ([0, 1], [0, 2], [1]):
        name = next(site for site, kept in OWNED.items() if kept == owned)
        assert outcome.clients[2][name]["modalities"] == owned


def test_where_all_sites_have_all_it_is_fedavg_bit_by_bit(federation: Any) -> None:
    found, fedavg = (
        federation.run(method, network=network, rounds=3).server[3]["model"]
        for method in (ModalityEncoders(weighting="uniform"), FedAvg(weighting="uniform"))
    )
    assert found.keys() == fedavg.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in fedavg.items())


def test_a_site_without_examples_owns_nothing(federation: Any) -> None:
    there = sites(federation)
    whole = there[1].train
    assert isinstance(whole, TensorDataset)
    empty = TensorDataset({key: value[:0] for key, value in whole.inputs.items()})
    there[1] = replace(there[1], train=empty)
    outcome = federation.run(ModalityEncoders(), network=network, sites=there, rounds=1)
    start = federation.initial(network=network)
    found = outcome.server[1]["model"]
    stayed = {n for n, value in start.items() if np.array_equal(found[n], value)}
    assert stayed == {n for n in start if of_encoder(n) == 2}


def test_weights_by_distance_hold_for_encoders_too(federation: Any) -> None:
    made: Callable[..., Any] = on(ModalityEncoders)
    method = made(omega=0.5)
    outcome = federation.run(method, network=network, rounds=1, sites=sites(federation))
    omega = outcome.server[1]["distance"]["omega"]
    assert sorted(omega.values()) == [0.5, 1.0, 1.0]
    models = dict(zip("ABC", outcome.replies("train"), strict=True))
    for k, owners in enumerate(("AB", "AC", "B")):
        name = f"encoders.modality_{k}.0.weight"
        values = [models[site]["model"][name].numpy() for site in owners]
        wanted = np.average(values, axis=0, weights=[omega[site] for site in owners])
        np.testing.assert_allclose(outcome.server[1]["model"][name], wanted, rtol=1e-9)
    assert method.has_global
    assert not method.has_personal
    assert made(decoder="private").has_personal


def test_without_encoders_it_is_fedavg_or_shares_nothing() -> None:
    parts, own = find_parts(nn.Linear(2, 1)), find_parts(network())
    assert ModalityEncoders().same_as(parts) == "fedavg"
    assert ModalityEncoders().same_as(own) is None
    ModalityEncoders(decoder="private").check_setup(["A"], own)
    with pytest.raises(ConfigError, match=r"set model\.name to modality_unet"):
        ModalityEncoders(decoder="private").check_setup(["A"], parts)


def test_encoders_are_found_by_the_whole_name_of_their_module() -> None:
    module = nn.ModuleDict({"modality_10": nn.Linear(1, 1), "a_modality_1": nn.Linear(1, 1)})
    module["deep"] = nn.ModuleDict({"modality_1": nn.Linear(1, 1, bias=False)})
    assert encoders_of(find_parts(module)) == {
        1: {"deep.modality_1.weight"}, 10: {"modality_10.weight", "modality_10.bias"},
    }  # fmt: skip


def test_a_site_owns_what_one_slice_of_one_of_its_cases_shows() -> None:
    volumes = [torch.zeros(2, 4, 3, 3) for _ in range(3)]  # two slices of four modalities
    volumes[0][0, 3, 1, 1], volumes[1][1, 1, 2, 0] = 1.0, -1.0

    class Volumes:
        def example(self, index: int) -> Example:
            return Example(str(index), str(index), {"image": volumes[index]}, None)

    client: Any = SimpleNamespace(state={}, num_examples=3, examples=Volumes())
    assert owned_modalities(client) == [1, 3]
    assert client.state == {"modalities": [1, 3]}
    client.num_examples = 0
    assert owned_modalities(client) == [1, 3]
    client.state = {}
    assert owned_modalities(client) == []


# --- the U-Net, on the conformance suite


def unet(norm: str = "batch") -> nn.Module:
    return build_model("modality_unet", in_channels=3, out_channels=2, channels=(2, 4), norm=norm)


def images(name: str, count: int, seed: int) -> dict[str, Tensor]:
    with ambient(seed, f"modalities of {name}"):
        found = torch.randn(count, 3, 8, 8)
    label = (found.sum(1) > 0.5).long()
    found[:, [k for k in range(3) if k not in OWNED.get(name, range(3))]] = 0
    return {"image": found, "label": label}


IMAGES = Kind(
    "images that lack modalities", "segmentation", unet,
    lambda: SegmentationTask(2, metrics=("dice",)), images,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["shared", "private"])
def test_it_keeps_the_rules_on_images_that_lack_modalities(tmp_path: Any, decoder: Any) -> None:
    workers = toy_workers()
    try:
        suite = Conformance(ModalityEncoders(decoder=decoder), tmp_path, workers, kind=IMAGES)
        for rule in ("interrupted_requests", "repeated_requests", "absent_client", *ON_EVERY_KIND):
            getattr(suite, f"check_{rule}")()
    finally:
        workers.close()
