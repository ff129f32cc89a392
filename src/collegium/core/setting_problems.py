"""Sentences about settings that were refused: pydantic's errors in the words of an annotation.

Everything here follows from the annotation of the field: types such as ``int | None``, the words
of a `Literal`, and the bounds in ``Annotated[float, Ge(0), Lt(1)]``.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import annotated_types
from pydantic_core import ErrorDetails

from collegium.core.text import did_you_mean, short, unknown_word

Location = tuple[str | int, ...]

_ONE = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false",
    type(None): "null", Any: "a value",
}  # fmt: skip
_SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}
_SIZES = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_LENGTHS = {"min_length": "at least {} long", "max_length": "at most {} long"}
_OUT_OF_RANGE = {
    "greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number",
}  # fmt: skip


class Problem(NamedTuple):
    """One thing that is wrong with settings.

    Attributes:
        path: The keys that lead to it; empty if it is about several fields together.
        text: What should be there, and what is there.
    """

    path: Location
    text: str


def fields_of(kind: type) -> dict[str, Any]:
    """Return the annotation of every field that the constructor of a dataclass takes."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def problems_of(
    errors: Iterable[ErrorDetails], known: Mapping[str, Any], given: Any, title: str = ""
) -> list[Problem]:
    """Return one problem for every field about which pydantic reports errors.

    Args:
        errors: What pydantic found.
        known: The annotations of all fields or arguments.
        given: Their values by name, as they were given.
        title: What messages about an unknown field call the owner of the fields.
    """
    groups: dict[Location, list[ErrorDetails]] = {}
    for error in errors:
        groups.setdefault(_find(error["loc"], known).path, []).append(error)
    return [
        Problem(path, _sentence(path, group, known, given, title)) for path, group in groups.items()
    ]


def described(hint: Any) -> str:
    """Return in words which values an annotation takes, without their range."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _ONE:
        return _ONE[hint]
    if origin is typing.Annotated:
        return described(arguments[0])
    if origin is typing.Literal:
        *others, last = map(repr, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if _is_union(hint):
        return " or ".join(described(option) for option in arguments)
    if origin in (list, tuple, frozenset, set, Sequence):
        if dataclasses.is_dataclass(_bare(arguments[0])):
            return "a list"
        count = "" if origin is not tuple or ... in arguments else f"{len(arguments)} "
        return f"a list of {count}{_several(arguments[0])}"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(hint):
        return "keys and values"
    return getattr(hint, "__name__", str(hint))


def leaf_types(hint: Any) -> Iterator[Any]:
    """Yield the innermost types of an annotation: plain types and ``Literal[...]``."""
    parts = typing.get_args(_bare(hint))
    if typing.get_origin(_bare(hint)) is typing.Literal or not parts:
        yield _bare(hint)
        return
    for part in parts:
        yield from leaf_types(part)


def literal_words(hint: Any) -> list[str]:
    """Return the words among which an annotation lets one choose."""
    return [
        word
        for leaf in leaf_types(hint)
        if typing.get_origin(leaf) is typing.Literal
        for word in typing.get_args(leaf)
        if isinstance(word, str)
    ]


class _Found(NamedTuple):
    """The innermost field that contains an error.

    Attributes:
        path: The keys that lead to it.
        hint: Its annotation; None for an unknown field, and for the owner of all fields.
        beside: The annotations of all fields beside it.
    """

    path: Location
    hint: Any
    beside: Mapping[Any, Any]


def _find(location: Location, known: Mapping[Any, Any]) -> _Found:
    """Follow an error's location down to the field that holds it: not into lists of numbers."""
    found = _Found((), None, known)
    for step in location:
        below = _below(found.hint, step) if found.path else known
        if below is None:
            break
        found = _Found((*found.path, step), below.get(step), below)
    return found


