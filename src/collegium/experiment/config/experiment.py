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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from collegium.compression.session import CodecConfig, CodingConfig
from collegium.data.federation import FederationConfig, sites_of
from collegium.experiment.config import schema, yamlfile
from collegium.experiment.config.overrides import (
    normalise,
    override,
    read_federation,
    settle_federation,
)
from collegium.experiment.config.recipes import RECIPES, fill_in
from collegium.experiment.config.registry import ADAPTERS, ALGORITHMS, CODECS
from collegium.experiment.config.schema import (
    BROKEN,
    FRACTION,
    POSITIVE,
    Schema,
    at_least,
    each,
    must,
    named,
)
from collegium.experiment.config.yamlfile import KeyPath, Place, Source
from collegium.models import MODELS
from collegium.runtime.engines import EngineConfig
from collegium.training.loop import TrainingConfig

RESERVED = re.compile(r"average|disparity|global|site sd|worst site|mean|cluster-\d.*")
"""What stands beside sites' names in tables and folders, so that no site can be called so."""


@dataclass(frozen=True)
class ModelConfig:
    """The network: its name in the model factory and the factory's parameters."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AdapterConfig:
    """One way to adapt the models to a site outside; `name`, `params` and `label` as below."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or default_label(self.name))


@dataclass(frozen=True)
class AlgorithmConfig:
    """One algorithm of an experiment.

    Attributes:
        name: A built-in name, `file.py:Class` or `package.module:Class`.
        params: Its hyper-parameters.
        label: Names its folder and its rows in the results; by default the name.
        codec: Replaces the codecs of the experiment; None: those are used.
        adapters: Replace the adapters of the experiment; None: those are used.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    codec: CodingConfig | None = None
    adapters: tuple[AdapterConfig, ...] | None = None

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
class TrackingConfig:
    """Where a run is tracked; see docs/tracking.md.

    Attributes:
        uri: MLflow's tracking URI; None: a database in the run's own folder.
        experiment: The MLflow experiment; None: one with the name of the run.
    """

    name: Literal["mlflow"] = "mlflow"
    uri: str | None = None
    experiment: str | None = None


@dataclass(frozen=True)
class ExperimentConfig:
    """Everything that an experiment is.

    A file may also name a ``recipe``, which fills in what it does not say; see
    `collegium.experiment.config.recipes`.

    Attributes:
        protocol: "inside": all sites but `federation.outside` train, and the adapters are scored on
            those outside. "leave-one-site-out": the same with each site outside in turn.
        adapters: How the models are adapted to sites outside, each scored on all cases there.
        variations: Settings to run apart, by name: keys of this file and their values, such as
            `{2 epochs: {training.local_epochs: 2}}`. Without one: the settings as they are.
        loss: Of a segmentation "dice_ce" (the default), "dice" or "ce"; of a classification "ce"
            (the default) or "focal".
        output: The run's folder, relative to the current folder; by default `runs/<name>`.
    """

    name: str
    federation: FederationConfig
    model: ModelConfig
    algorithms: tuple[AlgorithmConfig, ...]
    rounds: int
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seeds: tuple[int, ...] = (0,)
    loss: Literal["dice_ce", "dice", "ce", "focal"] | None = None
    inference: InferenceConfig = InferenceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = field(default_factory=EngineConfig)
    on_failure: Literal["fail", "skip"] = "fail"
    codec: CodingConfig = field(default_factory=CodingConfig)
    protocol: Literal["inside", "leave-one-site-out"] = "inside"
    adapters: tuple[AdapterConfig, ...] = ()
    variations: dict[str, dict[str, Any]] = field(default_factory=dict)
    tracking: TrackingConfig | None = None
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
    for text in overrides:
        override(data, text, source)
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
        overrides: As for `load_config`. Their keys start with `federation.`, which may be left out
            for a federation file; others would go unused and are refused.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    keys = [key.name for key in fields(ExperimentConfig)]
    data, source = read_federation(Path(path), overrides, keys)
    _fill_recipe(data, source)
    federation = SCHEMA.build(FederationConfig, data["federation"], ("federation",), source)
    source.check()
    return federation


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Give the mapping of lists, texts, numbers and mappings that `parse_config` reads back."""
    data: dict[str, Any] = schema.plain(config)
    data["model"] = {"name": config.model.name, **data["model"]["params"]}
    data["codec"] = config.codec.to_dict()
    data["adapters"] = _plain_adapters(config.adapters)
    data["algorithms"] = [
        {
            "name": algorithm.name,
            "label": algorithm.label,
            **({} if algorithm.codec is None else {"codec": algorithm.codec.to_dict()}),
            **(
                {}
                if algorithm.adapters is None
                else {"adapters": _plain_adapters(algorithm.adapters)}
            ),
            **schema.plain(algorithm.params),
        }
        for algorithm in config.algorithms
    ]
    return data


def _plain_adapters(adapters: Sequence[AdapterConfig]) -> list[dict[str, Any]]:
    return [{"name": a.name, "label": a.label, **schema.plain(a.params)} for a in adapters]


def to_yaml(config: ExperimentConfig) -> str:
    """Write a configuration as YAML, every default filled in."""
    return yamlfile.write_yaml(to_dict(config))


