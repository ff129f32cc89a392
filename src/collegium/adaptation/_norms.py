"""Batch normalisation at a site outside the federation: its layers, and batch statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from collegium.core.lazy import nn, torch
from collegium.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch normalisation layers by name."""
    kind = nn.modules.batchnorm._BatchNorm
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, kind)}


def require_batch_norms(module: nn.Module, adapter: str) -> dict[str, _BatchNorm]:
    """Return the batch normalisation layers by name.

    Args:
        module: the network.
        adapter: the adapter's name, for messages.

    Raises:
        ConfigError: there is none.
    """
    layers = batch_norms(module)
    if not layers:
        raise ConfigError(
            f"{adapter} adapts batch normalisation, and {type(module).__name__} has none; choose "
            f"another adapter, or train a network with batch normalisation"
        )
    return layers


def use_batch_statistics(module: nn.Module) -> None:
    """Make batch normalisation use each batch's own statistics, and drop the running ones.

    Otherwise the network is in evaluation mode (dropout is off). A batch with a single value per
    channel, which has no statistics, is from then on a `DataError`.
    """
    module.eval()
    for layer in batch_norms(module).values():
        layer.train()
        layer.register_forward_pre_hook(_require_values)
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None


def _require_values(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    values = inputs[0]
    if values.ndim > 1 and values.numel() == values.shape[1]:
        raise DataError(
            "batch normalisation takes its statistics from the batch, and a batch held one value "
            "per channel (a single vector, or a single image that the network shrinks to a pixel); "
            "give the site more or larger cases, or choose the adapter dsbn or none"
        )


def affine(layers: dict[str, _BatchNorm]) -> Iterator[Tensor]:
    """Yield the scales and shifts of layers, if they have any."""
    for layer in layers.values():
        yield from (p for p in (layer.weight, layer.bias) if isinstance(p, torch.Tensor))
