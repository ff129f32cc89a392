from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collegium.core.dataset import Example
from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.models.factory import MODELS, build_model
from collegium.models.files import export_model, import_safetensors
from collegium.models.unet import IOPUNet
from collegium.tasks import SegmentationTask

INPUTS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "unet": ({"in_channels": 1, "out_channels": 3}, (2, 1, 16, 16), (2, 3, 16, 16)),
    "iop_unet": ({"in_channels": 1, "out_channels": 3}, (2, 1, 16, 16), (2, 3, 16, 16)),
    "modality_unet": (
        {"in_channels": 2, "out_channels": 3, "channels": [4, 8]}, (2, 2, 16, 16), (2, 3, 16, 16),
    ),
    "densenet": ({"in_channels": 1, "out_channels": 3, "blocks": [1, 1]}, (2, 1, 16, 16), (2, 3)),
    "resnet18": ({"in_channels": 1, "out_channels": 3}, (2, 1, 64, 64), (2, 3)),
    "resnet18_encoder": ({"spatial_dims": 2}, (2, 1, 32, 32), (2, 512, 4, 4)),
    "tabnet": ({"in_features": 4, "out_features": 3}, (2, 4), (2, 3)),
    "mlp": ({"in_features": 4, "out_features": 3}, (2, 4), (2, 3)),
    "logistic": ({"in_features": 4, "out_features": 3}, (2, 4), (2, 3)),
}  # fmt: skip
"""By model parameters, the shape that enters, and the shape that comes out."""


def built(name: str, seed: int = 1) -> nn.Module:
    with ambient(seed, "test"):
        return build_model(name, **INPUTS[name][0])


@pytest.mark.parametrize("name", MODELS)
def test_every_listed_model_gives_what_it_should(name: str) -> None:
    _, shape, expected = INPUTS[name]
    assert built(name).eval()(torch.zeros(shape)).shape == expected


@pytest.mark.parametrize("name", MODELS)
def test_every_listed_model_is_the_same_again_bit_by_bit_after_a_step(name: str) -> None:
    def trained(seed: int) -> dict[str, torch.Tensor]:
        module = built(name, seed)
        x = torch.randn(INPUTS[name][1], generator=torch.Generator().manual_seed(0))
        module(x).square().sum().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-1e-3)
        return module.state_dict()

    first, second, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize("name", MODELS)
def test_every_listed_model_is_a_file_of_tensors_and_comes_back(name: str, tmp_path: Path) -> None:
    module = built(name).eval()
    state = module.state_dict()
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    export_model(Tensors(state), tmp_path / "model.safetensors")
    other = built(name, seed=2).eval()
    other.load_state_dict(dict(import_safetensors(tmp_path / "model.safetensors")))
    x = torch.randn(INPUTS[name][1], generator=torch.Generator().manual_seed(0))
    assert torch.equal(other(x), module(x))


@pytest.mark.parametrize("name", MODELS)
def test_head_and_body_of_every_listed_model_are_all_of_it(name: str) -> None:
    parts = find_parts(built(name))
    assert parts.head | parts.body == parts.encoder | parts.decoder == parts.names
    assert not parts.encoder & parts.decoder
    assert bool(parts.head) is (name != "resnet18_encoder")
    assert bool(parts.norm) is (name != "logistic")


def test_the_unet_may_shrink_each_axis_by_its_own_stride() -> None:
    strides = [[1, 2, 2], [2, 2, 2], 2]
    network = build_model(
        "unet", spatial_dims=3, in_channels=1, channels=[4, 8, 8, 12], strides=strides
    ).eval()
    bottom: list[torch.Size] = []
    *_, deepest = (m for m in network.modules() if "SkipConnection" in type(m).__name__)
    deepest.get_submodule("submodule").register_forward_hook(lambda *a: bottom.append(a[2].shape))
    assert network(torch.zeros(1, 1, 8, 16, 24)).shape == (1, 2, 8, 16, 24)
    assert bottom == [(1, 12, 2, 2, 3)]
    parts = find_parts(network)
    ups = ("model.2.", "model.1.submodule.2.", "model.1.submodule.1.submodule.2.")
    assert parts.decoder == {n for n in parts.names if n.startswith(ups)}
    assert parts.head == {n for n in parts.names if n.startswith("model.2.")}
    task = SegmentationTask(2)
    volume = Example("v", "p", {"image": torch.zeros(1, 1, 5, 9, 9)}, None)
    with torch.no_grad():
        assert task.predict(network, volume).shape == (1, 5, 9, 9)
    assert next(task.windows(network, volume.batch["image"])).shape == (1, 1, 8, 16, 16)


