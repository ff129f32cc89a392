"""Operators of `collegium.core.quick_layers`: few channels, several pixels at once.

Each is ``torch.ops.collegium.`` and its name, for tensors of a processor, with derivatives of any
order. In the order of channels-last, (B, C, *spatial) is read as a matrix with G pixels in a row,
(B * pixels / G, G * C), without a copy; results are in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from collegium.core.model_parts import channels_last_orders
from collegium.core.tensors import at_least_float32

ORDERS = channels_last_orders()
"""The order of channels-last by the number of axes."""

_TOGETHER = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""The types of so many bytes."""

_ROW = 256
"""The most numbers in a row of pixels that are taken together."""

_PARTS = 32
"""The most channels of half the size by which a transposed convolution is computed."""

_DOUBLES = [{3}, {2}, {1}, {1}, {1}]
"""Kernel, stride, padding, dilation and output padding of what doubles the sides."""


def applies(images: Tensor) -> bool:
    """Return whether operators can compute with a tensor: on a processor, not transformed.

    Args:
        images: of any shape.
    """
    return images.device.type == "cpu" and not torch._C._are_functorch_transforms_active()


def pixels_in_row(images: Tensor) -> int:
    """Return how many pixels are taken together; 1 if images are not in the right order.

    Args:
        images: (B, C, *spatial).
    """
    order = ORDERS.get(images.dim())
    if order is None or not images.is_contiguous(memory_format=order):
        return 1
    count, channels, together = images.numel() // images.shape[1], images.shape[1], 1
    while 2 * together * channels <= _ROW and count % (2 * together) == 0:
        together *= 2
    return together


def _rows(images: Tensor) -> tuple[Tensor, int]:
    """Return a matrix of channels-last images, and how many pixels each of its rows has."""
    images = images.contiguous(memory_format=ORDERS[images.dim()])
    together = pixels_in_row(images)
    return images.movedim(1, -1).reshape(-1, together * images.shape[1]), together


def _of_channels(sums: Tensor, together: int) -> Tensor:
    """Return the sums of channels from those of the columns of a matrix."""
    return sums.view(together, -1).sum(0)


