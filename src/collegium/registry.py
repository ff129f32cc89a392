"""Finding algorithms, codecs and adapters by name: built in, installed, from a file or a module.

Built-in algorithms are the modules of `collegium.algorithms`: the module's name is the algorithm's,
there is nothing to register, and nothing is imported until one is asked for. The same holds for the
codecs in `collegium.codecs` and the adapters in `collegium.adaptation`. Modules whose name begins
with an underscore are none of them.
"""

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar, cast

from collegium.adaptation.base import Adapter
from collegium.algorithm import Algorithm
from collegium.codecs.base import Codec
from collegium.errors import ConfigError
from collegium.userfile import import_file, not_loading

T = TypeVar("T")

GROUP = "collegium.algorithms"
"""The package of the built-in algorithms, and the entry point group of other packages."""

CODECS = "collegium.codecs"
"""The same for codecs."""

ADAPTERS = "collegium.adaptation"
"""The same for adapters."""

SOURCE = "__collegium_source__"
"""The attribute by which a class that is no module's remembers its name, say `file.py:Class`."""

DISTANCE_AWARE = "+distance"
"""What makes any algorithm that averages distance-aware when it follows its name."""


@dataclass(frozen=True)
class _Shelf(Generic[T]):
    """A kind of thing that is found by name.

    Attributes:
        word: What messages call it.
        group: The package of the built-in ones, and the entry point group.
        base: The class that all derive from; its own module is not one of them.
    """

    word: str
    group: str
    base: type[T]


_ALGORITHMS: _Shelf[Algorithm] = _Shelf("algorithm", GROUP, Algorithm)  # type: ignore[type-abstract]
_ADAPTERS: _Shelf[Adapter] = _Shelf("adapter", ADAPTERS, Adapter)  # type: ignore[type-abstract]
_CODECS: _Shelf[Codec] = _Shelf("codec", CODECS, Codec)  # type: ignore[type-abstract]


class Info(NamedTuple):
    """What there is to say about a codec or an adapter in one row.

    Attributes:
        name: As written in an experiment file.
        summary: The first line of its docstring, or why it cannot be loaded.
        paper: The first link in its docstring, else in its module's.
    """

    name: str
    summary: str
    paper: str


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
    return _names(_ALGORITHMS)


def codec_names() -> list[str]:
    """Give the names of all built-in and installed codecs, sorted; imports none of them."""
    return _names(_CODECS)


def adapter_names() -> list[str]:
    """Give the names of all built-in and installed adapters, sorted; imports none of them."""
    return _names(_ADAPTERS)


def load_algorithm(name: str) -> type[Algorithm]:
    """Find an algorithm's class.

    Args:
        name: A built-in name, that of an entry point, `file.py:Class` or `package.module:Class`;
            with `+distance` after it, the same with the weights or clusters of `distance`.

    Raises:
        ConfigError: There is no such algorithm, or its code does not load.
    """
    if name.endswith(DISTANCE_AWARE):
        kind = _import_module(_ALGORITHMS, f"{GROUP}.distance", name).on(
            load_algorithm(name.removesuffix(DISTANCE_AWARE))
        )
        setattr(kind, SOURCE, name)
        return _class_of(_ALGORITHMS, kind, name)
    return _load(_ALGORITHMS, name)


def load_codec(name: str) -> type[Codec]:
    """Find a codec's class.

    Args:
        name: A built-in name, that of an entry point, `file.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: There is no such codec, or its code does not load.
    """
    return _load(_CODECS, name)


def load_adapter(name: str) -> type[Adapter]:
    """Find an adapter's class.

    Args:
        name: A built-in name, that of an entry point, `file.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: There is no such adapter, or its code does not load.
    """
    return _load(_ADAPTERS, name)


def describe(thing: Algorithm | Codec) -> tuple[str, dict[str, Any]]:
    """Give the name and the hyper-parameters with which a configuration makes it again."""
    kind = type(thing)
    package, _, module = kind.__module__.rpartition(".")
    group = GROUP if isinstance(thing, Algorithm) else CODECS
    built_in = module if package == group else f"{kind.__module__}:{kind.__qualname__}"
    return vars(kind).get(SOURCE) or built_in, thing.hyperparameters()


def list_algorithms() -> list[AlgorithmInfo]:
    """Describe every built-in and installed algorithm; one that does not load says why."""
    return [_info(name) for name in algorithm_names()]


def _info(name: str) -> AlgorithmInfo:
    try:
        kind = load_algorithm(name)
    except ConfigError as error:
        return AlgorithmInfo(name, f"cannot be loaded: {error}", "", ())
    return AlgorithmInfo(name, *_told(kind), tuple(sorted(kind.all_sends())))


def list_codecs() -> list[Info]:
    """Describe every built-in and installed codec; one that does not load says why."""
    return _list(_CODECS)


def list_adapters() -> list[Info]:
    """Describe every built-in and installed adapter; one that does not load says why."""
    return _list(_ADAPTERS)


