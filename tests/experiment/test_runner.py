import base64
import csv
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from collegium.cli import app
from collegium.core.files import lock
from collegium.core.model_parts import find_parts
from collegium.core.seals import read_json
from collegium.data.phantoms import make_federation
from collegium.errors import CheckpointError, ConfigError, EgressError, StorageError
from collegium.evaluation.report.overlays import encode_png, read_index, write_index
from collegium.evaluation.scores import rows_of
from collegium.experiment.config.experiment import ExperimentConfig, parse_config, to_dict
from collegium.experiment.federation import OpenedExperiment, cache_folder
from collegium.experiment.grid import jobs_of
from collegium.experiment.jobs import Event
from collegium.experiment.runner import (
    collect_rows,
    decided,
    is_finished,
    read_run_config,
    run_experiment,
    write_run_file,
)
from collegium.models.factory import build_model
from collegium.runtime.ledger import first_break, read_ledger

ROOT = Path(__file__).resolve().parents[2]
MODEL: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1}


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_federation(tmp_path_factory.mktemp("phantoms"), 2, cases=8, size=32)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, cache) -> None:
    monkeypatch.setenv("COLLEGIUM_CACHE", str(cache))


@pytest.fixture
def settings(phantoms, tmp_path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "federation": str(phantoms),
        "model": MODEL,
        "algorithms": ["fedavg", "fedbn"],
        "rounds": 2,
        "training": {"batch_size": 2, "local_steps": 2, "lr": 0.01},
        "output": str(tmp_path / "run"),
    }


def bits(output: Path) -> dict[str, bytes]:
    """Every stored state and test score, by file."""
    files = [*output.rglob("*.state"), *output.rglob("test.json")]
    return {str(file.relative_to(output)): file.read_bytes() for file in files}


def rows_in(config: ExperimentConfig) -> list[Any]:
    """The rows of a run, with None for an undefined value."""
    results = collect_rows(config)
    return rows_of(results.astype({"value": object}).where(results.notna(), None))


def rows(config) -> list[tuple]:
    """The rows of a run without what a clock says."""
    return [
        (r.algorithm, r.seed, r.round, r.site, r.case, r.split, r.model, r.metric, r.value,
         r.bytes_up, r.bytes_down)
        for r in rows_in(config)
    ]  # fmt: skip


def test_experiment_runs_and_is_not_run_again(settings):
    config = parse_config(settings)
    events: list[Event] = []
    output = run_experiment(config, events.append)
    kinds = [(event.kind, event.algorithm) for event in events if event.kind != "round"]
    assert kinds == [(kind, name) for name in ("fedavg", "fedbn") for kind in ("job", "done")]
    rounds = [event for event in events if event.kind == "round" and event.algorithm == "fedbn"]
    assert [event.round for event in rounds] == [1, 2]
    assert all(0 <= score <= 1 for event in rounds for score in event.scores.values())
    for name in ("results.csv", "results.parquet", "report.html", "run.json"):
        assert (output / name).stat().st_size > 0
    assert _tables_agree_with_scores(config)
    before = bits(output)
    for file in (output / "tables").iterdir():
        file.unlink()
    again: list[Event] = []
    run_experiment(read_run_config(output), again.append)
    assert again == []
    assert bits(output) == before
    assert _tables_agree_with_scores(config)
    other = parse_config({**settings, "report": {"relevant": {"dice": 0.25}}})
    run_experiment(other, again.append)
    assert again == []
    assert read_run_config(output).report.relevant == {"dice": 0.25}
    verdicts = json.loads((output / "tables" / "verdicts.json").read_text())
    assert {e["verdict"]["relevant"] for e in verdicts if e["verdict"]["metric"] == "dice"} <= {
        0.25
    }
    folder = jobs_of(config)[1].folder
    network = build_model("unet", **{k: v for k, v in MODEL.items() if k != "name"})
    norm = find_parts(network).norm
    assert norm
    for site in OpenedExperiment(config).variation("").sites:
        lines = read_ledger(folder / "clients" / site / "ledger.jsonl")
        sent = {
            n for line in lines for n, _, _ in line["parts"].get("model", {}).get("tensors", [])
        }
        assert sent
        assert not sent & norm
    assert _rows_agree_with_scores(config, folder)


