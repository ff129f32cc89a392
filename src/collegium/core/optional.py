"""Libraries that only some users need."""

import importlib
from types import ModuleType

from collegium.errors import ConfigError


def need(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a library of one of Collegium's extras.

    Args:
        module: The library's name in Python.
        extra: The extra that installs it.
        purpose: What it is needed for, to begin the sentence with.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{purpose}: {error.name} is not installed; run: pip install 'collegium[{extra}]'"
        ) from error
