import numpy as np
import pytest
import torch
from torch import nn

from collegium.core.model_parts import find_parts
from collegium.errors import ConfigError
from collegium.models.factory import build_model


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_densenet_121_has_its_published_size() -> None:
    network = build_model(
        "densenet", growth=32, blocks=[6, 12, 24, 16], init_features=64, stem="large",
        out_channels=1000,
    )  # fmt: skip
    assert size(network) == 7_978_856


def test_densenet_bc_of_depth_100_has_its_published_size() -> None:
    network = build_model("densenet", growth=12, init_features=24, out_channels=10)
    assert size(network) == 769_162


def test_the_defaults_are_the_network_of_pfednet() -> None:
    channels, expected = 12, 3 * 12 * 9  # the first convolution
    for block in range(3):
        for _ in range(16):  # two norms, 1 x 1 to 24 channels, 3 x 3 to 6
            expected += 2 * channels + channels * 24 + 2 * 24 + 24 * 6 * 9
            channels += 6
        if block < 2:  # a norm and 1 x 1 to half of the channels
            expected += 2 * channels + channels * (channels // 2)
            channels //= 2
    expected += 2 * channels + channels * 2 + 2  # the last norm, the classes
    assert size(build_model("densenet")) == expected


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("stem", "side"), [("small", 8), ("large", 2)])
def test_the_stem_says_how_small_the_last_map_is(dims: int, stem: str, side: int) -> None:
    network = build_model(
        "densenet", spatial_dims=dims, in_channels=1, out_channels=3, blocks=[1, 1, 1], stem=stem
    ).eval()
    x = torch.rand(2, 1, *[32] * dims)
    features: torch.Tensor = network.get_submodule("features")(x)
    assert features.shape[2:] == (side,) * dims
    weight, bias = (network.get_parameter(f"class_layers.out.{n}") for n in ("weight", "bias"))
    pooled = features.clamp(min=0).flatten(2).mean(2).detach().numpy()
    expected = pooled @ weight.detach().numpy().T + bias.detach().numpy()
    np.testing.assert_allclose(network(x).detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(("norm", "kind"), [("batch", nn.BatchNorm2d), ("instance", None)])
def test_head_is_the_map_to_classes_and_encoder_all_before(
    norm: str, kind: type[nn.Module] | None
) -> None:
    network = build_model("densenet", blocks=[1, 1], norm=norm)
    parts = find_parts(network)
    assert parts.head == parts.decoder == {"class_layers.out.weight", "class_layers.out.bias"}
    assert parts.encoder == parts.body == {n for n in parts.names if n.startswith("features.")}
    layers = [
        "features.denseblock1.denselayer1.layers.norm1",
        "features.denseblock1.denselayer1.layers.norm2", "features.transition1.norm",
        "features.denseblock2.denselayer1.layers.norm1",
        "features.denseblock2.denselayer1.layers.norm2", "features.norm5",
    ]  # fmt: skip
    tensors = ["weight", "bias"]
    tensors += ["running_mean", "running_var", "num_batches_tracked"] if kind else []
    assert parts.norm == {f"{layer}.{tensor}" for layer in layers for tensor in tensors}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"spatial_dims": 1}, "densenet.spatial_dims: should be 2 or 3, not 1"),
        ({"blocks": []}, r"densenet.blocks: should be at least 1 long, not \[\]"),
        ({"blocks": [4, 0]}, r"densenet.blocks: each should be at least 1, not \[4, 0\]"),
        ({"growth": 0}, "densenet.growth: should be at least 1, not 0"),
        ({"stem": "huge"}, "densenet.stem: should be 'small' or 'large', not 'huge'"),
        ({"norm": "layer"}, "densenet.norm: should be 'batch', 'instance' or 'population'"),
        ({"dropout": 1}, "densenet.dropout: should be at least 0 and below 1, not 1"),
        ({"compression": 0.5}, "has no parameter 'compression'"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model("densenet", **params)