def _tables_agree_with_scores(config) -> bool:
    """Every site's mean over patients of FedAvg is in the table, and the comparisons are there."""
    folder = jobs_of(config)[0].folder
    scores = read_json(folder / "server/test.json")
    tables = Path(config.output) / "tables"
    with (tables / "dice.csv").open(newline="") as file:
        found = {
            line["column"]: float(line["mean"])
            for line in csv.DictReader(file) if line["method"] == "FedAvg global" and line["mean"]
        }  # fmt: skip
    for site, by_model in scores.items():
        patients: dict[str, list[float]] = {}
        for case in by_model["global"]:
            patients.setdefault(case["patient"], []).append(case["dice"])
        assert found[site] == pytest.approx(fmean(map(fmean, patients.values())))
    assert "Nobody trained alone" in (tables / "dice-joining.txt").read_text()
    return len(scores) == 2


def _rows_agree_with_scores(config, folder: Path) -> bool:
    """The table's rows on test cases are the scores that the run ended with."""
    scores = read_json(folder / "server/test.json")
    expected = {
        (site, model, case["case"], metric): case[metric]
        for site, by_model in scores.items() for model, cases in by_model.items()
        for case in cases for metric in case if metric not in ("case", "patient")
    }  # fmt: skip
    found = {
        (r.site, r.model, r.case, r.metric): r.value
        for r in rows_in(config) if r.split == "test" and r.algorithm == "fedbn"
    }  # fmt: skip
    return found == expected and len(found) > 0


def test_pictures_are_drawn_once_and_embedded_as_they_are_stored(settings):
    config = parse_config({**settings, "algorithms": ["fedavg"], "rounds": 1})
    output = run_experiment(config)
    folder = jobs_of(config)[0].folder
    index, _ = read_index(folder / "overlays")
    named = {name for entry in index for name in (entry["file"], *entry["layers"].values())}
    stored = {path.name for path in (folder / "overlays").iterdir()}
    assert named == stored - {"index.json"}
    page = (output / "report.html").read_text()
    for entry in index:
        for name in entry["layers"].values():
            content = (folder / "overlays" / name).read_bytes()
            assert base64.b64encode(content).decode() in page
    other = encode_png(Image.new("P", (8, 8)))
    for name in named:
        (folder / "overlays" / name).write_bytes(other)
    write_index(folder / "overlays", index)
    (folder / "rows.jsonl").unlink()  # as if the run had been stopped before they were written
    run_experiment(read_run_config(output))
    assert (folder / "rows.jsonl").exists()
    assert {(folder / "overlays" / name).read_bytes() for name in named} == {other}


def test_a_finished_run_is_resumed_without_its_data(settings, tmp_path):
    federation = make_federation(tmp_path / "data", 2, cases=6, size=32)
    config = parse_config({**settings, "federation": str(federation), "algorithms": ["fedavg"]})
    assert not is_finished(config)
    run_experiment(config)
    assert is_finished(config)
    report = (tmp_path / "run" / "report.html").read_bytes()
    shutil.rmtree(tmp_path / "data")
    run_experiment(read_run_config(tmp_path / "run"))
    assert (tmp_path / "run" / "report.html").read_bytes() == report
    more = parse_config({**to_dict(config), "seeds": [0, 1]})
    assert not is_finished(more)


@pytest.mark.slow
def test_number_of_workers_does_not_change_a_bit(settings, tmp_path):
    results = {}
    for workers in (1, 2):
        config = parse_config(
            {**settings, "engine": {"workers": workers}, "output": str(tmp_path / str(workers))}
        )
        output = run_experiment(config)
        results[workers] = (bits(output), rows(config))
        for path in output.rglob("ledger.jsonl"):
            assert first_break(read_ledger(path)) is None
    assert len(results[1][0]) > 10
    assert results[1] == results[2]


