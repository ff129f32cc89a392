"""Optional dependencies, imported when they are used."""

import importlib
from types import ModuleType

from collegium.errors import ConfigError


def import_optional(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a library of one of Collegium's extras.

    Args:
        module: The library's name in Python.
        extra: The extra that installs it.
        purpose: What the library is for; the error begins with it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{purpose}: {error.name} is not installed; run: pip install 'collegium[{extra}]'"
        ) from error
