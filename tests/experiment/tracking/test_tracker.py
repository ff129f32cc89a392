import base64
import logging
import re
import shutil
import threading
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from collegium.data.phantoms import make_federation
from collegium.errors import StorageError
from collegium.evaluation.results import read_rows, results_frame, write_rows
from collegium.evaluation.scores import rows_of
from collegium.experiment.config.experiment import ExperimentConfig, digest, parse_config, to_dict
from collegium.experiment.grid import jobs_of
from collegium.experiment.jobs import Event
from collegium.experiment.runner import collect_rows, read_run_config, run_experiment
from collegium.experiment.tracking import Tracker, content
from collegium.experiment.tracking.store import local_uri

MODEL: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1}


def settings(federation: Mapping[str, Any], output: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "federation": federation,
        "model": MODEL,
        "algorithms": ["fedavg", "fedbn"],
        "rounds": 2,
        "training": {"batch_size": 2, "local_steps": 1, "lr": 0.01},
        "output": str(output),
    }


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two sites, the first of which hands out its personal model."""
    file = make_federation(tmp_path_factory.mktemp("phantoms"), 2, cases=6, size=32)
    data = yaml.safe_load(file.read_text())
    data["root"] = str(file.parent)
    data["sites"][min(data["sites"])]["share"] = ["personal"]
    return dict(data)


@pytest.fixture(scope="module")
def tracked(federation, tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    """A finished run in the store of its own, whose events came from another thread."""
    config = parse_config(settings(federation, tmp_path_factory.mktemp("tracked") / "run"))
    tracker = Tracker(config)

    def observe(event: Event) -> None:
        thread = threading.Thread(target=tracker, args=(event,))
        thread.start()
        thread.join()

    tracker.finish(run_experiment(config, observe))
    return config


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URI of a store of plain files, which is quicker than a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


class Found:
    """What MLflow's own client finds in a store."""

    def __init__(self, uri: str, experiment: str = "tiny") -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=uri)
        about = self.client.get_experiment_by_name(experiment)
        assert about is not None
        runs = self.client.search_runs([about.experiment_id])
        self.parents = [run for run in runs if "collegium.run" in run.data.tags]
        self.jobs = {
            run.data.params["algorithm.label"]: run
            for run in runs if "collegium.job" in run.data.tags
        }  # fmt: skip
        assert len(runs) == len(self.parents) + len(self.jobs)

    def history(self, label: str) -> dict[str, list[tuple[int, float]]]:
        """Steps and values of every metric of a job."""
        run = self.jobs[label]
        return {
            name: [
                (metric.step, metric.value)
                for metric in self.client.get_metric_history(run.info.run_id, name)
            ]
            for name in run.data.metrics
        }


def expected(config: ExperimentConfig, label: str) -> dict[str, list[tuple[int, float]]]:
    """Every round's losses, scores and bytes of each site, as its rows hold them."""
    found: dict[str, list[tuple[int, float]]] = {}
    used = "personal" if label == "fedbn" else "global"
    for row in rows_of(collect_rows(config)):
        if row.algorithm != label or row.split not in ("train", "val"):
            continue
        names = {f"train/loss/{row.site}": row.value, f"bytes_up/{row.site}": float(row.bytes_up)}
        if row.split == "val":
            kind = "" if row.model == used else f"{row.model}/"
            names = {f"val/{kind}{row.metric}/{row.site}": row.value}
        for name, value in names.items():
            if not isnan(value):
                found.setdefault(name, []).append((row.round, value))
    return {name: sorted(points) for name, points in found.items()}


def test_history_of_every_round_and_site_is_that_of_the_rows(tracked):
    found = Found(local_uri(Path(tracked.output)))
    for label in ("fedavg", "fedbn"):
        wanted, history = expected(tracked, label), found.history(label)
        assert len(wanted) >= 6
        assert {name: sorted(history[name]) for name in wanted} == wanted
        for name in history:
            steps = [step for step, _ in history[name]]
            assert len(steps) == len(set(steps)), name


def test_test_scores_are_the_means_over_a_sites_cases(tracked):
    cases: dict[str, list[float]] = {}
    for row in rows_of(collect_rows(tracked)):
        if (row.algorithm, row.split, row.model) == ("fedbn", "test", "personal"):
            cases.setdefault(f"test/{row.metric}/{row.site}", []).extend(
                [] if isnan(row.value) else [row.value]
            )
    history = Found(local_uri(Path(tracked.output))).history("fedbn")
    assert cases
    for name, values in cases.items():
        ((step, value),) = history[name]
        assert step == 2
        assert value == pytest.approx(sum(values) / len(values), abs=1e-12)


