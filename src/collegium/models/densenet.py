"""DenseNet-BC (Huang et al., CVPR 2017, https://arxiv.org/abs/1608.06993), by MONAI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import MinLen

from collegium.core.lazy import nn
from collegium.core.settings import Fraction, PositiveInt, validated
from collegium.models._settings import MonaiNorm, monai_norm


@validated
def monai_densenet(
    *,
    spatial_dims: Literal[2, 3] = 2,
    in_channels: PositiveInt = 3,
    out_channels: PositiveInt = 2,
    growth: PositiveInt = 6,
    blocks: Annotated[Sequence[PositiveInt], MinLen(1)] = (16, 16, 16),
    init_features: PositiveInt = 12,
    bn_size: PositiveInt = 4,
    stem: Literal["small", "large"] = "small",
    norm: MonaiNorm = "batch",
    dropout: Fraction = 0.0,
) -> nn.Module:
    """Return MONAI's DenseNet-BC for classification.

    The defaults are the network of the pFedNet paper, for images of 32 x 32. DenseNet-121 has
    growth 32, blocks (6, 12, 24, 16), init_features 64 and the large stem. A transition always
    halves the channels (compression 0.5), which MONAI has no switch for.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Channels of the image.
        out_channels: Classes.
        growth: Channels that each layer adds.
        blocks: Layers of each dense block.
        init_features: Channels of the first convolution.
        bn_size: A layer's bottleneck has this many times `growth` channels.
        stem: "small", a 3 x 3 convolution, for small images; "large", a 7 x 7 convolution and a
            pooling, each with stride 2.
        norm: "batch", "instance" (with scale and shift) or "population"; see
            `collegium.models.population.PopulationNorm`.
        dropout: Probability after each layer, in [0, 1).

    Returns:
        The network; its output is logits (B, out_channels).

    Raises:
        ConfigError: A parameter has a value that cannot work.
    """
    from monai.networks.nets.densenet import DenseNet

    network = DenseNet(
        spatial_dims=spatial_dims,
        in_channels=in_channels,
        out_channels=out_channels,
        init_features=init_features,
        growth_rate=growth,
        block_config=tuple(blocks),
        bn_size=bn_size,
        norm=monai_norm(norm),
        dropout_prob=dropout,
    )
    if stem == "small":
        kind = nn.Conv2d if spatial_dims == 2 else nn.Conv3d
        conv = kind(in_channels, init_features, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight)  # as MONAI does
        network.features.conv0 = conv
        for name in ("norm0", "relu0", "pool0"):
            delattr(network.features, name)
    return network
