"""Build a network from the name and the parameters of a configuration.

The initial weights come from torch's ambient random state: to get the same weights again, fork and
seed it around `build_model`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import MinLen

from collegium.core.lazy import nn
from collegium.core.model_parts import head_layer
from collegium.core.setting_problems import Problem
from collegium.core.settings import (
    Fraction,
    NonNegativeInt,
    PositiveInt,
    argument_problems,
    from_mapping,
    refusal,
    validated,
)
from collegium.core.text import did_you_mean
from collegium.core.userfile import import_file
from collegium.errors import ConfigError
from collegium.models._settings import MonaiNorm, monai_norm, require
from collegium.models.lora import Lora, add_adapters

Factory: TypeAlias = "Callable[..., nn.Module]"


@validated
def monai_unet(
    *,
    spatial_dims: Literal[2, 3] = 2,
    in_channels: PositiveInt = 3,
    out_channels: PositiveInt = 2,
    channels: Annotated[Sequence[PositiveInt], MinLen(2)] = (16, 32, 64, 128),
    strides: Sequence[PositiveInt | Sequence[PositiveInt]] | None = None,
    num_res_units: NonNegativeInt = 1,
    norm: MonaiNorm = "batch",
    dropout: Fraction = 0.0,
) -> nn.Module:
    """Return MONAI's U-Net with residual units.

    The sides of images must be multiples of the product of the strides, axis by axis;
    `SegmentationTask.predict` pads to such a size, and training crops must have one.

    Args:
        spatial_dims: 2 or 3.
        in_channels: Channels of the image.
        out_channels: Classes, the background included.
        channels: Channels of each level, the top one first; at least two levels.
        strides: Down-sampling between the levels, one fewer than `channels`: a number, or one for
            each axis, such as (1, 2, 2) for thick slices. None: 2 everywhere.
        num_res_units: Units in each residual block; 0 for plain convolutions.
        norm: "batch", "instance" (with scale and shift) or "population"; see
            `collegium.models.population.PopulationNorm`.
        dropout: Probability, in [0, 1).

    Returns:
        The network.

    Raises:
        ConfigError: A parameter has a value that cannot work.
    """
    levels = (2,) * (len(channels) - 1) if strides is None else tuple(map(_stride, strides))
    whole = f"a whole number for each level, or {spatial_dims} of them, one for each axis"
    require(
        "unet",
        ("strides", strides, "one fewer than channels", len(levels) == len(channels) - 1),
        ("strides", strides, whole, all(_is_stride(level, spatial_dims) for level in levels)),
    )
    from monai.networks.nets.unet import UNet

    from collegium.models._skips import use_quick_skips

    network = UNet(
        spatial_dims=spatial_dims,
        in_channels=in_channels,
        out_channels=out_channels,
        channels=tuple(channels),
        strides=levels,  # type: ignore[arg-type]  # a number for each axis is fine too
        num_res_units=num_res_units,
        norm=monai_norm(norm),
        dropout=dropout,
    )
    use_quick_skips(network)
    return network


def _stride(stride: int | Sequence[int]) -> int | tuple[int, ...]:
    """Return one level's stride as MONAI takes it."""
    return tuple(stride) if isinstance(stride, Sequence) else stride


def _is_stride(stride: int | tuple[int, ...], spatial_dims: int) -> bool:
    axes = stride if isinstance(stride, tuple) else (stride,) * spatial_dims
    return len(axes) == spatial_dims


_PLACES: Mapping[str, str] = {
    "unet": "collegium.models.factory:monai_unet",
    "iop_unet": "collegium.models.unet:IOPUNet",
    "modality_unet": "collegium.models.modality_unet:ModalityUNet",
    "densenet": "collegium.models.densenet:monai_densenet",
    "resnet18": "collegium.models.resnet:monai_resnet18",
    "resnet18_encoder": "collegium.models.resnet:ResNet18Encoder",
    "tabnet": "collegium.models.tabnet:TabNet",
    "mlp": "collegium.models.tables:MLP",
    "logistic": "collegium.models.tables:Logistic",
}
"""Where the factory of each built-in network is; it is imported when the network is used."""

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "unet": "MONAI's U-Net with residual units, for 2-D and 3-D images",
        "iop_unet": "the 2-D U-Net of the IOP-FL paper (7.8 million parameters)",
        "modality_unet": "a U-Net with an encoder for each channel, of which images may lack some",
        "densenet": "MONAI's DenseNet-BC for classification, by default that of the pFedNet paper",
        "resnet18": "MONAI's ResNet-18 for classification of 2-D and 3-D images",
        "resnet18_encoder": "ResNet-18 up to its last feature map, by which sites are compared",
        "tabnet": "TabNet, for tables",
        "mlp": "a multi-layer perceptron, for tables",
        "logistic": "logistic regression, for tables",
    }
)
"""The built-in networks: a one-line description by name."""


