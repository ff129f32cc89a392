"""Shared by the built-in networks: rules about several parameters, and MONAI's norms."""

from collections.abc import Mapping
from typing import Any, Literal

from collegium.errors import ConfigError

MonaiNorm = Literal["batch", "instance", "population"]

MONAI_NORMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "batch": ("BATCH", {}),
    "instance": ("INSTANCE", {"affine": True}),
}
"""MONAI's own normalisations that have scale and shift, by our name."""


def monai_norm(norm: MonaiNorm) -> tuple[str, dict[str, Any]]:
    """Return a normalisation as MONAI's networks take it; MONAI learns of ours by the way.

    Args:
        norm: Its name in an experiment.
    """
    if norm != "population":
        return MONAI_NORMS[norm]
    from monai.networks.layers.factories import Norm

    from collegium.models.population import PopulationNorm

    if "POPULATION" not in Norm.names:
        Norm.add_factory_class("population", PopulationNorm)
    return "POPULATION", {}


Rule = tuple[str, object, str, bool]
"""Name of a setting, its value, what to set it to, and whether it can work."""


def require(model: str, *rules: Rule) -> None:
    """Refuse the first setting that cannot work.

    Args:
        model: The name of the model.
        rules: What has to hold, in this order.

    Raises:
        ConfigError: One of them cannot.
    """
    for key, value, wanted, good in rules:
        if not good:
            raise ConfigError(
                f"model.{key} is {value!r} for the model {model!r}: set it to {wanted}."
            )
