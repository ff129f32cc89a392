import json
from pathlib import Path
from typing import Any

import pytest

from collegium.evaluation.results import ResultRow, results_frame
from collegium.experiment.config.experiment import ExperimentConfig, parse_config
from collegium.experiment.grid import jobs_of
from collegium.experiment.jobs import Event
from collegium.experiment.tracking import content
from collegium.experiment.tracking.content import Point

ALGORITHM = """
from dataclasses import dataclass
from collegium.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    '''Ours.'''
"""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    home = tmp_path / "anna"
    home.mkdir()
    (home / "mine.py").write_text(ALGORITHM)
    return {
        "name": "tiny",
        "federation": {
            "name": "two",
            "root": str(home / "scans"),
            "sites": {"a": {"folder": "a"}, "b": {"manifest": str(home / "b.csv")}},
        },
        "model": {"name": "unet", "in_channels": 1},
        "algorithms": [f"{home / 'mine.py'}:Mine", {"name": "fedprox", "mu": 0.25}],
        "rounds": 3,
        "seeds": [4, 5],
        "variations": {"long": {"training.local_epochs": 2}, "as is": {}},
        "output": str(home / "run"),
    }


@pytest.fixture
def config(settings) -> ExperimentConfig:
    return parse_config(settings)


def row(**about: Any) -> ResultRow:
    common = {"experiment": "tiny", "algorithm": "x", "seed": 0, "round": 2}
    return {**common, **about}


def parameters_of_job(config: ExperimentConfig, *key: Any) -> dict[str, str]:
    (job,) = (job for job in jobs_of(config) if job.key == key)
    return content.parameters_of(content.fixed_settings_of_job(job))


def test_settings_say_nothing_about_this_machine(config, tmp_path):
    settings = content.settings_of(config)
    jobs = jobs_of(config)
    told = [settings, content.fixed_settings(config), content.tags_of(config)]
    told += [content.fixed_settings_of_job(job) for job in jobs]
    told += [content.tags_of_job(job, jobs[0]) for job in jobs]
    text = json.dumps(told)
    assert str(tmp_path) not in text
    assert "anna" not in text
    assert "root" not in settings["federation"]
    assert "output" not in settings
    assert settings["federation"]["sites"]["a"]["folder"] == "a"
    assert settings["federation"]["sites"]["b"]["manifest"] == "b.csv"
    assert [entry["name"] for entry in settings["algorithms"]] == ["mine.py:Mine", "fedprox"]


def test_parameters_of_a_cell_are_its_own(config):
    parameters = parameters_of_job(config, "long", "", "fedprox", 5)
    assert parameters["seed"] == "5"
    assert parameters["variation"] == "long"
    assert parameters["training.local_epochs"] == "2"
    assert (parameters["algorithm.name"], parameters["algorithm.mu"]) == ("fedprox", "0.25")
    assert not [key for key in parameters if key.startswith(("algorithms", "seeds", "variations"))]
    other = parameters_of_job(config, "as is", "", "fedprox", 5)
    assert other["training.local_epochs"] == "1"


def test_parameters_stay_when_a_run_goes_on_elsewhere_or_is_extended(settings, config, tmp_path):
    other = parse_config({
        **settings, "output": str(tmp_path / "b"), "seeds": [5, 6], "adapters": ["none"],
        "algorithms": [{"name": "fedprox", "mu": 0.25, "adapters": ["tent"]}],
        "engine": {"workers": 2, "jobs": 2},
        "federation": {**settings["federation"], "root": str(tmp_path / "moved")},
    })  # fmt: skip
    before, after = (content.fixed_settings(c) for c in (config, other))
    assert content.parameters_of(before) == content.parameters_of(after)
    key = "long", "", "fedprox", 5
    assert parameters_of_job(config, *key) == parameters_of_job(other, *key)
    changed = parse_config({**settings, "rounds": 4})
    assert content.parameters_of(content.fixed_settings(changed))["rounds"] == "4"


def test_tags_name_what_an_experiment_may_be_extended_by(settings):
    config = parse_config({
        **settings, "algorithms": ["fedavg", "fedprox"],
        "adapters": ["none", {"name": "tent", "label": "quick+tent", "steps": 2}],
    })  # fmt: skip
    assert content.tags_of(config) == {
        "collegium.algorithms": "fedavg, fedprox",
        "collegium.seeds": "4, 5",
        "collegium.variations": "long, as is",
        "collegium.adapters": "none, quick+tent",
    }
    first, second = jobs_of(config)[:2]
    tags = content.tags_of_job(second, first)
    assert tags["collegium.trained_by"] == "long, fedavg, seed 4"
    assert json.loads(tags["adapter.quick:tent"])["steps"] == 2
    assert "collegium.trained_by" not in content.tags_of_job(first, first)


def test_long_value_is_cut_where_mlflow_would_refuse_it():
    parameters = content.parameters_of({"text": "x" * 7000, "list": list(range(2000))})
    assert [len(text) for text in parameters.values()] == [6000, 6000]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/data/scans/mine.py:Mine", "mine.py:Mine"),
        ("C:\\scans\\b.csv", "b.csv"),
        ("~/scans", "scans"),
        ("$SCANS/b", "b"),
        ("../anna/b.csv", "b.csv"),
        ("training/b.csv", "training/b.csv"),
        ("dice_ce", "dice_ce"),
    ],
)
def test_paths_keep_their_last_part_only(text, left):
    assert content.without_place(text) == left


