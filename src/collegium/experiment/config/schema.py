"""From mappings to plain dataclasses, by their annotations; the dataclasses need no base class.

Beside it only `yamlfile` and the phantoms know YAML, and nothing else knows pydantic.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from collegium.core.text import did_you_mean
from collegium.errors import ConfigError
from collegium.experiment.config.yamlfile import KeyPath, Source, short

T = TypeVar("T")
Reader = Callable[[Any, KeyPath, Source], Any]
Rule = tuple[Callable[[Any], bool], str]
"""What a value has to satisfy, and the words for it."""

BROKEN: Any = object()
"""Stands for a value about which the source has been told already."""


def must(holds: Callable[[Any], bool], words: str) -> Rule:
    """Make the rule that a value should be what `words` say."""
    return holds, f"should be {words}"


def at_least(least: float) -> Rule:
    """Make the rule for numbers from `least` on."""
    return must(lambda value: least <= value < math.inf, f"at least {least}")


def each(rule: Rule) -> Rule:
    """Make the rule for lists of values that each obey another rule."""
    return lambda values: all(map(rule[0], values)), f"each {rule[1]}"


POSITIVE = must(lambda value: 0 < value < math.inf, "above 0")
FRACTION = must(lambda value: 0 <= value < 1, "at least 0 and below 1")


@dataclass(frozen=True)
class Schema:
    """How dataclasses are filled from mappings.

    Attributes:
        rules: By class and field, what a value must satisfy and the words for it.
        readers: Functions for the classes that are not written field by field.
    """

    rules: Mapping[tuple[type, str], Rule] = field(default_factory=dict)
    readers: Mapping[type, Reader] = field(default_factory=dict)

    def build(
        self, kind: type[T], data: Any, path: KeyPath, source: Source, *, title: str = ""
    ) -> T:
        """Fill a dataclass; where that fails, tell the source why and give `BROKEN`.

        Args:
            kind: The dataclass.
            data: The mapping of its fields.
            path: The path to `data`.
            source: Knows where the keys were written, and is told the problems.
            title: What messages about unknown fields call `kind`.
        """
        if not isinstance(data, Mapping):
            source.complain(path, f"should hold keys and values, not {short(data)}")
            return typing.cast(T, BROKEN)
        before = len(source.problems)
        fields = {f.name: f for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
        hints = typing.get_type_hints(kind, include_extras=True)
        values: dict[str, Any] = {}
        for key, value in data.items():
            inner = (*path, str(key))
            if key in fields:
                values[key] = self._value(hints[key], value, inner, source)
                holds, words = self.rules.get((kind, key), (bool, ""))
                known = values[key] is not None and values[key] is not BROKEN
                if words and known and not holds(values[key]):
                    source.complain(inner, f"{words}, not {short(value)}")
            else:
                source.complain(inner, unknown("field", str(key), list(fields), title))
        for name, f in fields.items():
            needed = f.default is f.default_factory is dataclasses.MISSING
            if needed and name not in values:
                source.complain((*path, name), f"missing; add {described(hints[name])}")
        if len(source.problems) > before:
            return typing.cast(T, BROKEN)
        try:
            return kind(**values)
        except (ConfigError, ValueError, TypeError) as error:
            source.complain(path, str(error))
            return typing.cast(T, BROKEN)

    def build_named(
        self, load: Callable[[str], Any], value: Any, path: KeyPath, source: Source
    ) -> tuple[str, Any]:
        """Make what is written as a name, or as a mapping with a name and fields.

        Args:
            load: Finds a class by its name, or raises a `ConfigError`.
            value: The name or the mapping.
            path: The path to it.
            source: Knows where it was written, and is told the problems.

        Returns:
            The name, and the instance or `BROKEN`.
        """
        name, params = name_and_rest(value, path, source)
        try:
            kind = load(name) if name else BROKEN
        except ConfigError as error:
            source.complain((*path, "name"), str(error))
            kind = BROKEN
        if kind is BROKEN:
            return name, BROKEN
        return name, self.build(kind, params, path, source, title=name.rpartition(":")[2])

    def _value(self, hint: Any, value: Any, path: KeyPath, source: Source) -> Any:
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        if value is None and type(None) in options:
            return None
        for option in options:
            entry = _entry_of(option)
            if dataclasses.is_dataclass(option):
                return self._one(option, value, path, source)
            if dataclasses.is_dataclass(entry):
                kind = typing.get_origin(option)
                return self._many(kind, entry, value, path, source)
        return _leaf(hint, value, path, source)

    def _one(self, kind: Any, value: Any, path: KeyPath, source: Source) -> Any:
        if kind in self.readers:
            return self.readers[kind](value, path, source)
        return self.build(kind, value, path, source)

    def _many(self, holder: Any, kind: Any, value: Any, path: KeyPath, source: Source) -> Any:
        if holder is dict and isinstance(value, Mapping):
            return {str(k): self._one(kind, v, (*path, str(k)), source) for k, v in value.items()}
        if holder is tuple and isinstance(value, list):
            return tuple(self._one(kind, v, (*path, str(i)), source) for i, v in enumerate(value))
        words = "a list" if holder is tuple else "keys and values"
        source.complain(path, f"should be {words}, not {short(value)}")
        return BROKEN


def named(value: Any) -> Any:
    """Write a bare name as the mapping that it stands for."""
    return {"name": value} if isinstance(value, str) else value


def name_and_rest(value: Any, path: KeyPath, source: Source) -> tuple[str, dict[str, Any]]:
    """Split off the name, a path in it made absolute; without one, complain and give ""."""
    rest = dict(named(value)) if isinstance(value, str | Mapping) else {}
    name = rest.pop("name", None)
    if not isinstance(name, str) or not name:
        source.complain(path, f"needs a name, but is {short(value)}")
        return "", rest
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        base = source.place((*path, "name")).base
        name = f"{(base / Path(file).expanduser()).resolve()}:{attribute}"
    return name, rest


def _entry_of(hint: Any) -> Any:
    """Give what a dict or tuple annotation holds."""
    arguments = typing.get_args(hint)
    positions: dict[Any, int] = {dict: 1, tuple: 0}
    position = positions.get(typing.get_origin(hint))
    return arguments[position] if arguments and position is not None else None


def _leaf(hint: Any, value: Any, path: KeyPath, source: Source) -> Any:
    try:
        # JSON's strict mode is the wanted one: lists may fill tuples, but "3" is no number
        adapter = pydantic.TypeAdapter(hint)
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except pydantic.ValidationError as error:
        text = f"should be {described(hint)}, not {short(value)}"
        if hasattr(hint, "__metadata__"):
            text = f"{error.errors()[0]['msg'].removeprefix('Input ')}, not {short(value)}"
        options = [o for o in _literals(hint) if isinstance(o, str)]
        source.complain(path, text + did_you_mean(str(value), options))
    except pydantic.PydanticUserError:
        source.complain(path, f"fields of type {hint} cannot be written in YAML")
    return BROKEN


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _literals(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(o for part in typing.get_args(hint) for o in _literals(part))


_ONE = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false",
    type(None): "null", Any: "a value",
}  # fmt: skip
_SOME = {int: "whole numbers", float: "numbers", str: "texts"}


def described(hint: Any) -> str:
    """Say in words what an annotation takes."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if hint in _ONE:
        return _ONE[hint]
    if origin is typing.Annotated:
        return described(arguments[0])
    if origin is typing.Literal:
        *others, last = map(repr, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if _is_union(hint):
        return " or ".join(described(option) for option in arguments)
    if origin in (tuple, list, frozenset, set):
        count = "" if ... in arguments or origin is not tuple else f"{len(arguments)} "
        return f"a list of {count}{_SOME.get(arguments[0], 'entries')}"
    return "keys and values"


def unknown(what: str, word: str, options: list[str], owner: str = "") -> str:
    """Say that a name is unknown, with the closest one or, failing that, all there are."""
    of = f" for {owner}" if owner else ""
    near = did_you_mean(word, options) or f"; there is {', '.join(options) or 'none'}"
    return f"unknown {what}{of}{near}"


def plain(value: Any) -> Any:
    """Write dataclasses, tuples and sets as the mappings and lists that YAML and JSON have."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value)]
    return str(value) if isinstance(value, Path) else value


def flat(value: Any, path: KeyPath = ()) -> dict[str, str]:
    """Write every leaf of mappings, and of lists of mappings, as JSON under its dotted key."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        return {".".join(path): json.dumps(value)}
    return {k: v for key, item in value.items() for k, v in flat(item, (*path, str(key))).items()}
