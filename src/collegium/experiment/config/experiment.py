"""The experiment file: YAML in, one frozen `ExperimentConfig` out, every mistake with its line.

YAML becomes a mapping, each override `a.b=value` sets one value in it, and the annotations of the
settings say which keys there are and what they hold. There is no interpolation, no list of defaults
and no composition: copy a file.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from collegium.compression.session.config import CodecsConfig
from collegium.core.settings import (
    Fraction,
    NonNegativeInt,
    Positive,
    PositiveInt,
    from_mapping,
    refusal,
    rule,
    settings,
)
from collegium.core.text import unknown_word
from collegium.data.federation_config import FederationConfig, sites_of
from collegium.errors import ConfigError
from collegium.evaluation.scores import RELEVANT, UNUSABLE
from collegium.experiment.config import schema, yaml_file
from collegium.experiment.config.named_parts import expand_short_forms, separate_params
from collegium.experiment.config.overrides import override, read_federation, resolve_federation
from collegium.experiment.config.recipes import RECIPES, apply_recipe
from collegium.experiment.config.yaml_file import KeyPath, Place, Source
from collegium.experiment.initial_weights import InitialWeights, digest_of_file
from collegium.runtime.distances import Diagnostic
from collegium.runtime.early_stopping import EarlyStopping
from collegium.runtime.engines import EngineConfig
from collegium.runtime.participation import EVERYBODY, Participation, check_home_rounds
from collegium.runtime.secure.config import SecureMean
from collegium.runtime.selection import DEFAULT, Selection
from collegium.training.loop import TrainingConfig, check_warm_up

LEAVE_ONE_SITE_OUT, CROSS_VALIDATION = "leave-one-site-out", "cross-validation"
"""The two protocols with folds, which a plus joins into one that has both."""

RESERVED = re.compile(r"average|disparity|global|site sd|worst site|mean|cluster-\d.*")
"""Names that tables and folders give to other things than sites."""


@settings
class ModelConfig:
    """The network.

    Attributes:
        name: A built-in name, `file.py:factory` or `package.module:factory`.
        params: The parameters of its factory.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@settings
class NamedPart:
    """A class, built in or not, with its hyper-parameters and a label.

    Attributes:
        name: A built-in name, `file.py:Class` or `package.module:Class`.
        params: Its hyper-parameters.
        label: Names its folder and its rows in the results; by default the name.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or default_label(self.name))

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that an experiment file holds, the parameters beside the name."""
        return {"name": self.name, "label": self.label, **schema.plain(self.params)}


@settings
class AdapterConfig(NamedPart):
    """One way to adapt the models to a site outside."""


