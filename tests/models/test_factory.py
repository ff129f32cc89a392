from pathlib import Path

import pytest
import torch
from torch import nn

from collegium.errors import ConfigError
from collegium.models.factory import MODELS, build_model
from collegium.models.unet import IOPUNet


def test_every_listed_model_can_be_built_and_segments() -> None:
    for name in MODELS:
        network = build_model(name, in_channels=1, out_channels=3).eval()
        assert network(torch.zeros(1, 1, 16, 16)).shape == (1, 3, 16, 16)


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
        ("unnet", {}, r"no model 'unnet' \(did you mean 'unet'\?\): set model.name to one of unet"),
        ("zzz", {}, r"no model 'zzz': set model.name"),
        ("unet", {"channelz": [2, 4]}, r"no parameter 'channelz' \(did you mean 'channels'\?\)"),
        ("iop_unet", {"bias": 3}, "'iop_unet' has no parameter 'bias'"),
        ("unet", {"spatial_dims": 4}, "model.spatial_dims is 4 .*: set it to 2 or 3"),
        ("unet", {"channels": [4]}, r"model.channels is \[4\] .*: set it to at least two"),
        ("unet", {"strides": [2]}, r"model.strides is \[2\] .*: set it to one fewer"),
        ("unet", {"norm": "layer"}, "model.norm is 'layer' .*: set it to batch or instance"),
        ("unet", {"dropout": 1.0}, "model.dropout is 1.0"),
        ("nowhere.py:Net", {}, "nowhere.py cannot be read .*; correct the path"),
        ("no.such.package:Net", {}, "'no.such.package' cannot be imported"),
        ("torch.nn:Lineer", {}, r"no class or function 'Lineer' \(did you mean 'Linear'\?\)"),
        (
            "torch.nn:Linear",
            {"in_features": 2},
            "needs the parameter 'out_features': set model.out",
        ),
        ("fractions:Fraction", {}, "gave a Fraction: return a torch.nn.Module"),
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
