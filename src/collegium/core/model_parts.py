"""The roles of a network's tensors: normalisation, head, body, encoder, decoder, added.

Parts are found by the *type* of a module and by the *role* a network declares, never by a piece of
a name: a convolution called `norm1` is no normalisation, and a batch norm called `conv` is. A class
of one's own says that it normalises by ``normalises = True``. What an algorithm adds to a network
(`collegium.core.algorithm.Algorithm.extend`) never changes the roles of the network as it was
built: `fix_roles` records them first.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from collegium.core.lazy import nn, torch
from collegium.errors import ConfigError

ROLES = ("head", "encoder", "decoder")
"""What a network may declare in its attribute `roles`."""

MemoryFormat = Literal["auto", "channels_last", "contiguous"]
"""How the weights of a network are ordered in memory; see `set_memory_format`."""

_FIXED = "_collegium_roles"
"""The attribute of a network in which `fix_roles` records its roles."""


@dataclass(frozen=True)
class ModelParts:
    """The names of a network's tensors, by part; every name is a key of its `state_dict()`.

    Two names of one tensor (tied weights) are always in the same parts.

    Attributes:
        names: All tensors: parameters and persistent buffers.
        trainable: Parameters that require a gradient.
        norm: Every tensor of a normalisation layer: scale, shift, statistics, counters.
        norm_statistics: The buffers of normalisation layers only (running mean and variance, and
            the integer `num_batches_tracked`).
        head: The layer that gives the output; empty if the network has no linear layer or
            convolution and declares none.
        encoder: The path down, including the bottleneck; everything as built but the decoder if it
            is not declared.
        decoder: The path up and the head; the head alone for a network without a path up.
        added: What an algorithm added to the network as built; in none of the head, the encoder and
            the decoder.
        frozen: Parameters that require no gradient, and buffers of layers whose parameters are all
            so; a layer without parameters counts as what is around it.
    """

    names: frozenset[str]
    trainable: frozenset[str]
    norm: frozenset[str]
    norm_statistics: frozenset[str]
    head: frozenset[str]
    encoder: frozenset[str]
    decoder: frozenset[str]
    added: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()

    @property
    def body(self) -> frozenset[str]:
        """Everything but the head."""
        return self.names - self.head

    def named(self, part: str) -> frozenset[str]:
        """Return the tensors of a role, or those at or below every submodule or tensor of a name.

        Args:
            part: a role, which is an attribute of this class, or a name between dots: "lora_A" is
                ``block.0.lora_A.weight`` and ``block.1.lora_A.weight``.

        Raises:
            ConfigError: there is no such role or name.
        """
        if part in PARTS:
            found: frozenset[str] = getattr(self, part)
            return found
        found = frozenset(name for name in self.names if f".{part}." in f".{name}.")
        if not found:
            raise ConfigError(
                f"the network has no role and no submodule or tensor {part!r}; roles are "
                f"{', '.join(PARTS)}"
            )
        return found


PARTS = (*(field.name for field in fields(ModelParts)), "body")
"""The roles of tensors."""


def find_parts(module: nn.Module) -> ModelParts:
    """Sort a network's tensors into parts.

    A network may declare roles in `module.roles`, a mapping from "head", "encoder" or "decoder" to
    names of submodules. What it does not declare is found: the head is the last linear layer or
    convolution in module order; MONAI's `UNet` is known by its type.

    Args:
        module: Any network. It is not changed.

    Returns:
        The names of the tensors in each part.

    Raises:
        ConfigError: `module.roles` names an unknown role or a submodule that does not exist.
    """
    tensors = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }
    names = frozenset(tensors)
    twins = _twins(tensors)

    def part(found: Iterable[str]) -> frozenset[str]:
        """Return the names found with the twins of tied weights."""
        return frozenset(twin for name in names.intersection(found) for twin in twins[name])

    def below(submodules: Iterable[str]) -> frozenset[str]:
        """Return all tensors of some submodules; "" is the network itself."""
        starts = tuple(f"{submodule}." if submodule else "" for submodule in submodules)
        return part(name for name in names if name.startswith(starts))

    as_built = _as_built(module)
    roles, added = as_built.roles, names - part(as_built.names)
    head = below(roles["head"])
    decoder = below(roles.get("decoder", ())) | head
    norms = {
        name: layer
        for name, layer in module.named_modules(remove_duplicate=False)
        if _normalises(layer)
    }
    return ModelParts(
        names=names,
        trainable=part(
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        ),
        norm=below(norms),
        norm_statistics=part(
            f"{name}.{buffer}" if name else buffer
            for name, layer in norms.items()
            for buffer, _ in layer.named_buffers()
        ),
        head=head - added,
        encoder=(below(roles["encoder"]) if "encoder" in roles else names - decoder) - added,
        decoder=decoder - added,
        added=added,
        frozen=part(_frozen(module, names)),
    )


def _frozen(module: nn.Module, names: Collection[str]) -> Iterator[str]:
    """Yield the frozen tensors among all of a network; see `ModelParts`."""
    trained = {n: p.requires_grad for n, p in module.named_parameters(remove_duplicate=False)}
    if all(trained.values()):
        return
    for name in names:
        if name in trained:
            around = [name]
        else:
            place = name.rpartition(".")[0]
            around = [n for n in trained if n.rpartition(".")[0] == place]
            while not around and place:
                around = [n for n in trained if n.startswith(f"{place}.")]
                place = place.rpartition(".")[0]
            around = around or [*trained]
        if not any(trained[n] for n in around):
            yield name


def freeze(module: nn.Module, parts: Collection[str]) -> None:
    """Stop the training of parts of a network, in place.

    Args:
        module: the network.
        parts: roles, or names of submodules or tensors; see `ModelParts.named`.

    Raises:
        ConfigError: there is no such role or name, it has no parameters, or nothing is left that
            is trained.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    roles = find_parts(module)
    for part in parts:
        try:
            named = roles.named(part) & parameters.keys()
        except ConfigError as error:
            raise ConfigError(f"training.freeze: {error}") from error
        if not named:
            raise ConfigError(f"training.freeze: {part!r} has no parameters; leave it out")
        for name in named:
            parameters[name].requires_grad_(False)
    if parts and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"training.freeze: {', '.join(parts)} is the whole network, and nothing is left to "
            f"train; name less"
        )