@settings
class AlgorithmConfig(NamedPart):
    """One algorithm of an experiment.

    Attributes:
        codec: Replaces the codecs of the experiment; None: these are used.
        adapters: Replace the adapters of the experiment; None: these are used.
        training: Keys of the experiment's training, with the values that hold for this algorithm;
            see `with_own_training`.
    """

    codec: CodecsConfig | None = None
    adapters: tuple[AdapterConfig, ...] | None = None
    training: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that an experiment file holds, the parameters beside the name."""
        own: dict[str, Any] = {}
        if self.codec is not None:
            own["codec"] = self.codec.to_dict()
        if self.adapters is not None:
            own["adapters"] = [adapter.to_dict() for adapter in self.adapters]
        if self.training:
            own["training"] = dict(self.training)
        return {**super().to_dict(), **own}


@settings
class EvaluationConfig:
    """The schedule of scores on validation data.

    Attributes:
        every: Models are scored after every so many rounds, and after the last.
    """

    every: PositiveInt = 1


@settings
class ReportConfig:
    """The settings of verdicts; changing them trains nothing again.

    Attributes:
        relevant: The smallest difference of each metric that matters, in its unit. A difference
            that is surely smaller is "no relevant difference". That of `dice` counts for
            `dice_vessel` too, unless that has its own; metrics without one are never called so.
        unusable: The mean score of each metric below which a model is called unusable, or, of
            distances and losses, above which; found as `relevant` is.
    """

    relevant: dict[str, Positive] = field(default_factory=lambda: dict(RELEVANT))
    unusable: dict[str, Positive] = field(default_factory=lambda: dict(UNUSABLE))


@settings
class InferenceConfig:
    """The prediction of whole images.

    Attributes:
        window: Size of the sliding window per spatial axis, in pixels; None: an image is predicted
            in one piece.
        overlap: Share of a window that its neighbour covers too.
        batch_size: Windows or slices in one forward pass. It decides the time, the memory and the
            last bits of a network's outputs.
    """

    window: tuple[PositiveInt, ...] | None = None
    overlap: Fraction = 0.25
    batch_size: PositiveInt = 4


@settings
class TrackingConfig:
    """The tracking of a run; see docs/tracking.md.

    Attributes:
        name: The tool.
        uri: MLflow's tracking URI; None: a database in the run's own folder.
        experiment: The MLflow experiment; None: one with the name of the run.
    """

    name: Literal["mlflow"] = "mlflow"
    uri: str | None = None
    experiment: str | None = None


@settings
class ExperimentConfig:
    """Everything that an experiment is.

    A file may also name a ``recipe``, which fills in what it does not say; see
    `collegium.experiment.config.recipes`.

    Attributes:
        name: Names the run and, by default, its folder.
        federation: The sites, their task and their data.
        model: The network.
        initial_weights: The file from which the common initial model comes; None: the network
            draws its weights by the seed.
        algorithms: The algorithms to compare.
        rounds: How many rounds each of them trains.
        home_rounds: How many of the rounds, the last ones, every site trains its own model in,
            which stays there.
        training: How a client trains, unless an algorithm says otherwise of itself.
        seeds: All algorithms are trained once for each.
        loss: Of a segmentation "dice_ce" (the default), "dice" or "ce"; of a classification "ce"
            (the default) or "focal".
        inference: How whole images are predicted.
        evaluation: When models are scored on validation data.
        selection: Which round's models are tested and used, by validation cases.
        early_stopping: When an algorithm ends before its last round, by validation cases; None:
            all rounds are trained.
        diagnostics: What is recorded in every round beside what a run needs, which changes none of
            its bits. "layer_distance": how far local training moved each layer of the model that a
            site received, see `collegium.runtime.distances.layer_distances`.
        report: What verdicts are made with.
        engine: What carries requests to the clients.
        participation: Who takes part in a round, and what happens if a site does not answer.
        codec: The codecs of messages, unless an algorithm has its own.
        secure_mean: How sites mask what is averaged, so that the server sees the sum alone; None:
            it sees every model. See docs/security.md.
        protocol: "inside": all sites but `federation.outside` train, and the adapters are scored on
            those outside. "leave-one-site-out": the same with each site outside in turn.
            "cross-validation": the patients of each site are divided into `splits.folds`, of which
            each is the test in turn. "leave-one-site-out+cross-validation": both, every fold of the
            patients with each site outside.
        adapters: How the models are adapted to sites outside, each scored on all cases there.
        variations: Settings to run apart, by name: keys of this file and their values, such as
            `{2 epochs: {training.local_epochs: 2}}`. Without one: the settings as they are.
        tracking: Where the run is tracked; None: nowhere.
        output: The run's folder, relative to the current folder; by default `runs/<name>`.
    """

    name: str
    federation: FederationConfig
    model: ModelConfig
    algorithms: Annotated[tuple[AlgorithmConfig, ...], rule(bool, "one or more algorithms")]
    rounds: PositiveInt
    home_rounds: NonNegativeInt = 0
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seeds: Annotated[
        tuple[int, ...],
        rule(
            lambda seeds: len(seeds) == len(set(seeds)) > 0 <= min(seeds),
            "one or more different whole numbers from 0 on",
        ),
    ] = (0,)
    loss: Literal["dice_ce", "dice", "ce", "focal"] | None = None
    inference: InferenceConfig = InferenceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    selection: Selection = DEFAULT
    initial_weights: InitialWeights | None = None
    early_stopping: EarlyStopping | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    report: ReportConfig = ReportConfig()
    engine: EngineConfig = field(default_factory=EngineConfig)
    participation: Participation = EVERYBODY
    codec: CodecsConfig = field(default_factory=CodecsConfig)
    secure_mean: SecureMean | None = None
    protocol: Literal[
        "inside",
        "leave-one-site-out",
        "cross-validation",
        "leave-one-site-out+cross-validation",
    ] = "inside"
    adapters: tuple[AdapterConfig, ...] = ()
    variations: dict[str, dict[str, Any]] = field(default_factory=dict)
    tracking: TrackingConfig | None = None
    output: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", self.output or f"runs/{self.name}")


def default_label(name: str) -> str:
    """Return the label of a part without one: its name, or the class's for `file.py:Class`."""
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
    data, source = yaml_file.read_yaml_file(Path(path))
    for text in overrides:
        override(data, text, source)
    return _experiment(data, source)


