"""Layers that compute what torch's do, in less time on a processor.

torch's kernels for channels-last tensors compute with the channels of one pixel at once. The last
level of a U-Net has as many channels as there are classes, often two of the sixteen for which there
is room, so that its batch normalisation took longer than its convolutions. Where channels are few,
several neighbouring pixels are taken together here: (B, C, *spatial) in the order of channels-last
is read as a matrix with G pixels in a row, (B * pixels / G, G * C), without a copy. The gradient of
a bias is summed up in the same way: for that of a transposed convolution, torch takes longer than
for that of its weight. A transposed convolution that doubles the sides, to few channels, is one of
half the size to so many more, of which each pixel makes a square (Shi et al. 2016,
https://arxiv.org/abs/1609.07009, section 3).

Outputs and gradients are those of torch's layers up to rounding; see each class. On other devices,
for other orders of memory and under `torch.func` they are torch's own. Names, parameters and roles
of a network stay as they are. `torch.compile` calls the operators as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from collegium.core.model_parts import orders_of_weights
from collegium.core.quick_operators import applies, pixels_in_row

_FEW = range(2, 8)
"""With how many channels a normalisation, or what comes out of a convolution, gains."""


def use_quick_layers(module: nn.Module) -> None:
    """Replace layers of a network by quicker ones, in place.

    Args:
        module: the network, its weights in their order of memory.
    """
    ordered = orders_of_weights(module)
    for layer in module.modules():
        kind = _QUICK.get(type(layer))
        if kind is not None and _gains(layer, ordered):
            layer.__class__ = kind


def _gains(layer: nn.Module, ordered: Collection[int]) -> bool:
    """Return whether a layer is one of those that are quicker here.

    Args:
        layer: a layer of a kind that can be replaced.
        ordered: how many axes those weights have that are channels-last.
    """
    if isinstance(layer, nn.PReLU):
        return layer.num_parameters == 1
    if isinstance(layer, _BatchNorm):
        return layer.affine and layer.num_features in _FEW
    assert isinstance(layer, _ConvNd)
    slow = isinstance(layer, _ConvTransposeNd) or layer.out_channels in _FEW
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return slow and plain and layer.bias is not None and layer.weight.dim() in ordered


@contextmanager
def torch_layers(module: nn.Module) -> Iterator[None]:
    """Make a network's layers torch's own inside the block, for libraries that know only these.

    Args:
        module: the network.
    """
    changed = {layer: type(layer) for layer in module.modules() if type(layer) in _TORCH}
    for layer, kind in changed.items():
        layer.__class__ = _TORCH[kind]
    try:
        yield
    finally:
        for layer, kind in changed.items():
            layer.__class__ = kind


class QuickPReLU(nn.PReLU):
    """PReLU with one slope, in a third of the time; torch's own where it is compiled.

    torch's backward pass writes the gradient of the slope for every element before it adds them up,
    in a kernel that is not vectorised. Outputs and gradients of inputs are torch's to the last bit;
    the gradient of the slope is the same sum in another order.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return the activations.

        Args:
            images: of any shape.
        """
        if not applies(images) or torch.compiler.is_compiling():
            return super().forward(images)
        output: Tensor = _PReLU.apply(images, self.weight.to(images.dtype))  # type: ignore[no-untyped-call]
        return output


class _PReLU(torch.autograd.Function):
    """max(x, 0) + a min(x, 0), and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.leaky_relu(x, float(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        if torch.is_grad_enabled():  # somebody differentiates again, also by the slope
            below = torch.where(x > 0, gradient, weight * gradient)
        else:
            if gradient.stride() != x.stride():  # torch's kernels for two orders are slow
                gradient = torch.empty_like(x, dtype=gradient.dtype).copy_(gradient)
            below = torch.ops.aten.leaky_relu_backward(gradient, x, float(weight), False)
        if not ctx.needs_input_grad[1]:
            return below, None
        slope = (x.clamp(max=0) * gradient).sum()  # of bfloat16 too added up in float32
        return below, slope.reshape(1)


class _QuickBatchNorm(_BatchNorm):
    """Batch normalisation of few channels by the statistics of a batch, in an eighth of the time.

    Mean and variance are sums of float32, the variance of what differs from the mean.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised images; running statistics learn as torch's do.

        Args:
            images: (B, C, *spatial).
        """
        tracked = self.running_mean, self.running_var, self.num_batches_tracked, self.momentum
        learns = self.training and not any(own is None for own in tracked)
        if not learns or not applies(images) or pixels_in_row(images) == 1:
            return super().forward(images)
        output: Tensor
        output, mean, variance = torch.ops.collegium.normalise(
            images, self.weight, self.bias, self.eps
        )
        count = images.numel() // images.shape[1]
        running_mean, running_variance, steps, momentum = cast("tuple[Any, ...]", tracked)
        with torch.no_grad():
            running_mean.lerp_(mean, momentum)
            running_variance.lerp_(variance * (count / (count - 1)), momentum)
            steps.add_(1)
        return output


class QuickBatchNorm2d(_QuickBatchNorm, nn.BatchNorm2d):
    """See `_QuickBatchNorm`."""


class QuickBatchNorm3d(_QuickBatchNorm, nn.BatchNorm3d):
    """See `_QuickBatchNorm`."""


class _QuickConv(_ConvNd):
    """A convolution whose bias has its gradient summed up apart."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the output of the convolution.

        Args:
            images: (B, C, *spatial).
        """
        if not applies(images) or images.dim() != self.weight.dim():
            output: Tensor = super().forward(images)
            return output
        return _convolve(self, images)


class QuickConv2d(_QuickConv, nn.Conv2d):
    """See `_QuickConv`."""


class QuickConv3d(_QuickConv, nn.Conv3d):
    """See `_QuickConv`."""


class _QuickConvTranspose(_ConvTransposeNd):
    """A transposed convolution whose bias has its gradient summed up apart."""

    def forward(self, images: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Return the output of the convolution.

        Args:
            images: (B, C, *spatial).
            output_size: the spatial size of the output; None: by the layer's padding.
        """
        other = output_size is not None or images.dim() != self.weight.dim()
        if not applies(images) or other:
            output: Tensor = super().forward(images, output_size)
            return output
        return _convolve(self, images)


class QuickConvTranspose2d(_QuickConvTranspose, nn.ConvTranspose2d):
    """See `_QuickConvTranspose`."""


class QuickConvTranspose3d(_QuickConvTranspose, nn.ConvTranspose3d):
    """See `_QuickConvTranspose`."""


def _convolve(layer: _ConvNd, images: Tensor) -> Tensor:
    """Return what a convolution makes of images, by the operator."""
    sizes = (layer.stride, layer.padding, layer.dilation)
    geometry = (*map(list, sizes), layer.transposed, list(layer.output_padding), layer.groups)
    output: Tensor = torch.ops.collegium.convolve(images, layer.weight, layer.bias, *geometry)
    return output


_QUICK: dict[type[nn.Module], type[nn.Module]] = {
    nn.PReLU: QuickPReLU,
    nn.BatchNorm2d: QuickBatchNorm2d,
    nn.BatchNorm3d: QuickBatchNorm3d,
    nn.Conv2d: QuickConv2d,
    nn.Conv3d: QuickConv3d,
    nn.ConvTranspose2d: QuickConvTranspose2d,
    nn.ConvTranspose3d: QuickConvTranspose3d,
}
"""The quicker layers by torch's."""

_TORCH = {quick: theirs for theirs, quick in _QUICK.items()}
