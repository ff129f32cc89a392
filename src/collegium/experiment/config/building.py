"""Makes what a configuration names: algorithms, adapters and codecs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from collegium.adaptation.base import Adapter
from collegium.compression.session import Coding
from collegium.core.algorithm import Algorithm
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import (
    SCHEMA,
    AdapterConfig,
    AlgorithmConfig,
    ExperimentConfig,
    default_label,
)
from collegium.experiment.config.registry import ADAPTERS, ALGORITHMS, CODECS
from collegium.experiment.config.yamlfile import Place, Source, read_yaml
from collegium.models.factory import build_model, parameters_of
from collegium.models.standardised import Standardised
from collegium.tasks import ClassificationTask, SegmentationTask, Task


def network_of(config: ExperimentConfig) -> Callable[[], nn.Module]:
    """Give what makes an experiment's network.

    What the data decide and the configuration leaves open is filled in: the channels or features
    that go in, and the classes that come out.

    Raises:
        ConfigError: There is no such model.
    """
    model, federation = config.model, config.federation
    outputs = federation.task.channels
    known: dict[str, Any] = {"out_channels": outputs, "out_features": outputs}
    if federation.table is not None:
        known |= {"in_features": federation.table.features, "groups": federation.table.groups}
    elif federation.image.inputs is not None:
        known["in_channels"] = federation.image.inputs * (2 * federation.sampling.neighbours + 1)
    taken = parameters_of(model.name)
    filled = {key: value for key, value in known.items() if key in taken}
    build = partial(build_model, model.name, **{**filled, **model.params})
    if federation.table is None or federation.table.scale != "federation":
        return build
    return partial(_standardised, build, federation.table.features)


def _standardised(build: Callable[[], nn.Module], features: int) -> nn.Module:
    return Standardised(build(), features)


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Make the algorithm that a configuration names.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    source = Source(Place(f"algorithm {config.label!r}", Path.cwd()))
    kind = ALGORITHMS.load(config.name)
    title = default_label(config.name)
    algorithm = SCHEMA.build(kind, config.params, ("algorithm",), source, title=title)
    source.check()
    return algorithm


def build_adapter(config: AdapterConfig) -> Adapter:
    """Make the adapter that a configuration names.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    source = Source(Place(f"adapter {config.label!r}", Path.cwd()))
    kind = ADAPTERS.load(config.name)
    title = default_label(config.name)
    adapter = SCHEMA.build(kind, config.params, ("adapter",), source, title=title)
    source.check()
    return adapter


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Read hyper-parameters from a command line.

    Args:
        texts: `key=value` each, the value read as YAML.

    Raises:
        ConfigError: With one sentence, of the first that is not written so.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is no hyper-parameter; write key=value, e.g. lam=0.1")
        settings[key], _ = read_yaml(value, text, Path.cwd())
    return settings


def adapters_of(config: ExperimentConfig, algorithm: AlgorithmConfig) -> tuple[AdapterConfig, ...]:
    """Give the adapters of an algorithm: its own or, without any, the experiment's."""
    return config.adapters if algorithm.adapters is None else algorithm.adapters


def build_coding(config: ExperimentConfig, algorithm: AlgorithmConfig) -> Coding:
    """Make the codecs with which an algorithm of an experiment runs.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    source = Source(Place(f"codecs of {algorithm.label!r}", Path.cwd()))
    asked = config.codec if algorithm.codec is None else algorithm.codec
    built = {
        side: SCHEMA.build_named(CODECS.load, codec.to_dict(), ("codec", side), source)[1]
        for side, codec in {"up": asked.up, "down": asked.down}.items()
        if codec is not None
    }
    source.check()
    return Coding(**built)


def task_of(config: ExperimentConfig) -> Task:
    """Return the task that the configuration describes."""
    kind, loss = config.federation.task, config.loss
    if kind.name == "classification":
        return ClassificationTask(
            kind.classes, loss or "ce", weights=kind.weights, metric=kind.metric or "accuracy"
        )
    window = config.inference.window
    return SegmentationTask(
        kind.classes, loss or "dice_ce", window=window, overlap=config.inference.overlap,
        metric=kind.metric or "dice", regions=kind.regions,
    )  # fmt: skip
