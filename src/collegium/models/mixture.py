"""A second network beside a site's own, whose outputs are mixed: one module with one state.

`collegium.core.algorithm.Algorithm.extend` adds it, so that a personal model which consists of two
networks is trained, stored, scored, exported and deployed as any other.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from collegium.core.model_parts import require_free_name
from collegium.core.tensors import Tensors

if TYPE_CHECKING:
    from torch import nn

SECOND = "second"
"""The name of the second network among the first one's submodules."""

WEIGHT = f"{SECOND}.weight"
"""The name of the second network's weight among the tensors."""


def attach_second_network(
    module: nn.Module, network: nn.Module | None = None, *, alike: bool = True
) -> None:
    """Add a second network to a network, in place; in evaluation mode it returns a mixture.

    The mixture is weight * second(images) + (1 - weight) * first(images), with the weight at 0 to
    begin with. In training mode the network is the first one alone, and the second is called by the
    method's objective as ``module.second.network``.

    Args:
        module: the network as built.
        network: the second network; None: one of the same architecture.
        alike: whether the latter starts as a copy of the first one; otherwise its layers draw
            initial weights of their own, from torch's ambient random state; frozen layers are
            copies in any case.

    Raises:
        ConfigError: the network has a submodule or attribute of that name.
    """
    require_free_name(module, SECOND)
    from collegium.models._second_network import SecondNetwork

    if network is None:
        network = copy.deepcopy(module)
        for layer in () if alike else network.modules():
            frozen = not all(p.requires_grad for p in layer.parameters(recurse=False))
            if callable(draw := getattr(layer, "reset_parameters", None)) and not frozen:
                draw()
    second = SecondNetwork(network)
    module.add_module(SECOND, second)
    module.register_forward_hook(second.mix)


def second_of(model: Tensors) -> Tensors:
    """Return a second network with the weights of a first one.

    Args:
        model: the first network's tensors.
    """
    return Tensors((f"{SECOND}.network.{name}", tensor) for name, tensor in model.items())
