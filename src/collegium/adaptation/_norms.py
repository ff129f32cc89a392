"""Batch normalisation outside the federation: by the statistics of the images at hand."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from collegium.errors import ConfigError


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers of batch normalisation by name."""
    return {n: layer for n, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def require_batch_norms(module: nn.Module, adapter: str) -> dict[str, _BatchNorm]:
    """Return the layers of batch normalisation by name.

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
    """Let batch normalisation use each batch's own statistics, and forget the running ones.

    The network stays in evaluation mode otherwise (dropout is off).
    """
    module.eval()
    for layer in batch_norms(module).values():
        layer.train()
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None


def affine(layers: dict[str, _BatchNorm]) -> Iterator[Tensor]:
    """Yield the scales and shifts of layers."""
    for layer in layers.values():
        yield from (p for p in (layer.weight, layer.bias) if isinstance(p, torch.Tensor))
