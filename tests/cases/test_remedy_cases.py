"""What a message proposes must not do harm if it is followed to the letter."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from collegium import cli


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def refusal(*arguments: str, code: int) -> str:
    """Return the message of a refused call in one line."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_res01_splits_of_a_run_that_has_begun_are_never_drawn_anew(place: Path) -> None:
    first = call("run", "e.yaml", "rounds=3")
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


TABLE = """\
name: t
federation:
  name: t
  sites: {a: {table: a.csv}, b: {table: b.csv}}
  task: {name: classification, classes: ["0", "1"]}
  table: {label: label, numeric: [x], case: id, patient: pid}
model: {name: logistic}
training: {batch_size: 4, local_steps: 1}
algorithms: [fedavg]
rounds: 3
output: run
"""


def test_res01_siblings_a_table_with_more_rows_fewer_rows_or_other_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"r{n},p{n},{n % 5},{n % 2}" for n in range(12)]
    header = "id,pid,x,label"

    def write(lines: list[str]) -> None:
        (tmp_path / "a.csv").write_text("\n".join([header, *lines, ""]), "utf-8")

    (tmp_path / "e.yaml").write_text(TABLE, "utf-8")
    write(rows)
    (tmp_path / "b.csv").write_text((tmp_path / "a.csv").read_text("utf-8"), "utf-8")
    first = call("run", "e.yaml")
    assert first.exit_code == 0, first.output
    (tmp_path / "run" / "fedavg" / "seed-0" / "rows.jsonl").unlink()
    stored = (tmp_path / "run" / "splits" / "a.json").read_text("utf-8")
    splits = json.loads(stored)["splits"]
    places = {split: int(case[1:]) for case, split in splits.items()}

    write([*rows, "r12,p12,3,1"])
    assert "lacks r12: " in refusal("resume", "run", code=3)
    write(rows[1:])
    assert "has unknown r0: " in refusal("resume", "run", code=3)
    moved = rows[places["test"]].split(",")
    moved[1] = f"p{places['train']}"  # one patient in training and test
    write([",".join(moved) if row.startswith(f"{moved[0]},") else row for row in rows])
    text = refusal("resume", "run", code=3)
    assert f"have its patient {moved[1]} in two splits" in text
    assert "start the run in a new output folder" in text
    assert (tmp_path / "run" / "splits" / "a.json").read_text("utf-8") == stored
    write(rows)
    again = call("resume", "run")
    assert again.exit_code == 0, again.output


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