def _below(hint: Any, step: str | int) -> Mapping[Any, Any] | None:
    """Return the annotations of the fields or entries in a field; None if it has none."""
    for option in map(_bare, _options(hint)):
        if dataclasses.is_dataclass(option):
            return fields_of(typing.cast(type, option))
        position = {dict: 1, tuple: 0}.get(typing.get_origin(option))
        if position is not None:
            entry = typing.get_args(option)[position]
            if any(dataclasses.is_dataclass(_bare(inner)) for inner in _options(entry)):
                return {step: entry}
    return None


def _sentence(
    path: Location, errors: list[ErrorDetails], known: Mapping[str, Any], given: Any, title: str
) -> str:
    _, hint, beside = _find(path, known)
    first, kinds = errors[0], {error["type"] for error in errors}
    here = len(first["loc"]) == len(path)
    if first["type"] == "unexpected_keyword_argument":
        owner = title if len(path) == 1 else ""
        return unknown_word("field", str(path[-1]), [*map(str, beside)], owner)
    if here and first["type"].startswith("missing"):
        return f"missing; add {described(hint)}"
    value = _value(given, path, first["input"])
    raised = [error["ctx"]["error"] for error in errors if "error" in error.get("ctx", {})]
    if raised:
        holder = hint is None or dataclasses.is_dataclass(_bare(_options(hint)[0]))
        return str(raised[0]) if holder else f"{raised[0]}, not {short(value)}"
    wrong = [error["input"] for error in errors if error["type"] == "literal_error"]
    meant = did_you_mean(str(wrong[0]), literal_words(hint)) if wrong else ""
    wanted = _wanted(hint, first, kinds)
    if not isinstance(value, list | tuple | dict):
        wanted = wanted.removeprefix("each ")
    return f"{wanted}, not {short(value)}{meant}"


def _wanted(hint: Any, error: ErrorDetails, kinds: set[str]) -> str:
    words = _range(hint, _SIZES) if kinds & _OUT_OF_RANGE else ""
    if "finite_number" in kinds:
        return words.replace("be ", "be finite and ", 1) if words else "should be a finite number"
    words = words or (_range(hint, _LENGTHS) if kinds & {"too_short", "too_long"} else "")
    if words:
        return words
    if error["type"] == "dataclass_exact_type":
        return f"should be of the class {error['ctx']['class_name']}"
    if hint is None and not error["type"].endswith("_type"):
        return error["msg"]
    words = "keys and values" if hint is None else described(hint)
    return f"should {'hold' if words == 'keys and values' else 'be'} {words}"


def _several(hint: Any) -> str:
    """Return `described` in the plural."""
    hint = _bare(hint)
    if _is_union(hint):
        return " or ".join(map(_several, typing.get_args(hint)))
    return _SEVERAL.get(hint) or described(hint).replace("a list", "lists", 1)


def _range(hint: Any, bounds: Mapping[str, str]) -> str:
    """Return the outermost bounds of an annotation as "should be at least 0"; empty without any."""
    if typing.get_origin(hint) is typing.Annotated:
        annotated, *metadata = typing.get_args(hint)
        words = [text for item in metadata for text in _words(item, bounds)]
        return f"should be {' and '.join(words)}" if words else _range(annotated, bounds)
    parts = (_range(part, bounds) for part in typing.get_args(hint))
    found = next((words for words in parts if words), "")
    each = found and not _is_union(hint) and not found.startswith("each ")
    return f"each {found}" if each else found


def _value(given: Any, path: Location, otherwise: Any) -> Any:
    for step in path:
        try:
            given = given[step]
        except (KeyError, IndexError, TypeError):
            return otherwise
    return given


def _words(metadata: Any, bounds: Mapping[str, str]) -> Iterator[str]:
    """Yield the words for one item of ``Annotated``, such as ``Ge(0)`` or pydantic's ``Field``."""
    several = getattr(metadata, "metadata", None)
    if isinstance(metadata, annotated_types.GroupedMetadata):
        several = list(metadata)
    for item in several or ():
        yield from _words(item, bounds)
    for name, words in bounds.items():
        if several is None and getattr(metadata, name, None) is not None:
            yield words.format(getattr(metadata, name))


def _bare(hint: Any) -> Any:
    """Return an annotation without what ``Annotated`` adds."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if _is_union(hint) else (hint,)
