"""The parts of an experiment that are a name and parameters: model, algorithms, adapters, codecs.

In a file their parameters stand beside the name, and a bare name will do:
``{name: ditto, lam: 0.5}`` or ``ditto``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collegium.core.text import short, unknown_word
from collegium.errors import ConfigError
from collegium.experiment.config.registry import ADAPTERS, ALGORITHMS, CODECS
from collegium.experiment.config.schema import parse, plain
from collegium.experiment.config.yaml_file import KeyPath, Source
from collegium.models.factory import MODELS, parameter_problems

_REFUSED: dict[str, Any] = {"name": "refused", "params": {}}
"""Stands for a part whose problems are known, so that the rest of the file can be checked."""


def named(value: Any) -> Any:
    """Return a bare name as the mapping that it stands for."""
    return {"name": value} if isinstance(value, str) else value


def expand_short_forms(data: dict[str, Any], source: Source) -> None:
    """Write `algorithm` as a list of one, and bare names as mappings, in place.

    Args:
        data: The mapping of an experiment.
        source: The origin of the data, which collects the problems.
    """
    if "algorithm" in data and "algorithms" in data:
        source.add_problem(("algorithm",), "give either algorithm or algorithms, not both")
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
            holder["codec"] = _both_directions(holder["codec"])
        if isinstance(holder, dict) and isinstance(holder.get("adapters"), list):
            holder["adapters"] = [named(adapter) for adapter in holder["adapters"]]


def _both_directions(codec: Any) -> Any:
    """Return a bare name as the codec up, null as no codec, and bare names below as mappings."""
    if codec is None or isinstance(codec, str):
        codec = {"up": codec}
    return {k: named(v) for k, v in codec.items()} if isinstance(codec, dict) else codec


def separate_params(data: dict[str, Any], source: Source) -> None:
    """Check the parameters of every named part, and write them below ``params``, in place.

    Defaults of algorithms, adapters and codecs are filled in.

    Args:
        data: The mapping of an experiment without short forms.
        source: The origin of the data, which collects the problems.
    """
    if "model" in data:
        data["model"] = _model(data["model"], source)
    _codecs_and_adapters(data, (), source)
    if isinstance(data.get("algorithms"), list):
        data["algorithms"] = [
            _algorithm(algorithm, ("algorithms", str(index)), source)
            for index, algorithm in enumerate(data["algorithms"])
        ]


def build_named(
    load: Callable[[str], Any], value: Any, path: KeyPath, source: Source
) -> tuple[str, Any]:
    """Build an object from the mapping of its class's name and its parameters.

    Args:
        load: Returns the class of a name, or raises a `ConfigError`.
        value: The mapping.
        path: The path to it.
        source: The origin of the data, which collects the problems.

    Returns:
        The name, and the instance or, after a problem, None.
    """
    name, params = _name_and_params(value, path, source)
    try:
        kind = load(name) if name else None
    except ConfigError as error:
        source.add_problem((*path, "name"), str(error))
        kind = None
    title = name.rpartition(":")[2]
    return name, None if kind is None else parse(kind, params, path, source, title=title)


def _name_and_params(value: Any, path: KeyPath, source: Source) -> tuple[str, dict[str, Any]]:
    """Return the name, a path in it made absolute, or "" after a problem; and the rest."""
    params = dict(value) if isinstance(value, Mapping) else {}
    name = params.pop("name", None)
    if not isinstance(name, str) or not name:
        source.add_problem(path, f"needs a name, but is {short(value)}")
        return "", params
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        base = source.place((*path, "name")).base
        name = f"{(base / Path(file).expanduser()).resolve()}:{attribute}"
    return name, params


def _model(value: Any, source: Source) -> dict[str, Any]:
    name, params = _name_and_params(value, ("model",), source)
    if name and ":" not in name and name not in MODELS:
        problem = unknown_word(f"model {name!r}", name, list(MODELS))
        source.add_problem(("model", "name"), problem)
    elif name and ":" not in name and not source.recorded:
        for path, text in parameter_problems(name, params):
            source.add_problem(("model", *map(str, path)), text)
    return {"name": name, "params": params} if name else _REFUSED


def _algorithm(value: Any, path: KeyPath, source: Source) -> dict[str, Any]:
    beside = ("label", "codec", "adapters", "training")
    algorithm = _separated(ALGORITHMS.load, value, path, source, beside)
    _codecs_and_adapters(algorithm, path, source)
    return algorithm


def _codecs_and_adapters(holder: dict[str, Any], path: KeyPath, source: Source) -> None:
    if isinstance(holder.get("codec"), dict):
        holder["codec"] = {
            side: codec
            if codec is None or side not in ("up", "down")
            else _separated(CODECS.load, codec, (*path, "codec", side), source)
            for side, codec in holder["codec"].items()
        }
    if isinstance(holder.get("adapters"), list):
        holder["adapters"] = [
            _separated(ADAPTERS.load, adapter, (*path, "adapters", str(i)), source, ("label",))
            for i, adapter in enumerate(holder["adapters"])
        ]


def _separated(
    load: Callable[[str], Any],
    value: Any,
    path: KeyPath,
    source: Source,
    beside: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return a part with its parameters below ``params``; `beside` names keys that are none."""
    mapping = value if isinstance(value, Mapping) else {}
    own = {key: item for key, item in mapping.items() if key not in beside}
    name, built = build_named(load, own or value, path, source)
    part = _REFUSED
    if built is not None:
        part = {"name": name, "params": plain(built.hyperparameters())}
    return {**part, **{key: mapping[key] for key in beside if key in mapping}}
