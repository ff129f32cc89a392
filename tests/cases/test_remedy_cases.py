"""What a message proposes must not do harm if it is followed to the letter."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from collegium import cli


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_cases: Path, request: pytest.FixtureRequest
) -> Path:
    """The current folder: a copy of the field case that the test is named after."""
    number = request.node.name.removeprefix("test_").partition("_")[0]
    (found,) = new_cases.glob(f"{number}_*")
    copy: Path = tmp_path / str(number)
    shutil.copytree(found, copy, copy_function=shutil.copyfile)
    monkeypatch.chdir(copy)
    return copy


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def refusal(*arguments: str, code: int) -> str:
    """Return the message of a refused call in one line."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_res01_splits_of_a_run_that_has_begun_are_never_drawn_anew(place: Path) -> None:
    first = call("run", "e.yaml", "rounds=1")
    assert first.exit_code == 0, first.output
    (place / "run" / "fedavg" / "seed-0" / "rows.jsonl").unlink()
    splits = place / "run" / "splits" / "a.json"
    stored = splits.read_text("utf-8")
    with (place / "a.csv").open("a") as table:
        table.write("\n" + (place / "more.csv").read_text("utf-8"))
    text = refusal("resume", "run", code=3)
    assert "lacks a7: " in text
    assert "delete" not in text
    assert "start the run in a new output folder" in text
    splits.unlink()
    text = refusal("resume", "run", code=5)
    assert "run/splits lacks the splits of a, by which this run has begun to train" in text
    assert not splits.exists()
    other = call("run", "e.yaml", "rounds=1", "output=other")
    assert other.exit_code == 0, other.output
    assert "a7" in json.loads((place / "other" / "splits" / "a.json").read_text("utf-8"))["splits"]
    assert "a7" not in json.loads(stored)["splits"]


def test_tab11_a_value_beyond_a_limit_is_not_proposed_as_missing(place: Path) -> None:
    words = " ".join(call("inspect", "f.yaml").output.split())
    assert "a.csv, row 1: column crp holds a value below a limit, not a number" in words
    assert "the limit or half of it" in words
    assert "table.missing" not in words
    assert "<0.5" not in words


def test_tab11_values_beyond_a_limit_that_are_declared_missing_are_told_of(place: Path) -> None:
    words = " ".join(call("inspect", "g.yaml").output.split())
    assert "crp holds values beyond a limit in 2 of 4 rows" in words
    assert "bili holds values beyond a limit in 1 of 4 rows" in words
    assert "they become the mean" in words
