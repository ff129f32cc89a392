"""Finds the layer that the images enter, for methods that add a layer before the network."""

from __future__ import annotations

from torch import nn

from collegium.errors import ConfigError


def first_layer(
    module: nn.Module, kinds: tuple[type[nn.Module], ...], *, name: str, called: str, instead: str
) -> nn.Module:
    """Return the first layer of some kinds, which says what images a network takes.

    Args:
        module: the network.
        kinds: the kinds.
        name: the name that the layer before it will have.
        called: the kinds in words, for the message.
        instead: what to do without such a layer, for the message.

    Raises:
        ConfigError: there is no such layer, or something has the name already.
    """
    first = next((layer for layer in module.modules() if isinstance(layer, kinds)), None)
    if first is None or hasattr(module, name):
        why = f"no {called}" if first is None else f"something named {name!r}"
        raise ConfigError(
            f"{type(module).__name__} has {why}, so that its images cannot be normalised; {instead}"
        )
    return first
