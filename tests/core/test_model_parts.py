import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest
import torch
from torch import nn

from collegium.core.model_parts import MemoryFormat, find_parts, set_memory_format
from collegium.errors import ConfigError
from collegium.models.unet import IOPUNet


class Misnamed(nn.Module):
    """Names that say the wrong thing about their types."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.Conv2d(1, 2, 3)
        self.conv = nn.BatchNorm2d(2)
        self.bn = nn.Linear(2, 2)
        self.weight_mean = nn.GroupNorm(1, 2)


class Declared(nn.Module):
    roles: ClassVar[Mapping[str, Sequence[str]]] = {"head": ("first",), "decoder": ("last",)}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.first_too = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)


def test_the_type_of_a_layer_and_not_its_name_makes_it_a_norm() -> None:
    parts = find_parts(Misnamed())
    assert parts.norm == {
        "conv.weight",
        "conv.bias",
        "conv.running_mean",
        "conv.running_var",
        "conv.num_batches_tracked",
        "weight_mean.weight",
        "weight_mean.bias",
    }
    assert parts.norm_statistics == {
        "conv.running_mean",
        "conv.running_var",
        "conv.num_batches_tracked",
    }


def test_the_last_linear_layer_is_the_head_even_before_a_norm() -> None:
    parts = find_parts(Misnamed())
    assert parts.head == {"bn.weight", "bn.bias"}
    assert parts.decoder == parts.head
    assert parts.body == parts.encoder == parts.names - parts.head
    assert parts.names == set(Misnamed().state_dict())


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (nn.LayerNorm(3), {"0.weight", "0.bias"}),
        (nn.RMSNorm(3), {"0.weight"}),
        (nn.InstanceNorm1d(3), set()),
        (nn.InstanceNorm1d(3, affine=True), {"0.weight", "0.bias"}),
        (
            nn.SyncBatchNorm(3, affine=False),
            {"0.running_mean", "0.running_var", "0.num_batches_tracked"},
        ),
        (nn.PReLU(3), set()),
        (nn.Embedding(3, 2), set()),
    ],
)
def test_every_kind_of_norm_layer_is_known(layer: nn.Module, names: set[str]) -> None:
    assert find_parts(nn.Sequential(layer)).norm == names


def test_a_network_that_is_itself_a_norm_is_all_norm() -> None:
    parts = find_parts(nn.BatchNorm1d(2))
    assert parts.norm == parts.names
    assert "running_mean" in parts.norm_statistics
    assert "weight" not in parts.norm_statistics
    assert parts.head == frozenset()


def test_frozen_parameters_and_buffers_are_not_trainable() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    network[0].get_parameter("weight").requires_grad = False
    assert find_parts(network).trainable == {
        "0.bias",
        "1.weight",
        "1.bias",
        "2.weight",
        "2.bias",
    }


def test_buffers_outside_the_state_dict_are_in_no_part() -> None:
    network = nn.BatchNorm1d(2)
    network.register_buffer("scratch", torch.zeros(1), persistent=False)
    network.register_buffer("kept", torch.zeros(1))
    parts = find_parts(network)
    assert "scratch" not in parts.names
    assert "scratch" not in parts.norm_statistics
    assert "kept" in parts.norm_statistics


def test_tied_weights_are_always_in_the_same_parts() -> None:
    network = nn.ModuleDict(
        {"embed": nn.Embedding(5, 3), "mix": nn.Linear(3, 3), "out": nn.Linear(3, 5, bias=False)}
    )
    network["out"].register_parameter("weight", network["embed"].get_parameter("weight"))
    parts = find_parts(network)
    assert parts.head == {"out.weight", "embed.weight"}
    assert parts.body == {"mix.weight", "mix.bias"}
    assert parts.trainable == parts.names


def test_a_parameter_that_shares_memory_only_is_tied_too() -> None:
    network = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    network["b"].weight = nn.Parameter(network["a"].get_parameter("weight").data)
    assert find_parts(network).head == {"a.weight", "b.weight"}


def test_a_norm_used_under_two_names_is_norm_under_both() -> None:
    norm = nn.BatchNorm1d(2)
    parts = find_parts(nn.ModuleDict({"site": norm, "shared": norm, "out": nn.Linear(2, 1)}))
    assert parts.norm == parts.names - {"out.weight", "out.bias"}


def test_a_view_of_another_shape_is_not_tied() -> None:
    network = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 1, bias=False)})
    network["b"].weight = nn.Parameter(network["a"].get_parameter("weight").data[:1])
    assert find_parts(network).head == {"b.weight"}


def test_tensors_without_memory_are_not_tied_to_each_other() -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_parts(network).head == {"1.weight", "1.bias"}


def test_declared_roles_win_and_the_head_belongs_to_the_decoder() -> None:
    parts = find_parts(Declared())
    assert parts.head == {"first.weight", "first.bias"}
    assert parts.decoder == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert parts.encoder == {"first_too.weight", "first_too.bias"}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"neck": ("first",)}, "key 'neck': use only head, encoder, decoder"),
        ({"head": ("firzt",)}, r"roles\['head'\] is \('firzt',\)"),
        ({"head": "first"}, r"roles\['head'\] is 'first': make it a list"),
        ([], "roles is a list: make it a mapping"),
    ],
)
def test_roles_that_cannot_be_used_are_refused(roles: object, message: str) -> None:
    network = Declared()
    vars(network)["roles"] = roles
    with pytest.raises(ConfigError, match=message):
        find_parts(network)


def test_parts_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        find_parts(nn.Linear(1, 1)).head = frozenset()  # type: ignore[misc]


def under(names: frozenset[str], *starts: str) -> set[str]:
    return {name for name in names if name.startswith(starts)}


def test_the_iop_unet_splits_where_the_path_turns_up() -> None:
    parts = find_parts(IOPUNet(3, 2, base=4))
    assert parts.head == {"head.weight", "head.bias"}
    assert parts.decoder == under(parts.names, "up.", "merge.", "head.")
    assert parts.encoder == under(parts.names, "down.", "bottleneck.")
    assert parts.encoder | parts.decoder == parts.names
    # 18 batch norms (two in each of 9 blocks) of 5 tensors, 3 of them statistics
    assert len(parts.norm) == 90
    assert len(parts.norm_statistics) == 54
    # 18 convolutions without bias, 4 transposed ones and the head with bias
    assert len(parts.names) == 90 + 18 + 2 * 4 + 2


@pytest.mark.parametrize("units", [0, 1])
def test_the_decoder_of_the_monai_unet_is_the_path_up_at_every_level(units: int) -> None:
    nets = pytest.importorskip("monai.networks.nets")
    network = nets.UNet(2, 3, 2, (4, 8, 16, 32), (2, 2, 2), num_res_units=units, norm="batch")
    parts = find_parts(network)
    ups = ("model.2.", "model.1.submodule.2.", "model.1.submodule.1.submodule.2.")
    assert parts.decoder == under(parts.names, *ups)
    assert parts.encoder == parts.names - parts.decoder
    bottom = under(parts.names, "model.1.submodule.1.submodule.1.submodule.")
    assert bottom
    assert bottom <= parts.encoder
    assert parts.head == under(parts.names, "model.2.")  # from the last features to the classes
    assert len(parts.head) == (2 if units == 0 else 10)
    norms = {name for name in parts.names if ".N." in name}  # MONAI's name for the norm of a unit
    assert norms
    assert parts.norm == norms


@pytest.mark.parametrize(
    ("choice", "norm", "flat", "deep"),
    [
        ("auto", nn.BatchNorm2d, True, True),
        ("auto", nn.InstanceNorm2d, False, True),
        ("auto", nn.InstanceNorm3d, True, True),
        ("channels_last", nn.InstanceNorm2d, True, True),
        ("contiguous", nn.BatchNorm2d, False, False),
    ],
)
def test_convolutions_are_channels_last_by_the_kind_of_network(
    choice: MemoryFormat, norm: type[nn.Module], flat: bool, deep: bool
) -> None:
    network = nn.ModuleDict(
        {"flat": nn.Conv2d(3, 4, 3), "deep": nn.Conv3d(3, 4, 3), "line": nn.Linear(3, 4)}
    )
    network["norm"] = norm(4)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    set_memory_format(network, choice)
    weights = {name.removesuffix(".weight"): p for name, p in network.named_parameters()}
    assert weights["flat"].is_contiguous(memory_format=torch.channels_last) == flat
    assert weights["deep"].is_contiguous(memory_format=torch.channels_last_3d) == deep
    assert weights["line"].is_contiguous()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
