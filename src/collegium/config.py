"""The experiment file: YAML in, one frozen `ExperimentConfig` out, every mistake with its line.

YAML becomes a mapping, each override `a.b=value` sets one leaf, and the plain dataclasses of the
parts say which keys there are and what they hold. There is no interpolation, no list of defaults
and no composition: copy a file.
"""

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from collegium import schema, yamlfile
from collegium.algorithm import Algorithm
from collegium.data.federation import FederationConfig, expand_root, sites_of
from collegium.engines import EngineConfig
from collegium.errors import ConfigError
from collegium.models import MODELS
from collegium.registry import load_algorithm, load_codec
from collegium.schema import BROKEN, FRACTION, POSITIVE, Schema, at_least, each, must, named
from collegium.training import TrainingConfig
from collegium.wire import CodecConfig, Coding, CodingConfig
from collegium.yamlfile import KeyPath, Place, Source


@dataclass(frozen=True)
class ModelConfig:
    """The network: its name in the model factory and the factory's parameters."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AlgorithmConfig:
    """One algorithm of an experiment.

    Attributes:
        name: A built-in name, `file.py:Class` or `package.module:Class`.
        params: Its hyper-parameters.
        label: Names its folder and its rows in the results; by default the name.
        codec: Replaces the codecs of the experiment; None: those are used.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    codec: CodingConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or default_label(self.name))


@dataclass(frozen=True)
class EvaluationConfig:
    """When models are scored on validation data: every so many rounds, and after the last."""

    every: int = 1


@dataclass(frozen=True)
class InferenceConfig:
    """The sliding window for whole images; without one they are predicted in one piece."""

    window: tuple[int, ...] | None = None
    overlap: float = 0.25


@dataclass(frozen=True)
class ExperimentConfig:
    """Everything that an experiment is.

    Attributes:
        output: The run's folder, relative to the current folder; by default `runs/<name>`.
    """

    name: str
    federation: FederationConfig
    model: ModelConfig
    algorithms: tuple[AlgorithmConfig, ...]
    rounds: int
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seeds: tuple[int, ...] = (0,)
    loss: Literal["dice_ce", "dice"] = "dice_ce"
    inference: InferenceConfig = InferenceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = field(default_factory=EngineConfig)
    on_failure: Literal["fail", "skip"] = "fail"
    codec: CodingConfig = field(default_factory=CodingConfig)
    output: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", self.output or f"runs/{self.name}")


def default_label(name: str) -> str:
    """Give the label of an algorithm without one: its name, or the class's for `file.py:Class`."""
    return name.rpartition(":")[2]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read an experiment file.

    Args:
        path: The YAML file. Paths in it are relative to its folder, `output` to the current one.
        overrides: `a.b=value` each, the value read as YAML; a path in a value is relative to the
            current folder. `algorithm=x` replaces all algorithms, `algorithms.0.lam=1` sets one
            hyper-parameter.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    data, source = yamlfile.read_yaml_file(Path(path))
    for override in overrides:
        _override(data, override, source)
    return _experiment(data, source)


def parse_config(
    data: Mapping[str, Any], where: str = "configuration", base: Path | None = None
) -> ExperimentConfig:
    """Make an experiment of a mapping, the inverse of `to_dict`.

    Args:
        data: The mapping, as YAML or JSON would give it.
        where: What error messages call it.
        base: The folder that relative paths in it start from; by default the current one.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    return _experiment(copy.deepcopy(dict(data)), Source(Place(where, base or Path.cwd())))


def load_federation(path: str | Path, overrides: Sequence[str] = ()) -> FederationConfig:
    """Read a federation file, or the federation that an experiment file describes or names.

    Args:
        path: The YAML file.
        overrides: As for `load_config`; for both kinds of file their keys start with `federation.`.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    data, inner = yamlfile.read_yaml_file(Path(path))
    source = inner
    if "federation" not in data:
        data, source = {"federation": data}, Source(inner.root)
        source.nest(("federation",), inner)
    for override in overrides:
        _override(data, override, source)
    _settle_federation(data, source)
    federation = SCHEMA.build(FederationConfig, data["federation"], ("federation",), source)
    source.check()
    return federation


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Make the algorithm that a configuration names.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    source = Source(Place(f"algorithm {config.label!r}", Path.cwd()))
    kind = load_algorithm(config.name)
    title = default_label(config.name)
    algorithm = SCHEMA.build(kind, config.params, ("algorithm",), source, title=title)
    source.check()
    return algorithm


