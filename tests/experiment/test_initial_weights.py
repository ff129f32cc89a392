"""Runs that start from the weights in a file."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from collegium import cli
from collegium.algorithms.fedavg import FedAvg
from collegium.algorithms.ifca import IFCA
from collegium.core.tensors import Tensors
from collegium.data.phantoms import make_federation
from collegium.distributed.description import describe
from collegium.distributed.experiment import RemoteExperiment
from collegium.errors import CheckpointError, ConfigError
from collegium.experiment.config.building import network_of
from collegium.experiment.config.experiment import load_config
from collegium.experiment.federation import OpenedExperiment, open_configured
from collegium.experiment.initial_weights import InitialWeights
from collegium.experiment.runner import read_run_config, run_experiment
from collegium.runtime.federation import initial_model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_federation(folder, 2, cases=8, size=32)
    return folder


@pytest.fixture
def experiment(data: Path, tmp_path: Path) -> Path:
    """An experiment, with a file of weights beside it."""
    settings = {
        "name": "given",
        "federation": str(data / "federation.yaml"),
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 0},
        "training": {"lr": 1e-12, "batch_size": 2, "local_steps": 1, "compile": "off"},
        "rounds": 1,
        "algorithms": ["fedavg"],
        "output": str(tmp_path / "run"),
    }
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(settings))
    torch.manual_seed(7)
    state = network_of(load_config(file))().state_dict()
    save_file({f"net.{n}": torch.rand_like(t.float()) for n, t in state.items()},
              tmp_path / "given.safetensors")  # fmt: skip
    settings["initial_weights"] = {"file": "given.safetensors", "rename": {"net.": ""}}
    file.write_text(yaml.safe_dump(settings))
    return file


def test_a_run_starts_from_the_file(experiment: Path) -> None:
    config = load_config(experiment)
    run = run_experiment(config)
    given = load_file(experiment.parent / "given.safetensors")
    found = load_file(run / "fedavg" / "seed-0" / "clients" / "alder" / "global.safetensors")
    for name, tensor in found.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(tensor, given[f"net.{name}"], msg=name)


def test_another_seed_starts_from_the_same_weights(experiment: Path) -> None:
    federation = open_configured(load_config(experiment), splits=None)
    first, second = (federation.initial_model(FedAvg(), seed) for seed in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_run_keeps_to_the_file_that_it_began_with(experiment: Path) -> None:
    run = run_experiment(load_config(experiment))
    recorded = json.loads((run / "run.json").read_text())
    assert "given.safetensors" in json.dumps(recorded)
    other = experiment.parent / "given.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(other).items()}, other)
    with pytest.raises(ConfigError, match="is not the file that the run began with"):
        open_configured(read_run_config(run), splits=None).initial_model(FedAvg(), 0)
    with pytest.raises(CheckpointError, match="initial_weights"):
        run_experiment(load_config(experiment))


def test_sites_over_a_network_learn_neither_file_nor_place(experiment: Path) -> None:
    config = load_config(experiment)
    told = json.dumps(describe(config))
    assert "given.safetensors" not in told
    assert str(experiment.parent) not in told
    assert config.initial_weights is not None
    assert config.initial_weights.digest in told


def weights(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> InitialWeights:
    save_file(tensors, folder / "w.safetensors")
    return InitialWeights(file=str(folder / "w.safetensors"), **settings)


MODEL = Tensors({"a.weight": torch.zeros(2, 3), "a.bias": torch.zeros(2), "new.x": torch.zeros(1)})


def test_the_longest_beginning_counts_and_types_are_those_of_the_model(tmp_path: Path) -> None:
    given = {"m.a.weight": torch.ones(2, 3).half(), "m.old.bias": torch.full((2,), 2.0)}
    start = weights(tmp_path, given, rename={"m.": "", "m.old.": "a."})
    model = start.put_into(MODEL, added={"new.x"})
    assert model["a.weight"].dtype == torch.float32
    assert model["a.weight"].tolist() == [[1.0] * 3] * 2
    assert model["a.bias"].tolist() == [2.0, 2.0]
    assert model["new.x"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a.weight": torch.ones(2, 3)}, r"has no 'a\.bias', but a\.weight .*1 of 2 tensors"),
        (
            {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(3)},
            r"has 'a\.bias' as \(3,\), and the network as \(2,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_unless_allowed(
    tmp_path: Path, given: dict[str, torch.Tensor], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=words):
        weights(tmp_path, given).put_into(MODEL, added={"new.x"})
    with caplog.at_level(logging.WARNING):
        model = weights(tmp_path, given, partly=True).put_into(MODEL, added={"new.x"})
    assert model["a.weight"].tolist() == [[1.0] * 3] * 2
    assert model["a.bias"].tolist() == [0.0, 0.0]
    assert "1 of 2 tensors start from the file" in caplog.text


def test_a_file_of_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no 'a\.weight', but z"):
        weights(tmp_path, {"z": torch.ones(1)}, partly=True).put_into(MODEL)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    given = {"x.a": torch.ones(1), "y.a": torch.ones(1)}
    with pytest.raises(ConfigError, match="would both be 'a'; correct rename"):
        weights(tmp_path, given, rename={"x.": "", "y.": ""}).read()


def test_a_method_with_several_initial_models_is_refused(experiment: Path) -> None:
    federation = open_configured(load_config(experiment), splits=None)
    with pytest.raises(ConfigError, match="IFCA starts from several initial models"):
        federation.initial_model(IFCA(), 0, 1)


def test_a_file_that_is_not_there_is_a_problem_of_the_configuration(experiment: Path) -> None:
    with pytest.raises(ConfigError, match=r"initial_weights.*no\.safetensors cannot be read"):
        load_config(experiment, ["initial_weights=no.safetensors"])


def test_a_network_with_adapters_starts_from_weights_of_one_without(experiment: Path) -> None:
    settings = yaml.safe_load(experiment.read_text())
    settings["model"]["lora"] = {"rank": 2}
    experiment.write_text(yaml.safe_dump(settings))
    federation = open_configured(load_config(experiment), splits=None)
    model = federation.initial_model(FedAvg(), 0)
    given = load_file(experiment.parent / "given.safetensors")
    adapters = {name for name in model if ".lora_A." in name or ".lora_B." in name}
    assert adapters
    assert any(".base_layer." in name for name in model)
    for name in model.keys() - adapters:
        plain = name.replace(".base_layer.", ".")
        torch.testing.assert_close(model[name], given[f"net.{plain}"].to(model[name]), msg=name)
    drawn = initial_model(federation.builder(FedAvg()), 0)
    assert all(torch.equal(model[name], drawn[name]) for name in adapters)
    trained = experiment.parent / "trained.safetensors"
    save_file({name: tensor + 1 for name, tensor in model.items()}, trained)
    again = InitialWeights(str(trained)).put_into(model)
    assert all(torch.equal(again[name], model[name] + 1) for name in model)


def test_the_coordinator_of_a_network_starts_from_the_file(experiment: Path) -> None:
    config = load_config(experiment)
    here = open_configured(config, splits=None).initial_model(FedAvg(), 0)
    opened: Any = OpenedExperiment(config)
    opened._declared = lambda site, variation: 0
    there = RemoteExperiment.variation(opened, "").initial_model(FedAvg(), 0)
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.slow
def test_the_documented_efficientnet_starts_from_a_file_but_for_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page = Path(__file__).parents[2] / "docs" / "fine-tuning-large-networks.md"
    text = page.read_text("utf-8").partition("## EfficientNet")[2]
    save, drawn, classes, experiment = re.findall(r"```(?:\w+)\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(save.replace("pretrained=True", "pretrained=False"), {})
    command = drawn.split()
    assert command.pop(0) == "collegium"
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    exec(classes, {})
    Path("efficientnet.yaml").write_text(experiment)
    config = load_config(Path("efficientnet.yaml"), ["algorithms=[fedper]", "rounds=1"])
    output = run_experiment(config)
    assert "the network draws _fc.weight, _fc.bias" in caplog.text
    given = load_file("efficientnet-b0.safetensors")
    assert given["_fc.weight"].shape == (1000, 1280)
    found = load_file(output / "fedper/seed-0/clients/alder/personal.safetensors")
    assert found["_fc.weight"].shape == (2, 1280)
    assert found.keys() == given.keys()
