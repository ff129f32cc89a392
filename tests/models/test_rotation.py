from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.errors import ConfigError
from collegium.models._rotation_head import RotationHead
from collegium.models.factory import build_model
from collegium.models.rotation import (
    attach_rotation_head,
    crop_square,
    rotate,
    rotation_head,
    rotation_logits,
    rotation_loss,
)
from collegium.models.tables import MLP, Logistic
from collegium.models.tabnet import TabNet
from collegium.models.unet import IOPUNet


def monai_unet(dims: int = 2) -> nn.Module:
    return build_model(
        "unet", spatial_dims=dims, in_channels=1, out_channels=2, channels=[4, 8, 12],
        num_res_units=1,
    )  # fmt: skip


def headed(module: nn.Module) -> Any:
    attach_rotation_head(module)
    return module


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def linear(head: RotationHead, features: torch.Tensor) -> np.ndarray:
    """The head by hand: the mean over space, then a matrix and a bias."""
    pooled = features.detach().numpy().reshape(*features.shape[:2], -1).mean(-1)
    return np.asarray(pooled @ head.weight.detach().numpy().T + head.bias.detach().numpy())


def test_the_head_of_the_iop_unet_hangs_on_its_bottleneck() -> None:
    module = headed(IOPUNet(1, 2, base=4)).eval()
    x = images(3, 1, 32, 32)
    y = x
    for block in module.down:
        y = nn.functional.max_pool2d(block(y), 2)
    expected = linear(rotation_head(module), module.bottleneck(y))
    np.testing.assert_allclose(rotation_logits(module, x).detach(), expected, atol=1e-6)


@pytest.mark.parametrize("dims", [2, 3])
def test_the_head_of_monais_unet_hangs_on_its_bottom(dims: int) -> None:
    module = headed(monai_unet(dims)).eval()
    x = images(2, 1, *[16] * dims)
    level = module.model
    bottom = level[1].submodule[1].submodule(level[1].submodule[0](level[0](x)))
    assert bottom.shape[1] == 12
    expected = linear(rotation_head(module), bottom)
    np.testing.assert_allclose(rotation_logits(module, x).detach(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "features"), [("densenet", "features"), ("resnet18", "layer4"), ("encoder", "layer4")]
)
def test_the_head_of_a_classifier_hangs_on_what_it_pools(name: str, features: str) -> None:
    with ambient(1, "test"):
        plain = (
            build_model("resnet18_encoder", spatial_dims=2)
            if name == "encoder"
            else build_model(name, in_channels=1)
        )
    module = headed(plain).eval()
    x, seen = images(2, 1, 32, 32), []
    module.get_submodule(features).register_forward_hook(lambda *a: seen.append(a[2].detach()))
    module(x)
    pooled = seen[0].clamp(min=0)  # a ReLU follows the last norm of a DenseNet
    expected = linear(rotation_head(module), pooled)
    np.testing.assert_allclose(rotation_logits(module, x).detach(), expected, atol=1e-5)


def test_without_an_encoder_it_hangs_on_what_enters_the_head() -> None:
    module = headed(nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1))).eval()
    x = images(2, 1, 6, 6)
    expected = linear(rotation_head(module), module[1](module[0](x)))
    np.testing.assert_allclose(rotation_logits(module, x).detach(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: IOPUNet(1, 2, base=4), (2, 1, 32, 32)),
        (monai_unet, (2, 1, 16, 16)),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), (2, 3)),
    ],
)
def test_network_is_as_before_but_for_the_head(make, shape) -> None:
    with ambient(1, "test"):
        plain = make()
    with ambient(1, "test"):
        module = headed(make())
    before, after = plain.state_dict(), module.state_dict()
    assert set(after) - set(before) == {"rotation.weight", "rotation.bias"}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    x = images(*shape)
    assert torch.equal(module(x), plain(x))
    assert find_parts(module).head == find_parts(plain).head
    assert find_parts(module).decoder == find_parts(plain).decoder


def test_the_initial_head_is_drawn_as_a_linear_layer_is() -> None:
    with ambient(2, "test"):
        head = RotationHead(16)
    bound = 1 / 4
    assert tuple(head.weight.shape) == (4, 16)
    assert float(head.weight.abs().max().detach()) <= bound
    assert float(head.weight.std().detach()) == pytest.approx(bound / 3**0.5, rel=0.2)


def test_the_head_takes_the_networks_number_type() -> None:
    module = headed(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double())
    assert rotation_head(module).weight.dtype == torch.float64


def test_the_path_up_does_not_run() -> None:
    module = headed(IOPUNet(1, 2, base=4)).eval()
    seen: list[nn.Module] = []
    for part in (*module.up, *module.merge, module.head):
        part.register_forward_hook(lambda layer, *_: seen.append(layer))
    rotation_logits(module, images(1, 1, 32, 32)).sum().backward()
    assert not seen
    assert module.down[0][0].weight.grad is not None
    assert all(p.grad is None for n, p in module.named_parameters() if n.startswith("up"))
    module(images(1, 1, 32, 32))
    assert len(seen) == 9


