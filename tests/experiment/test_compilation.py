"""Whether an experiment compiles its network: by a rule, once, and kept."""

import json
import logging
from typing import Any

import pytest
from torch import nn

from collegium.data.phantoms import make_federation
from collegium.errors import CheckpointError, ConfigError
from collegium.experiment.compilation import (
    WORTH_COMPILING,
    decide_compilation,
    gains,
    planned_steps,
)
from collegium.experiment.config.experiment import ExperimentConfig, parse_config
from collegium.experiment.runner import run_experiment

UNET: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 0}
IOP_UNET = {"name": "iop_unet", "in_channels": 1, "base": 2}
MLP = {"name": "mlp", "in_features": 3, "hidden": [4], "out_features": 2}


@pytest.fixture
def phantoms(tmp_path):
    return str(make_federation(tmp_path / "phantoms", 2, cases=4, size=32))


def experiment(federation: str, steps: int | None = 30, **changes: Any) -> ExperimentConfig:
    """Two methods and three seeds, of ten rounds at two sites."""
    training = {"batch_size": 2, "local_steps": steps, **changes.pop("training", {})}
    return parse_config({
        "name": "tiny", "federation": federation, "model": UNET, "training": training,
        "algorithms": ["fedavg", "fedbn"], "seeds": [0, 1, 2], "rounds": 10, **changes,
    })  # fmt: skip


@pytest.fixture
def without_compiler():
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/there/is/none",)}):
        yield


def compiles(config: ExperimentConfig, begun: ExperimentConfig | None = None) -> str:
    return decide_compilation(config, begun).training.compile


def test_the_steps_of_all_jobs_rounds_and_sites_count(phantoms):
    assert planned_steps(experiment(phantoms)) == 2 * 3 * 10 * 2 * 30
    assert planned_steps(experiment(phantoms, participation={"clients_per_round": 1})) == 1800
    assert planned_steps(experiment(phantoms, protocol="leave-one-site-out")) == 3600
    assert planned_steps(experiment(phantoms, steps=None)) == 0
    sweep = {"few": {"training.local_steps": 10}, "many": {"training.local_steps": 20}}
    assert planned_steps(experiment(phantoms, variations=sweep)) == 3600


def test_auto_compiles_long_experiments_with_networks_that_gain(phantoms, monkeypatch):
    monkeypatch.setattr("collegium.experiment.compilation.compiler_problem", lambda device: "")
    enough = WORTH_COMPILING // 120 + 1
    assert compiles(experiment(phantoms, enough - 1)) == "off"
    assert compiles(experiment(phantoms, enough)) == "on"
    for model in (MLP, IOP_UNET):
        assert compiles(experiment(phantoms, 10 * enough, model=model)) == "off"


def test_on_a_gpu_all_networks_with_convolutions_count_as_quicker():
    convolutions = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    for device, expected in (("cuda", True), ("cuda:1", True), ("cpu", False)):
        assert gains(convolutions, device) is expected
        assert gains(convolutions.append(nn.PReLU()), device)
        del convolutions[-1]
        assert not gains(nn.Sequential(nn.Linear(2, 2), nn.PReLU()), device)


@pytest.mark.parametrize("choice", ["on", "off"])
def test_a_run_keeps_what_it_began_with(phantoms, choice):
    begun = experiment(phantoms, training={"compile": choice})
    assert compiles(experiment(phantoms, 10_000 if choice == "off" else 1), begun) == choice


def test_without_a_compiler_auto_is_off_in_a_sentence(phantoms, without_compiler, caplog):
    with caplog.at_level(logging.WARNING, logger="collegium"):
        assert compiles(experiment(phantoms, 10_000)) == "off"
        assert compiles(experiment(phantoms, 1)) == "off"
    assert [record.getMessage() for record in caplog.records] == [
        "training is not compiled, which would be faster: there is no C++ compiler such as g++; "
        "install it before a run begins"
    ]


def test_without_a_compiler_a_compiled_run_does_not_go_on_in_silence(phantoms, without_compiler):
    begun = experiment(phantoms, training={"compile": "on"})
    for config in (experiment(phantoms), begun):
        with pytest.raises(ConfigError, match="this machine cannot compile: there is no C\\+\\+"):
            decide_compilation(config, begun)
        assert decide_compilation(config, begun, finished=True) == begun


def test_the_record_of_a_run_holds_what_was_decided(phantoms, tmp_path, monkeypatch):
    monkeypatch.setenv("COLLEGIUM_CACHE", str(tmp_path / "cache"))
    output = str(tmp_path / "run")
    short: dict[str, Any] = {"output": output, "algorithms": ["fedavg"], "seeds": [0], "rounds": 1}
    run_experiment(experiment(phantoms, 1, **short))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["training"]["compile"] == "off"
    run_experiment(experiment(phantoms, 1, **short | {"seeds": [*range(3)]}))  # is extended by it
    with pytest.raises(CheckpointError, match=r'training\.compile="off", now "on"'):
        run_experiment(experiment(phantoms, 1, **short, training={"compile": "on"}))


def test_an_algorithms_own_training_counts_and_is_decided_with_the_experiments(
    phantoms, without_compiler
):
    def with_own(**training: Any) -> ExperimentConfig:
        return experiment(phantoms, algorithms=["fedavg", {"name": "fedbn", "training": training}])

    assert planned_steps(with_own(local_steps=10)) == 3 * 10 * 2 * (30 + 10)
    found = decide_compilation(with_own(compile="auto", lr=0.1), None)
    assert found.training.compile == "off"
    assert found.algorithms[1].training == {"lr": 0.1}
    with pytest.raises(ConfigError, match="this machine cannot compile"):
        decide_compilation(with_own(compile="on"), None)
