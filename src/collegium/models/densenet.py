"""DenseNet-BC (Huang et al., CVPR 2017, https://arxiv.org/abs/1608.06993), by MONAI."""

from collections.abc import Sequence

from torch import nn

from collegium.models._settings import MONAI_NORMS, at_least, require

STEMS = ("small", "large")
"""What a DenseNet may begin with; see `monai_densenet`."""


def monai_densenet(
    *,
    spatial_dims: int = 2,
    in_channels: int = 3,
    out_channels: int = 2,
    growth: int = 6,
    blocks: Sequence[int] = (16, 16, 16),
    init_features: int = 12,
    bn_size: int = 4,
    stem: str = "small",
    norm: str = "batch",
    dropout: float = 0.0,
) -> nn.Module:
    """MONAI's DenseNet-BC for classification.

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
        norm: "batch", or "instance" (with scale and shift).
        dropout: Probability after each layer, in [0, 1).

    Returns:
        The network; it gives logits (B, out_channels).

    Raises:
        ConfigError: A parameter has a value that cannot work.
    """
    require(
        "densenet",
        ("spatial_dims", spatial_dims, "2 or 3", spatial_dims in (2, 3)),
        *at_least(1, {"growth": growth, "init_features": init_features, "bn_size": bn_size}),
        ("blocks", blocks, "at least one number of layers", bool(blocks) and min(blocks) >= 1),
        ("stem", stem, " or ".join(STEMS), stem in STEMS),
        ("norm", norm, " or ".join(MONAI_NORMS), norm in MONAI_NORMS),
        ("dropout", dropout, "at least 0 and below 1", 0 <= dropout < 1),
    )
    from monai.networks.nets.densenet import DenseNet

    network = DenseNet(
        spatial_dims=spatial_dims,
        in_channels=in_channels,
        out_channels=out_channels,
        init_features=init_features,
        growth_rate=growth,
        block_config=tuple(blocks),
        bn_size=bn_size,
        norm=MONAI_NORMS[norm],
        dropout_prob=dropout,
    )
    if stem == "small":
        network.features.conv0 = _small_stem(spatial_dims, in_channels, init_features)
        for name in ("norm0", "relu0", "pool0"):
            delattr(network.features, name)
    return network


def _small_stem(spatial_dims: int, in_channels: int, out_channels: int) -> nn.Module:
    kind = nn.Conv2d if spatial_dims == 2 else nn.Conv3d
    conv = kind(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight)  # as MONAI does
    return conv
