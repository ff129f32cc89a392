"""A network whose layers mix the weights of several models (IOP-FL, Jiang et al., 2023, Eq. 5-6).

A routed layer uses the sum of the same layer's weights in several models, its sources, each times a
coefficient that depends on the layer's own input, sample by sample.
"""

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

from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

CONVOLUTIONS: Mapping[int, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    1: (functional.conv1d, functional.conv_transpose1d),
    2: (functional.conv2d, functional.conv_transpose2d),
    3: (functional.conv3d, functional.conv_transpose3d),
}
"""Convolution and transposed convolution by the number of spatial axes."""

MAX_MIXED_WEIGHTS = 2**19
"""The number of mixed weights that are held at once; larger batches are split."""

GRAM_CHUNK = 2**16
"""The number of entries of a source that are converted to double precision at once."""


class Router(nn.Module):
    """A network that computes the coefficients of one layer from the layer's input (Eq. 5).

    Mean over space, a linear layer to twice the channels, dropout, a linear layer to one number per
    source, sigmoid; nothing in between. The coefficients are per sample and need not sum to one.

    The last linear layer starts at weight 0 and bias -ln(sources - 1), so that every coefficient is
    exactly 1 / sources, as the paper's Algorithm 1 says; the released code starts it as torch does,
    near one half each, which makes the routed weights several times too large.

    Args:
        channels: channels of the layer's input.
        sources: the number of models, the global one included.
        dropout: fraction of hidden units that are dropped during adaptation.

    Raises:
        ConfigError: there are fewer than two sources.
    """

    def __init__(self, channels: int, sources: int, dropout: float = 0.2) -> None:
        super().__init__()
        start = _starting_logit(sources)
        self.hidden = nn.Linear(channels, 2 * channels)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * channels, sources)
        nn.init.zeros_(self.output.weight)
        nn.init.constant_(self.output.bias, start)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the coefficients (B, sources) for inputs (B, channels, *spatial)."""
        if inputs.ndim > 2:  # not mean(), whose backward pass divides a whole map
            inputs = inputs.flatten(2).sum(dim=2) / inputs[0, 0].numel()
        coefficients: Tensor = self.output(self.dropout(self.hidden(inputs))).sigmoid()
        return coefficients


class SharedRouter(nn.Module):
    """A router with one coefficient per source for all layers and all inputs.

    It is our reading of the variant that the paper's Table III calls global: the numbers go through
    a sigmoid and start at 1 / sources.

    Args:
        sources: the number of models, the global one included.

    Raises:
        ConfigError: there are fewer than two sources.
    """

    def __init__(self, sources: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.full((sources,), _starting_logit(sources)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the coefficients (B, sources) for inputs (B, ...)."""
        return self.logits.sigmoid().expand(len(inputs), -1)


def _starting_logit(sources: int) -> float:
    """Return the logit of a coefficient of 1 / sources."""
    if sources < 2:
        raise ConfigError(f"routing needs two models or more, but there is {sources}")
    return -math.log(sources - 1)


def mix_weights(weights: Tensor, coefficients: Tensor) -> Tensor:
    """Combine a layer's weights over the sources in one product (Eq. 6).

    Args:
        weights: (sources, *shape), the layer's weights or biases in every model.
        coefficients: (sources,), or (B, sources) for separate weights for every sample.

    Returns:
        (*shape), or (B, *shape).
    """
    flat = coefficients @ weights.reshape(len(weights), -1)
    return flat.reshape(*coefficients.shape[:-1], *weights.shape[1:])


