"""A tiny experiment on drawn sites."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from collegium.data.phantoms import make_federation
from collegium.experiment.config.experiment import ExperimentConfig, load_config

EXPERIMENT = """\
name: tiny
federation: {federation}
model: {{name: unet, in_channels: 1, channels: [4, 8], num_res_units: 0}}
algorithms: [fedavg, fedbn]
training: {{batch_size: 2, local_steps: 1}}
rounds: 2
output: {output}
"""


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_federation(tmp_path_factory.mktemp("drawn"), 2, cases=10, size=32)


@pytest.fixture
def experiment(tmp_path: Path, drawn: Path) -> Path:
    """The file of an experiment on two sites; its output folder is ``run`` beside it."""
    path = tmp_path / "x.yaml"
    names = {"federation": json.dumps(str(drawn)), "output": json.dumps(str(tmp_path / "run"))}
    path.write_text(EXPERIMENT.format(**names))
    return path


@pytest.fixture
def configure(experiment: Path) -> Callable[..., ExperimentConfig]:
    """The experiment, with some values replaced."""
    return lambda *overrides: load_config(experiment, overrides)