def _list(shelf: _Shelf[T]) -> list[Info]:
    rows = []
    for name in _names(shelf):
        try:
            rows.append(Info(name, *_told(_load(shelf, name))))
        except ConfigError as error:
            rows.append(Info(name, f"cannot be loaded: {error}", ""))
    return rows


def _told(kind: type) -> tuple[str, str]:
    """Give the first line of a class's docstring, and the link to its source."""
    own, module = inspect.cleandoc(kind.__doc__ or ""), sys.modules[kind.__module__].__doc__ or ""
    link = re.search(r"https?://[^\s)>\]]+", f"{own}\n{module}")
    summary = own.partition("\n")[0] or module.strip().partition("\n")[0]
    return summary, link[0].rstrip(".,;") if link else ""


def _names(shelf: _Shelf[T]) -> list[str]:
    return sorted({*_built_in(shelf), *_entry_points(shelf)})


def _load(shelf: _Shelf[T], name: str) -> type[T]:
    if ":" in name:
        return _from_place(shelf, name)
    if name in _built_in(shelf):
        return _only_class(shelf, _import_module(shelf, f"{shelf.group}.{name}", name))
    if name in _entry_points(shelf):
        return _class_of(shelf, _load_entry_point(shelf, _entry_points(shelf)[name]), name)
    known = _names(shelf)
    close = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {close[0]!r}? There" if close else "there"
    raise ConfigError(
        f"unknown {shelf.word} {name!r}; {guess} is {', '.join(known) or 'none'}; "
        "your own is written file.py:Class"
    )


def _built_in(shelf: _Shelf[T]) -> set[str]:
    spec = importlib.util.find_spec(shelf.group)
    folders = spec.submodule_search_locations if spec else None
    helper = shelf.base.__module__.rpartition(".")[2]
    names = {m.name for m in pkgutil.iter_modules(folders or [])}
    return {name for name in names if not name.startswith("_") and name != helper}


def _entry_points(shelf: _Shelf[T]) -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=shelf.group)}


def _load_entry_point(shelf: _Shelf[T], point: metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever somebody else's module raises
        raise not_loading(
            f"{shelf.word} {point.name!r}, installed as {point.value}", error
        ) from error


def _from_place(shelf: _Shelf[T], name: str) -> type[T]:
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ConfigError(f"{shelf.word} {name!r}: the name before the colon is empty; fill it in")
    if not place.endswith(".py"):
        module = _import_module(shelf, place, name)
        return _class_of(shelf, _attribute(shelf, module, attribute, name), name)
    path = Path(place).expanduser().resolve()
    kind = _class_of(shelf, _attribute(shelf, import_file(path), attribute, name), name)
    if SOURCE not in vars(kind):
        setattr(kind, SOURCE, f"{path}:{attribute}")
    return kind


def _import_module(shelf: _Shelf[T], module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{shelf.word} {name!r}: there is no module {error.name!r}; "
                "install its package or correct the name"
            ) from error
        raise not_loading(f"module {module!r} of {shelf.word} {name!r}", error) from error
    except Exception as error:  # whatever a user's module raises
        raise not_loading(f"module {module!r} of {shelf.word} {name!r}", error) from error


def _attribute(shelf: _Shelf[T], module: ModuleType, attribute: str, name: str) -> Any:
    found: Any = module
    for step in attribute.split("."):
        if not hasattr(found, step):
            known = [key for key, value in vars(module).items() if _belongs(shelf, value)]
            raise ConfigError(
                f"{shelf.word} {name!r}: there is no class {attribute!r}; "
                f"the {shelf.word}s there are: {', '.join(known) or 'none'}"
            )
        found = getattr(found, step)
    return found


def _only_class(shelf: _Shelf[T], module: ModuleType) -> type[T]:
    kinds = [
        value
        for value in vars(module).values()
        if _belongs(shelf, value) and value.__module__ == module.__name__
    ]
    if len(kinds) != 1:
        names = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise ConfigError(f"{module.__name__} should define one {shelf.word}, but defines {names}")
    return _class_of(shelf, kinds[0], module.__name__)


def _belongs(shelf: _Shelf[T], value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, shelf.base) and value is not shelf.base


def _class_of(shelf: _Shelf[T], value: Any, name: str) -> type[T]:
    if not _belongs(shelf, value):
        base = f"{shelf.base.__module__}.{shelf.base.__qualname__}"
        raise ConfigError(f"{shelf.word} {name!r} is not a subclass of {base}; make it one")
    if "__dataclass_params__" not in vars(value) or not value.__dataclass_params__.frozen:
        raise ConfigError(f"{shelf.word} {name!r}: write @dataclass(frozen=True) above its class")
    if inspect.isabstract(value):
        missing = " and ".join(map(repr, sorted(value.__abstractmethods__)))
        raise ConfigError(f"{shelf.word} {name!r} has no method {missing}; write it")
    return cast(type[T], value)