def digest(config: ExperimentConfig) -> str:
    """Give 32 hexadecimal digits that change with whatever determines the numbers of a run."""
    canonical = json.dumps(decisive(config), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def difference(
    old: ExperimentConfig | Mapping[str, Any], new: ExperimentConfig | Mapping[str, Any]
) -> list[str]:
    """Name each key by which two configurations would give other numbers, with both values.

    Args:
        old: How a run was made: a configuration, or what `to_dict` gave.
        new: How it is asked for now.
    """
    then, now = schema.flat(decisive(old)), schema.flat(decisive(new))
    return [
        f"{key}={then.get(key, 'nothing')}, now {now.get(key, 'nothing')}"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]


def decisive(config: ExperimentConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Give the mapping of what determines the numbers; where data and results lie does not."""
    data = to_dict(config) if isinstance(config, ExperimentConfig) else schema.plain(config)
    for key in ("output", "tracking"):
        data.pop(key, None)
    data["federation"] = {k: v for k, v in data.get("federation", {}).items() if k != "root"}
    engine = data.get("engine", {})
    return data | {"engine": {k: v for k, v in engine.items() if k not in ("workers", "jobs")}}


def _experiment(data: dict[str, Any], source: Source) -> ExperimentConfig:
    normalise(data, source)
    settle_federation(data, source)
    _fill_recipe(data, source)
    config = SCHEMA.build(ExperimentConfig, data, (), source)
    if config is not BROKEN:
        _check_names(config, source)
    source.check()
    return config


def _fill_recipe(data: dict[str, Any], source: Source) -> None:
    recipe = data.pop("recipe", None)
    if recipe is not None and recipe not in RECIPES:
        source.complain(("recipe",), schema.unknown("recipe", str(recipe), list(RECIPES)))
    elif recipe is not None:
        fill_in(data, recipe)


def _check_names(config: ExperimentConfig, source: Source) -> None:
    """Check what becomes the name of a folder, and that there is somebody to train."""
    names: dict[KeyPath, str] = {("name",): config.name}
    names |= {("federation", "sites", site): site for site in config.federation.sites}
    names |= {("variations", variation): variation for variation in config.variations}
    lists: dict[KeyPath, Sequence[AlgorithmConfig | AdapterConfig]] = {
        ("algorithms",): config.algorithms,
        ("adapters",): config.adapters,
    }
    for number, algorithm in enumerate(config.algorithms):
        lists["algorithms", str(number), "adapters"] = algorithm.adapters or ()
    for path, entries in lists.items():
        labels = [entry.label for entry in entries]
        for index, label in enumerate(labels):
            here = (*path, str(index), "label")
            names[here] = label
            if label in labels[:index]:
                source.complain(here, f"{label!r} is there twice; give each a label of its own")
    for site in config.federation.sites:
        if RESERVED.fullmatch(site.lower()):
            here = ("federation", "sites", site)
            source.complain(here, f"{site!r} is a word of tables or models; choose another name")
    for path, name in names.items():
        if not re.fullmatch(r"\w[\w .+-]*", name):
            source.complain(path, f"{name!r} cannot name a folder; use letters, digits, - and _")
    inside = len(sites_of(config.federation))
    if not inside:
        source.complain(("federation", "sites"), "no site is left to train on; add one")
    if inside == 1 and config.protocol == "leave-one-site-out":
        source.complain(("protocol",), "leaving one site out needs two sites or more")


def _read_model(value: Any, path: KeyPath, source: Source) -> ModelConfig:
    name, params = schema.name_and_rest(value, path, source)
    if name and ":" not in name and name not in MODELS:
        source.complain((*path, "name"), schema.unknown(f"model {name!r}", name, list(MODELS)))
        return BROKEN  # type: ignore[no-any-return]
    return ModelConfig(name, params) if name else BROKEN


def _read_algorithm(value: Any, path: KeyPath, source: Source) -> AlgorithmConfig:
    rest = dict(named(value)) if isinstance(value, str | Mapping) else {}
    own, label = rest.pop("codec", None), rest.pop("label", "")
    listed = rest.pop("adapters", None)
    name, built = SCHEMA.build_named(ALGORITHMS.load, rest or value, path, source)
    where = (*path, "codec")
    codec = None if own is None else SCHEMA.build(CodingConfig, own, where, source)
    if not isinstance(label, str):
        source.complain((*path, "label"), f"should be text, not {yamlfile.short(label)}")
    adapters = None if listed is None else _read_adapters(listed, (*path, "adapters"), source)
    if BROKEN in (built, codec, adapters) or not isinstance(label, str):
        return BROKEN  # type: ignore[no-any-return]
    params = schema.plain(built.hyperparameters())
    return AlgorithmConfig(name, params, label, codec, adapters)


def _read_adapters(value: Any, path: KeyPath, source: Source) -> tuple[AdapterConfig, ...]:
    if not isinstance(value, list):
        source.complain(path, f"should be a list, not {yamlfile.short(value)}")
        return BROKEN  # type: ignore[no-any-return]
    read = [_read_adapter(entry, (*path, str(i)), source) for i, entry in enumerate(value)]
    return BROKEN if BROKEN in read else tuple(read)


def _read_adapter(value: Any, path: KeyPath, source: Source) -> AdapterConfig:
    rest = dict(named(value)) if isinstance(value, str | Mapping) else {}
    label = rest.pop("label", "")
    name, built = SCHEMA.build_named(ADAPTERS.load, rest or value, path, source)
    if not isinstance(label, str):
        source.complain((*path, "label"), f"should be text, not {yamlfile.short(label)}")
    if built is BROKEN or not isinstance(label, str):
        return BROKEN  # type: ignore[no-any-return]
    return AdapterConfig(name, schema.plain(built.hyperparameters()), label)


def _read_codec(value: Any, path: KeyPath, source: Source) -> CodecConfig:
    name, built = SCHEMA.build_named(CODECS.load, value, path, source)
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
    readers={
        ModelConfig: _read_model,
        AlgorithmConfig: _read_algorithm,
        AdapterConfig: _read_adapter,
        CodecConfig: _read_codec,
    },
)
"""What every part of an experiment file has to satisfy."""
