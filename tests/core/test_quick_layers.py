import copy
from typing import Any

import pytest
import torch
from torch import nn

from collegium.core.model_parts import set_memory_format
from collegium.core.quick_layers import QuickPReLU, torch_layers, use_quick_layers
from collegium.core.quick_operators import ORDERS, concatenate, planar

SHAPES = [(5,), (3, 4), (2, 3, 8, 9), (2, 3, 4, 5, 6)]


def pair(slope: float = 0.25, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """torch's layer and ours, with equal slopes."""
    theirs = nn.Sequential(nn.PReLU(init=slope)).to(dtype)
    ours = copy.deepcopy(theirs)
    use_quick_layers(ours)
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
    use_quick_layers(network)
    assert [type(layer) for layer in network] == [nn.PReLU, nn.ReLU, QuickPReLU]


def test_autocast_computes_in_bfloat16_as_torch_s_does() -> None:
    theirs, ours = pair()
    images = inputs((2, 3, 8, 8), torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = theirs(images), ours(images)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def layers(dims: int) -> dict[str, nn.Module]:
    """Layers that are replaced, by name."""
    conv, up, norm = (
        (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d)
        if dims == 2
        else (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d)
    )
    return {
        "batch norm": norm(4),
        "batch norm of three": norm(3, eps=1e-3, momentum=0.3),
        "convolution": conv(4, 2, 3, padding=1),
        "convolution with steps": conv(4, 3, 3, stride=2, dilation=2, padding=2),
        "convolution in groups": conv(4, 2, 3, groups=2),
        "doubling": up(4, 3, 3, stride=2, padding=1, output_padding=1),
        "doubling to one": up(4, 1, 3, stride=2, padding=1, output_padding=1),
        "doubling to many": up(4, 16, 3, stride=2, padding=1, output_padding=1),
        "doubling in groups": up(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2),
        "doubling without overlap": up(4, 2, 2, stride=2),
        "transposed": up(4, 2, 3, stride=3, padding=1, output_padding=2),
    }


def twins(dims: int, name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """torch's layer and ours with equal weights, and images for them."""
    torch.manual_seed(0)
    theirs = nn.Sequential(layers(dims)[name])
    theirs = theirs.to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    set_memory_format(theirs, "channels_last")
    ours = copy.deepcopy(theirs)
    use_quick_layers(nn.Sequential(ours, channels_last_layer(dims)))
    assert type(ours[0]).__name__.startswith("Quick")
    channels = 3 if name.endswith("three") else 4
    images = torch.randn(2, channels, *(6, 8, 4)[:dims], dtype=dtype)
    return theirs, ours, images.contiguous(memory_format=ORDERS[images.dim()])


def channels_last_layer(dims: int) -> nn.Module:
    """A layer by which a network's order of memory is seen: one channel has both orders."""
    layer = nn.Conv2d(16, 16, 3) if dims == 2 else nn.Conv3d(16, 16, 3)
    set_memory_format(layer, "channels_last")
    return layer


NAMES = sorted(layers(2))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_layers_equal_torch_s_in_outputs_gradients_and_statistics(name: str, dims: int) -> None:
    theirs, ours, images = twins(dims, name, torch.float64)
    found = []
    for layer in (theirs, ours):
        own = images.clone().requires_grad_()
        output = layer(own)
        weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)
        output.backward(weights)
        found.append([output, own.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    assert found[1][0].is_contiguous(memory_format=ORDERS[images.dim()])
    for layer in (theirs, ours):
        layer.eval()
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_layers_can_be_differentiated_twice(name: str) -> None:
    theirs, ours, images = twins(2, name, torch.float64)
    found = []
    for layer in (theirs, ours):
        own = images.clone().requires_grad_()
        parameters = [own, *layer.parameters()]
        first = torch.autograd.grad(layer(own).pow(3).sum(), parameters, create_graph=True)
        total = torch.stack([each.square().sum() for each in first]).sum()
        found.append(torch.autograd.grad(total, parameters))
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_layers_compute_in_bfloat16_under_autocast_as_torch_s_do(name: str) -> None:
    theirs, ours, images = twins(2, name, torch.float32)
    found = []
    for layer in (theirs, ours):
        own = images.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(own)
        output.float().square().mean().backward()
        found.append([output, own.grad, *(p.grad for p in layer.parameters())])
    assert [value.dtype for value in found[1]] == [value.dtype for value in found[0]]
    for expected, value in zip(*found, strict=True):
        size = float(expected.detach().float().abs().max())
        torch.testing.assert_close(value, expected, rtol=0.02, atol=0.02 * size)


def test_layers_are_torch_s_own_under_functional_transforms_and_without_a_batch() -> None:
    for name in NAMES:
        theirs, ours, images = twins(2, name, torch.float32)
        theirs.eval()
        ours.eval()
        stacked = torch.stack([images, 2 * images])
        assert torch.equal(torch.func.vmap(ours)(stacked), torch.func.vmap(theirs)(stacked))
        if "norm" not in name:
            torch.testing.assert_close(ours(images[0]), theirs(images[0]))


def test_a_single_row_of_odd_size_is_normalised_by_torch() -> None:
    theirs, ours, _ = twins(2, "batch norm", torch.float32)
    images = torch.randn(1, 4, 3, 5).contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize("what", ["statistics", "momentum"])
def test_statistics_that_are_taken_away_later_are_torch_s_matter(what: str) -> None:
    theirs, ours, images = twins(2, "batch norm", torch.float32)
    for network in (theirs, ours):
        layer: Any = network[0]  # type: ignore[index]
        if what == "momentum":
            layer.momentum = None
        else:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    assert torch.equal(ours(images), theirs(images))
    for expected, found in zip(theirs.buffers(), ours.buffers(), strict=True):
        assert torch.equal(found, expected)


def test_a_transposed_convolution_takes_the_size_of_its_output() -> None:
    theirs, ours, images = twins(2, "doubling", torch.float32)
    size = [11, 16]
    expected = theirs[0](images, output_size=size)  # type: ignore[index]
    assert torch.equal(ours[0](images, output_size=size), expected)  # type: ignore[index]


def test_layers_with_many_channels_or_another_order_of_memory_stay_torch_s() -> None:
    def kinds(network: nn.Sequential, choice: Any) -> list[str]:
        set_memory_format(network, choice)
        use_quick_layers(network)
        return [type(layer).__name__ for layer in network]

    def network() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16),
            nn.ConvTranspose2d(16, 8, 3), nn.BatchNorm2d(8),
            nn.Conv2d(8, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1),
            nn.BatchNorm2d(3), nn.Conv2d(2, 2, 3, padding="same"),
        )  # fmt: skip

    assert kinds(network(), "channels_last") == [
        "Conv2d", "BatchNorm2d", "QuickConvTranspose2d", "BatchNorm2d", "Conv2d",
        "QuickBatchNorm2d", "QuickConv2d", "QuickBatchNorm2d", "Conv2d",
    ]  # fmt: skip
    assert "Quick" not in " ".join(kinds(network(), "contiguous")).replace("QuickBatchNorm2d", "")


def test_layers_are_torch_s_while_others_look_at_them() -> None:
    _, ours, _ = twins(2, "doubling", torch.float32)
    with torch_layers(ours):
        assert type(ours[0]) is nn.ConvTranspose2d  # type: ignore[index]
    assert type(ours[0]).__name__ == "QuickConvTranspose2d"  # type: ignore[index]


def test_a_planar_copy_gives_its_gradient_in_the_order_of_the_network() -> None:
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    doubled = (2 * images.requires_grad_()).contiguous(memory_format=torch.channels_last)
    copied = planar(doubled)
    assert copied.is_contiguous()
    assert torch.equal(copied, doubled)
    weights = torch.arange(120.0).view(2, 3, 4, 5)
    (gradient,) = torch.autograd.grad((copied * weights).sum(), doubled)
    assert torch.equal(gradient, weights)
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert planar(weights) is weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("axes", [4, 5])
def test_the_gradients_of_a_concatenation_are_torch_s_and_have_no_gaps(axes, dtype) -> None:
    order = ORDERS[axes]
    parts = [
        inputs((2, channels, 8, 9, 3)[:axes], dtype, order).requires_grad_() for channels in (3, 5)
    ]
    weights = inputs((2, 8, 8, 9, 3)[:axes], dtype, order)
    found, expected = concatenate(*parts), torch.cat(parts, dim=1)
    assert torch.equal(found, expected)
    of_ours = torch.autograd.grad((found * weights).sum(), parts)
    of_theirs = torch.autograd.grad((expected * weights).sum(), parts)
    for ours, theirs in zip(of_ours, of_theirs, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous(memory_format=order)
        assert not theirs.is_contiguous(memory_format=order)


def test_a_concatenation_is_differentiable_twice_and_under_functional_transforms() -> None:
    parts = [
        inputs((2, channels, 3, 4), torch.float64, torch.channels_last).requires_grad_()
        for channels in (1, 2)
    ]
    assert torch.autograd.gradgradcheck(lambda *own: concatenate(*own).pow(3), parts)
    gradient = torch.func.grad(lambda own: concatenate(own, parts[1]).pow(3).sum())(parts[0])
    torch.testing.assert_close(gradient, 3 * parts[0] ** 2)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_tensors_of_other_orders_are_concatenated_by_torch(order) -> None:
    first = inputs((2, 3, 4, 5), torch.float32)
    second = inputs((2, 2, 4, 5), torch.float32, order).requires_grad_()
    assert "Concatenation" not in str(concatenate(first, second).grad_fn)
