"""Finds algorithms, adapters and codecs by the names that experiment files and users give them.

A built-in name is that of a module: `collegium.algorithms.ditto` is the algorithm "ditto". There is
nothing to register, and no module is imported before it is asked for. Other packages add names by
entry points, and a user names a class of their own as `file.py:Class` or `package.module:Class`.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from collegium.adaptation.base import Adapter
from collegium.compression.base import Codec
from collegium.core.algorithm import Algorithm
from collegium.core.text import did_you_mean
from collegium.core.userfile import import_file, loading_error, mark_as_users
from collegium.errors import ConfigError

T = TypeVar("T")

SOURCE = "__collegium_source__"
"""The attribute in which a class that is not built in keeps its name, e.g. `file.py:Class`."""

WRAPPERS = frozenset({"distance", "fedavgm", "fedadam", "fedyogi", "robust"})
"""The algorithms that another one that averages may be combined with: ``NAME+distance``."""


def bare_name(name: str) -> str:
    """Return the name of an algorithm without the wrappers that follow it."""
    plain, plus, wrapper = name.rpartition("+")
    return bare_name(plain) if plus and wrapper in WRAPPERS else name


class Configurable(Protocol):
    """An instance of one of the classes."""

    def hyperparameters(self) -> dict[str, Any]:
        """Return the fields by name."""


class Entry(NamedTuple):
    """One row of `Registry.list`.

    Attributes:
        name: As written in an experiment file.
        summary: The first line of its docstring, or why it cannot be loaded.
        paper: The first link in its docstring, otherwise in its module's.
        kind: The class; None where it cannot be loaded.
    """

    name: str
    summary: str
    paper: str
    kind: Any


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The classes of one kind, by name.

    Attributes:
        word: What messages call one of them.
        package: The package whose modules are the built-in ones.
        group: The entry point group of other packages.
        base: The class that all of them derive from.
        helpers: Public modules of the package that hold none of them.
    """

    word: str
    package: str
    group: str
    base: type[T]
    helpers: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """Return all built-in and installed names, sorted; no module is imported."""
        return sorted({*self._built_in, *self._entry_points()})

    def load(self, name: str) -> type[T]:
        """Return the class of a name.

        Args:
            name: A built-in name, that of an entry point, `file.py:Class` or
                `package.module:Class`.

        Raises:
            ConfigError: There is no such class, or its code does not load.
        """
        if ":" in name:
            return self._from_place(name)
        if name in self._built_in:
            return self._only_class(self._import(f"{self.package}.{name}", name))
        points = self._entry_points()
        if name in points:
            return self._checked(self._load_entry_point(points[name]), name)
        known = self.names()
        raise ConfigError(
            f"unknown {self.word} {name!r}{did_you_mean(name, known)}; known are "
            f"{', '.join(known) or 'none'}; your own is written file.py:Class"
        )

    def list(self) -> list[Entry]:
        """Return a row for every name; if one does not load, its summary is the reason."""
        rows = []
        for name in self.names():
            try:
                kind = self.load(name)
            except ConfigError as error:
                rows.append(Entry(name, f"cannot be loaded: {error}", "", None))
            else:
                rows.append(Entry(name, *_documented(kind), kind))
        return rows

    def describe(self, thing: Configurable) -> tuple[str, dict[str, Any]]:
        """Return the name and the hyper-parameters from which a configuration makes it again."""
        kind = type(thing)
        package, _, module = kind.__module__.rpartition(".")
        built_in = package == self.package
        own = module if built_in else f"{kind.__module__}:{kind.__qualname__}"
        return vars(kind).get(SOURCE) or own, thing.hyperparameters()

    @cached_property
    def _built_in(self) -> frozenset[str]:
        spec = importlib.util.find_spec(self.package)
        folders = spec.submodule_search_locations if spec else None
        names = {m.name for m in pkgutil.iter_modules(folders or []) if not m.ispkg}
        return frozenset(name for name in names - self.helpers if not name.startswith("_"))

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        return {point.name: point for point in metadata.entry_points(group=self.group)}

    def _load_entry_point(self, point: metadata.EntryPoint) -> Any:
        try:
            return point.load()
        except Exception as error:  # whatever somebody else's module raises
            raise loading_error(
                f"{self.word} {point.name!r}, installed as {point.value}", error
            ) from error

    def _from_place(self, name: str) -> type[T]:
        place, _, attribute = name.rpartition(":")
        if not place:
            raise ConfigError(
                f"{self.word} {name!r}: the name before the colon is empty; fill it in"
            )
        path = Path(place).expanduser().resolve()
        module = import_file(path) if place.endswith(".py") else self._import(place, name)
        if not f"{module.__name__}.".startswith("collegium."):
            mark_as_users(module)
        kind = self._checked(self._attribute(module, attribute, name), name)
        if place.endswith(".py") and SOURCE not in vars(kind):
            setattr(kind, SOURCE, f"{path}:{attribute}")
        return kind

    def _import(self, module: str, name: str) -> ModuleType:
        try:
            return importlib.import_module(module)
        except Exception as error:  # whatever a user's module raises
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and f"{module}.".startswith(f"{missing}."):
                raise ConfigError(
                    f"{self.word} {name!r}: there is no module {missing!r}; "
                    "install its package or correct the name"
                ) from error
            raise loading_error(f"module {module!r} of {self.word} {name!r}", error) from error

    def _attribute(self, module: ModuleType, attribute: str, name: str) -> Any:
        found: Any = module
        for step in attribute.split("."):
            if not hasattr(found, step):
                known = [key for key, value in vars(module).items() if self._belongs(value)]
                raise ConfigError(
                    f"{self.word} {name!r}: there is no class {attribute!r}; "
                    f"the {self.word}s there are: {', '.join(known) or 'none'}"
                )
            found = getattr(found, step)
        return found

    def _only_class(self, module: ModuleType) -> type[T]:
        kinds = [
            value
            for value in vars(module).values()
            if self._belongs(value) and value.__module__ == module.__name__
        ]
        if len(kinds) != 1:
            names = ", ".join(kind.__name__ for kind in kinds) or "none"
            raise ConfigError(
                f"{module.__name__} should define one {self.word}, but defines {names}"
            )
        return self._checked(kinds[0], module.__name__)

    def _belongs(self, value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, self.base) and value is not self.base

    def _checked(self, value: Any, name: str) -> type[T]:
        if not self._belongs(value):
            base = f"{self.base.__module__}.{self.base.__qualname__}"
            raise ConfigError(f"{self.word} {name!r} is not a subclass of {base}; make it one")
        if "__dataclass_params__" not in vars(value) or not value.__dataclass_params__.frozen:
            raise ConfigError(
                f"{self.word} {name!r}: write @settings (from collegium import settings) above it"
            )
        if inspect.isabstract(value):
            missing = " and ".join(map(repr, sorted(value.__abstractmethods__)))
            raise ConfigError(f"{self.word} {name!r} has no method {missing}; write it")
        return cast(type[T], value)


