"""What stands beside deployed models: enough of an experiment to use them elsewhere."""

from pathlib import Path
from typing import Any

from collegium.errors import ConfigError
from collegium.experiment.config.experiment import ExperimentConfig, parse_config, to_dict
from collegium.experiment.config.yamlfile import read_yaml_file


def settings_of(config: ExperimentConfig, seed: int) -> dict[str, Any] | None:
    """Return what it takes to use the models of a run elsewhere, and no site and no path.

    Returns:
        An experiment, as far as predictions depend on it; None where its network is made by code
        of the user's own, which does not travel.
    """
    if ":" in config.model.name:
        return None
    whole = to_dict(config)
    whole["model"].pop("weights", None)  # the file of what the models hold
    federation = whole["federation"]
    kept = {key: federation[key] for key in ("name", "task", "image", "table")}
    sampling = {key: federation["sampling"][key] for key in ("crop", "neighbours")}
    return {
        "name": config.name,
        "seeds": [seed],
        "model": whole["model"],
        "inference": whole["inference"],
        "federation": {**kept, "sampling": sampling},
    }


def read_settings(path: Path) -> ExperimentConfig:
    """Read a file of what `settings_of` gives; nothing in it runs code but Collegium's own.

    Raises:
        ConfigError: With one sentence for every problem found.
    """
    data, _ = read_yaml_file(path)
    federation, model = data.get("federation"), data.get("model")
    unknown = data.keys() - {"name", "seeds", "model", "inference", "federation"}
    name = model.get("name") if isinstance(model, dict) else model
    if unknown or not isinstance(federation, dict) or ":" in str(name):
        raise ConfigError(
            f"{path} is not what Collegium writes beside models; copy the folder again, or name "
            f"the experiment that they were trained with by --config"
        )
    site = {"folder" if federation.get("table") is None else "table": "."}
    sites = {"federation": {**federation, "sites": {"none": site}}}
    return parse_config({**data, **sites, "algorithms": ["fedavg"], "rounds": 1}, str(path))
