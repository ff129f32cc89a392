"""Import of Python files that users name in their configurations, and the mistakes in them."""

import hashlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, ModuleType

from collegium.errors import CollegiumError, ConfigError

_MARK = "__collegium_user__"
"""The global of a module by which it is known as a user's own."""

_ON_ONE_MACHINE: ContextVar[bool] = ContextVar("_ON_ONE_MACHINE", default=False)
"""Whether server and client share a machine, so that a client may name its files."""


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
    mark_as_users(module)
    try:
        # not through a bytecode file, which knows an edit only by the second and the size
        exec(compile(content, str(path), "exec"), vars(module))
    except Exception as error:  # whatever a user's file raises
        del sys.modules[name]
        raise loading_error(str(path), error) from error
    return module


def mark_as_users(module: ModuleType) -> None:
    """Mark a module as a user's own: what goes wrong in its code is not a bug in Collegium."""
    vars(module)[_MARK] = True


def loading_error(code: str, error: Exception) -> ConfigError:
    """Return the error of a user's code that does not load.

    Args:
        code: the file or module, as the error names it.
        error: what its import raised.
    """
    found = _users_frame(error)
    line = f" (line {found[1]})" if found else ""
    return ConfigError(f"{code} does not load: {_kind_and_text(error)}{line}; correct its code")


def describe_mistake(error: Exception) -> str | None:
    """Return in one sentence what went wrong in a user's own code, with its file and line.

    None for an error that no code of a user was part of, and for one that is a sentence already.
    """
    found = None if isinstance(error, CollegiumError) else _users_frame(error)
    if found is None:
        return None
    frame, line, is_last = found
    place = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    if is_last:
        return f"{_kind_and_text(error)} ({place}); correct the code there"
    return (
        f"{_kind_and_text(error)} (in what is called by {place}); correct the code there, or find "
        f"with --debug where it was raised"
    )


@contextmanager
def on_one_machine() -> Iterator[None]:
    """Make `client_mistake` name files inside the block."""
    token = _ON_ONE_MACHINE.set(True)
    try:
        yield
    finally:
        _ON_ONE_MACHINE.reset(token)


def is_on_one_machine() -> bool:
    """Return whether server and client share a machine; see `on_one_machine`."""
    return _ON_ONE_MACHINE.get()


def client_mistake(error: Exception) -> Exception:
    """Return a mistake in a user's code as the error to report to the server, on one machine.

    Elsewhere, and if it is none, return the error itself: paths and texts stay at the site.
    """
    text = describe_mistake(error) if _ON_ONE_MACHINE.get() else None
    return error if text is None else ConfigError(text)


def _users_frame(error: Exception) -> tuple[FrameType, int, bool] | None:
    """Return the deepest frame in a user's code, its line, and whether it raised the error."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    for position, (frame, line) in reversed([*enumerate(frames, 1)]):
        if _is_users(frame):
            return frame, line, position == len(frames)
    return None


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame runs code of a user: a marked module, a script or a notebook."""
    name = frame.f_globals.get("__name__")
    script = name == "__main__" and frame.f_globals.get("__package__") in (None, "")
    return script or frame.f_globals.get(_MARK, False)


def _kind_and_text(error: Exception) -> str:
    """Return the kind of an error and its text in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