class RoutedLayer(nn.Module):
    """A convolution, transposed or not, or a linear layer with separate weights for each sample.

    Every sample's weights are the product of its coefficients with the stacked weights of the
    models; all samples are convolved at once, as groups of one convolution.

    Args:
        layer: the layer to replace; its weights are not used.
        sources: the number of models.
        router: computes the coefficients (B, sources) of the layer's input.
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
        """Return the layer's output, and store the coefficients of the samples."""
        weight = self.get_buffer("weight")
        flat = weight.ndim == 3 and inputs.ndim > 2
        coefficients = self.router(inputs.flatten(1, -2).mean(dim=1) if flat else inputs)
        self.coefficients = coefficients.detach()
        size = max(1, MAX_MIXED_WEIGHTS // weight[0].numel())
        parts = zip(torch.split(inputs, size), torch.split(coefficients, size), strict=True)
        outputs = [self._mix(*part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mix(self, inputs: Tensor, coefficients: Tensor) -> Tensor:
        weight, bias = self.get_buffer("weight"), self._buffers["bias"]
        mixed = mix_weights(weight, coefficients)
        mixed_bias = None if bias is None else mix_weights(bias, coefficients)
        apply = self._linear if weight.ndim == 3 else self._convolve
        with _recompute_in_backward(mixed, weight, coefficients.detach()):
            return apply(inputs, mixed, mixed_bias)

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
        output = CONVOLUTIONS[axes][self.transposed](
            inputs.reshape(1, -1, *inputs.shape[2:]),
            weight.flatten(0, 1),
            None if bias is None else bias.flatten(),
            groups=groups,
            **settings,
        )
        return output.reshape(count, -1, *output.shape[2:])


@contextmanager
def _recompute_in_backward(mixed: Tensor, weight: Tensor, coefficients: Tensor) -> Iterator[None]:
    """Store no sample's weights for the backward pass, which mixes them again.

    Mixing takes a few percent of a convolution's time; the stored weights of all samples would take
    the memory of a model for each of them.
    """
    pointer, size = mixed.data_ptr(), mixed.numel()  # the hooks outlive and must not hold ``mixed``

    def pack(tensor: Tensor) -> Tensor | tuple[torch.Size, tuple[int, ...]]:
        same = tensor.data_ptr() == pointer and tensor.numel() == size
        return (tensor.shape, tensor.stride()) if same else tensor

    def unpack(packed: Tensor | tuple[torch.Size, tuple[int, ...]]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return mix_weights(weight, coefficients).as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def replace_layers(
    module: nn.Module, sources: int, router: Callable[[int], nn.Module]
) -> dict[str, RoutedLayer]:
    """Replace a network's convolutions and linear layers by routed layers.

    The output projection of torch's `MultiheadAttention` stays: it is never called, only its
    weights are read. Layers of torch's `TransformerEncoder` lose their fast path, which would
    bypass the routers of their linear layers.

    Args:
        module: the network, changed in place; everything else that it holds stays.
        sources: the number of models.
        router: builds the router of a layer, given the channels of its input.

    Returns:
        The routed layers by name; their stacked weights are still to be filled.

    Raises:
        ConfigError: the network has neither convolutions nor linear layers, or computes the weights
            of one from other tensors, as weight normalisation does.
    """
    replaced: dict[int, RoutedLayer] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if name and _can_be_routed(layer):
            if id(layer) not in replaced:
                _require_own_weights(name, layer)
                channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
                replaced[id(layer)] = RoutedLayer(layer, sources, router(channels))
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, replaced[id(layer)])
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # the condition of the fast path
    if not replaced:
        raise ConfigError(
            f"{type(module).__name__} has neither convolutions nor linear layers to be routed"
        )
    return {n: layer for n, layer in module.named_modules() if isinstance(layer, RoutedLayer)}


def _can_be_routed(layer: nn.Module) -> TypeGuard[_ConvNd | nn.Linear]:
    own = not isinstance(layer, NonDynamicallyQuantizableLinear)
    return own and isinstance(layer, _ConvNd | nn.Linear)


def _require_own_weights(name: str, layer: nn.Module) -> None:
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        raise ConfigError(
            f"the layer {name} computes its weights from other tensors (weight normalisation or "
            f"similar), which cannot be mixed; choose another adapter or another network"
        )


def fill_weights(
    layers: Mapping[str, RoutedLayer], models: Mapping[str, Tensors], names: Sequence[str]
) -> None:
    """Copy the weights of every model into the stacks, one model after the other.

    Args:
        layers: the routed layers by name.
        models: models by name.
        names: the names of the sources, in their order.
    """
    for position, source in enumerate(names):
        model = models[source]
        for name, layer in layers.items():
            layer.get_buffer("weight")[position].copy_(model[f"{name}.weight"])
            if layer._buffers["bias"] is not None:
                layer.get_buffer("bias")[position].copy_(model[f"{name}.bias"])
        del model


def router_factory(
    sources: int, dropout: float, *, shared: bool = False
) -> Callable[[int], nn.Module]:
    """Return a function that builds the router of a layer, for `replace_layers`.

    Args:
        sources: the number of models.
        dropout: as in `Router`.
        shared: whether all layers get the same `SharedRouter`, and not a `Router` each.
    """
    if shared:
        router = SharedRouter(sources)
        return lambda _: router
    return lambda channels: Router(channels, sources, dropout)


def routing_parameters(layers: Mapping[str, RoutedLayer]) -> Iterator[nn.Parameter]:
    """Return the parameters of the routers, each once."""
    return nn.ModuleList(layer.router for layer in layers.values()).parameters()


def gram_matrix(weights: Tensor) -> Tensor:
    """Return the inner products of the sources' weights with each other.

    Args:
        weights: (S, *shape).

    Returns:
        (S, S), float64 on the CPU.
    """
    gram = torch.zeros(len(weights), len(weights), dtype=torch.float64)
    for chunk in torch.split(weights.detach().flatten(1), GRAM_CHUNK, dim=1):
        exact = chunk.double()
        gram += (exact @ exact.T).cpu()
    return gram


def weight_variation(weights: Tensor, coefficients: Tensor) -> Tensor:
    """Return the relative distance of each case's mixed weights from the equal mix.

    With S sources and a case's coefficients r, it is ||W(r) - W(e)|| / ||W(e)||. W(r) is the sum of
    r_k W_k (Eq. 6), e is 1 / S for every source, the norm is Frobenius' and biases do not count. No
    case's weights are computed: with G the Gram matrix and d = r - e, the squared distance is d G d
    and the squared norm e G e.

    Args:
        weights: (S, *shape), the layer's weights in every source.
        coefficients: (cases, S).

    Returns:
        (cases,), float64; 0 if all sources are zero.
    """
    gram = gram_matrix(weights)
    equal = torch.full((len(weights),), 1 / len(weights), dtype=torch.float64)
    difference = coefficients.cpu().double() - equal
    squared = ((difference @ gram) * difference).sum(dim=1).clamp(min=0)
    norm = (equal @ gram @ equal).clamp(min=torch.finfo(torch.float32).tiny)
    return (squared / norm).sqrt()
