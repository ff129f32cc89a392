"""What is recorded of the rounds for the figures of papers, from the file to the table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from collegium.data.phantoms import make_federation
from collegium.errors import CheckpointError, ConfigError
from collegium.evaluation.report.reading import read_run_output
from collegium.evaluation.timing import read_accounts
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.runner import read_run_config, run_experiment

SITES = {"alder", "birch", "cedar"}
METHODS = ["fedavg", "fedbn", {"name": "grace", "alignment": "none"}, "pfednet"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An experiment that records what may be asked for, and two of its methods without that."""
    root = tmp_path_factory.mktemp("diagnostics")
    patch = pytest.MonkeyPatch()
    patch.setenv("COLLEGIUM_CACHE", str(root / "cache"))
    settings: dict[str, Any] = {
        "name": "tiny",
        "federation": str(make_federation(root / "phantoms", 3, cases=8, size=32)),
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1},
        "rounds": 2,
        "training": {"batch_size": 2, "local_steps": 2, "lr": 0.01},
    }
    asked: dict[str, Any] = {
        "plain": {"algorithms": ["fedbn", "pfednet"]},
        "recorded": {"algorithms": METHODS, "diagnostics": ["layer_distance"]},
    }
    found = {
        name: run_experiment(parse_config({**settings, **more, "output": str(root / name)}))
        for name, more in asked.items()
    }
    patch.undo()
    return found


@pytest.fixture(scope="module")
def rows(runs: dict[str, Path]) -> pd.DataFrame:
    """The rows of the one that records, as a user reads them."""
    found = pd.read_csv(runs["recorded"] / "results.csv", keep_default_na=False)
    return found.assign(value=pd.to_numeric(found["value"]))


def test_what_is_recorded_changes_no_bit(runs: dict[str, Path]) -> None:
    bits = [
        {
            str(file.relative_to(output)): file.read_bytes()
            for method in ("fedbn", "pfednet")
            for pattern in ("*.state", "test.json", "*.safetensors")
            for file in (output / method).rglob(pattern)
        }
        for output in runs.values()
    ]
    assert len(bits[0]) > 10
    assert bits[0] == bits[1]


def test_nothing_is_recorded_that_was_not_asked_for(runs: dict[str, Path]) -> None:
    found = pd.read_csv(runs["plain"] / "results.csv")
    assert not found["metric"].str.startswith("layer_distance").any()
    assert found["metric"].str.startswith("sdwd/").sum() == 2 * 6


def test_every_layer_that_travels_has_a_distance_by_round_and_site(rows: pd.DataFrame) -> None:
    found = rows[rows["metric"].str.startswith("layer_distance/")]
    assert {*found["algorithm"]} == {"fedavg", "fedbn", "grace"}
    assert {*found["split"]} == {"train"}
    places = found.groupby(["algorithm", "round", "site"])["metric"].nunique()
    assert {*places.index.get_level_values("site")} == SITES
    assert len(places) == 3 * 2 * 3
    counts = {str(method): {*found} for method, found in places.groupby(level="algorithm")}
    assert counts["fedavg"] == counts["grace"]
    assert all(len(each) == 1 for each in counts.values())  # the same in every round and site
    assert min(counts["fedbn"]) < min(counts["fedavg"])  # its normalisation does not travel
    assert (found["value"] > 0).all()


def test_the_server_s_numbers_have_a_row_without_a_site(rows: pd.DataFrame) -> None:
    server = rows[rows["site"] == ""]
    assert {*server["split"]} == {"train"}
    names = {name: {*metrics} for name, metrics in server.groupby("algorithm")["metric"]}
    boxes = {f"sdwd/{name}" for name in ("min", "q1", "median", "q3", "max", "mean")}
    assert names == {"pfednet": boxes, "grace": {"consistency/before", "consistency/after"}}
    assert (server.groupby(["algorithm", "metric"])["round"].apply(tuple) == (1, 2)).all()
    sides = server[server["algorithm"] == "grace"].pivot_table(
        index="round", columns="metric", values="value"
    )
    assert (sides["consistency/after"] >= sides["consistency/before"] - 1e-12).all()


def test_the_bytes_of_every_round_are_told_in_both_directions(rows: pd.DataFrame) -> None:
    losses = rows[(rows["split"] == "train") & (rows["metric"] == "loss")]
    shared = losses[losses["round"] > 0]
    assert len(shared) == 4 * 2 * 3
    assert (shared["bytes_up"] > 1000).all()
    assert (shared["bytes_down"] > 1000).all()
    assert {*losses[losses["round"] == 0]["algorithm"]} == {"pfednet"}  # the sketches of its graph


def test_the_server_is_no_site_of_the_report(runs: dict[str, Path]) -> None:
    assert read_run_output(runs["recorded"]).sites == sorted(SITES)


def test_a_run_that_began_without_them_is_not_extended_by_diagnostics(
    runs: dict[str, Path],
) -> None:
    config = read_run_config(runs["plain"])
    with pytest.raises(CheckpointError, match=r"diagnostics=\[\], now \[.layer_distance.\]"):
        run_experiment(replace(config, diagnostics=("layer_distance",)))


def test_an_unknown_diagnostic_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"diagnostics.*layer_distance"):
        parse_config({"diagnostics": ["layers"]})


def test_scores_and_losses_of_steps_stand_in_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLEGIUM_CACHE", str(tmp_path / "cache"))
    file = make_federation(tmp_path / "phantoms", 3, cases=8, size=32)
    federation = yaml.safe_load(file.read_text()) | {"root": str(file.parent), "outside": ["cedar"]}
    for site in ("alder", "birch"):
        federation["sites"][site] |= {"share": ["personal"]}
    adapters = [
        {"name": "routing", "label": "plain", "epochs": 2},
        {"name": "routing", "epochs": 2, "record_steps": True},
        {"name": "tent", "record_steps": True},
    ]
    settings: dict[str, Any] = {
        "name": "tiny",
        "federation": federation,
        "model": {
            "name": "unet",
            "in_channels": 1,
            "channels": [4, 8],
            "num_res_units": 1,
            "norm": "batch",
        },
        "algorithms": ["iopfl"],
        "adapters": adapters,
        "rounds": 1,
        "training": {"batch_size": 2, "local_steps": 2, "lr": 0.01},
        "output": str(tmp_path / "run"),
    }
    output = run_experiment(parse_config(settings))
    accounts = {account["adapter"]["label"]: account for account in read_accounts(output)}
    assert not {"by_step", "loss_deviations"} & accounts["plain"].keys()
    assert accounts["routing"]["losses"] == accounts["plain"]["losses"]
    steps = accounts["routing"]["by_step"]
    results = pd.read_csv(output / "results.csv")
    of_case = results[(results["split"] == "outside") & (results["metric"] == "dice")]
    delivered = of_case[of_case["model"] == "routing"]["value"]
    chosen = accounts["routing"]["chosen"]
    assert steps["mean"][chosen] == pytest.approx(delivered.mean())
    assert steps["deviation"][chosen] == pytest.approx(delivered.std(ddof=0))
    assert steps["cases"] == [len(delivered)] * 3
    losses, deviations = (accounts["routing"][name] for name in ("losses", "loss_deviations"))
    assert [row.keys() for row in losses] == [row.keys() for row in deviations]
    assert all(row["total"] > 0 for row in deviations)
    assert accounts["tent"]["by_step"]["steps"] == [0, 1]
    assert (output / "report.html").exists()