def test_runs_are_nested_named_and_finished(tracked):
    found = Found(local_uri(Path(tracked.output)))
    (parent,) = found.parents
    assert parent.info.run_name == "tiny"
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["collegium.digest"] == digest(tracked)
    assert parent.data.tags["version.torch"].startswith("2.")
    assert found.jobs.keys() == {"fedavg", "fedbn"}
    for label, run in found.jobs.items():
        assert run.info.run_name == f"{label}, seed 0"
        assert run.info.status == "FINISHED"
        assert run.info.user_id == "unknown"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["collegium.digest"] == digest(tracked)
        assert run.data.tags["collegium.job"].endswith(f"/{label}/seed-0")
        assert run.data.params["rounds"] == "2"
        assert run.data.params["training.lr"] == "0.01"
        assert run.data.params["algorithm.name"] == label
    assert "mlflow.user" not in parent.data.tags


def test_artifacts_are_the_files_of_the_run_bit_by_bit(tracked, tmp_path):
    output = Path(tracked.output)
    found = Found(local_uri(output))

    def download(run: Any) -> dict[str, bytes]:
        folder = tmp_path / run.info.run_id
        folder.mkdir()
        found.client.download_artifacts(run.info.run_id, "", str(folder))
        return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.*")}

    got = download(found.parents[0])
    config = yaml.safe_load(got.pop("config.yaml"))
    assert config["federation"]["sites"] == to_dict(tracked)["federation"]["sites"]
    assert "root" not in config["federation"]
    tables = {f"tables/{file.name}" for file in (output / "tables").iterdir()}
    assert tables >= {"tables/dice.txt", "tables/dice.tex", "tables/dice-joining.md"}
    assert got == {name: (output / name).read_bytes() for name in {"report.html", *tables}}
    for job in jobs_of(tracked):
        label, server = job.algorithm.label, job.folder / "server"
        site = min(tracked.federation.sites)
        if label == "fedbn":  # has no global model; one site shares its personal one
            file = job.folder / "clients" / site / "personal.safetensors"
            models = {f"models/{site}.safetensors": file.read_bytes()}
            assert len(list(job.folder.glob("clients/*/personal.safetensors"))) == 2
        else:
            models = {"models/global.safetensors": (server / "global.safetensors").read_bytes()}
        for name in ("index.json", "settings.json"):  # how they are used
            models[f"models/{name}"] = (server / "deployed" / name).read_bytes()
        got = download(found.jobs[label])
        assert got == models
        assert not [name for name, held in got.items() if str(tmp_path.parent).encode() in held]


def test_nothing_logged_says_where_the_run_lies(tracked):
    found = Found(local_uri(Path(tracked.output)))
    roots = (str(Path(tracked.output).parent), str(Path(tracked.federation.root)))
    for run in [*found.parents, *found.jobs.values()]:
        text = f"{run.data.params} {run.data.tags} {run.info.run_name}"
        assert not [root for root in roots if root in text]


def test_page_for_a_server_has_neither_images_nor_folders(tracked):
    output = Path(tracked.output)
    here = (output / "report.html").read_text()
    page = content.page_for_a_server(output, tracked)
    folders = (str(output), str(Path(tracked.federation.root)))
    assert not [folder for folder in folders if folder in here]
    images = "data:image/"
    assert images in here
    assert images not in page
    saved = b"".join(base64.b64decode(text) for text in re.findall(r"base64,([\w+/=]+)", page))
    assert b"local_steps" in saved
    for folder in folders:
        assert folder not in page
        assert folder.encode() not in saved


def test_finished_run_is_not_logged_again(tracked):
    output = Path(tracked.output)
    before = {label: Found(local_uri(output)).history(label) for label in ("fedavg", "fedbn")}
    tracker = Tracker(tracked)
    run_experiment(read_run_config(output), tracker)
    tracker.finish(output)
    found = Found(local_uri(output))
    assert len(found.parents) == 1
    assert {label: found.history(label) for label in ("fedavg", "fedbn")} == before


def test_store_that_moved_with_its_run_is_not_taken_for_the_one_it_was(tracked, tmp_path):
    shutil.copytree(tracked.output, tmp_path / "moved")
    moved = parse_config({**to_dict(tracked), "output": str(tmp_path / "moved")})
    with pytest.raises(StorageError, match=r"before it moved; remove .*moved/mlflow, and all of"):
        Tracker(moved).finish(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "mlflow")


class StoppedError(Exception):
    """Ends a run from outside."""


def test_resumed_run_goes_on_in_the_same_runs(federation, files, tmp_path):
    config = parse_config({**settings(federation, tmp_path / "run"), "rounds": 3})
    first = Tracker(config, uri=files, experiment="several")

    def stop(event: Event) -> None:
        first(event)
        if (event.algorithm, event.kind, event.round) == ("fedbn", "round", 2):
            raise StoppedError

    with pytest.raises(StoppedError):
        run_experiment(config, stop)
    before = Found(files, "several")
    assert before.jobs["fedavg"].info.status == "FINISHED"
    assert before.jobs["fedbn"].info.status == "RUNNING"
    second = Tracker(config, uri=files, experiment="several")
    second.finish(run_experiment(config, second))
    after = Found(files, "several")
    assert {k: run.info.run_id for k, run in after.jobs.items()} == {
        k: run.info.run_id for k, run in before.jobs.items()
    }
    assert [run.info.run_id for run in after.parents] == [run.info.run_id for run in before.parents]
    for label in ("fedavg", "fedbn"):
        history, wanted = after.history(label), expected(config, label)
        assert {name: history[name] for name in wanted} == wanted


