"""From the data of an experiment file and its overrides to one mapping, every name in its place."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from collegium.data.federation import FederationConfig, expand_root
from collegium.errors import ConfigError
from collegium.experiment.config import schema, yamlfile
from collegium.experiment.config.schema import named
from collegium.experiment.config.yamlfile import KeyPath, Place, Source


def normalise(data: dict[str, Any], source: Source) -> None:
    """Write `algorithm` as a list of one, and bare names as mappings, in place."""
    if "algorithm" in data and "algorithms" in data:
        source.complain(("algorithm",), "give either algorithm or algorithms, not both")
        del data["algorithm"]
    if "algorithm" in data:
        data["algorithms"] = [data.pop("algorithm")]
        source.renamed = {("algorithms", "0"): ("algorithm",)}
    if isinstance(data.get("algorithms"), list):
        data["algorithms"] = [named(algorithm) for algorithm in data["algorithms"]]
    if "model" in data:
        data["model"] = named(data["model"])
    algorithms = data.get("algorithms")
    for holder in [data, *(algorithms if isinstance(algorithms, list) else ())]:
        if isinstance(holder, dict) and "codec" in holder:
            holder["codec"] = _directions(holder["codec"])
        if isinstance(holder, dict) and isinstance(holder.get("adapters"), list):
            holder["adapters"] = [named(adapter) for adapter in holder["adapters"]]


def _directions(codec: Any) -> Any:
    """Write a bare name as the codec up, nothing as none, and bare names below as mappings."""
    if codec is None or isinstance(codec, str):
        codec = {"up": codec}
    return {k: named(v) for k, v in codec.items()} if isinstance(codec, dict) else codec


def override(data: dict[str, Any], text: str, source: Source) -> None:
    """Set one leaf as `a.b=value` says, in place.

    Raises:
        ConfigError: It is no override, or there is no such leaf.
    """
    key, equals, value_text = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"{text!r} is no override; write key=value, e.g. training.lr=0.01")
    place = Place(f"override {text}", Path.cwd())
    value, _ = yamlfile.read_yaml(value_text, place.text, place.base)
    set_value(data, path, value, place, source)


def set_value(
    data: dict[str, Any], path: KeyPath, value: Any, place: Place, source: Source
) -> None:
    """Set one leaf, in place.

    Raises:
        ConfigError: There is no such leaf.
    """
    normalise(data, source)
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
    yamlfile.set_leaf(data, path, value, place, source)


def _inline_federation(data: dict[str, Any], source: Source) -> None:
    """Put the content of the federation file in the place of its name."""
    name = data.get("federation")
    path: KeyPath = ("federation",)
    if isinstance(name, str):
        data["federation"], inner = yamlfile.read_yaml_file(
            source.place(path).base / Path(name).expanduser()
        )
        source.nest(path, inner)


def read_federation(
    path: Path, overrides: Sequence[str], keys: Collection[str]
) -> tuple[dict[str, Any], Source]:
    """Read a federation file, or an experiment file for the federation in it.

    Whatever else an override sets would go unused: the source is told that it is a problem, and so
    is a key that an experiment does not have.

    Args:
        path: The YAML file.
        overrides: `federation.a.b=value` each, for a federation file also `a.b=value`; or `recipe`.
        keys: What an experiment file may hold.

    Returns:
        The mapping of an experiment, for a federation file with `federation` alone; its source.

    Raises:
        ConfigError: The file cannot be read, or an override sets no leaf.
    """
    data, inner = yamlfile.read_yaml_file(path)
    source, alone = inner, "federation" not in data
    if alone:
        data, source = {"federation": data}, Source(inner.root)
        source.nest(("federation",), inner)
    for key in [key for key in data if key not in {*keys, "algorithm", "recipe"}]:
        source.complain((str(key),), schema.unknown("field", str(key), [*keys]))
    settable = [f"federation.{key.name}" for key in dataclasses.fields(FederationConfig)]
    for text in overrides:
        key = text.partition("=")[0]
        if key.partition(".")[0] in ("federation", "recipe"):
            override(data, text, source)
        elif alone:
            override(data, f"federation.{text}", source)
        else:
            problem = schema.unknown("field", key, settable)
            source.problems.append(f"{key}: {problem} (override {text})")
    settle_federation(data, source)
    return data, source


def settle_federation(data: dict[str, Any], source: Source) -> None:
    """Read the federation's file where it has one, and make its root absolute."""
    _inline_federation(data, source)
    federation, path = data.get("federation"), ("federation", "root")
    root = federation.get("root", ".") if isinstance(federation, dict) else None
    if isinstance(federation, dict) and isinstance(root, str):
        place = source.place(path)
        try:
            federation["root"] = str((place.base / expand_root(root)).resolve())
        except ConfigError as error:
            source.problems.append(f"{error} ({place.text})")
