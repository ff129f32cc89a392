import pytest
import torch
from torch import Tensor, nn

from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.errors import ConfigError
from collegium.models.factory import build_model
from collegium.models.modality_unet import ModalityUNet, present

MODALITIES = 3


def network(dims: int = 2, norm: str = "batch") -> ModalityUNet:
    with ambient(3, "modalities"):
        module = build_model(
            "modality_unet", spatial_dims=dims, in_channels=MODALITIES, out_channels=2,
            channels=[2, 4, 6], norm=norm,
        )  # fmt: skip
    assert isinstance(module, ModalityUNet)
    return module


def images(*owned: tuple[int, ...], dims: int = 2) -> Tensor:
    """Return an image for each tuple of modalities; the others are 0."""
    found = torch.zeros(len(owned), MODALITIES, *[8] * dims)
    noise = torch.Generator().manual_seed(0)
    for image, modalities in zip(found, owned, strict=True):
        for k in modalities:
            image[k] = torch.randn(image[k].shape, generator=noise)
    return found


def encoder(module: ModalityUNet, k: int, image: Tensor) -> list[Tensor]:
    """Return the features of an encoder at every level, by its own layers."""
    found, levels = [], module.get_submodule(f"encoders.modality_{k}")
    assert isinstance(levels, nn.ModuleList)
    for level in levels:
        image = level(image)
        found.append(image)
    return found


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_features_are_the_means_over_the_modalities_of_each_sample(dims: int, norm: str) -> None:
    module, batch = network(dims, norm).eval(), images((0, 1, 2), (1,), (0, 2), (), dims=dims)
    fused = module.fuse(batch)
    assert [tuple(level.shape) for level in fused] == [
        (4, width, *[side] * dims) for width, side in ((2, 8), (4, 4), (6, 2))
    ]
    for sample, owned in enumerate(((0, 1, 2), (1,), (0, 2))):
        own = [encoder(module, k, batch[sample : sample + 1, k : k + 1]) for k in owned]
        for level, found in enumerate(fused):
            expected = torch.stack([features[level][0] for features in own]).mean(0)
            torch.testing.assert_close(found[sample], expected)
    assert not any(level[3].any() for level in fused)
    assert module(batch).shape == (4, 2, *[8] * dims)


def test_an_absent_modality_leaves_its_encoder_as_it_is() -> None:
    module = network().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module(images((0, 2), (2,))).square().sum().backward()
    after = module.state_dict()
    parts = find_parts(module)
    absent = parts.named("modality_1")
    assert {n for n, p in module.named_parameters() if p.grad is None} == absent & parts.trainable
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == parts.norm_statistics - absent
    assert len(absent & parts.norm_statistics) == 3 * 2 * 3  # levels, units, buffers


def test_statistics_of_an_encoder_are_those_of_the_samples_that_have_the_modality() -> None:
    mixed, alone = network().train(), network().train()
    batch = images((0, 1), (1,), (0, 2))
    mixed(batch)
    alone(batch[[0, 2]])
    names = find_parts(mixed).named("modality_0") & find_parts(mixed).norm_statistics
    for name in names:
        torch.testing.assert_close(mixed.state_dict()[name], alone.state_dict()[name])


def test_a_single_pixel_makes_a_modality_present() -> None:
    channel = torch.zeros(3, 4, 4)
    channel[1, 2, 3], channel[2, 0, 0] = 1e-30, -1.0
    assert present(channel).tolist() == [1, 2]


def test_without_values_all_modalities_are_present() -> None:
    with torch.device("meta"):
        assert network().eval()(torch.empty(5, MODALITIES, 8, 8)).shape == (5, 2, 8, 8)


def test_double_precision_and_bfloat16_compute() -> None:
    module, batch = network().eval(), images((0, 1), (2,))
    with torch.no_grad():
        expected = module(batch)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(module(batch).float(), expected, atol=0.2, rtol=0.1)
        torch.testing.assert_close(module.double()(batch.double()).float(), expected)


def test_roles_are_the_encoders_the_way_up_and_the_head() -> None:
    parts = find_parts(network())
    assert parts.encoder == {name for name in parts.names if name.startswith("encoders.modality_")}
    assert parts.head == {"head.conv.weight", "head.conv.bias"}
    assert parts.head < parts.decoder == parts.names - parts.encoder


def test_the_way_up_takes_the_features_of_each_level() -> None:
    module, batch = network().eval(), images((0, 1), (2,))
    for features in (module.merge[-1], module.merge[0]):
        seen: list[Tensor] = []
        features.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        module(batch)
        level = 0 if features is module.merge[-1] else 1
        assert torch.equal(seen[0][:, -module.widths[level] :], module.fuse(batch)[level])


def test_images_with_another_number_of_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="2 channels for 3 modalities"):
        network()(torch.zeros(1, 2, 8, 8))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"channels": [8]}, r"channels: should be at least 2 long, not \[8\]"),
        ({"in_channels": 0}, "in_channels: should be at least 1, not 0"),
        ({"norm": "group"}, "norm: should be 'batch', 'instance' or 'population', not 'group'"),
        ({"modalities": ["t1"]}, "has no parameter 'modalities'"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model("modality_unet", **params)
