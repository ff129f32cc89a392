"""What the server tells a site of an experiment, and what a site checks before it takes part.

A description holds settings and names only: no path, no code, no address of another site.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from collegium import __version__
from collegium.core.failures import known_error
from collegium.diagnostics.assessment.survey import Assessment
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import ExperimentConfig, decisive
from collegium.experiment.config.registry import (
    ADAPTERS,
    ALGORITHMS,
    CODECS,
    Registry,
    bare_name,
)
from collegium.experiment.config.schema import digest_of
from collegium.experiment.grid import variations_of


def describe(config: ExperimentConfig, survey: Assessment | None = None) -> dict[str, Any]:
    """Return what a site is told of an experiment.

    Args:
        config: the experiment, as its server reads it; of its sites only the names are told.
        survey: what the sites are asked instead of training.

    Raises:
        ConfigError: it uses a class or a network from a file, which cannot travel.
    """
    if ".py:" in config.model.name or (survey is not None and survey.encoder):
        raise ConfigError(
            "a network of your own stands in a file, and no code travels to the sites; choose one "
            "of 'collegium list models', and no --encoder"
        )
    settings = decisive(config)
    federation = settings["federation"]
    federation["sites"] = {site: {"remote": True} for site in sorted(federation["sites"])}
    if federation["public"]:
        federation["public"] = {"remote": True}
    settings["engine"] = {"threads": config.engine.threads}
    kinds = {
        f"{registry.word} {name}": _sources(registry, name) for registry, name in _names(config)
    }
    asked = {} if survey is None else {"survey": survey.hyperparameters()}
    return {
        **asked,
        "settings": settings,
        "collegium": __version__,
        "torch": torch.__version__.partition("+")[0],
        "sources": dict(sorted(kinds.items())),
    }


def digest(description: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits by which a site's operator accepts an experiment.

    Args:
        description: see `describe`.
    """
    return digest_of(description)


def check_versions(description: Mapping[str, Any], methods: Collection[str]) -> None:
    """Check that this site runs the very code that the server means; before anything is imported.

    Args:
        description: see `describe`.
        methods: names of the form `package.module:name` that the site's operator permits.

    Raises:
        ConfigError: a version or a source differs, or a name is not permitted.
    """
    if description["collegium"] != __version__:
        theirs = str(description["collegium"])
        raise known_error("other_version", package="Collegium", theirs=theirs, own=__version__)
    own_torch = torch.__version__.partition("+")[0]
    if description["torch"] != own_torch:
        theirs = str(description["torch"])
        raise known_error("other_version", package="torch", theirs=theirs, own=own_torch)
    for place in _places([description["settings"], description.get("survey")]):
        if bare_name(place) not in methods:
            raise known_error("other_package", place=place)
    registries = {registry.word: registry for registry in (ALGORITHMS, ADAPTERS, CODECS)}
    for key, theirs in description["sources"].items():
        word, _, name = str(key).partition(" ")
        base = bare_name(name)
        if word not in registries or (base not in registries[word].names() and base not in methods):
            raise known_error("method_missing", method=str(key))
        if _sources(registries[word], name) != theirs:
            raise known_error("other_code", method=str(key))


def _places(settings: Any) -> Iterator[str]:
    """Yield what settings could have imported: whatever is written ``place:name``, in any form.

    The words of the federation are classes, columns and layouts, and none of them is imported.
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _places(str(key))
            if str(key).partition(".")[0] != "federation":
                yield from _places(value)
    elif isinstance(settings, list | tuple):
        for item in settings:
            yield from _places(item)
    elif ":" in str(settings):
        yield str(settings)


def _names(config: ExperimentConfig) -> Iterator[tuple[Registry[Any], str]]:
    """Yield every class that an experiment names."""
    for settings in variations_of(config).values():
        for algorithm in settings.algorithms:
            yield ALGORITHMS, algorithm.name
            for adapter in algorithm.adapters or ():
                yield ADAPTERS, adapter.name
            yield from ((CODECS, name) for name in _codec_names(algorithm.codec))
        for adapter in settings.adapters:
            yield ADAPTERS, adapter.name
        yield from ((CODECS, name) for name in _codec_names(settings.codec))


def _codec_names(codecs: Any) -> list[str]:
    """Return the names of codecs in a setting."""
    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, Mapping):
            found.extend(str(value[key]) for key in ("name", "then") if value.get(key))
            for item in value.values():
                look(item)

    look(codecs.to_dict() if codecs is not None else {})
    return found


def _sources(registry: Registry[Any], name: str) -> str:
    """Return a digest of the source files of a class and of those that it derives from."""
    if ".py:" in name:
        raise ConfigError(
            f"the {registry.word} {name!r} stands in a file, and no code travels to the sites; "
            f"make it a package, install it everywhere, and write package.module:Class"
        )
    standard = Path(inspect.__file__).parent
    modules = {kind.__module__ for kind in registry.load(name).__mro__}
    files = {Path(getattr(sys.modules[module], "__file__", None) or "") for module in modules}
    mine = sorted(file for file in files if file.name and file.parent != standard)
    return hashlib.blake2b(b"".join(map(Path.read_bytes, mine)), digest_size=8).hexdigest()
