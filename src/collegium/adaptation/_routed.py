"""A network whose layers mix the weights of several models, sample by sample (IOP-FL, Eq. 6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from collegium.adaptation._router import Router, route
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

CONVOLVE: Mapping[int, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    1: (functional.conv1d, functional.conv_transpose1d),
    2: (functional.conv2d, functional.conv_transpose2d),
    3: (functional.conv3d, functional.conv_transpose3d),
}

MOST = 2**19
"""How many mixed weights are held at once; beyond, samples wait for each other."""


class SharedRouter(nn.Module):
    """One coefficient per source for the whole network, whatever its input.

    The variant that the paper's Table III calls global, as we read it: the numbers go through a
    sigmoid and start at 1 / sources.
    """

    def __init__(self, sources: int) -> None:
        super().__init__()
        if sources < 2:
            raise ConfigError(f"routing needs two models or more, but there is {sources}")
        self.logits = nn.Parameter(torch.full((sources,), -math.log(sources - 1)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the coefficients (B, sources) for inputs (B, ...)."""
        return self.logits.sigmoid().expand(len(inputs), -1)


class RoutedLayer(nn.Module):
    """A convolution, transposed or not, or a linear layer with weights of its own for each sample.

    Every sample's weights are the product of its coefficients with the stacked weights of the
    models; all samples are convolved at once, as groups of one convolution.

    Args:
        layer: the layer that it stands for; its weights are not looked at.
        sources: how many models there are.
        router: gives the coefficients (B, sources) of the layer's input.
    """

    def __init__(self, layer: nn.Module, sources: int, router: nn.Module) -> None:
        super().__init__()
        self.router = router.to(next(layer.parameters()).dtype)
        self.settings: dict[str, Any] = {
            name: getattr(layer, name)
            for name in ("stride", "padding", "dilation", "groups", "output_padding")
            if hasattr(layer, name)
        }
        self.transposed = isinstance(layer, _ConvTransposeNd)
        self.mode = getattr(layer, "padding_mode", "zeros")
        self.margins = getattr(layer, "_reversed_padding_repeated_twice", ())
        self.coefficients: Tensor | None = None
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        self.register_buffer("weight", weight.new_empty(sources, *weight.shape))
        stacked = weight.new_empty(sources, *bias.shape) if isinstance(bias, Tensor) else None
        self.register_buffer("bias", stacked)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layer gives, and keep the coefficients of the samples."""
        weight = self.get_buffer("weight")
        flat = weight.ndim == 3 and inputs.ndim > 2
        coefficients = self.router(inputs.flatten(1, -2).mean(dim=1) if flat else inputs)
        self.coefficients = coefficients.detach()
        at_once = max(1, MOST // weight[0].numel())
        pieces = zip(torch.split(inputs, at_once), torch.split(coefficients, at_once), strict=True)
        outputs = [self._mix(*piece) for piece in pieces]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mix(self, inputs: Tensor, coefficients: Tensor) -> Tensor:
        weight, bias = self.get_buffer("weight"), self._buffers["bias"]
        own = route(weight, coefficients)
        shift = None if bias is None else route(bias, coefficients)
        apply = self._linear if weight.ndim == 3 else self._convolve
        with _made_again(own, weight, coefficients.detach()):
            return apply(inputs, own, shift)

    @staticmethod
    def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        output = torch.bmm(rows, weight.transpose(1, 2))
        if bias is not None:
            output = output + bias[:, None]
        return output.reshape(*inputs.shape[:-1], weight.shape[1])

    def _convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        settings = dict(self.settings)
        count, axes = len(inputs), inputs.ndim - 2
        groups = settings.pop("groups") * count
        if not self.transposed:
            settings.pop("output_padding", None)
            if self.mode != "zeros":
                inputs = functional.pad(inputs, self.margins, mode=self.mode)
                settings["padding"] = 0
        output = CONVOLVE[axes][self.transposed](
            inputs.reshape(1, -1, *inputs.shape[2:]),
            weight.flatten(0, 1),
            None if bias is None else bias.flatten(),
            groups=groups,
            **settings,
        )
        return output.reshape(count, -1, *output.shape[2:])


@contextmanager
def _made_again(own: Tensor, weight: Tensor, coefficients: Tensor) -> Iterator[None]:
    """Keep no sample's weights for the backward pass: they are mixed again when it needs them.

    Mixing takes a few percent of a convolution's time; kept, the weights of all samples would take
    the memory of a model for each of them.
    """
    place, size = own.data_ptr(), own.numel()  # the hooks live long and must not hold ``own``

    def pack(tensor: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
        same = tensor.data_ptr() == place and tensor.numel() == size
        return (tensor.shape, tensor.stride()) if same else tensor

    def unpack(kept: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return route(weight, coefficients).as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def routed_layers(module: nn.Module) -> dict[str, RoutedLayer]:
    """Return the routed layers of a network by name."""
    return {n: layer for n, layer in module.named_modules() if isinstance(layer, RoutedLayer)}


def make_routed(
    module: nn.Module, sources: int, router: Callable[[int], nn.Module]
) -> dict[str, RoutedLayer]:
    """Put routed layers in the place of a network's convolutions and linear layers.

    The output projection of torch's `MultiheadAttention` stays: it is never called, only its
    weights are read. Layers of torch's `TransformerEncoder` lose their fast path, which would read
    the weights of their linear layers past the routers.

    Args:
        module: the network, changed in place; whatever else it holds stays.
        sources: how many models there are.
        router: makes the router of a layer, given the channels of its input.

    Returns:
        The routed layers by name; their stacked weights are still to be filled.

    Raises:
        ConfigError: the network has neither convolutions nor linear layers, or makes the weights
            of one from others, such as weight normalisation does.
    """
    made: dict[int, RoutedLayer] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if name and _is_routed(layer):
            if id(layer) not in made:
                _require_own_weights(name, layer)
                channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
                made[id(layer)] = RoutedLayer(layer, sources, router(channels))
            place, _, last = name.rpartition(".")
            setattr(module.get_submodule(place), last, made[id(layer)])
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # what the fast path asks for
    if not made:
        raise ConfigError(
            f"{type(module).__name__} has neither convolutions nor linear layers to be routed"
        )
    return routed_layers(module)


def _is_routed(layer: nn.Module) -> TypeGuard[_ConvNd | nn.Linear]:
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return False
    return isinstance(layer, _ConvNd | nn.Linear)


def _require_own_weights(name: str, layer: nn.Module) -> None:
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        raise ConfigError(
            f"the layer {name} makes its weights from others (weight normalisation or the like), "
            f"which cannot be mixed; choose another adapter, or take that out of the network"
        )


def fill(
    layers: Mapping[str, RoutedLayer], models: Mapping[str, Tensors], names: Sequence[str]
) -> None:
    """Copy the weights of every model into the stacks, one model after the other."""
    for position, source in enumerate(names):
        model = models[source]
        for name, layer in layers.items():
            layer.get_buffer("weight")[position].copy_(model[f"{name}.weight"])
            if layer._buffers["bias"] is not None:
                layer.get_buffer("bias")[position].copy_(model[f"{name}.bias"])
        del model


def layer_router(sources: int, dropout: float) -> Callable[[int], nn.Module]:
    """Return what makes a router of its own for each layer."""
    return lambda channels: Router(channels, sources, dropout)


def routing_parameters(layers: Mapping[str, RoutedLayer]) -> Iterator[nn.Parameter]:
    """Yield the parameters of the routers, each once."""
    seen: set[int] = set()
    for layer in layers.values():
        for parameter in layer.router.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
