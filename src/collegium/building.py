"""Makes what a configuration names: algorithms, adapters and codecs."""

from pathlib import Path

from collegium.adaptation.base import Adapter
from collegium.algorithm import Algorithm
from collegium.config import SCHEMA, AdapterConfig, AlgorithmConfig, ExperimentConfig, default_label
from collegium.registry import load_adapter, load_algorithm, load_codec
from collegium.wire import Coding
from collegium.yamlfile import Place, Source


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


def build_adapter(config: AdapterConfig) -> Adapter:
    """Make the adapter that a configuration names.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    source = Source(Place(f"adapter {config.label!r}", Path.cwd()))
    kind = load_adapter(config.name)
    title = default_label(config.name)
    adapter = SCHEMA.build(kind, config.params, ("adapter",), source, title=title)
    source.check()
    return adapter


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
        side: SCHEMA.build_named(load_codec, codec.to_dict(), ("codec", side), source)[1]
        for side, codec in {"up": asked.up, "down": asked.down}.items()
        if codec is not None
    }
    source.check()
    return Coding(**built)
