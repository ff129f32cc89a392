import copy
import sys
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.fedper import FedPer
from collegium.core.algorithm import NetworkBuilder
from collegium.core.dataset import TensorDataset
from collegium.core.model_parts import find_parts
from collegium.core.payloads import ModelPart
from collegium.core.randomness import ambient
from collegium.core.settings import settings
from collegium.data.site import Site
from collegium.errors import ConfigError
from collegium.models.factory import build_model, parameter_problems
from collegium.models.lora import Lora, add_adapters, merge_adapters, name_without_adapters
from collegium.runtime.federation import initial_model
from collegium.runtime.simulation import simulate
from collegium.tasks import SupervisedTask
from collegium.training.loop import TrainingConfig

MLP: dict[str, Any] = {"name": "mlp", "in_features": 3, "out_features": 2, "hidden": [5, 4]}
SWIN: dict[str, Any] = {
    "name": "monai.networks.nets:SwinUNETR", "in_channels": 1, "out_channels": 2, "spatial_dims": 2,
    "feature_size": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2],
}  # fmt: skip
UNETR: dict[str, Any] = {
    "name": "monai.networks.nets:UNETR", "in_channels": 1, "out_channels": 2, "spatial_dims": 2,
    "img_size": 32, "feature_size": 4, "hidden_size": 12, "mlp_dim": 16, "num_heads": 2,
}  # fmt: skip
VIT: dict[str, Any] = {
    "name": "monai.networks.nets:ViT", "in_channels": 1, "img_size": [16, 16],
    "patch_size": [8, 8], "spatial_dims": 2, "hidden_size": 12, "mlp_dim": 16, "num_layers": 2,
    "num_heads": 2, "classification": True, "num_classes": 3,
}  # fmt: skip
WITH_EINOPS = pytest.mark.skipif(
    find_spec("einops") is None, reason="MONAI's transformers need einops: pip install einops"
)
UNET: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [4, 8, 8]}


def network(model: dict[str, Any], seed: int = 1, **lora: Any) -> nn.Module:
    with ambient(seed, "test"):
        return build_model(**model, lora=lora)


def plain(model: dict[str, Any], seed: int = 1) -> nn.Module:
    with ambient(seed, "test"):
        return build_model(**model)


def moved(module: nn.Module) -> nn.Module:
    """The network with the second factors of its adapters drawn, which begin as 0."""
    with torch.no_grad(), ambient(5, "moved"):
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    return module


def images(side: int, axes: int = 2) -> Tensor:
    return torch.rand(2, 1, *[side] * axes, generator=torch.Generator().manual_seed(0))


def output(module: nn.Module, batch: Tensor) -> Tensor:
    found = module.eval()(batch)
    tensor: Tensor = found[0] if isinstance(found, tuple) else found
    return tensor.detach()


@pytest.mark.parametrize(
    ("model", "lora", "side", "axes"),
    [
        pytest.param(
            SWIN, {"modules": ["qkv", "linear1"]}, 64, 2, marks=[WITH_EINOPS, pytest.mark.slow]
        ),
        pytest.param(UNETR, {"modules": ["qkv"]}, 32, 2, marks=WITH_EINOPS),
        pytest.param(VIT, {}, 16, 2, marks=WITH_EINOPS),
        (UNET, {"rank": 2}, 16, 2),
        ({**UNET, "spatial_dims": 3, "norm": "instance"}, {}, 8, 3),
        ({"name": "iop_unet", "in_channels": 1, "base": 2}, {}, 16, 2),
        ({"name": "resnet18", "in_channels": 1}, {"modules": ["layer4"]}, 32, 2),
    ],
)
def test_a_network_begins_as_it_was_and_trains_adapters_and_head(
    model: dict[str, Any], lora: dict[str, Any], side: int, axes: int
) -> None:
    adapted, bare, batch = network(model, **lora), plain(model), images(side, axes)
    own = {name_without_adapters(n): t for n, t in adapted.state_dict().items()}
    own.pop(None)
    assert own.keys() == bare.state_dict().keys()
    assert all(torch.equal(own[name], t) for name, t in bare.state_dict().items())
    assert torch.equal(output(adapted, batch), output(bare, batch))
    parts = find_parts(adapted)
    adapters = {name for name in parts.names if ".lora_A." in name or ".lora_B." in name}
    head = {name for name in parts.head if name in dict(adapted.named_parameters())}
    assert parts.trainable == adapters | head
    assert adapters
    assert head
    assert parts.head == find_parts(bare).head
    assert parts.frozen == parts.names - adapters - parts.head
    different = output(moved(adapted), batch)
    assert not torch.allclose(different, output(bare, batch))
    merge_adapters(adapted)
    assert adapted.state_dict().keys() == bare.state_dict().keys()
    torch.testing.assert_close(output(adapted, batch), different, rtol=1e-4, atol=1e-4)