def parse_config(
    data: Mapping[str, Any],
    where: str = "configuration",
    base: Path | None = None,
    *,
    recorded: bool = False,
) -> ExperimentConfig:
    """Make an experiment of a mapping, the inverse of `to_dict`.

    Args:
        data: The mapping, as YAML or JSON would give it.
        where: What error messages call it.
        base: The folder that relative paths in it start from; by default the current one.
        recorded: Whether it is the record of a run; see `Source.recorded`.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    source = Source(Place(where, base or Path.cwd()), recorded=recorded)
    return _experiment(copy.deepcopy(dict(data)), source)


def load_federation(path: str | Path, overrides: Sequence[str] = ()) -> FederationConfig:
    """Read a federation file, or the federation that an experiment file describes or names.

    Of an experiment with cross-validation, its splits are those of the first fold.

    Args:
        path: The YAML file.
        overrides: As for `load_config`. Their keys start with `federation.`, which may be left out
            for a federation file; others would go unused and are refused.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    keys = [key.name for key in fields(ExperimentConfig)]
    data, source = read_federation(Path(path), overrides, keys)
    _apply_recipe(data, source)
    federation = schema.parse(FederationConfig, data["federation"], ("federation",), source)
    protocol = str(data.get("protocol", ""))
    if federation is not None:
        _check_fold(protocol, federation, source)
    source.raise_problems()
    assert federation is not None
    if protocol.endswith(CROSS_VALIDATION):
        return replace(federation, splits=replace(federation.splits, fold=1))
    return federation