def build_model(name: str, **params: Any) -> nn.Module:
    """Build a network.

    Args:
        name: One of `MODELS`, or the user's own as "path/to/file.py:factory" or
            "package.module:factory"; a factory is a class or a function that returns a module.
        **params: The parameters of the network; and ``lora``, the fields of
            `collegium.models.lora.Lora` by name, which adds adapters, unless the factory has a
            parameter of that name.

    Returns:
        A new network; its initial weights come from torch's ambient random state.

    Raises:
        ConfigError: The name, a parameter or the user's factory cannot be used.
    """
    factory = _factory(name)
    if factory is None:
        raise ConfigError(
            f"there is no model {name!r}{did_you_mean(name, MODELS) or ':'} set model.name to one "
            f"of {', '.join(MODELS)}, or to file.py:factory."
        )
    own, adapters = _adapters(factory, params)
    _check_params(name, factory, own)
    problems = argument_problems(factory, own)
    if problems:
        raise refusal(name, problems)
    lora, wrong = (None, []) if adapters is None else from_mapping(Lora, adapters, title="lora")
    if wrong:
        raise refusal("model.lora", wrong)
    model = factory(**own)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model {name!r} returned a {type(model).__name__}: return a torch.nn.Module."
        )
    if lora is not None:
        add_adapters(model, lora)
    return model


def build_fitting(module: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Build a network that takes and returns what another one does.

    Args:
        module: The other network.
        settings: ``name`` and parameters of the network. Of the channels or features that go in and
            come out, and the spatial axes, those that are left out are the other's, as its first
            layer and its head have them.

    Raises:
        ConfigError: See `build_model`.
    """
    kinds = (nn.modules.conv._ConvNd, nn.Linear)  # transposed convolutions among them
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    of_head = [layer for layer in head_layer(module).modules() if isinstance(layer, kinds)]
    known = dict[str, Any]()
    if layers and of_head:
        first, out = layers[0], _out(of_head[-1])
        if isinstance(first, nn.Linear):
            known = {"in_features": first.in_features, "out_features": out}
        else:
            dims = len(first.kernel_size)
            known = {"in_channels": first.in_channels, "out_channels": out, "spatial_dims": dims}
    params = {key: value for key, value in settings.items() if key != "name"}
    taken = parameters_of(settings["name"])
    fitting = {key: value for key, value in known.items() if key in taken}
    return build_model(settings["name"], **{**fitting, **params})


def _out(layer: nn.Module) -> int:
    """Return how many channels or features come out of a layer."""
    found: int = getattr(layer, "out_features", None) or layer.out_channels  # type: ignore[assignment]
    return found


def _adapters(
    factory: Factory, params: Mapping[str, Any]
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return the factory's own parameters, and the adapters apart; None without any."""
    own = dict(params)
    if "lora" in inspect.signature(factory).parameters:
        return own, None
    return own, own.pop("lora", None)


def parameters_of(name: str) -> frozenset[str]:
    """Return the names of the parameters that a model takes.

    Raises:
        ConfigError: There is no such model.
    """
    factory = _factory(name)
    known = inspect.signature(factory).parameters if factory is not None else {}
    return frozenset(known)


def parameter_problems(name: str, params: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with some of the parameters of a built-in network.

    Args:
        name: One of `MODELS`.
        params: Some of its parameters; that others are missing is no problem.
    """
    own, adapters = _adapters(_load(_PLACES[name]), params)
    wrong = [] if adapters is None else from_mapping(Lora, adapters, title="lora")[1]
    return [
        *argument_problems(_load(_PLACES[name]), own, title=name),
        *(Problem(("lora", *path), text) for path, text in wrong),
    ]


def _check_params(name: str, factory: Factory, params: Mapping[str, Any]) -> None:
    """Check that the factory takes all the parameters, and that none is missing."""
    signature = inspect.signature(factory).parameters.values()
    known = [
        parameter.name
        for parameter in signature
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature)
    for key in params:
        if key not in known and not takes_any:
            raise ConfigError(
                f"the model {name!r} has no parameter {key!r}{did_you_mean(key, known) or ':'} "
                f"use only {', '.join(known) or 'its name'} under model."
            )
    for parameter in signature:
        needed = parameter.name in known and parameter.default is parameter.empty
        if needed and parameter.name not in params:
            raise ConfigError(
                f"the model {name!r} needs the parameter {parameter.name!r}: "
                f"set model.{parameter.name}."
            )


def _factory(name: str) -> Factory | None:
    """Return the factory of a network; None if no built-in network has this name."""
    place = name if ":" in name else _PLACES.get(name)
    return None if place is None else _load(place)


def _load(name: str) -> Factory:
    """Import a factory from the place that its name tells."""
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        module = import_file(Path(source).expanduser().resolve())
    else:
        module = _load_module(name, source)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError(
            f"the model {name!r} cannot be built because {source} defines no class or function "
            f"{attribute!r}{did_you_mean(attribute, vars(module)) or ':'} correct model.name."
        )
    loaded: Factory = factory
    return loaded


def _load_module(name: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ImportError as error:
        raise ConfigError(
            f"the model {name!r} cannot be built because {source!r} cannot be imported ({error}): "
            f"install the package or correct model.name."
        ) from error