class _AsBuilt(NamedTuple):
    """The tensors and roles of a network as it was built."""

    names: frozenset[str]
    roles: Mapping[str, Sequence[str]]


def fix_roles(module: nn.Module) -> None:
    """Record the roles of a network as it is now, in place; tensors that come later are `added`.

    Raises:
        ConfigError: `module.roles` names an unknown role or a submodule that does not exist.
    """
    object.__setattr__(module, _FIXED, _as_built(module))


def _as_built(module: nn.Module) -> _AsBuilt:
    """Return what `fix_roles` has recorded of a network, or what it is now."""
    fixed: _AsBuilt | None = vars(module).get(_FIXED)
    return fixed or _AsBuilt(frozenset(module.state_dict()), _roles(module))


def head_layer(module: nn.Module) -> nn.Module:
    """Return the layer that the features enter: the first of the head's submodules.

    Raises:
        ConfigError: the network has no head.
    """
    names = _as_built(module).roles["head"]
    if not names:
        raise ConfigError(
            f"{type(module).__name__} has no linear layer or convolution and declares no head: "
            f"name it in {type(module).__name__}.roles."
        )
    return module.get_submodule(names[0])


def require_free_name(module: nn.Module, name: str) -> None:
    """Check that a submodule can be added to a network under a name.

    Args:
        module: the network.
        name: the name.

    Raises:
        ConfigError: the network has a submodule or attribute of that name.
    """
    if hasattr(module, name):
        raise ConfigError(
            f"{type(module).__name__} has something named {name!r} already; rename it"
        )


def _roles(module: nn.Module) -> dict[str, Sequence[str]]:
    """Return the submodules of every role: declared, known by the network's type, or found.

    Found is the head alone: the last linear layer or convolution, in module order.
    """
    layers = [
        name
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd))
    ]
    return {"head": layers[-1:], **_monai_unet_roles(module), **_declared_roles(module)}