def with_own_training(config: ExperimentConfig, algorithm: AlgorithmConfig) -> ExperimentConfig:
    """Return an experiment whose training is that of one of its algorithms.

    Args:
        config: The experiment.
        algorithm: The algorithm, whose own keys replace those of the experiment's training.

    Raises:
        ConfigError: Together they are no valid training.
    """
    if not algorithm.training:
        return config
    words = {**schema.plain(config.training), **schema.plain(algorithm.training)}
    training, problems = from_mapping(TrainingConfig, words)
    if training is None:
        raise refusal(TrainingConfig.__name__, problems)
    return replace(config, training=training)


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Return the mapping of lists, texts, numbers and mappings that `parse_config` reads back."""
    data: dict[str, Any] = schema.plain(config)
    data["model"] = {"name": config.model.name, **data["model"]["params"]}
    data["codec"] = config.codec.to_dict()
    data["adapters"] = [adapter.to_dict() for adapter in config.adapters]
    data["algorithms"] = [algorithm.to_dict() for algorithm in config.algorithms]
    return data


def to_yaml(config: ExperimentConfig) -> str:
    """Write a configuration as YAML, every default filled in."""
    return yaml_file.write_yaml(to_dict(config))


def digest(config: ExperimentConfig) -> str:
    """Return 32 hexadecimal digits that change with whatever determines the numbers of a run."""
    return schema.digest_of(decisive(config))


def difference(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """Return each key by which two configurations would give other numbers, with both values.

    Args:
        old: The configuration of a run.
        new: The one that is asked for now.
    """
    then, now = schema.flat(decisive(old)), schema.flat(decisive(new))
    return [
        f"{key}={then.get(key, 'nothing')}, now {now.get(key, 'nothing')}"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]


def decisive(config: ExperimentConfig) -> dict[str, Any]:
    """Return the mapping of what determines the numbers; places of data and results do not."""
    data = to_dict(config)
    del data["output"], data["tracking"], data["report"], data["federation"]["root"]
    for key in ("workers", "jobs", "folder", "deadline", "patience"):
        del data["engine"][key]
    for key in ("on_failure", "min_clients", "retry_seconds"):
        del data["participation"][key]
    if data["initial_weights"]:
        del data["initial_weights"]["file"]  # the digest says which it is
    return data


def _experiment(data: dict[str, Any], source: Source) -> ExperimentConfig:
    expand_short_forms(data, source)
    resolve_federation(data, source)
    _resolve_folder(data, source)
    _resolve_initial_weights(data, source)
    _apply_recipe(data, source)
    separate_params(data, source)
    _check_own_training(data, source)
    config = schema.parse(ExperimentConfig, data, (), source)
    if config is not None and not source.problems:
        _check_names(config, source)
    source.raise_problems()
    assert config is not None
    return config


def _resolve_folder(data: dict[str, Any], source: Source) -> None:
    """Make the folder of start-up kits absolute, in place."""
    engine = data.get("engine")
    folder = engine.get("folder") if isinstance(engine, dict) else None
    if isinstance(engine, dict) and isinstance(folder, str):
        base = source.place(("engine", "folder")).base
        engine["folder"] = str((base / Path(folder).expanduser()).resolve())


def _resolve_initial_weights(data: dict[str, Any], source: Source) -> None:
    """Make the file absolute and note its digest, in place; what a run has recorded stays."""
    path, value = ("initial_weights",), data.get("initial_weights")
    if isinstance(value, str):
        value = data["initial_weights"] = {"file": value}
    if not isinstance(value, dict) or "digest" in value:
        return
    if not isinstance(value.get("file"), str):
        source.add_problem(path, "needs a file")
        return
    file = (source.place((*path, "file")).base / Path(value["file"]).expanduser()).resolve()
    try:
        data["initial_weights"] = {**value, "file": str(file), "digest": digest_of_file(file)}
    except ConfigError as error:
        source.add_problem((*path, "file"), str(error).removeprefix("initial_weights: "))


def _apply_recipe(data: dict[str, Any], source: Source) -> None:
    recipe = data.pop("recipe", None)
    if recipe is not None and recipe not in RECIPES:
        source.add_problem(("recipe",), unknown_word("recipe", str(recipe), list(RECIPES)))
    elif recipe is not None:
        apply_recipe(data, recipe)


def _check_own_training(data: dict[str, Any], source: Source) -> None:
    """Check what algorithms say of their training together with what the experiment says.

    The values are stored, in place, as those of the settings that they are checked by.
    """
    common = data.get("training", {})
    algorithms = data.get("algorithms")
    for index, algorithm in enumerate(algorithms if isinstance(algorithms, list) else ()):
        own, path = algorithm.get("training"), ("algorithms", str(index), "training")
        if not isinstance(own, dict) or not isinstance(common, dict):
            continue  # is a problem of its own
        whole, problems = from_mapping(TrainingConfig, {**common, **own}, title="training")
        for problem in problems:
            if not problem.path or problem.path[0] in own:
                source.add_problem((*path, *map(str, problem.path)), problem.text)
        if whole is not None:
            algorithm["training"] = {key: schema.plain(getattr(whole, key)) for key in own}


def _check_names(config: ExperimentConfig, source: Source) -> None:
    """Check the names that become folders, and that there is a site to train on."""
    names: dict[KeyPath, str] = {("name",): config.name}
    names |= {("federation", "sites", site): site for site in config.federation.sites}
    names |= {("variations", variation): variation for variation in config.variations}
    lists: dict[KeyPath, Sequence[NamedPart]] = {
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
                source.add_problem(here, f"{label!r} is there twice; give each a label of its own")
    for site in config.federation.sites:
        if RESERVED.fullmatch(site.lower()):
            here = ("federation", "sites", site)
            source.add_problem(here, f"{site!r} is a word of tables or models; choose another name")
    for path, name in names.items():
        if not re.fullmatch(r"\w[\w .+-]*", name):
            source.add_problem(path, f"{name!r} cannot name a folder; use letters, digits, - and _")
    _check_rounds(config, source)
    inside = len(sites_of(config.federation))
    if not inside:
        source.add_problem(("federation", "sites"), "no site is left to train on; add one")
    _check_fold(config.protocol, config.federation, source)
    if inside == 1 and config.protocol.startswith(LEAVE_ONE_SITE_OUT):
        source.add_problem(("protocol",), "leaving one site out needs two sites or more")


def _check_fold(protocol: str, federation: FederationConfig, source: Source) -> None:
    """Check that one fold is not chosen where each is taken in turn."""
    if protocol.endswith(CROSS_VALIDATION) and federation.splits.fold:
        here = ("federation", "splits", "fold")
        source.add_problem(here, f"protocol: {protocol} takes each fold in turn; remove it")


def _check_rounds(config: ExperimentConfig, source: Source) -> None:
    """Check what has to be fewer than all rounds."""
    try:
        check_home_rounds(config.home_rounds, config.rounds)
    except ConfigError as error:
        source.add_problem(("home_rounds",), str(error))
    trainings: dict[KeyPath, TrainingConfig] = {("training", "warm_up"): config.training}
    for index, algorithm in enumerate(config.algorithms):
        if "warm_up" in algorithm.training:
            here = ("algorithms", str(index), "training", "warm_up")
            trainings[here] = with_own_training(config, algorithm).training
    for path, training in trainings.items():
        try:
            check_warm_up(training, config.rounds)
        except ConfigError as error:
            source.add_problem(path, str(error))
