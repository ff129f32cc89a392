"""Overrides of an experiment file, and the federation file that it may name."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from collegium.core.text import unknown_word
from collegium.data.column_patterns import expand_table
from collegium.data.federation_config import FederationConfig, expand_root
from collegium.errors import ConfigError
from collegium.experiment.config import yaml_file
from collegium.experiment.config.named_parts import expand_short_forms
from collegium.experiment.config.yaml_file import KeyPath, Place, Source


def override(data: dict[str, Any], text: str, source: Source) -> None:
    """Set the value of an override `a.b=value`, in place.

    Args:
        data: The mapping of an experiment.
        text: The override.
        source: The origin of the data, where the override is noted.

    Raises:
        ConfigError: It is no override, or there is no such key.
    """
    key, equals, value_text = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"{text!r} is no override; write key=value, e.g. training.lr=0.01")
    place = Place(f"override {text}", Path.cwd())
    value, _ = yaml_file.read_yaml(value_text, place.text, place.base)
    set_value(data, path, value, place, source)


def set_value(
    data: dict[str, Any], path: KeyPath, value: Any, place: Place, source: Source
) -> None:
    """Set one value of an experiment, in place.

    Args:
        data: The mapping of an experiment.
        path: The keys that lead to the value; `algorithm` stands for the only one.
        value: The value.
        place: Where it comes from.
        source: The origin of the data, where the place is noted.

    Raises:
        ConfigError: There is no such key.
    """
    expand_short_forms(data, source)
    if path in (("algorithm",), ("algorithms",)):
        data.pop("algorithms", None)
        source.renamed = {}
    elif path[0] == "algorithm":
        several = data.setdefault("algorithms", [{}])
        if len(several) != 1:
            example = f"algorithms.0.{'.'.join(path[1:])}"
            raise ConfigError(
                f"{'.'.join(path)}: there are {len(several)} algorithms; say which: {example}"
            )
        path = ("algorithms", "0", *path[1:])
    elif path[0] == "federation" and len(path) > 1:
        _inline_federation(data, source)
    yaml_file.set_leaf(data, path, value, place, source)


def _inline_federation(data: dict[str, Any], source: Source) -> None:
    """Put the content of the federation file in the place of its name."""
    name = data.get("federation")
    path: KeyPath = ("federation",)
    if isinstance(name, str):
        data["federation"], inner = yaml_file.read_yaml_file(
            source.place(path).base / Path(name).expanduser()
        )
        source.include(path, inner)


def read_federation(
    path: Path, overrides: Sequence[str], keys: Collection[str]
) -> tuple[dict[str, Any], Source]:
    """Read a federation file, or an experiment file for the federation in it.

    An override of anything else would have no effect: that is a problem, and so is a key that an
    experiment does not have.

    Args:
        path: The YAML file.
        overrides: `federation.a.b=value` each, for a federation file also `a.b=value`; or `recipe`.
        keys: What an experiment file may hold.

    Returns:
        The mapping of an experiment, for a federation file with `federation` alone; its source.

    Raises:
        ConfigError: The file cannot be read, or an override sets no value.
    """
    data, inner = yaml_file.read_yaml_file(path)
    source, alone = inner, "federation" not in data
    if alone:
        data, source = {"federation": data}, Source(inner.root)
        source.include(("federation",), inner)
    for key in [key for key in data if key not in {*keys, "algorithm", "recipe"}]:
        source.add_problem((str(key),), unknown_word("field", str(key), [*keys]))
    settable = [f"federation.{key.name}" for key in dataclasses.fields(FederationConfig)]
    for text in overrides:
        key = text.partition("=")[0]
        if key.partition(".")[0] in ("federation", "recipe"):
            override(data, text, source)
        elif alone:
            override(data, f"federation.{text}", source)
        else:
            problem = unknown_word("field", key, settable)
            source.problems.append(((), f"{key}: {problem} (override {text})"))
    resolve_federation(data, source)
    return data, source


def resolve_federation(data: dict[str, Any], source: Source) -> None:
    """Read the federation's file, if it has one, and make its root absolute, in place.

    Patterns among the columns of tables become the columns that the tables have.

    Args:
        data: The mapping of an experiment.
        source: The origin of the data, which collects the problems.
    """
    _inline_federation(data, source)
    federation, path = data.get("federation"), ("federation", "root")
    root = federation.get("root", ".") if isinstance(federation, dict) else None
    if isinstance(federation, dict) and isinstance(root, str):
        try:
            federation["root"] = str((source.place(path).base / expand_root(root)).resolve())
            _expand_columns(federation, source)
        except ConfigError as error:
            source.add_problem(path, str(error), named=False)


def _expand_columns(federation: dict[str, Any], source: Source) -> None:
    """Replace patterns among the columns by the columns that the sites' tables have, in place."""
    table, sites = federation.get("table"), federation.get("sites")
    if not isinstance(table, dict) or not isinstance(sites, dict):
        return
    try:
        federation["table"] = expand_table(table, sites, Path(federation["root"]))
    except ConfigError as error:
        source.add_problem(("federation", "table"), str(error))
