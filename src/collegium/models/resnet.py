"""ResNet-18 (He et al., CVPR 2016, https://arxiv.org/abs/1512.03385), by MONAI."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from collegium.core.settings import PositiveInt, validated
from collegium.core.tensors import require_same_names
from collegium.errors import CollegiumError, ConfigError, ProtocolError
from collegium.models.files import import_safetensors

_DILATIONS: Mapping[str, int] = {"layer3": 2, "layer4": 4}


@validated
def monai_resnet18(
    *, spatial_dims: Literal[2, 3] = 2, in_channels: PositiveInt = 3, out_channels: PositiveInt = 2
) -> nn.Module:
    """Return MONAI's ResNet-18 for classification, with 1 x 1 convolutions in shortcuts.

    In two dimensions it is the network of the paper; the side of images is halved five times.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Channels of the image.
        out_channels: Classes.

    Returns:
        The network; its output is logits (B, out_channels).

    Raises:
        ConfigError: A parameter has a value that cannot work.
    """
    return _resnet(
        spatial_dims, in_channels, num_classes=out_channels, shortcut_type="B",
        bias_downsample=False,
    )  # fmt: skip


class ResNet18Encoder(nn.Sequential):
    """ResNet-18 up to its last feature map: (B, 512, *spatial) for (B, in_channels, *spatial).

    Names and shapes of the tensors are those of MedicalNet's 3-D ResNet-18 (Chen et al., 2019,
    https://arxiv.org/abs/1904.00625), whose shortcuts fill missing channels with zeros. A file of
    MedicalNet is converted for use here by
    ``export_model(import_model(Path("resnet_18.pth")), Path("resnet_18.safetensors"))``.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Channels of the image; MedicalNet's is 1.
        dilated: Whether the last two layers dilate their convolutions instead of halving the sides
            again, as in MedicalNet, so that a side is halved three times. False: five times, as in
            the paper.
        weights: A .safetensors file with all of the network's tensors. Empty: random ones.

    Raises:
        ConfigError: A parameter has a value that cannot work, or the file holds another network.
    """

    roles: ClassVar[Mapping[str, Sequence[str]]] = {
        "encoder": ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4"),
        "head": (),
    }

    @validated
    def __init__(
        self,
        *,
        spatial_dims: Literal[2, 3] = 3,
        in_channels: PositiveInt = 1,
        dilated: bool = True,
        weights: str = "",
    ) -> None:
        whole = _resnet(spatial_dims, in_channels, feed_forward=False, shortcut_type="A")
        names = ("conv1", "bn1", "act", "maxpool", "layer1", "layer2", "layer3", "layer4")
        super().__init__(OrderedDict((name, whole.get_submodule(name)) for name in names))
        for name in ("layer2", "layer3", "layer4"):
            dilation = _DILATIONS.get(name, 1) if dilated else 1
            _replace_shortcuts(self.get_submodule(name), dilation)
        self._shape = spatial_dims, in_channels
        if weights:
            _load_weights(self, weights)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the last feature map, (B, 512, *spatial), of images (B, in_channels, *spatial).

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
    """The parameter-free shortcut: every stride-th position, with zeros for missing channels."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        axes = images.ndim - 2
        sampled = images[:, :, *[slice(None, None, self.stride)] * axes]
        missing = self.channels - images.shape[1]
        return functional.pad(sampled, [*[0, 0] * axes, 0, missing])


def _resnet(spatial_dims: int, in_channels: int, **params: Any) -> nn.Module:
    from monai.networks.nets.resnet import ResNet

    layers, widths = [2, 2, 2, 2], [64, 128, 256, 512]
    return ResNet("basic", layers, widths, spatial_dims, in_channels, conv1_t_stride=2, **params)


def _replace_shortcuts(layer: nn.Module, dilation: int) -> None:
    """Replace a layer's shortcuts, as MONAI's pass no gradients, and dilate its convolutions."""
    for block in layer.children():
        convs = [conv for conv in block.children() if isinstance(conv, nn.Conv2d | nn.Conv3d)]
        stride = convs[0].stride[0] if dilation == 1 else 1
        if block.downsample is not None:
            block.downsample = _Shortcut(convs[0].out_channels, stride)
        axes = len(convs[0].stride)
        convs[0].stride = (stride,) * axes
        for conv in convs:
            conv.padding = conv.dilation = (dilation,) * axes


def _load_weights(module: nn.Module, weights: str) -> None:
    """Load all tensors of a network; only counters of batches may be absent."""
    own = module.state_dict()
    counters = {name: t for name, t in own.items() if not t.is_floating_point()}
    try:
        loaded = counters | dict(import_safetensors(Path(weights).expanduser()))
        require_same_names(own, loaded)
        for name, tensor in loaded.items():
            if tensor.shape != own[name].shape:
                shapes = f"{name} is {tuple(tensor.shape)}, not {tuple(own[name].shape)}"
                raise ProtocolError(shapes)
    except CollegiumError as error:
        raise ConfigError(
            f"model.weights is {weights!r}, which resnet18_encoder cannot load ({error}): name a "
            f".safetensors file of this network."
        ) from error
    module.load_state_dict(loaded)
