from typing import Literal

import pytest
import torch
from torch import nn

from collegium.errors import ConfigError
from collegium.models.unet import IOPUNet


def test_parameters_and_routed_layers_are_those_of_the_paper(golden) -> None:
    case = golden("unet_parameter_count")
    with torch.device("meta"):
        network = IOPUNet(**case["params"])
    expected = case["expected"]
    assert sum(p.numel() for p in network.parameters()) == expected["segmentation_net"]
    layers = [m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    assert len(layers) == expected["routed_layers"]


@pytest.mark.parametrize("size", [(16, 32), (17, 31), (5, 40)])
def test_logits_have_the_size_of_the_image(size: tuple[int, int]) -> None:
    network = IOPUNet(1, 3, base=2).eval()
    assert network(torch.ones(2, 1, *size)).shape == (2, 3, *size)


def test_an_odd_image_is_the_image_padded_below_and_to_the_right() -> None:
    network = IOPUNet(1, 2, base=2).eval()
    image = torch.rand(1, 1, 20, 30, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(1, 1, 32, 32)
    padded[..., :20, :30] = image
    torch.testing.assert_close(network(image), network(padded)[..., :20, :30])


@pytest.mark.parametrize(
    ("norm", "kind"),
    [("batch", nn.BatchNorm2d), ("instance", nn.InstanceNorm2d), ("group", nn.GroupNorm)],
)
def test_the_norm_is_chosen_by_name_and_has_scale_and_shift(
    norm: Literal["batch", "instance", "group"], kind: type[nn.Module]
) -> None:
    network = IOPUNet(1, 2, base=2, norm=norm)
    norms = [m for m in network.modules() if isinstance(m, kind)]
    assert len(norms) == 18
    assert all(len(list(m.parameters())) == 2 for m in norms)
    network(torch.rand(1, 1, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^IOPUNet\.norm: should be 'batch', 'instance', 'group' or"
    ):
        IOPUNet(norm="layer")  # type: ignore[arg-type]
