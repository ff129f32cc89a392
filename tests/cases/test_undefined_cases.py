"""Runs by the command line whose metrics are undefined."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from collegium import cli

CASE = "met01_metric_undefined_everywhere"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    return result


def written(run: str) -> Path:
    """Write tables and report of a run again, as its user may, and return the tables' folder."""
    call("tables", run)
    call("report", run)
    assert Path(run, "report.html").stat().st_size > 1000
    return Path(run, "tables")


def test_met01_sites_of_one_class_have_no_auc(folder: Path, new_cases: Path) -> None:
    for path in (new_cases / CASE / "one_class_sites").iterdir():
        shutil.copyfile(path, folder / path.name)
    assert "Accuracy" in call("run", "e.yaml").stdout
    tables = written("run2")
    assert pd.read_csv(tables / "auc.csv")["mean"].isna().all()
    assert pd.read_csv(tables / "accuracy.csv")["mean"].notna().all()
    assert "auc is undefined in every test case at a, b." in (tables / "auc.txt").read_text("utf-8")
    assert "is undefined in" not in (tables / "accuracy.txt").read_text("utf-8")
    verdicts = json.loads((tables / "verdicts.json").read_text("utf-8"))
    auc = [entry["sentence"] for entry in verdicts if entry["verdict"]["metric"] == "auc"]
    assert len(auc) == 3
    assert all("0 test patients with class" in sentence for sentence in auc)
