"""YAML with the place of everything in it, so that a message can name file and line.

It reads the plain values of YAML 1.2: `1e-3` is a number, `no` and `2026-01-31` are text. What is
read is bounded in bytes, values (each counted wherever an alias repeats it), depth and digits.
"""

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from collegium.core.foreign_json import whole_number
from collegium.core.text import short
from collegium.errors import ConfigError

KeyPath = tuple[str, ...]

MOST_BYTES, MOST_VALUES, MOST_LEVELS = 4_000_000, 200_000, 40
"""Bounds of a document; one of a thousand sites has 0.2 MB, 10,000 values and 5 levels."""

_PLAIN_VALUES = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


_TOO_DEEP = f"is nested more than {MOST_LEVELS} levels deep; is it the right file?"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Read a whole number; unlike in YAML 1.1, 010 is ten."""
        return whole_number(self.construct_scalar(node))


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}  # type: ignore[misc]


for _name, (_pattern, _first) in _PLAIN_VALUES.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)


@dataclass(frozen=True)
class Place:
    """The origin of a value.

    Attributes:
        text: The file and line, or the override, as messages name it.
        base: The folder that a relative path in the value starts from.
    """

    text: str
    base: Path


@dataclass
class Source:
    """The origin of every key of a configuration, and all problems found in it.

    Attributes:
        root: The place of keys that have none of their own.
        places: The place of each key, by its path, in the order in which they were written.
        problems: By path, one sentence each.
        renamed: Paths that a user wrote otherwise than they are stored.
        recorded: Whether it is the record of a run, whose network was checked before it was
            written: most networks can be checked with torch loaded only.
    """

    root: Place
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[tuple[KeyPath, str]] = field(default_factory=list)
    renamed: dict[KeyPath, KeyPath] = field(default_factory=dict)
    recorded: bool = False

    def as_written(self, path: KeyPath) -> KeyPath:
        """Return a path as the user wrote it."""
        for stored, written in self.renamed.items():
            if path[: len(stored)] == stored:
                return written + path[len(stored) :]
        return path

    def place(self, path: KeyPath) -> Place:
        """Return the place of a key, or of the nearest key around it."""
        return self.places.get(self._nearest(path), self.root)

    def relocate(self, path: KeyPath, place: Place) -> None:
        """Note that a value, and all below it, now comes from elsewhere.

        Args:
            path: The path to the value.
            place: Where it comes from.
        """
        path = self.as_written(path)
        for key in [key for key in self.places if key[: len(path)] == path]:
            del self.places[key]
        self.places[path] = place

    def include(self, path: KeyPath, inner: "Source") -> None:
        """Note that all below a path comes from another source.

        Args:
            path: The path.
            inner: The origin of what is below it.
        """
        self.relocate(path, inner.root)
        self.places |= {path + key: place for key, place in inner.places.items()}

    def add_problem(self, path: KeyPath, text: str, *, named: bool = True) -> None:
        """Note a problem at the place of a key.

        Args:
            path: The path to the key.
            text: What is wrong.
            named: Whether the sentence begins with the path; otherwise the text names the key.
        """
        name = ".".join(self.as_written(path))
        start = f"{name}: " if named and name else ""
        self.problems.append((path, f"{start}{text} ({self.place(path).text})"))

    def raise_problems(self) -> None:
        """Raise all problems at once, if there are any, in the order in which keys were written.

        Raises:
            ConfigError: There are problems.
        """
        order = {key: index for index, key in enumerate(self.places)}
        ordered = sorted(self.problems, key=lambda p: order.get(self._nearest(p[0]), -1))
        sentences = [text for _, text in ordered]
        if len(sentences) == 1:
            raise ConfigError(sentences[0])
        if sentences:
            listed = "".join(f"\n  {sentence}" for sentence in sentences)
            raise ConfigError(f"{len(sentences)} problems in the configuration:{listed}")

    def _nearest(self, path: KeyPath) -> KeyPath:
        """Return the innermost key on a path whose place is known, as it was written."""
        written = self.as_written(path)
        around = (written[:length] for length in range(len(written), 0, -1))
        return next((key for key in around if key in self.places), ())


def read_yaml(text: str, where: str, base: Path) -> tuple[Any, Source]:
    """Read one YAML document, and where each of its keys was written.

    Args:
        text: The document.
        where: What messages call it.
        base: The folder that relative paths in it start from.

    Raises:
        ConfigError: It is not YAML, exceeds a bound, a key is written twice, or an alias holds
            itself.
    """
    source = Source(Place(where, base))
    _check_size(len(text), where)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, source
        _locate(node, (), source, ())
        return loader.construct_document(node), source
    except RecursionError as error:
        raise ConfigError(f"{where}: {_TOO_DEEP}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        reason, _, _ = str(error).partition("\n")
        raise ConfigError(f"{where}: not valid YAML: {reason}") from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # of a value under a tag
        raise ConfigError(f"{where}: not valid YAML: {short(str(error))}") from error


def read_yaml_file(path: Path) -> tuple[dict[str, Any], Source]:
    """Read a YAML file that holds one mapping.

    Raises:
        ConfigError: The file is missing or unreadable, or holds something else.
    """
    try:
        _check_size(path.stat().st_size, str(path))
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error
    data, source = read_yaml(text, str(path), path.absolute().parent)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: should hold keys and values, not {short(data)}")
    return data, source


def _check_size(size: int, where: str) -> None:
    if size > MOST_BYTES:
        raise ConfigError(
            f"{where}: has {size} bytes, and at most {MOST_BYTES} are read; is it the right file?"
        )


def write_yaml(data: Mapping[str, Any]) -> str:
    """Write a mapping so that `read_yaml` gives it back."""
    text: str = yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def write_entry(key: str, value: Any) -> str:
    """Write one key with its value in one line, as `read_yaml` gives it back.

    Args:
        key: The key.
        value: What YAML can hold.
    """
    text: str = yaml.dump(
        {key: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True,
        default_flow_style=True, width=float("inf"),
    )  # fmt: skip
    return text.strip()[1:-1]


def _locate(node: yaml.Node, path: KeyPath, source: Source, above: tuple[int, ...]) -> None:
    if id(node) in above:
        name = ".".join(path)
        raise ConfigError(f"{name}: an alias that holds itself ({source.place(path).text})")
    if len(path) > MOST_LEVELS:
        raise ConfigError(f"{source.root.text}: {_TOO_DEEP}")
    if len(source.places) > MOST_VALUES:
        raise ConfigError(
            f"{source.root.text}: holds more than {MOST_VALUES} values, counted wherever an alias "
            f"repeats them; write it without aliases of aliases"
        )
    children: list[tuple[str, yaml.Node, int]] = []
    if isinstance(node, yaml.MappingNode):
        if odd := [key for key, _ in node.value if not isinstance(key, yaml.ScalarNode)]:
            line = odd[0].start_mark.line + 1
            raise ConfigError(f"{source.root.text}, line {line}: a key should be a word")
        children = [(str(key.value), value, key.start_mark.line) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(i), item, item.start_mark.line) for i, item in enumerate(node.value)]
    seen: dict[str, int] = {}
    for key, child, line in children:
        inner = (*path, key)
        if key in seen:
            lines = f"{source.root.text}, lines {seen[key] + 1} and {line + 1}"
            raise ConfigError(f"{'.'.join(inner)}: written twice; keep one of them ({lines})")
        seen[key] = line
        source.places[inner] = Place(f"{source.root.text}, line {line + 1}", source.root.base)
        _locate(child, inner, source, (*above, id(node)))


def set_leaf(data: Any, path: KeyPath, value: Any, place: Place, source: Source) -> None:
    """Set one value deep in mappings and lists, in place, making missing mappings on the way.

    Args:
        data: The mapping or list to change.
        path: The keys and positions that lead to the value.
        value: The value.
        place: Where it comes from.
        source: The origin of the data, which is noted there.

    Raises:
        ConfigError: Something on the way is neither a mapping nor a list with that place.
    """
    node = data
    for depth, step in enumerate(path):
        last = depth == len(path) - 1
        key: str | int = step
        if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            key = int(step)
        elif not isinstance(node, dict):
            around = ".".join(path[:depth])
            found = f"a list of {len(node)}" if isinstance(node, list) else short(node)
            raise ConfigError(f"{'.'.join(path)}: {around} is {found} and has no {step!r} to set")
        if last:
            node[key] = value
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[key]
    source.relocate(path, place)
