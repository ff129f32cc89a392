"""Four drawn sites, and what they tell when they are asked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collegium.core.message import Message
from collegium.core.tensors import Tensors
from collegium.data.phantoms import make_federation
from collegium.experiment.config.experiment import ExperimentConfig, load_config

EXPERIMENT = """\
name: tiny
federation: {federation}
model: {{name: unet, in_channels: 1, channels: [4, 8], num_res_units: 0}}
algorithm: fedavg
rounds: 1
output: {output}
"""


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_federation(tmp_path_factory.mktemp("drawn"), 4, cases=10, size=32)


@pytest.fixture
def experiment(tmp_path: Path, drawn: Path) -> Path:
    """The file of a tiny experiment on four sites; its output folder is ``run`` beside it."""
    path = tmp_path / "x.yaml"
    names = {"federation": json.dumps(str(drawn)), "output": json.dumps(str(tmp_path / "run"))}
    path.write_text(EXPERIMENT.format(**names))
    return path


@pytest.fixture
def configure(experiment: Path) -> Callable[..., ExperimentConfig]:
    """The experiment, with some values replaced."""
    return lambda *overrides: load_config(experiment, overrides)


@pytest.fixture
def replies() -> Callable[..., dict[str, Message]]:
    """What sites tell whose images and labels are shifted by so much."""

    def make(
        *,
        cases: int = 14,
        intensity: Any = None,
        label: Any = None,
        seen: Any = None,
        seed: int = 6,
    ) -> dict[str, Message]:
        rng = np.random.default_rng(seed)
        made = {}
        for site in "ABCD":
            x = rng.normal((intensity or {}).get(site, 0.0), 1.0, cases)
            y = 100 * rng.uniform(1.0, 2.0, cases) + (label or {}).get(site, 0.0)
            rows = rng.normal((seen or {}).get(site, 0.0), 1.0, (cases, 6))
            table = {"cases": cases, "unit": "intensity", "columns": {"1": sorted(x.tolist())}}
            volumes = {"cases": cases, "unit": "mL", "columns": {"1": sorted(y.tolist())}}
            made[site] = Message.of(
                intensity_maxima=table,
                label_volumes=volumes,
                label_histogram={"0": 0.9, "1": 0.1},
                embeddings=Tensors({"cases": torch.tensor(rows, dtype=torch.float32)}),
            )
        return made

    return make
