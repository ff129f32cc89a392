"""The U-Net of the IOP-FL paper."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from collegium.core.quick_operators import concatenate
from collegium.core.settings import PositiveInt, validated
from collegium.models.population import PopulationNorm


def _group_norm(channels: int) -> nn.Module:
    """Return a group normalisation with eight groups, or fewer if eight is no divisor."""
    return nn.GroupNorm(math.gcd(8, channels), channels)


NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "instance": partial(nn.InstanceNorm2d, affine=True),
    "group": _group_norm,
    "population": PopulationNorm,
}
"""The normalisations of `IOPUNet`, each with scale and shift."""


def _block(in_channels: int, out_channels: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return two times convolution, normalisation and ReLU."""
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [
            nn.Conv2d(channels, out_channels, kernel_size=3, padding=1, bias=False),
            norm(out_channels),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class IOPUNet(nn.Module):
    """The 2-D U-Net of IOP-FL (Jiang et al. 2023), also used with other norms by GRACE and HarmoFL.

    Four levels of `base`, 2, 4 and 8 times `base` channels and a bottleneck of 16 times `base`. A
    block is twice (3x3 convolution without bias, normalisation, ReLU); max-pooling goes down, 2x2
    transposed convolutions go up, skips are concatenated, and a 1x1 convolution gives logits.
    The authors' code also holds an unused head for a rotation task, which is left out here.

    Height and width need not be multiples of 16: the input is padded with zeros below and to the
    right up to the next multiple, and the logits are cropped to the input's size. The padding
    enters the statistics of instance and group normalisation.

    Args:
        in_channels: Channels of the image.
        out_channels: Classes, the background included.
        base: Channels of the first level.
        norm: "batch", "instance", "group" or "population"; see
            `collegium.models.population.PopulationNorm`.
    """

    roles: ClassVar[Mapping[str, Sequence[str]]] = {
        "encoder": ("down", "bottleneck"),
        "decoder": ("up", "merge", "head"),
        "head": ("head",),
    }
    depth: ClassVar[int] = 4

    @validated
    def __init__(
        self,
        in_channels: PositiveInt = 3,
        out_channels: PositiveInt = 2,
        *,
        base: PositiveInt = 32,
        norm: Literal["batch", "instance", "group", "population"] = "batch",
    ) -> None:
        super().__init__()
        make_norm = NORMS[norm]
        widths = [base * 2**level for level in range(self.depth)]
        sources = [in_channels, *widths[:-1]]
        self.down = nn.ModuleList(
            _block(source, width, make_norm) for source, width in zip(sources, widths, strict=True)
        )
        self.bottleneck = _block(widths[-1], 2 * widths[-1], make_norm)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2)
            for width in reversed(widths)
        )
        self.merge = nn.ModuleList(
            _block(2 * width, width, make_norm) for width in reversed(widths)
        )
        self.head = nn.Conv2d(base, out_channels, kernel_size=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return logits (B, out_channels, H, W) for images (B, in_channels, H, W) of any size."""
        height, width = image.shape[-2:]
        multiple = 2**self.depth
        features = functional.pad(image, (0, -width % multiple, 0, -height % multiple))
        skips: list[torch.Tensor] = []
        for block in self.down:
            skips.append(block(features))
            features = functional.max_pool2d(skips[-1], kernel_size=2)
        features = self.bottleneck(features)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            features = merge(concatenate(up(features), skip))
        logits: torch.Tensor = self.head(features)
        return logits[..., :height, :width]