def _normalises(layer: nn.Module) -> bool:
    """Return whether a layer is one of normalisation: by its type, or as its class declares."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    known = isinstance(layer, (*kinds, nn.LocalResponseNorm))
    return known or bool(getattr(layer, "normalises", False))


def undecayed(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that weight decay leaves alone.

    They are those that the class of a layer names in its attribute ``undecayed``.

    Args:
        module: the network.
    """
    return frozenset(
        f"{name}.{own}" if name else own
        for name, layer in module.named_modules()
        for own in getattr(layer, "undecayed", ())
    )


def _twins(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return by name the names of the same memory seen with the same shape, itself included."""
    groups: dict[tuple[object, ...], list[str]] = {}
    keys: dict[str, tuple[object, ...]] = {}
    for name, tensor in tensors.items():
        memory = tensor.data_ptr() or id(tensor)  # empty and meta tensors have no address
        keys[name] = (tensor.device, memory, tensor.shape, tensor.stride())
        groups.setdefault(keys[name], []).append(name)
    return {name: groups[key] for name, key in keys.items()}


def _declared_roles(module: nn.Module) -> Mapping[str, Sequence[str]]:
    """Return the network's own `roles`, checked; empty if it declares none."""
    roles = getattr(module, "roles", {})
    kind = type(module).__name__
    if not isinstance(roles, Mapping):
        raise ConfigError(
            f"{kind}.roles is a {type(roles).__name__}: "
            f"make it a mapping from {', '.join(ROLES)} to names of submodules."
        )
    submodules = {name for name, _ in module.named_modules(remove_duplicate=False)}
    for role, members in roles.items():
        if role not in ROLES:
            raise ConfigError(f"{kind}.roles has the key {role!r}: use only {', '.join(ROLES)}.")
        if isinstance(members, str) or not submodules.issuperset(members):
            raise ConfigError(
                f"{kind}.roles[{role!r}] is {members!r}: "
                f"make it a list of names of submodules, as {kind}.named_modules() gives them."
            )
    return roles


def _monai_unet_roles(module: nn.Module) -> dict[str, list[str]]:
    """Return the path up of MONAI's `UNet`: the last of (down, SkipConnection, up) at every level.

    The head is the outermost of them, which maps features to classes. Its last convolution alone
    would be a map from classes to classes, after a transposed one that already gave the classes.
    """
    decoder = [f"{name}.2" for name in monai_unet_levels(module)]
    return {"decoder": decoder, "head": decoder[:1]} if decoder else {}


def monai_unet_levels(module: nn.Module) -> dict[str, nn.Sequential]:
    """Return the levels of MONAI's `UNet` by name, from the top; none of any other network.

    A level is (down, SkipConnection, up).
    """
    library = sys.modules.get("monai.networks.nets.unet")  # loaded if the module is one of its own
    if library is None or not isinstance(module, library.UNet):
        return {}
    return {
        name: level
        for name, level in module.named_modules()
        if isinstance(level, nn.Sequential)
        and len(level) == 3
        and isinstance(level[1], library.SkipConnection)
    }


def has_convolutions(module: nn.Module) -> bool:
    """Return whether a network has a convolution."""
    return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in module.modules())


def channels_last_orders() -> dict[int, torch.memory_format]:
    """Return the order of channels-last by the number of axes of a tensor that has one."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}


def orders_of_weights(module: nn.Module) -> dict[int, torch.memory_format]:
    """Return channels-last by the numbers of axes of a network's weights that are in that order.

    Args:
        module: the network.
    """
    orders = channels_last_orders()
    return {
        parameter.dim(): order
        for parameter in module.parameters()
        if (order := orders.get(parameter.dim()))
        and parameter.is_contiguous(memory_format=order)
        and not parameter.is_contiguous()
    }


def set_memory_format(module: nn.Module, choice: MemoryFormat) -> None:
    """Order a network's weights in memory; its convolutions order their outputs in the same way.

    "auto" is channels-last, which is faster for most networks, unless there is a 2-D instance
    normalisation: torch copies its inputs and outputs then. The choice depends on the network
    alone, since it decides the last bits of results.

    Args:
        module: the network, which is changed.
        choice: "auto", "channels_last" or "contiguous".
    """
    formats = channels_last_orders()
    if choice == "auto" and any(isinstance(m, nn.InstanceNorm2d) for m in module.modules()):
        del formats[4]
    for parameter in module.parameters() if choice != "contiguous" else ():
        if parameter.dim() in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])