def test_the_adapter_of_a_linear_layer_is_a_product_of_low_rank() -> None:
    module = moved(network({**MLP, "norm": "none"}, rank=2, alpha=6.0))
    w = {name: t.detach().double().numpy() for name, t in module.state_dict().items()}
    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    y = x.double().numpy()
    for layer in ("body.0", "body.4"):
        low = w[f"{layer}.lora_B.default.weight"] @ w[f"{layer}.lora_A.default.weight"]
        assert np.linalg.matrix_rank(low) == 2
        whole = w[f"{layer}.base_layer.weight"] + 6.0 / 2 * low
        y = np.maximum(y @ whole.T + w[f"{layer}.base_layer.bias"], 0)
    expected = y @ w["head.weight"].T + w["head.bias"]
    np.testing.assert_allclose(output(module, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [2, 3])
def test_the_adapter_of_a_convolution_is_two_convolutions(axes: int) -> None:
    kind = nn.Conv2d if axes == 2 else nn.Conv3d
    with ambient(0, "test"):
        layers = nn.Sequential(kind(1, 3, 3, stride=2, padding=1), kind(3, 1, 1))
        bare = copy.deepcopy(layers)
        add_adapters(layers, Lora(rank=2, alpha=1.0))
    moved(layers)
    conv, batch = functional.conv2d if axes == 2 else functional.conv3d, images(8, axes)
    a, b = (layers.get_parameter(f"0.lora_{factor}.default.weight") for factor in "AB")
    low = conv(conv(batch, a, stride=2, padding=1), b)
    expected = bare[1](bare[0](batch) + 0.5 * low)
    torch.testing.assert_close(output(layers, batch), expected.detach())


def test_adapters_are_drawn_after_the_weights_from_the_same_seed() -> None:
    first, again, other = (network(MLP, seed).state_dict() for seed in (1, 1, 2))
    name = "body.0.lora_A.default.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not first["body.0.lora_B.default.weight"].any()


@pytest.mark.parametrize(
    ("modules", "adapted"),
    [
        ((), {"0", "1.0", "4"}),
        (("1",), {"1.0"}),
        (("0",), {"0", "1.0"}),  # wherever a submodule of that name stands
    ],
)
def test_layers_that_an_adapter_would_get_wrong_have_none(
    modules: tuple[str, ...], adapted: set[str]
) -> None:
    conv = nn.Conv2d
    layers = nn.Sequential(
        conv(1, 4, 1), nn.Sequential(conv(4, 4, 1)), conv(4, 4, 3, dilation=2),
        conv(4, 4, 1, groups=2), nn.Linear(4, 4), conv(4, 4, 1, padding_mode="circular"),
        nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 8), nn.Linear(4, 2),
    )  # fmt: skip
    add_adapters(layers, Lora(rank=2, modules=modules))
    names = {name.partition(".lora_A")[0] for name in layers.state_dict() if ".lora_A" in name}
    assert names == adapted


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        (MLP, {"rank": 0}, "model.lora.rank: should be at least 1, not 0"),
        (MLP, {"ranc": 2}, "model.lora.ranc: .*did you mean 'rank'"),
        (MLP, {"modules": ["qkv"]}, "MLP has no linear layer or .* in a submodule 'qkv'; correct"),
        (MLP, {"modules": ["body", "head"]}, "MLP has no .* in a submodule 'head'; correct"),
        (
            {"name": "logistic", "in_features": 3, "out_features": 2},
            {},
            "Logistic has no linear layer or convolution that can have an adapter; correct",
        ),
    ],
)
def test_adapters_that_cannot_work_are_refused(
    model: dict[str, Any], lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        network(model, **lora)


def test_an_experiment_names_the_key_that_is_wrong() -> None:
    own = {key: value for key, value in MLP.items() if key != "name"}
    ((path, text),) = parameter_problems("mlp", {**own, "lora": {"dropout": 1.0}})
    assert path == ("lora", "dropout")
    assert text == "should be at least 0 and below 1, not 1.0"


def test_without_peft_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"^model.lora: peft is not .* 'collegium\[lora\]'$"):
        network(MLP)


