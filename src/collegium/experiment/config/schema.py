"""Mappings become settings, with the place of every mistake, and settings become plain values."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from collegium.core.settings import from_mapping
from collegium.experiment.config.yaml_file import KeyPath, Source

T = TypeVar("T")


def parse(kind: type[T], data: Any, path: KeyPath, source: Source, *, title: str = "") -> T | None:
    """Make settings of a mapping; if that is impossible, report why to the source.

    Args:
        kind: The class of the settings.
        data: The mapping of its fields.
        path: The path to `data`.
        source: The origin of the data, which collects the problems.
        title: What messages about unknown fields call `kind`.

    Returns:
        The settings, or None after a problem.
    """
    made, problems = from_mapping(kind, data, title=title)
    for problem in problems:
        source.add_problem((*path, *map(str, problem.path)), problem.text)
    return made


def plain(value: Any) -> Any:
    """Return dataclasses, tuples and sets as the mappings and lists that YAML and JSON have."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value)]
    return str(value) if isinstance(value, Path) else value


def digest_of(data: Any) -> str:
    """Return 32 hexadecimal digits that differ between values of `plain`."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def flat(value: Any, path: KeyPath = ()) -> dict[str, str]:
    """Return every leaf of mappings, and of lists of mappings, as JSON under its dotted key.

    Args:
        value: The mappings.
        path: The keys that lead to it.
    """
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = {str(index): item for index, item in enumerate(value)}
    if not isinstance(value, dict):
        return {".".join(path): json.dumps(value)}
    return {k: v for key, item in value.items() for k, v in flat(item, (*path, str(key))).items()}
