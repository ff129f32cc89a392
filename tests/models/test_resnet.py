from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.errors import ConfigError
from collegium.heterogeneity.embeddings import embed_image, make_encoder
from collegium.models.factory import build_model
from collegium.models.resnet import ResNet18Encoder


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def encoder(**params: Any) -> ResNet18Encoder:
    with ambient(1, "test"):
        return ResNet18Encoder(**params).eval()


def test_the_2d_network_has_the_size_of_the_paper() -> None:
    network = build_model("resnet18", out_channels=1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_689_512


@pytest.mark.parametrize("dims", [2, 3])
def test_it_gives_logits_and_every_parameter_learns(dims: int) -> None:
    network = build_model("resnet18", spatial_dims=dims, in_channels=1, out_channels=3)
    logits = network(images(2, 1, *[40] * dims))
    assert logits.shape == (2, 3)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_head_is_the_map_to_classes_and_encoder_all_before() -> None:
    parts = find_parts(build_model("resnet18"))
    assert parts.head == parts.decoder == {"fc.weight", "fc.bias"}
    assert parts.encoder == parts.body == parts.names - {"fc.weight", "fc.bias"}
    norms = {"bn1", *(f"layer{k}.0.downsample.1" for k in (2, 3, 4))}
    norms |= {f"layer{k}.{b}.bn{n}" for k in (1, 2, 3, 4) for b in (0, 1) for n in (1, 2)}
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert parts.norm == {f"{norm}.{tensor}" for norm in norms for tensor in tensors}


def by_hand(state: dict[str, torch.Tensor], x: torch.Tensor, *, dilated: bool) -> torch.Tensor:
    """The 2-D map from the tensors alone: MedicalNet's strides and dilations, or the paper's."""

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        scale, shift = state[f"{name}.weight"], state[f"{name}.bias"]
        return functional.batch_norm(y, mean, variance, scale, shift)

    y = functional.conv2d(x, state["conv1.weight"], stride=2, padding=3)
    y = functional.max_pool2d(functional.relu(norm(y, "bn1")), 3, stride=2, padding=1)
    strides = {1: 1, 2: 2, 3: 1, 4: 1} if dilated else {1: 1, 2: 2, 3: 2, 4: 2}
    for k, stride in strides.items():
        d = {3: 2, 4: 4}.get(k, 1) if dilated else 1
        for block in (f"layer{k}.0", f"layer{k}.1"):
            s = stride if block.endswith(".0") else 1
            z = functional.conv2d(y, state[f"{block}.conv1.weight"], None, s, d, d)
            z = functional.relu(norm(z, f"{block}.bn1"))
            z = functional.conv2d(z, state[f"{block}.conv2.weight"], None, 1, d, d)
            z = norm(z, f"{block}.bn2")
            kept = torch.zeros_like(z)
            kept[:, : y.shape[1]] = y[..., ::s, ::s]
            y = functional.relu(z + kept)
    return y


@pytest.mark.parametrize(("dilated", "side"), [(True, 5), (False, 2)])
def test_the_map_is_the_networks_by_hand(dilated: bool, side: int) -> None:
    network = encoder(spatial_dims=2, in_channels=2, dilated=dilated)
    x = images(2, 2, 40, 40)
    found = network(x)
    assert found.shape == (2, 512, side, side)
    expected = by_hand(dict(network.state_dict()), x, dilated=dilated)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_monais_own_network_gives_the_same_map_where_it_is_not_dilated() -> None:
    nets = pytest.importorskip("monai.networks.nets.resnet")
    network = encoder(dilated=False)
    other = nets.ResNetFeatures("resnet18", pretrained=False, spatial_dims=3, in_channels=1).eval()
    assert list(other.state_dict()) == list(network.state_dict())
    other.load_state_dict(network.state_dict())
    x = images(1, 1, 40, 33, 24)
    with torch.no_grad():
        torch.testing.assert_close(network(x), other(x)[-1])


def test_gradients_pass_through_the_shortcuts() -> None:
    network = encoder(spatial_dims=2)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith(("layer2", "layer3", "layer4")) and ".bn2." in name:
                parameter.zero_()  # nothing but the shortcut is left of these layers
    network(images(1, 1, 40, 40)).sum().backward()
    gradient = network.get_parameter("conv1.weight").grad
    assert gradient is not None
    assert bool(gradient.any())


def test_all_of_the_encoder_is_encoder_and_it_has_no_head() -> None:
    parts = find_parts(encoder())
    assert parts.encoder == parts.names == parts.body
    assert parts.head == parts.decoder == frozenset()
    assert len(parts.names) == 102  # 17 convolutions, 17 norms of 5 tensors
    assert len(parts.norm) == 17 * 5


def test_images_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 channels and 3 axes, not of shape \(1, 8, 8\): set"):
        encoder()(images(1, 1, 8, 8))
    with pytest.raises(ConfigError, match=r"takes images with 1 channels and 2 axes"):
        encoder(spatial_dims=2)(images(1, 3, 8, 8))


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    with ambient(5, "test"):
        return dict(ResNet18Encoder().state_dict())


def test_weights_of_a_file_are_loaded_whole(tmp_path: Path, state: dict[str, Any]) -> None:
    path = tmp_path / "medical net.safetensors"
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, path)
    found = build_model("resnet18_encoder", weights=str(path)).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_counters_may_be_absent(tmp_path: Path, state: dict[str, Any]) -> None:
    path = tmp_path / "old.safetensors"
    save_file({n: t for n, t in state.items() if not n.endswith("num_batches_tracked")}, path)
    network = build_model("resnet18_encoder", weights=str(path))
    assert torch.equal(network.state_dict()["layer4.1.bn2.bias"], state["layer4.1.bn2.bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv1.weight": None}, "missing conv1.weight"),
        ({"conv_seg.weight": torch.ones(1)}, "unexpected conv_seg.weight"),
        ({"bn1.weight": torch.ones(3)}, r"bn1.weight is \(3,\), not \(64,\)"),
    ],
)
def test_a_file_of_another_network_is_refused_in_one_sentence(
    change: dict[str, Any], message: str, tmp_path: Path, state: dict[str, Any]
) -> None:
    path = tmp_path / "other.safetensors"
    save_file({n: t for n, t in (state | change).items() if t is not None}, path)
    with pytest.raises(ConfigError, match=message) as caught:
        build_model("resnet18_encoder", weights=str(path))
    assert str(caught.value).startswith(f"model.weights is {str(path)!r}, which resnet18_encoder")
    assert "\n" not in str(caught.value)


