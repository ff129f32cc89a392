"""A second head on the features of a network, whose output is added to the first one's."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from collegium.core.model_parts import ModelParts, head_layer, require_free_name
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

SECOND_HEAD = "second_head"
"""The name of the second head among the network's submodules."""


def attach_second_head(module: nn.Module) -> None:
    """Add a copy of a network's head to it, in place, behind a gate that is 0 to begin with.

    In evaluation mode the network returns head(features) + gate * second(features); in training
    mode it is the network as it was, and the second head is called by the method's objective as
    ``second_head.layer``.

    Args:
        module: the network as built.

    Raises:
        ConfigError: the network has no head, or a submodule or attribute of that name.
    """
    from collegium.models._second_head import SecondHead

    require_free_name(module, SECOND_HEAD)
    head = head_layer(module)
    second = SecondHead(copy.deepcopy(head))
    module.add_module(SECOND_HEAD, second)
    head.register_forward_pre_hook(second.see)
    module.register_forward_hook(second.add)


def second_head_of(model: Tensors, parts: ModelParts) -> Tensors:
    """Return a second head with the weights of the first one, and a gate that is closed.

    Args:
        model: the network as built.
        parts: the roles of the whole network.

    Raises:
        ConfigError: the network has no second head.
    """
    inner = f"{SECOND_HEAD}.layer."
    layer = sorted(name.removeprefix(inner) for name in parts.added if name.startswith(inner))
    starts = {
        name.removesuffix(layer[0]) for name in parts.head if layer and name.endswith(layer[0])
    }
    fitting = [start for start in sorted(starts) if all(start + n in model for n in layer)]
    if not fitting:
        raise ConfigError("the network has no second head; see attach_second_head")
    copied = {f"{inner}{name}": model[fitting[0] + name] for name in layer}
    closed = next(iter(copied.values())).new_zeros(())
    return Tensors({**copied, f"{SECOND_HEAD}.gate": closed})