class AlgorithmRegistry(Registry[Algorithm]):
    """The algorithms; any that averages may be followed by `WRAPPERS`."""

    def load(self, name: str) -> type[Algorithm]:
        """Return the class of a name, wrapped where ``+`` and one of `WRAPPERS` follow it.

        Raises:
            ConfigError: There is no such class, its code does not load, or it cannot be wrapped.
        """
        if bare_name(name) == name:
            return super().load(name)
        plain, _, wrapper = name.rpartition("+")
        kind = self._import(f"{self.package}.{wrapper}", name).on(self.load(plain))
        setattr(kind, SOURCE, name)
        return self._checked(kind, name)


ALGORITHMS = AlgorithmRegistry(
    "algorithm", "collegium.algorithms", "collegium.algorithms",
    Algorithm,  # type: ignore[type-abstract]
)  # fmt: skip
ADAPTERS: Registry[Adapter] = Registry(
    "adapter", "collegium.adaptation", "collegium.adapters",
    Adapter, frozenset({"base", "outside"}),  # type: ignore[type-abstract]
)  # fmt: skip
CODECS: Registry[Codec] = Registry(
    "codec", "collegium.compression", "collegium.codecs",
    Codec, frozenset({"base"}),  # type: ignore[type-abstract]
)  # fmt: skip


def _documented(kind: type) -> tuple[str, str]:
    """Return the first line of a class's docstring, and the link to its source."""
    own, module = inspect.cleandoc(kind.__doc__ or ""), sys.modules[kind.__module__].__doc__ or ""
    link = re.search(r"https?://[^\s)>\]]+", f"{own}\n{module}")
    summary = own.partition("\n")[0] or module.strip().partition("\n")[0]
    return summary, link[0].rstrip(".,;") if link else ""
