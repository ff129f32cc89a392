"""Builds what a configuration names: networks, algorithms, adapters, codecs and tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from collegium.adaptation.base import Adapter
from collegium.core.algorithm import Algorithm, NetworkBuilder
from collegium.errors import CollegiumError, ConfigError
from collegium.experiment.config.experiment import (
    AdapterConfig,
    AlgorithmConfig,
    ExperimentConfig,
    NamedPart,
    default_label,
)
from collegium.experiment.config.named_parts import build_named
from collegium.experiment.config.registry import ADAPTERS, ALGORITHMS, CODECS, Registry
from collegium.experiment.config.schema import parse
from collegium.experiment.config.yaml_file import Place, Source, read_yaml
from collegium.models.factory import build_model, parameters_of
from collegium.tasks import ClassificationTask, SegmentationTask, Task
from collegium.tasks.segmentation import DEFAULT_METRICS

if TYPE_CHECKING:
    from torch import nn

    from collegium.compression.session.groups import Codecs

T = TypeVar("T")


@dataclass(frozen=True)
class ConfiguredNetwork:
    """Builds the network that an experiment configures.

    Attributes:
        name: The model's name.
        params: Its parameters.
        features: The number of features of a table whose scaling is part of the network; None: the
            network scales nothing.
    """

    name: str
    params: Mapping[str, Any]
    features: int | None = None

    def __call__(self) -> nn.Module:
        """Return a new network, with weights drawn from torch's generator.

        Raises:
            ConfigError: It cannot be built.
        """
        try:
            module = build_model(self.name, **self.params)
        except CollegiumError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the model {self.name!r} cannot be built from {dict(self.params)} ({reason}); "
                f"correct what stands under model"
            ) from error
        if self.features is None:
            return module
        from collegium.models.standardised import Standardised

        return Standardised(module, self.features)


def network_of(config: ExperimentConfig) -> ConfiguredNetwork:
    """Return what builds the network of an experiment, before an algorithm extends it.

    What the data decide and the configuration leaves open is filled in: the channels or features
    that go in, and the classes that come out.

    Raises:
        ConfigError: There is no such model.
    """
    model, federation = config.model, config.federation
    outputs, table = federation.task.channels, federation.table
    known: dict[str, Any] = {"out_channels": outputs, "out_features": outputs}
    if table is not None:
        known |= {"in_features": table.features, "groups": table.groups}
    elif federation.image.inputs is not None:
        known["in_channels"] = federation.image.inputs * (2 * federation.sampling.neighbours + 1)
    taken = parameters_of(model.name)
    filled = {key: value for key, value in known.items() if key in taken}
    scaled = table is not None and table.scale == "federation"
    features = known["in_features"] if scaled else None
    return ConfiguredNetwork(model.name, {**filled, **model.params}, features)


def build_extended_network(model: Mapping[str, Any], algorithm: Mapping[str, Any]) -> nn.Module:
    """Return a network with what an algorithm adds to it, as bundles name it.

    Args:
        model: The model's name and its parameters.
        algorithm: The algorithm's name and its hyper-parameters.

    Raises:
        ConfigError: There is no such model or algorithm, or the network cannot be built.
    """
    params, own = dict(model), dict(algorithm)
    network = ConfiguredNetwork(params.pop("name"), params)
    return NetworkBuilder(network, build_algorithm(AlgorithmConfig(own.pop("name"), own)))()


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm that a configuration names.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    return _build(ALGORITHMS, config)


def algorithm_at(config: AlgorithmConfig, site: str) -> AlgorithmConfig:
    """Return the configuration of an algorithm as it is at one site; see `Algorithm.at_site`.

    Args:
        config: The algorithm.
        site: The site's name.
    """
    method = build_algorithm(config)
    own = method.at_site(site)
    return config if own == method else replace(config, params=own.hyperparameters())


def build_adapter(config: AdapterConfig) -> Adapter:
    """Return the adapter that a configuration names.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    return _build(ADAPTERS, config)


def _build(registry: Registry[T], config: NamedPart) -> T:
    source = Source(Place(f"{registry.word} {config.label!r}", Path.cwd()))
    kind, title = registry.load(config.name), default_label(config.name)
    built = parse(kind, config.params, (registry.word,), source, title=title)
    source.raise_problems()
    assert built is not None
    return built


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Read hyper-parameters from a command line.

    Args:
        texts: `key=value` each, the value read as YAML.

    Raises:
        ConfigError: A text is not written so.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text!r} is no hyper-parameter; write key=value, e.g. lam=0.1")
        settings[key], _ = read_yaml(value, text, Path.cwd())
    return settings


def adapters_of(config: ExperimentConfig, algorithm: AlgorithmConfig) -> tuple[AdapterConfig, ...]:
    """Return the adapters of an algorithm: its own or, without any, the experiment's.

    Args:
        config: The experiment.
        algorithm: One of its algorithms.
    """
    return config.adapters if algorithm.adapters is None else algorithm.adapters


def build_codecs(config: ExperimentConfig, algorithm: AlgorithmConfig) -> Codecs:
    """Return the codecs with which an algorithm of an experiment runs.

    Args:
        config: The experiment.
        algorithm: One of its algorithms.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    from collegium.compression.session.groups import Codecs

    source = Source(Place(f"codecs of {algorithm.label!r}", Path.cwd()))
    chosen = config.codec if algorithm.codec is None else algorithm.codec
    built = {
        side: build_named(CODECS.load, codec.to_dict(), ("codec", side), source)[1]
        for side, codec in {"up": chosen.up, "down": chosen.down}.items()
        if codec is not None
    }
    source.raise_problems()
    return Codecs(**built)


def task_of(config: ExperimentConfig) -> Task:
    """Return the task that the configuration describes."""
    kind, loss = config.federation.task, config.loss
    if kind.name == "classification":
        return ClassificationTask(
            kind.classes, loss or "ce", weights=kind.weights, metric=kind.metric or "accuracy",
            metrics=kind.metrics, least_sensitivity=kind.least_sensitivity,
            prevalence=kind.prevalence, calibration_bins=kind.calibration_bins,
        )  # fmt: skip
    inference, metric = config.inference, kind.metric or "dice"
    first = () if metric in DEFAULT_METRICS else (metric,)
    metrics = dict.fromkeys((*first, *DEFAULT_METRICS, *kind.metrics))
    return SegmentationTask(
        kind.classes, loss or "dice_ce", window=inference.window, overlap=inference.overlap,
        batch_size=inference.batch_size, metric=metric, metrics=tuple(metrics),
        regions=kind.regions, exclusion=kind.exclusion, exclusion_form=kind.exclusion_form,
        surface_tolerance=kind.surface_tolerance, lesion_overlap=kind.lesion_overlap,
    )  # fmt: skip