def test_running_statistics_learn_only_where_they_are_told_to() -> None:
    module = headed(IOPUNet(1, 2, base=4)).train()
    start = {n: t.clone() for n, t in module.state_dict().items()}
    x = images(2, 1, 32, 32)
    quiet = rotation_logits(module, x, learn_statistics=False)
    assert all(torch.equal(t, start[n]) for n, t in module.state_dict().items())
    assert torch.equal(rotation_logits(module, x), quiet)
    moved = {n for n, t in module.state_dict().items() if not torch.equal(t, start[n])}
    assert {name.rpartition(".")[2] for name in moved} == {
        "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip
    assert all(name.startswith(("down", "bottleneck")) for name in moved)


def test_images_and_volumes_turn_in_the_plane_of_their_first_axes() -> None:
    for shape in ((4, 2, 3, 3), (4, 2, 3, 3, 5)):
        x = images(*shape)
        found = rotate(x, torch.arange(4))
        for k in range(4):
            assert np.array_equal(found[k].numpy(), np.rot90(x[k].numpy(), k, axes=(1, 2)))


def test_what_has_no_plane_turns_as_a_ring() -> None:
    x = torch.arange(8.0).repeat(4, 1)
    found = rotate(x, torch.arange(4)).numpy()
    assert [row[0] for row in found] == [0.0, 6.0, 4.0, 2.0]
    signals = x[:, None]
    assert np.array_equal(rotate(signals, torch.arange(4)).numpy()[:, 0], found)


def test_the_square_lies_in_the_middle() -> None:
    x = torch.arange(5.0).repeat(1, 1, 3, 1)
    assert crop_square(x)[0, 0, 0].tolist() == [1.0, 2.0, 3.0]
    assert tuple(crop_square(x).shape) == (1, 1, 3, 3)
    assert tuple(crop_square(images(1, 1, 6, 4, 9)).shape) == (1, 1, 4, 4, 9)
    assert tuple(crop_square(images(2, 3)).shape) == (2, 3)


def test_the_loss_is_the_cross_entropy_of_turned_images() -> None:
    module = headed(nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 1)))
    x, turns = images(3, 1, 4, 4), torch.tensor([3, 0, 2])
    turned = np.stack([np.rot90(x[i, 0].numpy(), int(k)) for i, k in enumerate(turns)])
    windows = np.lib.stride_tricks.sliding_window_view(turned, (2, 2), (1, 2))
    weight = module[0].weight.detach().numpy()[:, 0]
    maps = np.einsum("bhwij,cij->bchw", windows, weight)
    maps = np.maximum(maps + module[0].bias.detach().numpy()[:, None, None], 0)
    logits = linear(rotation_head(module), torch.from_numpy(maps))
    logarithm = np.log(np.exp(logits).sum(1))
    expected = (logarithm - logits[np.arange(3), turns.numpy()]).mean()
    assert float(rotation_loss(module, x, turns).detach()) == pytest.approx(expected, rel=1e-5)


class Declared(nn.Module):
    """A network whose encoder's last submodule is to be named by a test."""

    def __init__(self, *encoder: str) -> None:
        super().__init__()
        self.roles = {"encoder": encoder, "head": ("head",)}
        self.body, self.idle = nn.Conv2d(1, 2, 1), nn.Conv2d(1, 2, 1)
        self.act, self.head = nn.ReLU(), nn.Conv2d(2, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.act(self.body(x)))
        return logits


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (MLP(4, 2), r"MLP takes rows of a table, whose columns cannot be turned; choose another"),
        (nn.Sequential(nn.Identity(), Logistic(4, 2)), r"Logistic takes rows of a table"),
        (TabNet(4, 2), r"TabNet takes rows of a table"),
        (nn.ReLU(), r"ReLU has no linear layer or convolution and declares no head"),
        (Declared("body", "act"), r"ends with a ReLU, which has no known channels"),
        (headed(Declared("body")), r"has something named 'rotation' already; rename it"),
    ],
)
def test_networks_without_a_place_for_the_head_are_refused(module, words) -> None:
    with pytest.raises(ConfigError, match=words):
        attach_rotation_head(module)


def test_an_encoder_that_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"roles\['encoder'\] does not run when the network"):
        rotation_logits(headed(Declared("idle")), images(1, 1, 4, 4))


def test_an_encoder_that_gives_other_channels_is_refused() -> None:
    class Odd(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).repeat(1, 2, 1, 1)

    module = Declared("body")
    module.body, module.head = Odd(1, 2, 1), nn.Conv2d(4, 2, 1)
    with pytest.raises(ConfigError, match=r"made for 2 channels, but the encoder returns \(1, 4,"):
        rotation_logits(headed(module), images(1, 1, 4, 4))


def test_a_network_without_the_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="IOPUNet has no rotation head; train it with"):
        rotation_logits(IOPUNet(1, 2, base=4), images(1, 1, 32, 32))