def test_the_unet_has_the_size_that_its_channels_give() -> None:
    def conv(inputs: int, outputs: int, kernel: int = 3) -> int:
        return inputs * outputs * kernel**2 + outputs

    def rest(channels: int) -> int:
        return 2 * channels + 1  # scale, shift and the slope of the PReLU

    down = sum(2 * conv(i, o) + rest(o) for i, o in [(3, 16), (16, 32), (32, 64)])
    bottom = conv(64, 128) + rest(128) + conv(64, 128, kernel=1)
    ups = sum(conv(i, o) + rest(o) for i, o in [(192, 32), (64, 16), (32, 2)])
    units = conv(32, 32) + rest(32) + conv(16, 16) + rest(16) + conv(2, 2)
    network = build_model("unet", in_channels=3, out_channels=2, channels=[16, 32, 64, 128])
    size = sum(p.numel() for p in network.parameters())
    assert size == down + bottom + ups + units
    assert size == pytest.approx(200_000, rel=0.05)


def test_the_unet_may_be_three_dimensional_with_instance_norm() -> None:
    network = build_model(
        "unet", spatial_dims=3, in_channels=1, channels=[2, 4], strides=[2], norm="instance"
    )
    assert network(torch.zeros(1, 1, 4, 4, 4)).shape == (1, 2, 4, 4, 4)
    norms = [m for m in network.modules() if isinstance(m, nn.InstanceNorm3d)]
    assert len(norms) == 3
    assert all(m.affine for m in norms)


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_the_unet_computes_what_monai_s_own_does(spatial_dims: int) -> None:
    from monai.networks.nets.unet import UNet

    sizes: dict[str, Any] = {"channels": (4, 8, 16), "num_res_units": 1}
    ours = build_model(
        name="unet", spatial_dims=spatial_dims, in_channels=1, out_channels=2, **sizes
    )
    theirs = UNet(spatial_dims, 1, 2, strides=(2, 2), norm="batch", **sizes)
    theirs.load_state_dict(ours.state_dict())
    assert sum(type(layer).__name__ == "QuickSkipConnection" for layer in ours.modules()) == 2
    images = torch.randn(2, 1, *[8] * spatial_dims)
    found, expected = (network(images) for network in (ours, theirs))
    assert torch.equal(found, expected)
    found.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_weights_come_from_the_ambient_random_state() -> None:
    def weights(seed: int) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.random.manual_seed(seed)
            return nn.utils.parameters_to_vector(build_model("unet", channels=[2, 4]).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("unnet", {}, r"no model 'unnet'; did you mean 'unet'\? set model.name to one of unet"),
        ("zzz", {}, r"no model 'zzz': set model.name"),
        ("unet", {"channelz": [2, 4]}, r"no parameter 'channelz'; did you mean 'channels'\?"),
        ("iop_unet", {"bias": 3}, "'iop_unet' has no parameter 'bias'"),
        ("unet", {"spatial_dims": 4}, "unet.spatial_dims: should be 2 or 3, not 4"),
        ("unet", {"channels": [4]}, r"unet.channels: should be at least 2 long, not \[4\]"),
        ("unet", {"strides": [2]}, r"model.strides is \[2\] .*: set it to one fewer"),
        (
            "unet",
            {"strides": [2, [2, 2], "2"]},
            "unet.strides: should be a list of whole",
        ),
        ("unet", {"strides": [2, [2, 2, 2], 2]}, r"\[2, \[2, 2, 2\], 2\] .* or 2 of them"),
        ("unet", {"strides": [2, 0, 2]}, "unet.strides: each should be at least 1, not"),
        ("unet", {"norm": "layer"}, "unet.norm: should be 'batch', 'instance' or 'population'"),
        ("unet", {"dropout": 1.0}, "unet.dropout: should be at least 0 and below 1, not 1.0"),
        ("nowhere.py:Net", {}, "nowhere.py cannot be read .*; correct the path"),
        ("no.such.package:Net", {}, "'no.such.package' cannot be imported"),
        ("torch.nn:Lineer", {}, r"no class or function 'Lineer'; did you mean 'Linear'\?"),
        (
            "torch.nn:Linear",
            {"in_features": 2},
            "needs the parameter 'out_features': set model.out",
        ),
        ("fractions:Fraction", {}, "returned a Fraction: return a torch.nn.Module"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_sentence(
    name: str, params: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(name, **params)


def test_a_file_whose_code_raises_is_named_with_what_it_raised(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import nothing_of_the_kind\n")
    with pytest.raises(
        ConfigError, match=r"mine\.py does not load: ModuleNotFoundError: No module"
    ):
        build_model(f"{tmp_path / 'mine.py'}:Net")


def test_a_model_may_come_from_a_package() -> None:
    network = build_model("collegium.models.unet:IOPUNet", base=2)
    assert isinstance(network, IOPUNet)


def test_a_model_may_come_from_a_file(tmp_path: Path) -> None:
    source = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn

@dataclass
class Sizes:
    width: int

def make(*, width: int, **more):
    return nn.Linear(Sizes(width).width, more["out"])
"""
    (tmp_path / "mine.py").write_text(source)
    network = build_model(f"{tmp_path / 'mine.py'}:make", width=3, out=4)
    assert isinstance(network, nn.Linear)
    assert network.weight.shape == (4, 3)
