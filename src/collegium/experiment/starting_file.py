"""The experiment file with which `collegium init` starts: short, with a comment on each choice."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from collegium.core.files import write_atomically
from collegium.data.federation_config import FederationConfig, expand_root
from collegium.data.site_folders import federation_of_folder
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import load_federation, parse_config
from collegium.experiment.config.schema import plain
from collegium.experiment.config.yaml_file import read_yaml, read_yaml_file, write_entry
from collegium.experiment.starting import Choice, StartingValues, starting_values

FEDERATION = "federation.yaml"
"""The file that describes the federation in a folder, if it has one."""

WIDTH = 110
"""A comment that makes a line longer stands above it."""


def write_experiment(source: Path, output: Path) -> StartingValues:
    """Write an experiment to start with, over a federation or a folder of sites.

    Args:
        source: The federation's file, a folder that holds one, or one with a folder for each site.
        output: The experiment's file.

    Returns:
        What was chosen.

    Raises:
        ConfigError: The file exists, there is no federation, or the source is an experiment.
        DataError: The data have problems that prevent training.
        StorageError: The file cannot be written.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already: name another file, or move that one away")
    config, guessed, root = _read(source)
    start = starting_values(config, guessed=guessed)
    text = experiment_text(start, root or _root_for(output, start.federation))
    data, _ = read_yaml(text, str(output), output.absolute().parent)
    parse_config(data, str(output), output.absolute().parent)
    write_atomically(output, text.encode())
    return start


def experiment_text(start: StartingValues, root: str) -> str:
    """Return an experiment file.

    Args:
        start: What was chosen.
        root: The root of the federation's paths, as the file is to name it.
    """
    stated, whys = _stated(start.federation), _reasons(start.choices)
    name, sites = start.federation.name, stated.pop("sites")
    lines = [
        f"# {name}: does joining help? Training alone beside federated training, in equal steps.",
        "# Written by collegium init, by the rules of docs/recipes.md; all of it can be changed.",
        *_line("name", name),
        "federation:",
        *_line("name", stated.pop("name"), indent=2),
        *_line("root", root, indent=2),
        "  sites:",
        *(line for site in sites for line in _line(site, sites[site], indent=4)),
    ]
    for key, value in stated.items():
        lines += _line(key, value, whys[f"federation.{key}"], indent=2)
    for choice in start.choices:
        if not choice.key.startswith("federation."):
            lines += _line(choice.key, choice.value, [choice.why])
    return "\n".join(lines) + "\n"


def _read(source: Path) -> tuple[FederationConfig, bool, str | None]:
    """Return the federation, whether its classes are a guess, and a root to be kept as written."""
    if source.is_dir() and not (source / FEDERATION).is_file():
        return federation_of_folder(source), True, None
    file = source / FEDERATION if source.is_dir() else source
    data, _ = read_yaml_file(file)
    if "federation" in data or "algorithms" in data or "algorithm" in data:
        raise ConfigError(
            f"{file} is an experiment already: run it by collegium run, or name a federation's file"
        )
    root = str(data.get("root", "."))
    kept = root.startswith(("$", "~")) and Path(expand_root(root)).is_absolute()
    return load_federation(file), False, root if kept else None


def _root_for(output: Path, config: FederationConfig) -> str:
    """Return the root relative to the file's folder if it is within that, otherwise whole."""
    root, base = Path(config.root).resolve(), output.absolute().parent.resolve()
    return os.path.relpath(root, base) if root.is_relative_to(base) else str(root)


def _stated(config: FederationConfig) -> dict[str, Any]:
    """Return a federation's description without its root: task, splits, and what is no default."""
    stated = _unlike_default(config)
    stated.pop("root", None)
    stated["task"] = {"name": config.task.name, **stated.get("task", {})}
    stated["task"].setdefault("classes", [*config.task.classes])
    if config.table is None or config.table.split is None:
        stated["splits"] = plain(config.splits)
    return stated


def _unlike_default(value: Any) -> dict[str, Any]:
    """Return the fields of settings that differ from their defaults, as plain values."""
    kept = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if own != default:
            kept[field.name] = _plain_unlike_default(own)
    return kept


def _plain_unlike_default(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _unlike_default(value)
    if isinstance(value, Mapping):
        return {key: _plain_unlike_default(item) for key, item in value.items()}
    return plain(value)


def _reasons(choices: tuple[Choice, ...]) -> Mapping[str, list[str]]:
    """Return the reasons for what was chosen within each of the federation's keys."""
    reasons = defaultdict(list)
    for choice in choices:
        whole, _, key = choice.key.rpartition(".")
        reasons[whole].append(f"{key}: {choice.why}")
    return reasons


def _line(key: str, value: Any, why: Sequence[str] = (), *, indent: int = 0) -> Iterator[str]:
    """Yield a key and its value on one line, if it is short enough, with a comment beside or above.

    Longer mappings get a line for each of their keys.
    """
    margin = " " * indent
    text = margin + write_entry(key, value)
    beside = f"{text} # {'; '.join(why)}" if why else text
    if len(beside) <= WIDTH:
        yield beside
        return
    yield from (f"{margin}# {reason}" for reason in why)
    if len(text) <= WIDTH or not isinstance(value, Mapping):
        yield text
        return
    yield f"{margin}{write_entry(key, {}).removesuffix(' {}')}"
    for inner, own in value.items():
        yield from _line(inner, own, indent=indent + 2)