def normalise(
    images: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images normalised by batch, and mean and biased variance of every channel.

    Args:
        images: (B, C, *spatial).
        weight: (C,), the scale.
        bias: (C,), the shift.
        eps: added to the variance.
    """
    rows, together = _rows(images)
    rows = at_least_float32(rows)
    count = len(rows) * together
    mean = _of_channels(rows.sum(0), together) / count
    apart = rows - mean.repeat(together)
    variance = _of_channels(apart.square().sum(0), together) / count
    scale = torch.rsqrt(variance + eps) * weight
    output = _ordered(images)
    factor, shift = scale.repeat(together), bias.repeat(together)
    torch.addcmul(shift, apart, factor, out=_rows(output)[0])
    return output, mean, variance


def normalise_backward(
    gradient: Tensor, images: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by images, weight and bias of `normalise`.

    Args:
        gradient: by the normalised images, (B, C, *spatial).
        images: see `normalise`, as are weight and eps.
        weight: the scale.
        mean: (C,), as `normalise` returned it.
        variance: (C,), likewise.
        eps: added to the variance.
    """
    rows, together = _rows(images)
    above = at_least_float32(_rows(gradient)[0])
    count = len(rows) * together
    apart = at_least_float32(rows) - mean.repeat(together)
    inverse = torch.rsqrt(variance + eps)
    by_bias = _of_channels(above.sum(0), together)
    by_apart = _of_channels((above * apart).sum(0), together)
    scale = inverse * weight
    shift, slope = -scale * by_bias / count, -scale * inverse.square() * by_apart / count
    apart.mul_(slope.repeat(together)).add_(shift.repeat(together))
    below = _ordered(images)
    torch.addcmul(apart, above, scale.repeat(together), out=_rows(below)[0])
    return below, by_apart * inverse, by_bias


def sum_of_channels(images: Tensor) -> Tensor:
    """Return the sum of each channel, (C,); half precision is added up in float32.

    Args:
        images: (B, C, *spatial).
    """
    rows, together = _rows(images)
    return _of_channels(at_least_float32(rows.sum(0)), together).to(images.dtype)


def convolve(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Return a convolution with a bias, or a transposed one, as `torch.convolution` does.

    Args:
        images: (B, C, *spatial).
        weight: (out, in / groups, *kernel); transposed (in, out / groups, *kernel).
        bias: (out,).
        stride: for each axis, as are the padding and the dilation.
        padding: zeros on both sides.
        dilation: of the kernel.
        transposed: whether it is a transposed convolution.
        output_padding: of a transposed convolution.
        groups: into which channels are divided.
    """
    sizes = (weight.shape[2:], stride, padding, dilation, output_padding)
    parts = weight.shape[1] * 2 ** (weight.dim() - 2)
    doubles = transposed and groups == 1 and [{*size} for size in sizes] == _DOUBLES
    if doubles and parts <= _PARTS:
        return _double(images, weight, bias)
    output = torch.ops.aten.convolution(
        images, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    return output.contiguous(memory_format=ORDERS[images.dim()])  # type: ignore[no-any-return]


def _double(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a transposed convolution that doubles the sides, by one of half the size.

    Along an axis with kernel k, output 2i is k1 x_i, and 2i + 1 is k2 x_i + k0 x_(i+1).
    """
    axes = weight.dim() - 2
    none, one, two = [0] * axes, [1] * axes, [2] * axes
    kernel = functional.pad(weight.transpose(0, 1).flip([*range(2, 2 + axes)]), (0, 1) * axes)
    for axis in range(2, 2 + 2 * axes, 2):  # k2 k1 k0 0: by taps, and by odd and even
        kernel = kernel.unflatten(axis, (2, 2))  # type: ignore[no-untyped-call]
    sides = [*range(3, 3 + 2 * axes, 2)]
    kernel = kernel.flip(sides).permute(*sides, 0, 1, *range(2, 2 + 2 * axes, 2))
    kernel = kernel.reshape(-1, len(weight), *two).contiguous(memory_format=ORDERS[images.dim()])
    shift = bias.repeat(2**axes)
    output = torch.convolution(images, kernel, shift, one, one, one, False, none, 1)
    output = output.contiguous(memory_format=ORDERS[images.dim()]).movedim(1, -1)
    output = output[(slice(None), *[slice(1, None)] * axes)]
    output = output.unflatten(-1, (*two[1:], -1))  # type: ignore[no-untyped-call]
    *rows, columns = images.shape[2:]
    size = (len(images), weight.shape[1], *(2 * side for side in images.shape[2:]))
    doubled = torch.empty(size, dtype=output.dtype, memory_format=ORDERS[images.dim()])
    squares = doubled.movedim(1, -1).view(len(images), *(2 * row for row in rows), columns, -1)
    for axis in range(1, 2 * axes - 1, 2):
        squares = squares.unflatten(axis, (-1, 2))  # type: ignore[no-untyped-call]
    together = _TOGETHER.get(output.shape[-1] * output.element_size())
    if together is not None:  # two pixels are copied at once
        output, squares = output.view(together), squares.view(together)
    order = [axis for own in range(1, axes) for axis in (own, own + axes)]
    squares.copy_(output.permute(0, *order, axes, 2 * axes))
    return doubled


def _ordered(images: Tensor) -> Tensor:
    """Return an empty tensor such as the operators return for images."""
    return torch.empty_like(images, memory_format=ORDERS[images.dim()])


def _fake_normalise(images: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _ordered(images), torch.empty_like(weight), torch.empty_like(weight)


def _fake_normalise_backward(
    _: Tensor, images: Tensor, weight: Tensor, *__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _ordered(images), torch.empty_like(weight), torch.empty_like(weight)


def _fake_convolve(images: Tensor, weight: Tensor, bias: Tensor, *geometry: Any) -> Tensor:
    return _ordered(torch.ops.aten.convolution(images, weight, bias, *geometry))


def _fake_sum_of_channels(images: Tensor) -> Tensor:
    return images.new_empty(images.shape[1])


def _keep_normalised(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    images, weight, _, ctx.eps = inputs
    _, mean, variance = output
    ctx.save_for_backward(images, weight, mean, variance)


def _normalised_backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    images, weight, mean, variance = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return (
            *torch.ops.collegium.normalise_backward(
                gradient, images, weight, mean, variance, ctx.eps
            ),
            None,
        )
    # somebody differentiates again; torch's derivative of this one takes the statistics for
    # functions of the images without being told
    mean, inverse = mean.detach(), torch.rsqrt(variance.detach() + ctx.eps)
    found = torch.ops.aten.native_batch_norm_backward(
        gradient, images, weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
    )
    return (*found, None)


def _keep_convolved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, weight, _, *ctx.geometry = inputs
    ctx.save_for_backward(images, weight)


def _convolved_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    images, weight = ctx.saved_tensors
    of_images, of_weight, of_bias, *rest = ctx.needs_input_grad
    by_images, by_weight, by_bias = torch.ops.aten.convolution_backward(
        gradient, images, weight, None, *ctx.geometry, [of_images, of_weight, False]
    )
    if of_bias and torch.is_grad_enabled():  # somebody differentiates again
        by_bias = gradient.sum([axis for axis in range(gradient.dim()) if axis != 1])
    elif of_bias:
        by_bias = torch.ops.collegium.sum_of_channels(gradient)
    return by_images, by_weight, by_bias, *[None] * len(rest)


def planar(images: Tensor) -> Tensor:
    """Return images in torch's own order, whose gradient goes back in that of channels-last.

    Sums over the pixels of a channel are quicker in torch's order, and so are products with labels,
    which have it; convolutions take gradients in the order that they compute in.

    Args:
        images: (B, C, *spatial).
    """
    order = ORDERS.get(images.dim())
    if order is None or images.is_contiguous() or not applies(images):
        return images
    copy: Tensor = _Planar.apply(images, order)  # type: ignore[no-untyped-call]
    return copy


class _Planar(torch.autograd.Function):
    """A copy in torch's order."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, order: torch.memory_format) -> Tensor:
        ctx.order = order
        return images.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].contiguous(memory_format=ctx.order), None


def concatenate(first: Tensor, second: Tensor) -> Tensor:
    """Return the channels of one tensor and then those of another.

    torch's gradients are views with gaps; to add another to one takes several times as long as to
    copy it before, ten times in bfloat16.

    Args:
        first: (B, C, *spatial).
        second: (B, D, *spatial).

    Returns:
        (B, C + D, *spatial).
    """
    order = None if torch.compiler.is_compiling() else ORDERS.get(first.dim())
    ordered = order and all(part.is_contiguous(memory_format=order) for part in (first, second))
    if not ordered or not applies(first):
        return torch.cat([first, second], dim=1)
    joined: Tensor = _Concatenation.apply(first, second, order)  # type: ignore[no-untyped-call]
    return joined


class _Concatenation(torch.autograd.Function):
    """`torch.cat` along the channels, whose gradients have no gaps."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, order: torch.memory_format) -> Tensor:
        ctx.order, ctx.sizes = order, [first.shape[1], second.shape[1]]
        return torch.cat([first, second], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        first, second = torch.split(gradients[0], ctx.sizes, dim=1)
        order = ctx.order
        return first.contiguous(memory_format=order), second.contiguous(memory_format=order), None


def _define(function: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> str:
    """Make a function on tensors of a processor one of torch's operators, and return its name.

    Args:
        function: of tensors; the compiler does not see into it.
        schema: its arguments and results, as torch writes them.
        fake: returns empty tensors such as the function's, of tensors without data.
    """
    name = f"collegium::{function.__name__}"
    # torch.library.custom_op does the same, and imports the compiler at the first call
    torch.library.define(name, schema)
    torch.library.impl(name, "cpu", function)
    torch.library.register_fake(name, fake)
    return name


_define(sum_of_channels, "(Tensor images) -> Tensor", _fake_sum_of_channels)
_define(
    normalise_backward,
    "(Tensor gradient, Tensor images, Tensor weight, Tensor mean, Tensor variance, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_normalise_backward,
)
_NORMALISE = _define(
    normalise,
    "(Tensor images, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _fake_normalise,
)
_CONVOLVE = _define(
    convolve,
    "(Tensor images, Tensor weight, Tensor bias, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor",
    _fake_convolve,
)
torch.library.register_autograd(_NORMALISE, _normalised_backward, setup_context=_keep_normalised)
torch.library.register_autograd(_CONVOLVE, _convolved_backward, setup_context=_keep_convolved)
torch.library.register_autocast(_CONVOLVE, "cpu", torch.bfloat16)
