"""ResNet-18 (He et al., CVPR 2016, https://arxiv.org/abs/1512.03385), by MONAI."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from collegium.core.tensors import require_same_names
from collegium.errors import CollegiumError, ConfigError
from collegium.models._settings import at_least, require
from collegium.models.files import import_safetensors

_LAYERS, _WIDTHS = (2, 2, 2, 2), (64, 128, 256, 512)
_DILATIONS: Mapping[str, int] = {"layer3": 2, "layer4": 4}


def monai_resnet18(
    *, spatial_dims: int = 2, in_channels: int = 3, out_channels: int = 2
) -> nn.Module:
    """MONAI's ResNet-18 for classification, with a 1 x 1 convolution where a shortcut needs one.

    In two dimensions it is the network of the paper; the side of images is halved five times.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Channels of the image.
        out_channels: Classes.

    Returns:
        The network; it gives logits (B, out_channels).

    Raises:
        ConfigError: A parameter has a value that cannot work.
    """
    require("resnet18", ("spatial_dims", spatial_dims, "2 or 3", spatial_dims in (2, 3)))
    return _resnet(
        spatial_dims, in_channels, num_classes=out_channels, shortcut_type="B",
        bias_downsample=False,
    )  # fmt: skip


class ResNet18Encoder(nn.Sequential):
    """ResNet-18 up to its last feature map: (B, 512, *spatial) for (B, in_channels, *spatial).

    Names and shapes of the tensors are those of MedicalNet's 3-D ResNet-18 (Chen et al., 2019,
    https://arxiv.org/abs/1904.00625), whose shortcuts fill missing channels with zeros. A file of
    MedicalNet is turned into one that is read here by
    ``export_model(import_model(Path("resnet_18.pth")), Path("resnet_18.safetensors"))``.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Channels of the image; MedicalNet's is 1.
        dilated: MedicalNet's last two layers widen their convolutions instead of halving the sides
            again, so that a side is halved three times. False: five times, as in the paper.
        weights: A .safetensors file with all of the network's tensors. Empty: random ones.

    Raises:
        ConfigError: A parameter has a value that cannot work, or the file holds another network.
    """

    roles: ClassVar[Mapping[str, Sequence[str]]] = {
        "encoder": ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4"),
        "head": (),
    }

    def __init__(
        self,
        *,
        spatial_dims: int = 3,
        in_channels: int = 1,
        dilated: bool = True,
        weights: str = "",
    ) -> None:
        require(
            "resnet18_encoder",
            ("spatial_dims", spatial_dims, "2 or 3", spatial_dims in (2, 3)),
            *at_least(1, {"in_channels": in_channels}),
        )
        whole = _resnet(spatial_dims, in_channels, feed_forward=False, shortcut_type="A")
        names = ("conv1", "bn1", "act", "maxpool", "layer1", "layer2", "layer3", "layer4")
        super().__init__(OrderedDict((name, whole.get_submodule(name)) for name in names))
        for name in ("layer2", "layer3", "layer4"):
            dilation = _DILATIONS.get(name, 1) if dilated else 1
            _mend(self.get_submodule(name), dilation)
        self._shape = spatial_dims, in_channels
        if weights:
            _load(self, weights)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the last feature map.

        Raises:
            ConfigError: The images have other channels or axes than the network.
        """
        axes, channels = self._shape
        if images.ndim != axes + 2 or images.shape[1] != channels:
            raise ConfigError(
                f"resnet18_encoder takes images with {channels} channels and {axes} axes, not of "
                f"shape {tuple(images.shape[1:])}: set its in_channels and spatial_dims to theirs."
            )
        for layer in self:
            images = layer(images)
        return images


class _Shortcut(nn.Module):
    """The parameter-free shortcut: every stride-th position, missing channels filled with zeros."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        axes = images.ndim - 2
        kept = images[:, :, *[slice(None, None, self.stride)] * axes]
        missing = self.channels - images.shape[1]
        return functional.pad(kept, [*[0, 0] * axes, 0, missing])


def _resnet(spatial_dims: int, in_channels: int, **params: Any) -> nn.Module:
    from monai.networks.nets.resnet import ResNet

    return ResNet(
        "basic", [*_LAYERS], [*_WIDTHS], spatial_dims, in_channels, conv1_t_stride=2, **params
    )


def _mend(layer: nn.Module, dilation: int) -> None:
    """Give a layer shortcuts that pass gradients on, which MONAI's do not, and dilate it."""
    for block in layer.children():
        convs = [conv for conv in block.children() if isinstance(conv, nn.Conv2d | nn.Conv3d)]
        stride = convs[0].stride[0] if dilation == 1 else 1
        if block.downsample is not None:
            block.downsample = _Shortcut(convs[0].out_channels, stride)
        axes = len(convs[0].stride)
        convs[0].stride = (stride,) * axes
        for conv in convs:
            conv.padding = conv.dilation = (dilation,) * axes


def _load(module: nn.Module, weights: str) -> None:
    """Load all tensors of a network; only counters of batches may be absent."""
    own = module.state_dict()
    counters = {name: t for name, t in own.items() if not t.is_floating_point()}
    try:
        found = counters | dict(import_safetensors(Path(weights).expanduser()))
        require_same_names(own, found)
    except CollegiumError as error:
        raise _unsuitable(weights, str(error)) from error
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            shapes = f"{name} is {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
            raise _unsuitable(weights, shapes)
    module.load_state_dict(found)


def _unsuitable(weights: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model.weights is {weights!r}, which resnet18_encoder cannot load ({reason}): name a "
        f".safetensors file of this network."
    )
