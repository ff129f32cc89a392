"""Opens the federation of an experiment that is attacked."""

from __future__ import annotations

from collections.abc import Sequence

from collegium.errors import ConfigError
from collegium.experiment.config.experiment import ExperimentConfig
from collegium.experiment.federation import open_configured, stored_splits
from collegium.experiment.preflight import check_engine, check_network, check_setups
from collegium.runtime import process
from collegium.runtime.federation import Federation


def open_attacked(config: ExperimentConfig, sites: Sequence[str]) -> tuple[Federation, list[str]]:
    """Return the federation of an experiment, checked, and the sites that are attacked.

    Args:
        config: the experiment.
        sites: the sites that are attacked; empty: the first.

    Raises:
        ConfigError: the experiment has variations, or there is no such site.
        CollegiumError: in one sentence, whatever else cannot work.
    """
    if config.variations:
        raise ConfigError(
            "an attack is on one setting; set variations={} and what you want of them"
        )
    process.prepare(config.engine.threads)
    check_engine(config)
    opened = open_configured(config, splits=stored_splits(config))
    check_network(config, opened)
    check_setups(config)
    if unknown := sorted(set(sites) - set(opened.names)):
        raise ConfigError(
            f"there is no site {unknown[0]!r} that trains; choose from {', '.join(opened.names)}"
        )
    return opened, [*sites] or opened.names[:1]
