"""What stands beside deployed models: enough of an experiment to use them elsewhere."""

import json
from pathlib import Path

from collegium.core.files import write_atomically
from collegium.core.seals import KEY, check_seal, seal_json
from collegium.errors import ConfigError
from collegium.experiment.config.building import build_algorithm
from collegium.experiment.config.experiment import (
    AlgorithmConfig,
    ExperimentConfig,
    parse_config,
    to_dict,
)
from collegium.experiment.config.yaml_file import read_yaml_file


def write_settings(
    path: Path, config: ExperimentConfig, algorithm: AlgorithmConfig, seed: int
) -> None:
    """Write what it takes to use the models of a run elsewhere, and no site and no path.

    That is an experiment, as far as predictions depend on it. Nothing is written if the network is
    built or extended by code of the user's own, which does not travel.

    Args:
        path: the file.
        config: the experiment.
        algorithm: the algorithm that trained the models, which may have extended their network.
        seed: of the run.
    """
    if ":" in config.model.name or (extends(algorithm) and ":" in algorithm.name):
        return
    whole = to_dict(config)
    whole["model"].pop("weights", None)  # the file of what the models hold
    federation, added = whole["federation"], {}
    if extends(algorithm):
        added = {"algorithm": {"name": algorithm.name, **algorithm.params}}
    kept = {key: federation[key] for key in ("name", "task", "image", "table")}
    sampling = {key: federation["sampling"][key] for key in ("crop", "neighbours")}
    settings = {
        "name": config.name,
        "seeds": [seed],
        "model": whole["model"],
        "inference": whole["inference"],
        "federation": {**kept, "sampling": sampling},
        **added,
    }
    write_atomically(path, seal_json(json.dumps(settings, indent=1)))


def extends(algorithm: AlgorithmConfig) -> bool:
    """Return whether an algorithm adds layers to the network that it trains."""
    return build_algorithm(algorithm).extends


def read_settings(path: Path) -> ExperimentConfig:
    """Read a file of what `write_settings` writes; nothing in it runs code but Collegium's own.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    data, _ = read_yaml_file(path)
    try:
        check_seal(path.read_bytes())
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged or was edited; copy the folder again, or name the experiment that "
            f"the models were trained with by --config"
        ) from error
    data.pop(KEY, None)
    federation, given = data.get("federation"), [data.get("model"), data.get("algorithm", "fedavg")]
    unknown = data.keys() - {"name", "seeds", "model", "inference", "federation", "algorithm"}
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in given]
    if unknown or not isinstance(federation, dict) or any(":" in str(name) for name in names):
        raise ConfigError(
            f"{path} is not what Collegium writes beside models; copy the folder again, or name "
            f"the experiment that they were trained with by --config"
        )
    site = {"folder" if federation.get("table") is None else "table": "."}
    sites = {"federation": {**federation, "sites": {"none": site}}}
    return parse_config({"algorithm": "fedavg", "rounds": 1, **data, **sites}, str(path))
