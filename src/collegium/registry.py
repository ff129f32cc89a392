"""Finding algorithms by name: built in, from other packages, from a file or from a module.

Built-in algorithms are the modules of `collegium.algorithms`: the module's name is the algorithm's,
there is nothing to register, and nothing is imported until one is asked for.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from collegium.algorithm import Algorithm
from collegium.errors import ConfigError

GROUP = "collegium.algorithms"
"""The package of the built-in algorithms, and the entry point group of other packages."""

SOURCE = "__collegium_source__"
"""The attribute by which a class read from a file remembers its `file.py:Class`."""


class AlgorithmInfo(NamedTuple):
    """What there is to say about an algorithm in one row.

    Attributes:
        name: As written in an experiment file.
        summary: The first line of its docstring, or why it cannot be loaded.
        paper: The first link in its docstring, else in its module's.
        sends: Names of the parts that leave a client, sorted.
    """

    name: str
    summary: str
    paper: str
    sends: tuple[str, ...]


def algorithm_names() -> list[str]:
    """Give the names of all built-in and installed algorithms, sorted; imports none of them."""
    return sorted({*_built_in(), *_entry_points()})


def load_algorithm(name: str) -> type[Algorithm]:
    """Find an algorithm's class.

    Args:
        name: A built-in name, that of an entry point, `file.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: There is no such algorithm, or its code does not load.
    """
    if ":" in name:
        return _from_place(name)
    if name in _built_in():
        module = _import_module(f"{GROUP}.{name}", name)
        return _only_algorithm(module)
    if name in _entry_points():
        return _algorithm_class(_load_entry_point(_entry_points()[name]), name)
    known = algorithm_names()
    close = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {close[0]!r}? There" if close else "there"
    raise ConfigError(
        f"unknown algorithm {name!r}; {guess} is {', '.join(known) or 'none'}; "
        "your own is written file.py:Class"
    )


def describe(algorithm: Algorithm) -> tuple[str, dict[str, Any]]:
    """Give the name and the hyper-parameters with which an `AlgorithmConfig` makes it again."""
    kind = type(algorithm)
    package, _, module = kind.__module__.rpartition(".")
    name = vars(kind).get(SOURCE) or f"{kind.__module__}:{kind.__qualname__}"
    return (module if package == GROUP else name), algorithm.hyperparameters()


def list_algorithms() -> list[AlgorithmInfo]:
    """Describe every built-in and installed algorithm; one that does not load says why."""
    return [_info(name) for name in algorithm_names()]


def _info(name: str) -> AlgorithmInfo:
    try:
        kind = load_algorithm(name)
    except ConfigError as error:
        return AlgorithmInfo(name, f"cannot be loaded: {error}", "", ())
    own, module = inspect.cleandoc(kind.__doc__ or ""), sys.modules[kind.__module__].__doc__ or ""
    link = re.search(r"https?://[^\s)>\]]+", f"{own}\n{module}")
    summary = own.partition("\n")[0] or module.strip().partition("\n")[0]
    return AlgorithmInfo(
        name, summary, link[0].rstrip(".,;") if link else "", tuple(sorted(kind.all_sends()))
    )


def _built_in() -> set[str]:
    spec = importlib.util.find_spec(GROUP)
    folders = spec.submodule_search_locations if spec else None
    return {m.name for m in pkgutil.iter_modules(folders or []) if not m.name.startswith("_")}


def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _load_entry_point(point: metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever somebody else's module raises
        raise _not_loading(
            f"algorithm {point.name!r}, installed as {point.value}", error
        ) from error


def _from_place(name: str) -> type[Algorithm]:
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ConfigError(f"algorithm {name!r}: the name before the colon is empty; fill it in")
    if not place.endswith(".py"):
        return _algorithm_class(_attribute(_import_module(place, name), attribute, name), name)
    path = Path(place).expanduser().resolve()
    kind = _algorithm_class(_attribute(_import_file(path), attribute, name), name)
    if SOURCE not in vars(kind):
        setattr(kind, SOURCE, f"{path}:{attribute}")
    return kind


def _import_module(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"algorithm {name!r}: there is no module {error.name!r}; "
                "install its package or correct the name"
            ) from error
        raise _not_loading(f"module {module!r} of algorithm {name!r}", error) from error
    except Exception as error:  # whatever a user's module raises
        raise _not_loading(f"module {module!r} of algorithm {name!r}", error) from error


def _import_file(path: Path) -> ModuleType:
    """Import a file once for each content, under a name of its own."""
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
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; correct the path before the colon")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        # not through a bytecode file, which knows an edit only by the second and the size
        exec(compile(content, str(path), "exec"), vars(module))
    except Exception as error:  # whatever a user's file raises
        del sys.modules[name]
        raise _not_loading(str(path), error) from error
    return module


def _not_loading(what: str, error: Exception) -> ConfigError:
    return ConfigError(f"{what} does not load: {type(error).__name__}: {error}; correct its code")


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    found: Any = module
    for step in attribute.split("."):
        if not hasattr(found, step):
            known = [key for key, value in vars(module).items() if _is_algorithm(value)]
            raise ConfigError(
                f"algorithm {name!r}: there is no class {attribute!r}; "
                f"the algorithms there are: {', '.join(known) or 'none'}"
            )
        found = getattr(found, step)
    return found


def _only_algorithm(module: ModuleType) -> type[Algorithm]:
    kinds = [
        value
        for value in vars(module).values()
        if _is_algorithm(value) and value.__module__ == module.__name__
    ]
    if len(kinds) != 1:
        names = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise ConfigError(f"{module.__name__} should define one algorithm, but defines {names}")
    return _algorithm_class(kinds[0], module.__name__)


def _is_algorithm(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Algorithm) and value is not Algorithm


def _algorithm_class(value: Any, name: str) -> type[Algorithm]:
    if not _is_algorithm(value):
        raise ConfigError(
            f"algorithm {name!r} is not a subclass of collegium.algorithm.Algorithm; make it one"
        )
    if "__dataclass_params__" not in vars(value) or not value.__dataclass_params__.frozen:
        raise ConfigError(f"algorithm {name!r}: write @dataclass(frozen=True) above its class")
    if inspect.isabstract(value):
        raise ConfigError(f"algorithm {name!r} has no method 'round'; write it")
    kind: type[Algorithm] = value
    return kind
