import copy
from typing import Any

import pytest
import torch
from torch import nn

from collegium.core.prelu import QuickPReLU, use_quick_prelu

SHAPES = [(5,), (3, 4), (2, 3, 8, 9), (2, 3, 4, 5, 6)]


def pair(slope: float = 0.25, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """torch's layer and ours, with equal slopes."""
    theirs = nn.Sequential(nn.PReLU(init=slope)).to(dtype)
    ours = copy.deepcopy(theirs)
    use_quick_prelu(ours)
    assert isinstance(ours[0], QuickPReLU)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    return theirs, ours


def inputs(shape: tuple[int, ...], dtype: torch.dtype, order: Any = None) -> torch.Tensor:
    images = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    images[..., 0] = 0.0  # where a gradient depends on which side zero is on
    images = images.to(dtype)
    return images if order is None else images.contiguous(memory_format=order)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slope", [0.25, -0.5, 0.0, 1.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_of_inputs_are_torch_s_bit_by_bit(
    shape: tuple[int, ...], slope: float, dtype: torch.dtype
) -> None:
    order = torch.channels_last if len(shape) == 4 else None
    weights = torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=dtype).view(shape)
    found = []
    for layer in pair(slope, dtype):
        images = inputs(shape, dtype, order).requires_grad_()
        output = layer(images)
        output.backward(weights)
        found.append((output, images.grad, layer[0].weight.grad))  # type: ignore[index]
    (output, gradient, by_slope), (ours, own_gradient, own_by_slope) = found
    assert gradient is not None
    assert own_gradient is not None
    assert torch.equal(output, ours)
    assert torch.equal(gradient, own_gradient)
    x, w = inputs(shape, torch.float64), weights.double()
    exact = float((w * x.to(dtype).double())[x < 0].sum())
    size = float((w * x).abs().sum())
    assert own_by_slope.shape == by_slope.shape == (1,)
    assert float(own_by_slope) == pytest.approx(exact, abs=torch.finfo(dtype).eps * size)


def test_it_can_be_differentiated_twice() -> None:
    found = []
    for layer in pair(0.3, torch.float64):
        images = inputs((4, 6), torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(layer(images).pow(3).sum(), images, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [images, *layer.parameters()]))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_under_functional_transforms_and_elsewhere_it_is_torch_s_own() -> None:
    theirs, ours = pair()
    images = inputs((6, 4), torch.float32)
    expected = torch.func.vmap(theirs)(images)
    assert torch.equal(torch.func.vmap(ours)(images), expected)
    assert ours.to("meta")(images.to("meta")).shape == images.shape


def test_a_slope_for_every_channel_and_other_layers_stay_as_they_are() -> None:
    network = nn.Sequential(nn.PReLU(3), nn.ReLU(), nn.PReLU())
    use_quick_prelu(network)
    assert [type(layer) for layer in network] == [nn.PReLU, nn.ReLU, QuickPReLU]


def test_autocast_computes_in_bfloat16_as_torch_s_does() -> None:
    theirs, ours = pair()
    images = inputs((2, 3, 8, 8), torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = theirs(images), ours(images)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)