def build_coding(config: ExperimentConfig, algorithm: AlgorithmConfig) -> Coding:
    """Make the codecs with which an algorithm of an experiment runs.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    source = Source(Place(f"codecs of {algorithm.label!r}", Path.cwd()))
    asked = config.codec if algorithm.codec is None else algorithm.codec
    built = {
        side: SCHEMA.build_named(load_codec, codec.to_dict(), ("codec", side), source)[1]
        for side, codec in {"up": asked.up, "down": asked.down}.items()
        if codec is not None
    }
    source.check()
    return Coding(**built)


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Give the mapping of lists, texts, numbers and mappings that `parse_config` reads back."""
    data: dict[str, Any] = schema.plain(config)
    data["model"] = {"name": config.model.name, **data["model"]["params"]}
    data["codec"] = config.codec.to_dict()
    data["algorithms"] = [
        {
            "name": algorithm.name,
            "label": algorithm.label,
            **({} if algorithm.codec is None else {"codec": algorithm.codec.to_dict()}),
            **schema.plain(algorithm.params),
        }
        for algorithm in config.algorithms
    ]
    return data


def to_yaml(config: ExperimentConfig) -> str:
    """Write a configuration as YAML, every default filled in."""
    return yamlfile.write_yaml(to_dict(config))


def digest(config: ExperimentConfig) -> str:
    """Give 32 hexadecimal digits that change with whatever determines the numbers of a run."""
    canonical = json.dumps(_decisive(config), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def difference(
    old: ExperimentConfig | Mapping[str, Any], new: ExperimentConfig | Mapping[str, Any]
) -> list[str]:
    """Name each key by which two configurations would give other numbers, with both values.

    Args:
        old: How a run was made: a configuration, or what `to_dict` gave.
        new: How it is asked for now.
    """
    then, now = schema.flat(_decisive(old)), schema.flat(_decisive(new))
    return [
        f"{key}={then.get(key, 'nothing')}, now {now.get(key, 'nothing')}"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]


def _decisive(config: ExperimentConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Keep what determines the numbers; where data and results lie does not."""
    data = to_dict(config) if isinstance(config, ExperimentConfig) else schema.plain(config)
    data.pop("output", None)
    data["federation"] = {k: v for k, v in data.get("federation", {}).items() if k != "root"}
    engine = data.get("engine", {})
    return data | {"engine": {k: v for k, v in engine.items() if k not in ("workers", "jobs")}}


def _normalise(data: dict[str, Any], source: Source) -> None:
    """Write `algorithm` as a list of one, and bare names as mappings."""
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


def _directions(codec: Any) -> Any:
    """Write a bare name as the codec up, nothing as none, and bare names below as mappings."""
    if codec is None or isinstance(codec, str):
        codec = {"up": codec}
    return {k: named(v) for k, v in codec.items()} if isinstance(codec, dict) else codec


def _override(data: dict[str, Any], override: str, source: Source) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"{override!r} is no override; write key=value, e.g. training.lr=0.01")
    place = Place(f"override {override}", Path.cwd())
    value, _ = yamlfile.read_yaml(text, place.text, place.base)
    _normalise(data, source)
    if path in (("algorithm",), ("algorithms",)):
        data.pop("algorithms", None)
        source.renamed = {}
    elif path[0] == "algorithm":
        several = data.setdefault("algorithms", [{}])
        if len(several) != 1:
            example = f"algorithms.0.{'.'.join(path[1:])}"
            raise ConfigError(f"{key}: there are {len(several)} algorithms; say which: {example}")
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


def _settle_federation(data: dict[str, Any], source: Source) -> None:
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


def _experiment(data: dict[str, Any], source: Source) -> ExperimentConfig:
    _normalise(data, source)
    _settle_federation(data, source)
    config = SCHEMA.build(ExperimentConfig, data, (), source)
    if config is not BROKEN:
        _check_names(config, source)
    source.check()
    return config


def _check_names(config: ExperimentConfig, source: Source) -> None:
    """Check what becomes the name of a folder, and that there is somebody to train."""
    names: dict[KeyPath, str] = {("name",): config.name}
    names |= {("federation", "sites", site): site for site in config.federation.sites}
    labels = [algorithm.label for algorithm in config.algorithms]
    for index, label in enumerate(labels):
        path: KeyPath = ("algorithms", str(index), "label")
        names[path] = label
        if label in labels[:index]:
            source.complain(
                path, f"{label!r} is there twice; give each algorithm a label of its own"
            )
    for path, name in names.items():
        if not re.fullmatch(r"\w[\w .+-]*", name):
            source.complain(path, f"{name!r} cannot name a folder; use letters, digits, - and _")
    if not sites_of(config.federation):
        source.complain(("federation", "sites"), "no site is left to train on; add one")


def _read_model(value: Any, path: KeyPath, source: Source) -> ModelConfig:
    name, params = schema.name_and_rest(value, path, source)
    if name and ":" not in name and name not in MODELS:
        source.complain((*path, "name"), schema.unknown(f"model {name!r}", name, list(MODELS)))
        return BROKEN  # type: ignore[no-any-return]
    return ModelConfig(name, params) if name else BROKEN


def _read_algorithm(value: Any, path: KeyPath, source: Source) -> AlgorithmConfig:
    rest = dict(named(value)) if isinstance(value, str | Mapping) else {}
    own, label = rest.pop("codec", None), rest.pop("label", "")
    name, built = SCHEMA.build_named(load_algorithm, rest or value, path, source)
    where = (*path, "codec")
    codec = None if own is None else SCHEMA.build(CodingConfig, own, where, source)
    if not isinstance(label, str):
        source.complain((*path, "label"), f"should be text, not {yamlfile.short(label)}")
    if built is BROKEN or codec is BROKEN or not isinstance(label, str):
        return BROKEN  # type: ignore[no-any-return]
    return AlgorithmConfig(name, schema.plain(built.hyperparameters()), label, codec)


def _read_codec(value: Any, path: KeyPath, source: Source) -> CodecConfig:
    name, built = SCHEMA.build_named(load_codec, value, path, source)
    return BROKEN if built is BROKEN else CodecConfig(name, schema.plain(built.hyperparameters()))


_SEEDS = must(
    lambda seeds: len(seeds) == len(set(seeds)) > 0 <= min(seeds),
    "one or more different whole numbers from 0 on",
)

SCHEMA = Schema(
    rules={
        (ExperimentConfig, "rounds"): at_least(1),
        (ExperimentConfig, "seeds"): _SEEDS,
        (ExperimentConfig, "algorithms"): must(bool, "one or more algorithms"),
        (EvaluationConfig, "every"): at_least(1),
        (EngineConfig, "workers"): at_least(1),
        (EngineConfig, "threads"): at_least(1),
        (EngineConfig, "jobs"): at_least(1),
        (InferenceConfig, "window"): each(at_least(1)),
        (InferenceConfig, "overlap"): FRACTION,
        (TrainingConfig, "lr"): POSITIVE,
        (TrainingConfig, "lr_decay"): POSITIVE,
        (TrainingConfig, "momentum"): FRACTION,
        (TrainingConfig, "weight_decay"): at_least(0),
        (TrainingConfig, "batch_size"): at_least(1),
        (TrainingConfig, "local_epochs"): at_least(1),
        (TrainingConfig, "local_steps"): at_least(1),
        (TrainingConfig, "clip_norm"): POSITIVE,
    },
    readers={ModelConfig: _read_model, AlgorithmConfig: _read_algorithm, CodecConfig: _read_codec},
)
"""What every part of an experiment file has to satisfy."""