def test_numbers_of_a_round():
    event = Event(
        "round", algorithm="x", round=3, metric="dice", losses={"a": 0.5, "b": 0.25},
        scores={"a": 0.75}, bytes_up=100, bytes_down=50, seconds=1.5,
    )  # fmt: skip
    assert content.metrics_of(content.points_of_event(event)) == {
        ("train/loss/a", 3): 0.5,
        ("train/loss/b", 3): 0.25,
        ("mean/train/loss", 3): 0.375,
        ("val/dice/a", 3): 0.75,
        ("mean/val/dice", 3): 0.75,
        ("total/bytes_up", 3): 100.0,
        ("total/bytes_down", 3): 50.0,
        ("total/seconds", 3): 1.5,
    }


def test_scores_of_the_model_that_a_site_uses_stand_under_the_plain_name():
    rows = [
        row(split="val", site="a", model="global", metric="dice", value=0.5),
        row(split="val", site="a", model="personal", metric="dice", value=0.75),
        row(split="val", site="a", model="global", metric="dice", value=0.25, round=1),
        row(split="test", site="a", model="personal", metric="dice", value=0.5, case="c1"),
        row(split="test", site="a", model="personal", metric="dice", value=1.0, case="c2"),
        row(split="test", site="a", model="personal", metric="dice", value=None, case="c3"),
        row(split="test", site="b", model="personal", metric="dice", value=0.25, case="c1"),
        row(split="test", site="a", model="global", metric="dice", value=0.125, case="c1"),
        row(split="outside", site="o", model="tent", metric="dice", value=0.5, case="c1"),
        row(split="outside", site="o", model="none", metric="dice", value=0.25, case="c1"),
    ]
    assert content.metrics_of(content.points_of_rows(results_frame(rows))) == {
        ("val/global/dice/a", 2): 0.5,
        ("mean/val/global/dice", 2): 0.5,
        ("val/dice/a", 2): 0.75,
        ("mean/val/dice", 2): 0.75,
        ("val/dice/a", 1): 0.25,
        ("mean/val/dice", 1): 0.25,
        ("test/dice/a", 2): 0.75,
        ("test/dice/b", 2): 0.25,
        ("mean/test/dice", 2): 0.5,
        ("test/global/dice/a", 2): 0.125,
        ("mean/test/global/dice", 2): 0.125,
        ("outside/tent/dice/o", 2): 0.5,
        ("mean/outside/tent/dice", 2): 0.5,
        ("outside/none/dice/o", 2): 0.25,
        ("mean/outside/none/dice", 2): 0.25,
    }


def test_traffic_is_summed_over_sites():
    rows = [
        row(split="train", site=site, metric="loss", value=value, bytes_up=up, seconds=2.0)
        for site, value, up in (("a", 0.5, 10), ("b", None, 30))
    ]
    metrics = content.metrics_of(content.points_of_rows(results_frame(rows)))
    assert metrics["bytes_up/b", 2] == 30
    assert metrics["total/bytes_up", 2] == 40
    assert metrics["total/seconds", 2] == 4
    assert metrics["mean/train/loss", 2] == 0.5
    assert ("train/loss/b", 2) not in metrics


def test_numbers_that_are_not_finite_are_left_out():
    points = [Point("train/loss", "a", 1, float("nan")), Point("train/loss", "b", 1, 2.0)]
    assert content.metrics_of(points) == {
        ("train/loss/b", 1): 2.0, ("mean/train/loss", 1): 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "parts",
    [("val/dice", "site+b"), ("outside/a+b/f1@0.5", "ä"), ("x//y/../z", "é."), ("a" * 300,)],
)
def test_names_are_such_as_mlflow_takes(parts):
    from mlflow.utils import validation

    name = content.mlflow_name(*parts)
    validation._validate_metric(name, 1.0, 0, 0)
    assert len(name) <= 250


def test_names_of_different_sites_stay_different():
    names = {content.mlflow_name("val/dice", site) for site in ("a+b", "a b", "a_b", "a-b", "a.b")}
    assert len(names) == 5


def test_models_that_may_leave_are_the_global_and_the_handed_out_ones(tmp_path):
    kept = tmp_path / "clients" / "a" / "personal.safetensors"
    files = [tmp_path / "server" / "global.safetensors", kept]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
    assert content.models_of(tmp_path) == [files[0]]
    deployed = tmp_path / "server" / "deployed"
    deployed.mkdir()
    (deployed / "b.safetensors").write_bytes(b"y")
    assert content.models_of(tmp_path) == [files[0], deployed / "b.safetensors"]
    (deployed / "global.safetensors").write_bytes(b"x")
    (deployed / "settings.json").write_bytes(b"{}")
    assert content.models_of(tmp_path) == [
        deployed / "b.safetensors", deployed / "global.safetensors", deployed / "settings.json",
    ]  # fmt: skip


def test_a_jobs_parameters_hold_the_training_of_its_algorithm_once(settings):
    own = {"name": "fedprox", "mu": 0.25, "training": {"lr": 0.5}}
    config = parse_config({**settings, "algorithms": ["fedavg", own]})
    assert parameters_of_job(config, "as is", "", "fedavg", 4)["training.lr"] == "0.001"
    found = parameters_of_job(config, "as is", "", "fedprox", 4)
    assert found["training.lr"] == "0.5"
    assert not any(key.startswith("algorithm.training") for key in found)
