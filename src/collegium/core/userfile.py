"""Import of Python files that users name in their configurations."""

import hashlib
import sys
from pathlib import Path
from types import ModuleType

from collegium.errors import ConfigError


def import_file(path: Path) -> ModuleType:
    """Import a file, once for each content.

    Raises:
        ConfigError: it cannot be read, or its code raises.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); correct the path before the colon"
        ) from error
    key = hashlib.blake2b(str(path).encode() + b"\0" + content, digest_size=8).hexdigest()
    name = f"collegium_file_{key}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        # not through a bytecode file, which knows an edit only by the second and the size
        exec(compile(content, str(path), "exec"), vars(module))
    except Exception as error:  # whatever a user's file raises
        del sys.modules[name]
        raise loading_error(str(path), error) from error
    return module


def loading_error(code: str, error: Exception) -> ConfigError:
    """Return the error of a user's code that does not load.

    Args:
        code: the file or module, as the error names it.
        error: what its import raised.
    """
    return ConfigError(f"{code} does not load: {type(error).__name__}: {error}; correct its code")
