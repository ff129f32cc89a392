"""Low-rank adapters (LoRA, Hu et al., ICLR 2022, https://arxiv.org/abs/2106.09685), by peft."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from collegium.core.lazy import nn
from collegium.core.model_parts import find_parts
from collegium.core.optional import import_optional
from collegium.core.settings import Fraction, Positive, PositiveInt, settings
from collegium.errors import ConfigError

ADAPTERS = ("lora_A", "lora_B")
"""The submodules of an adapted layer that hold its adapter."""

BASE = "base_layer"
"""The submodule of an adapted layer that is the layer as it was."""


@settings
class Lora:
    """Adapters of a network: (alpha / rank) B A, of a low rank, is added to the weight of a layer.

    A is drawn and B is 0, so that the network begins as it was. Adapters and head are trained and
    everything else is frozen (`ModelParts.frozen`), the statistics of normalisation included. The
    adapter of a convolution is one to `rank` channels with the kernel and stride of the layer, and
    one with a kernel of 1.

    Attributes:
        rank: of the matrix that is added.
        alpha: the scale of what is added, times `rank`.
        dropout: probability on what enters an adapter, in [0, 1).
        modules: names of the submodules whose layers get adapters, wherever they stand, such as
            "qkv"; empty: all. Linear layers and convolutions get them, without groups or dilation,
            except in the head, and in torch's own attention and encoder layers, which do not call
            theirs in evaluation mode.
    """

    rank: PositiveInt = 4
    alpha: Positive = 8.0
    dropout: Fraction = 0.0
    modules: tuple[str, ...] = ()


def add_adapters(module: nn.Module, lora: Lora) -> None:
    """Add adapters to a network, in place; A is drawn from torch's ambient random state.

    Args:
        module: the network.
        lora: the adapters.

    Raises:
        ConfigError: peft is not installed, or no layer of the network can have an adapter.
    """
    peft: Any = import_optional("peft", "lora", "model.lora")
    head = find_parts(module).head
    names = [
        name
        for name, layer in _adaptable(module)
        if f"{name}.weight" not in head and _is_named(name, lora.modules)
    ]
    lacking = [w for w in lora.modules if not any(_is_named(name, (w,)) for name in names)]
    if lacking or not names:
        where = f" in a submodule {lacking[0]!r}" if lacking else ""
        raise ConfigError(
            f"model.lora: {type(module).__name__} has no linear layer or convolution that can have "
            f"an adapter{where}; correct model.lora.modules, or leave lora out"
        )
    trained = [p for name, p in module.named_parameters() if name in head and p.requires_grad]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="|".join(map(re.escape, names)),
    )
    peft.inject_adapter_in_model(config, module)
    for parameter in trained:
        parameter.requires_grad_(True)


def _is_named(name: str, modules: tuple[str, ...]) -> bool:
    """Return whether a layer stands at or below a submodule of one of some names, or of any."""
    return not modules or any(f".{wanted}." in f".{name}." for wanted in modules)


def _adaptable(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and layer of those for which peft has an adapter that is right."""
    inside: list[str] = []
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            inside.append(f"{name}." if name else "")
        if not name or name.startswith(tuple(inside)):
            continue
        if isinstance(layer, nn.Linear):
            yield name, layer
        elif isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            plain = layer.groups == 1 and layer.padding_mode == "zeros"
            if plain and {*layer.dilation} == {1}:
                yield name, layer


def merge_adapters(module: nn.Module) -> None:
    """Add adapters to the weights of their layers, in place; names are those without adapters.

    Args:
        module: the network.

    Raises:
        ConfigError: peft is not installed.
    """
    layers: Any = import_optional("peft.tuners.tuners_utils", "lora", "model.lora")
    for name, layer in [*module.named_modules()]:
        if isinstance(layer, layers.BaseTunerLayer):
            layer.merge()
            around, _, own = name.rpartition(".")
            setattr(module.get_submodule(around), own, layer.get_base_layer())


def name_without_adapters(name: str) -> str | None:
    """Return what a tensor is called in the network without adapters; None for an adapter's own.

    Args:
        name: its name in the network with adapters.
    """
    parts = name.split(".")
    if not {*ADAPTERS}.isdisjoint(parts):
        return None
    return ".".join(part for part in parts if part != BASE)