def test_a_file_of_torch_is_not_opened(tmp_path: Path, state: dict[str, Any]) -> None:
    path = tmp_path / "disguised.safetensors"
    torch.save(state, path)
    with pytest.raises(ConfigError, match="is a PyTorch file; convert it to safetensors"):
        build_model("resnet18_encoder", weights=str(path))
    with pytest.raises(ConfigError, match=r"absent\.safetensors: No such file"):
        build_model("resnet18_encoder", weights=str(tmp_path / "absent.safetensors"))


def test_sites_can_be_compared_by_it_with_and_without_a_file(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    path = tmp_path / "medicalnet.safetensors"
    save_file(state, path)
    trained, random = make_encoder(f"resnet18_encoder@{path}"), make_encoder("resnet18_encoder")
    for network in (trained, random):
        assert isinstance(network, nn.Module)
        assert not network.training
    assert isinstance(trained, ResNet18Encoder)
    assert torch.equal(trained.state_dict()["conv1.weight"], state["conv1.weight"])
    volume = images(1, 20, 24, 28)
    assert embed_image(volume, trained, 24).shape == (1024,)
    assert (embed_image(volume, random, 24) == embed_image(volume, make_encoder(
        "resnet18_encoder"), 24)).all()  # fmt: skip
    with pytest.raises(ConfigError, match=r"encoder: model.weights is 'absent'"):
        make_encoder("resnet18_encoder@absent")
    with pytest.raises(ConfigError, match="encoder: the model 'resnet18' has no parameter 'weig"):
        make_encoder("resnet18@absent")