def wide() -> nn.Module:
    return build_model(
        "mlp", in_features=3, out_features=1, hidden=[256, 256], norm="none", lora={"rank": 2}
    )


def site(name: str) -> Site:
    rng = torch.Generator().manual_seed(ord(name))
    samples = {"image": torch.randn(8, 3, generator=rng), "label": torch.randn(8, 1, generator=rng)}
    data = TensorDataset(samples)
    return Site(name, data, data, data)


TRAINING = TrainingConfig(optimizer="sgd", lr=0.05, batch_size=4)


def test_adapters_and_head_alone_are_trained_and_sent() -> None:
    task = SupervisedTask(nn.functional.mse_loss)
    found = simulate(FedAvg(), [site("A"), site("B")], wide, task, rounds=2, training=TRAINING)
    assert found.model is not None
    start = initial_model(wide, 0)
    different = {name for name, t in found.model.items() if not torch.equal(t, start[name])}
    assert different == find_parts(wide()).trainable
    trained = 4 * (2 * (3 + 256) + 2 * (256 + 256) + 256 + 1)  # bytes of the adapters and the head
    for record in found.records[1:3]:
        assert all(trained < sent < trained + 3000 for sent in record.bytes_up.values())
        assert all(trained < sent < trained + 3000 for sent in record.bytes_down.values())


def test_the_first_factors_can_be_frozen_too() -> None:
    parts = find_parts(NetworkBuilder(wide, FedAvg(), freeze=["lora_A"])())
    assert {name for name in parts.frozen if ".lora_A." in name}
    expected = {name for name in parts.names if ".lora_B." in name} | parts.head
    assert parts.trainable == expected


@settings
class OwnSecondFactors(FedPer):
    """FedAvg whose clients keep the second factor of every adapter."""

    sends: ClassVar[Any] = {"model": ModelPart(without="lora_B")}
    private: ClassVar[str] = "lora_B"


def test_a_factor_can_stay_at_home() -> None:
    task = SupervisedTask(nn.functional.mse_loss)
    sites = [site("A"), site("B")]
    found = simulate(OwnSecondFactors(), sites, wide, task, rounds=2, training=TRAINING)
    a, b = (found.personal[name] for name in "AB")
    different = {name for name in a if not torch.equal(a[name], b[name])}
    assert different == {name for name in a if ".lora_B." in name}
    assert different


def test_names_are_those_of_the_network_without_adapters() -> None:
    assert name_without_adapters("a.base_layer.weight") == "a.weight"
    assert name_without_adapters("a.lora_A.default.weight") is None
    assert name_without_adapters("lora_head.weight") == "lora_head.weight"
