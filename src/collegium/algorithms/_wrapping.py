"""Methods that are made of another one by a mix-in, such as ``fedprox+distance``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from collegium.core.algorithm import Algorithm, private_fits_of
from collegium.core.settings import settings
from collegium.errors import ConfigError


def wrap(
    method: type[Algorithm],
    mixin: type,
    about: str,
    neutral: Mapping[str, Any] | None,
    *,
    only_means: bool = False,
) -> type[Algorithm]:
    """Return a method with a mix-in before it among its bases.

    Args:
        method: the method.
        mixin: the mix-in; its name stands before the method's.
        about: what the mix-in adds, for the docstring.
        neutral: its hyper-parameters at which it changes nothing; None: it always does.
        only_means: whether the mix-in works at the server alone, and uses nothing of the replies
            but the means that the method takes of them. What `Algorithm.only_averaged` and
            `Algorithm.private_fits` say of the method then holds of both.

    Raises:
        ConfigError: the method needs all data in one place, or has the mix-in already.
    """
    if method.simulation_only:
        raise ConfigError(
            f"{method.__name__} cannot be given {about}: it trains on the data of all sites in one "
            f"place and averages nothing; write the suffix after an algorithm that averages, such "
            f"as fedavg"
        )
    if issubclass(method, mixin):
        raise ConfigError(
            f"{method.__name__} cannot be given {about}, which it has; write the suffix once"
        )
    both = None if method.neutral is None or neutral is None else {**method.neutral, **neutral}
    members = {
        "__doc__": f"{method.__name__} with {about}: the docstrings of both say what they do.",
        "__module__": method.__module__,
        "neutral": both,
        "only_averaged": method.averaged_parts() if only_means else frozenset(),
        "private_fits": private_fits_of(method) if only_means else 0,
    }
    return settings(type(f"{mixin.__name__}{method.__name__}", (mixin, method), members))


def wrapper(
    mixin: type, about: str, neutral: Mapping[str, Any] | None
) -> Callable[[type[Algorithm]], type[Algorithm]]:
    """Return the function that wraps a method with a mix-in that uses its means only.

    It gives the same class for the same method.

    Args:
        mixin: see `wrap`.
        about: see `wrap`.
        neutral: see `wrap`.
    """
    return cache(lambda method: wrap(method, mixin, about, neutral, only_means=True))