KILLED = """
import os, signal, sys
left = [int(sys.argv[1])]
original = os.replace
def replace(*arguments, **options):
    if ".state" in str(arguments[0]) or ".json" in str(arguments[0]):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    original(*arguments, **options)
os.replace = replace
sys.argv = ["collegium", *sys.argv[2:]]
from collegium.cli import main
main()
"""


def command_line(*arguments: str, kill_at: int = 0) -> int:
    """Run a command line, which kills itself in the middle of its kill_at-th save."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(kill_at), *arguments],
        env=environment, timeout=300, check=False, capture_output=True,
    ).returncode  # fmt: skip


@pytest.mark.slow
def test_killed_run_has_the_same_bits_when_resumed(settings, tmp_path):
    whole = parse_config({**settings, "output": str(tmp_path / "whole")})
    run_experiment(whole)
    expected = bits(tmp_path / "whole")
    for number in (4, 17):
        output = tmp_path / f"killed-{number}"
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps({**settings, "output": str(output)}))
        assert command_line("run", str(file), kill_at=number) == -signal.SIGKILL
        assert list(output.rglob("*.tmp"))
        assert command_line("resume", str(output)) == 0
        assert bits(output) == expected
        assert rows(read_run_config(output)) == rows(whole)


def test_variations_whose_adapters_have_no_site_outside_are_warned_of(settings, caplog):
    # all share one training, for they differ in adapters alone
    variations = {
        "all": {"adapters": ["tent", "none"]},
        "no": {},
        "own": {"algorithms": [{"name": "fedavg", "adapters": ["dsbn"]}]},
    }
    changes = {"algorithms": ["fedavg"], "variations": variations, "rounds": 1}
    with caplog.at_level(logging.WARNING):
        run_experiment(parse_config({**settings, **changes}))
    end = "do nothing; name a site in federation.outside, or write protocol: leave-one-site-out"
    assert [record.getMessage() for record in caplog.records] == [
        f"variation 'all': no site is outside, so nothing is adapted and the adapters (tent, none) "
        f"{end}",
        f"variation 'own': no site is outside, so nothing is adapted and the adapters (dsbn) {end}",
    ]


def test_run_without_test_cases_ends_in_a_report_and_no_tables(settings, phantoms, caplog):
    federation = yaml.safe_load(phantoms.read_text())
    federation |= {"root": str(phantoms.parent), "splits": {"validation": 0.3, "test": 0.0}}
    changes = {"federation": federation, "algorithms": ["fedavg"], "adapters": ["tent"]}
    with caplog.at_level(logging.WARNING):
        output = run_experiment(parse_config({**settings, **changes, "rounds": 1}))
    assert (output / "report.html").exists()
    assert not (output / "tables").exists()
    assert caplog.messages[0].startswith("no site is outside, so nothing is adapted and the ada")


def test_folder_of_another_experiment_is_refused(settings):
    config = parse_config({**settings, "algorithms": ["fedavg"], "rounds": 1})
    run_experiment(config)
    other = parse_config({**settings, "algorithms": ["fedavg"], "rounds": 2})
    with pytest.raises(CheckpointError, match=r"run made with other settings \(.*rounds"):
        run_experiment(other)


def test_a_run_that_goes_on_under_other_versions_says_so_and_keeps_both(
    settings, monkeypatch, caplog
):
    config = parse_config({**settings, "algorithms": ["fedavg"], "rounds": 1})
    path, today = Path(config.output) / "run.json", platform.python_version()
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.1")
    write_run_file(config, path.parent)
    write_run_file(config, path.parent)
    assert "earlier_versions" not in read_json(path)
    assert caplog.text == ""
    monkeypatch.undo()
    monkeypatch.setenv("COLLEGIUM_CACHE", str(path.parent.parent / "cache"))
    run_experiment(config)
    assert f"goes on under other versions than it began with (python 3.9.1, now {today}), so" in (
        caplog.text
    )
    about = read_json(path)
    assert about["versions"]["python"] == today
    assert about["earlier_versions"] == [{**about["versions"], "python": "3.9.1"}]
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.0")
    run_experiment(config)  # nothing is trained any more
    assert read_json(path) == about


def test_second_process_is_kept_out_of_the_folder(settings):
    config = parse_config(settings)
    output = Path(config.output)
    output.mkdir()
    with (
        lock(output),
        pytest.raises(StorageError, match=f"another process is running in {output}"),
    ):
        run_experiment(config)


def test_method_that_does_not_suit_is_refused_before_any_cell_runs(settings):
    config = parse_config({**settings, "algorithms": ["fedavg", "scaffold"]})
    events: list[Event] = []
    with pytest.raises(ConfigError, match="Scaffold is right with plain sgd only, not with adam"):
        run_experiment(config, events.append)
    assert events == []


def test_forbidden_part_is_refused_before_any_cell_runs(settings, phantoms):
    federation = yaml.safe_load(phantoms.read_text())
    federation["root"] = str(phantoms.parent)
    site = sorted(federation["sites"])[0]
    federation["sites"][site]["forbid"] = ["model"]
    config = parse_config({**settings, "federation": federation})
    events: list[Event] = []
    with pytest.raises(EgressError, match=f"FedAvg sends 'model' .* of site '{site}' forbids"):
        run_experiment(config, events.append)
    assert events == []


def test_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no run \(there is no run\.json\)"):
        run_experiment(read_run_config(tmp_path))
    (tmp_path / "run.json").write_text('{"config": ')
    with pytest.raises(CheckpointError, match=r"run\.json is damaged"):
        run_experiment(read_run_config(tmp_path))


def test_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("COLLEGIUM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("COLLEGIUM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "collegium"


def test_every_algorithm_runs_with_its_own_codec(settings):
    own = {"name": "fedavg", "label": "coded", "codec": {"up": "half", "down": "half"}}
    config = parse_config({**settings, "algorithms": ["fedavg", own]})
    output = run_experiment(config)
    up = {
        (row.algorithm, row.site, row.round): row.bytes_up
        for row in rows_in(config)
        if row.metric == "loss" and row.bytes_up is not None
    }
    trainable = find_parts(build_model(**MODEL)).trainable
    numbers = sum(t.numel() for n, t in build_model(**MODEL).state_dict().items() if n in trainable)
    for site in OpenedExperiment(config).variation("").sites:
        assert up["fedavg", site, 2] - up["coded", site, 2] > numbers  # two bytes less for each
        lines = read_ledger(output / "coded/seed-0/clients" / site / "ledger.jsonl")
        assert lines[0]["parts"]["model"]["codec"] == "Half"
        assert first_break(lines) is None
    assert read_run_config(output) == decided(config)
    assert "float16" in (output / "report.html").read_text(encoding="utf-8")
    other = parse_config({**settings, "algorithms": ["fedavg", {**own, "codec": "half"}]})
    with pytest.raises(CheckpointError, match=r"other settings \(algorithms\.1\.codec\.down"):
        run_experiment(other)


def states_of(output: Path, label: str) -> dict[str, bytes]:
    """Every stored state and test score of a method with seed 0."""
    return bits(output / label / "seed-0")


def test_a_method_with_its_own_training_has_the_bits_of_an_experiment_that_trains_so(
    settings, tmp_path
):
    """Scaffold with SGD and rounds at home beside FedAvg and pooled training with Adam."""
    own: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "schedule": "cosine", "batch_size": 3}
    trainings: dict[str, Any] = {"scaffold": own, "fedavg": {}, "pooled": {"local_steps": 1}}
    settings |= {"rounds": 3, "home_rounds": 1}
    entry = {"name": "scaffold", "training": own}
    pooled = {"name": "pooled", "training": trainings["pooled"]}
    file = tmp_path / "both.yaml"
    file.write_text(yaml.safe_dump({**settings, "algorithms": [entry, "fedavg", pooled]}))
    assert CliRunner().invoke(app, ["run", str(file)]).exit_code == 0
    output = Path(settings["output"])
    for label, training in trainings.items():
        alone = run_experiment(
            parse_config(
                {
                    **settings,
                    "algorithms": [label],
                    "training": {**settings["training"], **training},
                    "output": str(tmp_path / label),
                }
            )
        )
        assert len(states_of(alone, label)) > 3
        assert states_of(output, label) == states_of(alone, label)
    shown = CliRunner().invoke(app, ["config", "show", str(file)])
    assert yaml.safe_load(shown.stdout)["algorithms"][0]["training"] == own
    assert "schedule: cosine" in (output / "report.html").read_text(encoding="utf-8")
    slower = {"name": "scaffold", "training": {**own, "lr": 0.01}}
    changed = parse_config({**settings, "algorithms": [slower, "fedavg", pooled]})
    with pytest.raises(CheckpointError, match=r"algorithms\.0\.training\.lr=0\.05, now 0\.01"):
        run_experiment(changed)


def test_method_that_its_own_training_does_not_suit_is_refused(settings):
    settings["training"] |= {"optimizer": "sgd"}
    entry = {"name": "scaffold", "training": {"optimizer": "adam"}}
    config = parse_config({**settings, "algorithms": ["fedavg", entry]})
    with pytest.raises(ConfigError, match="Scaffold is right with plain sgd only, not with adam"):
        run_experiment(config)


def test_methods_that_are_stopped_early_have_the_bits_of_shorter_runs_and_are_reported_so(
    settings, tmp_path
):
    """No score improves by a Dice of 2: the second evaluation ends the rounds together."""
    rule = {"patience": 1, "min_delta": 2.0}
    local = {"name": "local", "training": {"local_steps": 1}}
    settings |= {"rounds": 8, "home_rounds": 1, "algorithms": ["fedavg", local]}
    stopping = {**settings, "early_stopping": rule}
    file = tmp_path / "stopping.yaml"
    file.write_text(yaml.safe_dump(stopping))
    done = CliRunner().invoke(app, ["run", str(file)])
    assert done.exit_code == 0, done.output
    assert "stopped early" in done.output
    planned = parse_config({**settings, "rounds": 3, "output": str(tmp_path / "planned")})
    assert bits(run_experiment(planned)) == bits(Path(settings["output"]))
    config = parse_config(stopping)
    ended = {
        (r.algorithm, r.site, r.round, r.value) for r in rows_in(config) if r.metric == "rounds"
    }
    sites = sorted(OpenedExperiment(config).variation("").sites)
    assert ended == {(label, site, 3, 3.0) for label in ("fedavg", "local") for site in sites}
    said = "Early stopping: every training ended after round 3."
    output = Path(config.output)
    for name in ("tables/dice.txt", "tables/dice-joining.md", "report.html"):
        assert said in (output / name).read_text(encoding="utf-8")
    page = (output / "report.html").read_text(encoding="utf-8")
    assert '<th scope="col">trained</th>' in page
    assert "<dd>at most 8</dd>" in page
    with pytest.raises(CheckpointError, match=r"early_stopping\.patience=1, now 2"):
        run_experiment(parse_config({**stopping, "early_stopping": {**rule, "patience": 2}}))


def test_early_stopping_without_validation_cases_is_refused_before_any_cell_runs(
    settings, phantoms
):
    federation = yaml.safe_load(phantoms.read_text())
    federation |= {"root": str(phantoms.parent), "splits": {"validation": 0.0, "test": 0.4}}
    settings |= {"federation": federation, "early_stopping": {"patience": 1}}
    events: list[Event] = []
    with pytest.raises(ConfigError, match="early_stopping needs validation cases, and no site"):
        run_experiment(parse_config(settings), events.append)
    assert events == []