def copy(tracked: ExperimentConfig, output: Path) -> ExperimentConfig:
    """The same run in another folder, never tracked."""
    untracked = shutil.ignore_patterns("mlflow", "tracking.json")
    shutil.copytree(tracked.output, output, ignore=untracked)
    return parse_config({**to_dict(tracked), "output": str(output)})


def test_store_that_was_away_while_the_run_went_on_has_everything_at_its_end(
    tracked, files, tmp_path
):
    config = copy(tracked, tmp_path / "run")
    Tracker(config, uri=files).finish(tmp_path / "run")
    found = Found(files)
    for label in ("fedavg", "fedbn"):
        history, wanted = found.history(label), expected(config, label)
        assert {name: sorted(history[name]) for name in wanted} == wanted


def test_equal_runs_in_two_folders_are_two_runs(tracked, files, tmp_path):
    for name in ("one", "two"):
        Tracker(copy(tracked, tmp_path / name), uri=files).finish(tmp_path / name)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=files)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 6


def test_cell_without_results_is_marked_as_failed_until_it_has_some(tracked, files, tmp_path):
    config = copy(tracked, tmp_path / "run")
    rows = jobs_of(config)[1].folder / "rows.jsonl"
    stored = rows.read_bytes()
    rows.unlink()
    tracker = Tracker(config, uri=files)
    tracker(Event("job", algorithm="fedbn"))
    tracker.finish(tmp_path / "run")
    found = Found(files)
    assert found.jobs["fedavg"].info.status == "FINISHED"
    assert found.jobs["fedbn"].info.status == "FAILED"
    assert found.parents[0].info.status == "FAILED"
    rows.write_bytes(stored)
    Tracker(config, uri=files).finish(tmp_path / "run")
    found = Found(files)
    assert found.jobs["fedbn"].info.status == "FINISHED"
    assert found.parents[0].info.status == "FINISHED"


def test_extended_run_goes_on_in_the_same_runs(tracked, files, tmp_path):
    config = copy(tracked, tmp_path / "run")
    one = parse_config({**to_dict(config), "algorithms": [{"name": "fedavg"}]})
    Tracker(one, uri=files).finish(tmp_path / "run")
    before = Found(files)
    assert before.parents[0].data.tags["collegium.algorithms"] == "fedavg"
    Tracker(config, uri=files).finish(tmp_path / "run")
    after = Found(files)
    assert after.parents[0].info.run_id == before.parents[0].info.run_id
    assert after.parents[0].data.tags["collegium.algorithms"] == "fedavg, fedbn"
    assert after.jobs["fedavg"].info.run_id == before.jobs["fedavg"].info.run_id
    assert after.history("fedavg") == before.history("fedavg")
    assert after.jobs.keys() == {"fedavg", "fedbn"}


def test_scores_of_an_adapter_with_other_settings_replace_the_former(tracked, files, tmp_path):
    config = copy(tracked, tmp_path / "run")
    job = jobs_of(config)[0]
    for value in (0.25, 0.75):
        shutil.copy(jobs_of(tracked)[0].folder / "rows.jsonl", job.folder)
        outside = {
            "experiment": "tiny", "algorithm": "fedavg", "seed": 0, "round": 2, "site": "o",
            "case": "outside-c001", "patient": "outside-p001", "split": "outside",
            "model": "tent", "metric": "dice", "value": value,
        }  # fmt: skip
        file = job.folder / "rows.jsonl"
        write_rows(file, pd.concat([read_rows([file]), results_frame([outside])]))
        Tracker(config, uri=files).finish(tmp_path / "run")
    found = Found(files)
    assert found.jobs["fedavg"].data.metrics["outside/tent/dice/o"] == 0.75
    history = found.history("fedavg")
    assert history["outside/tent/dice/o"] == [(2, 0.25), (2, 0.75)]
    wanted = expected(config, "fedavg")
    assert {name: sorted(history[name]) for name in wanted} == wanted


def test_unreachable_server_costs_one_warning_and_not_the_run(federation, tmp_path, caplog):
    uri = "http://127.0.0.1:9"
    config = parse_config({**settings(federation, tmp_path / "run"), "algorithms": ["fedavg"]})
    tracker = Tracker(config, uri=uri)
    with caplog.at_level(logging.WARNING):
        output = run_experiment(config, tracker)
    assert [record.getMessage() for record in caplog.records] == [
        f"MLflow at {uri} did not take what a run told it ([Errno 111] Connection refused); "
        f"the run continues, and sends it at its end"
    ]
    assert (output / "report.html").exists()
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:9 .*'collegium resume .*/run' sends it"):
        tracker.finish(output)
