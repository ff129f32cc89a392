"""ReLU with a second derivative, so that gradients of gradients see where its slope changes.

The gradient of a network with ReLU jumps wherever an activation crosses zero, and between the jumps
torch's second derivative is zero: a search that follows it is blind to them and stops at the first
one. Here the slope, 0 or 1, has the derivative of a sigmoid instead, as spiking networks are
trained (Neftci et al., 2019, https://arxiv.org/abs/1901.09948). Outputs and first derivatives stay
those of torch. That it helps to invert gradients is our own finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

WIDTH = 0.3
"""Width of the sigmoid over the standard deviation of the activations; 0.1 to 3 were tried."""

FUNCTIONS = (functional.relu, torch.relu, Tensor.relu)
IN_PLACE = (functional.relu_, torch.relu_, Tensor.relu_)


class TwiceDifferentiableReLU(TorchFunctionMode):
    """A context in which every ReLU that is called has the second derivative of this module.

    Leaky and parametric ones keep theirs.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or its replacement. See `TorchFunctionMode`."""
        given = dict(kwargs or {})
        if func not in FUNCTIONS + IN_PLACE:
            return func(*args, **given)
        image = args[0] if args else given["input"]
        if func in IN_PLACE or any(args[1:]) or given.get("inplace"):
            return image.copy_(_ReLU.apply(image.clone()))  # type: ignore[no-untyped-call]
        return _ReLU.apply(image)  # type: ignore[no-untyped-call]


class _ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.relu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        slope: Tensor = _Slope.apply(x)  # type: ignore[no-untyped-call]
        return slope * gradient


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        width = WIDTH * x.std(correction=0) + torch.finfo(x.dtype).tiny
        share = torch.sigmoid(x / width)
        derivative: Tensor = share * (1 - share) / width
        return derivative * gradient
