"""A U-Net with an encoder for each modality, of images of which some modalities are missing."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import MinLen
from torch import Tensor, nn

from collegium.core.quick_operators import concatenate
from collegium.core.settings import Fraction, PositiveInt, validated
from collegium.models._settings import MONAI_NORMS, MonaiNorm


class ModalityUNet(nn.Module):
    """A U-Net of MONAI's residual units, with an encoder for each channel and one decoder.

    Encoder k sees channel k alone. At every level the features of the present modalities are
    averaged, sample by sample, and the decoder goes up from these means, as in HeMIS (Havaei et
    al., MICCAI 2016, https://arxiv.org/abs/1607.05194), which adds the variance. FedMEPD
    (https://arxiv.org/abs/2603.04887) masks absent modalities in its fusion too; how it fuses could
    not be read. A sample without any modality has features of 0. The way up enlarges by repetition
    and has no transposed convolutions.

    A modality is absent from a sample if its channel is exactly 0 everywhere, as in the cases of
    sites that lack it. So a model needs nothing but images, wherever it predicts. The encoder does
    not run on such samples: they change neither its weights nor its running statistics. A crop in
    which a channel is 0 by chance, such as the background under `zscore_nonzero`, counts as without
    it.

    The sides of images must be multiples of 2 to the number of levels less one, as for the model
    "unet".

    Args:
        spatial_dims: 2 or 3.
        in_channels: Modalities, one channel each.
        out_channels: Classes, the background included.
        channels: Channels of each level, the top one first; at least two levels.
        norm: "batch", or "instance" (with scale and shift).
        dropout: Probability, in [0, 1).
    """

    roles: ClassVar[Mapping[str, Sequence[str]]] = {
        "encoder": ("encoders",),
        "decoder": ("up", "merge", "head"),
        "head": ("head",),
    }

    @validated
    def __init__(
        self,
        spatial_dims: Literal[2, 3] = 2,
        in_channels: PositiveInt = 4,
        out_channels: PositiveInt = 2,
        *,
        channels: Annotated[Sequence[PositiveInt], MinLen(2)] = (16, 32, 64, 128),
        norm: MonaiNorm = "batch",
        dropout: Fraction = 0.0,
    ) -> None:
        from monai.networks.blocks.convolutions import Convolution, ResidualUnit

        super().__init__()
        self.strides = (2,) * (len(channels) - 1)  # what sides are padded to multiples of
        self.widths = tuple(channels)

        def unit(source: int, width: int, strides: int = 1) -> nn.Module:
            return ResidualUnit(
                spatial_dims, source, width, strides, norm=MONAI_NORMS[norm], dropout=dropout
            )

        def up(source: int, width: int) -> nn.Module:
            larger = nn.Upsample(scale_factor=2)  # nearest, whose gradient is the same every time
            convolution = Convolution(
                spatial_dims, source, width, norm=MONAI_NORMS[norm], dropout=dropout
            )
            return nn.Sequential(larger, convolution)

        steps = [*pairwise(channels)]
        self.encoders = nn.ModuleDict(
            {
                f"modality_{k}": nn.ModuleList(
                    [unit(1, channels[0]), *(unit(above, below, 2) for above, below in steps)]
                )
                for k in range(in_channels)
            }
        )
        self.up = nn.ModuleList(up(below, above) for above, below in reversed(steps))
        self.merge = nn.ModuleList(unit(2 * above, above) for above, _ in reversed(steps))
        self.head = Convolution(
            spatial_dims, channels[0], out_channels, kernel_size=1, conv_only=True
        )

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (B, out_channels, *spatial) of images (B, in_channels, *spatial)."""
        if image.shape[1] != len(self.encoders):
            raise ValueError(f"{image.shape[1]} channels for {len(self.encoders)} modalities")
        *skips, features = self.fuse(image)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            features = merge(concatenate(up(features), skip))
        logits: Tensor = self.head(features)
        return logits

    def fuse(self, image: Tensor) -> list[Tensor]:
        """Return the mean features (B, channels, *spatial) of the present modalities, by level.

        Args:
            image: (B, in_channels, *spatial).
        """
        counts = image.new_zeros(len(image))
        sums = [
            image.new_zeros(len(image), width, *(-(-side // 2**level) for side in image.shape[2:]))
            for level, width in enumerate(self.widths)
        ]
        for k, levels in enumerate(self.encoders.values()):
            rows = present(image[:, k])
            if len(rows):
                counts[rows] += 1
                for level, features in enumerate(_features(levels, image[rows, k : k + 1])):
                    sums[level] = sums[level].index_add(0, rows, features.to(image.dtype))
        divisor = counts.clamp(min=1).view(-1, *[1] * (image.ndim - 1))
        return [total / divisor for total in sums]


def present(channel: Tensor) -> Tensor:
    """Return which samples have a modality: those whose channel is not 0 everywhere.

    On the device "meta", which has shapes and no values, all samples have it.

    Args:
        channel: (B, *spatial).

    Returns:
        The indices of these samples, in order.
    """
    if channel.is_meta:
        return torch.arange(len(channel), device=channel.device)
    return (channel != 0).flatten(1).any(1).nonzero()[:, 0]


def _features(levels: nn.Module, image: Tensor) -> Iterator[Tensor]:
    """Yield what each level of an encoder makes of (B, 1, *spatial)."""
    assert isinstance(levels, nn.ModuleList)
    for level in levels:
        image = level(image)
        yield image
