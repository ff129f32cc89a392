"""Data that change between a run and its continuation are named, and nothing is trained on them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.core.seals import read_json, seal_json
from collegium.runtime.records import RoundRecord
from collegium.runtime.run import Run

CELL = Path("run/ditto/seed-0")
TABLE = """\
name: rows
federation:
  name: rows
  root: data
  sites: {alder: {table: alder.csv}, birch: {table: birch.csv}}
  task: {name: classification, classes: ["0", "1"]}
  table: {label: died, numeric: [age], categorical: {sex: [f, m]}, case: id}
model: mlp
algorithm: ditto
rounds: 2
training: {batch_size: 2, local_steps: 1}
output: run
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def refused(result: Result, code: int, *words: str) -> None:
    """The command ended with this code and one sentence, in which these words stand."""
    assert result.exit_code == code, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert result.stderr.count("error: ") == 1
    for word in words:
        assert word in last


def stop_after_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run x.yaml until its first round is evaluated, and stop there as by Ctrl-C."""

    evaluate = Run._evaluate_if_due

    def stop(self: Run) -> RoundRecord:
        if self.server.round:
            raise KeyboardInterrupt
        return evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_evaluate_if_due", stop)
        assert call("run", "x.yaml").exit_code == 130
    assert (CELL / "server/000001.state").exists()


def states() -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in CELL.rglob("*.state")}


def empty_mask(path: Path) -> None:
    with Image.open(path) as mask:
        Image.fromarray(np.zeros_like(np.asarray(mask))).save(path)


def test_masks_emptied_under_the_same_names_are_refused_by_name(folder: Path, monkeypatch):
    stop_after_a_round(monkeypatch)
    before, masks = states(), sorted((folder / "data/birch/masks").iterdir())
    sound = {path: path.read_bytes() for path in masks}
    for path in masks:
        empty_mask(path)
    names = ", ".join(path.stem for path in masks)
    words = ("site birch: ", f"(another mask of {names}): put the old data back, or start the run")
    refused(call("resume", "run"), 3, *words)
    refused(call("run", "x.yaml"), 3, *words)
    assert states() == before
    for path, content in sound.items():
        path.write_bytes(content)
    assert call("resume", "run").exit_code == 0


def test_one_image_that_changed_is_refused_by_name(folder: Path, monkeypatch):
    stop_after_a_round(monkeypatch)
    path = sorted((folder / "data/alder/images").iterdir())[2]
    with Image.open(path) as image:
        pixels = np.asarray(image).copy()
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)
    refused(call("resume", "run"), 3, "site alder: ", f"(another image of {path.stem}): ")


def test_data_may_be_mended_before_anything_was_trained(folder: Path):
    mask = sorted((folder / "data/birch/masks").iterdir())[0]
    refused(call("run", "x.yaml", "training.batch_size=1000000", "model.in_channels=7"), 2)
    assert "contents" not in read_json(folder / "run/splits/birch.json")
    empty_mask(mask)
    assert call("run", "x.yaml").exit_code == 0
    contents = read_json(folder / "run/splits/birch.json")["contents"]
    assert {case: sorted(parts) for case, parts in contents.items()} == {
        f"birch_{number:03d}": ["image", "mask"] for number in range(1, 7)
    }


def test_files_that_were_only_touched_or_moved_are_the_same_data(folder: Path, monkeypatch):
    stop_after_a_round(monkeypatch)
    for path in (folder / "data").rglob("*.png"):
        os.utime(path, (1e9, 1e9))
    (folder / "data").rename(folder / "elsewhere")
    moved = f"federation.root={folder / 'elsewhere'}"
    federation = "federation=elsewhere/federation.yaml"
    assert call("run", "x.yaml", federation, moved).exit_code == 0


def test_a_run_from_before_there_were_contents_goes_on_and_gets_them(folder: Path, monkeypatch):
    stop_after_a_round(monkeypatch)
    path = folder / "run/splits/birch.json"
    splits = read_json(path)
    whole = path.read_bytes()
    del splits["contents"]
    path.write_bytes(seal_json(json.dumps(splits)))
    assert call("resume", "run").exit_code == 0
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("r3,53,f,1", "r3,54,f,1", "(other values of r3)"),
        ("r3,53,f,1", "r3,53,m,1", "(other values of r3)"),
        ("r3,53,f,1", "r3,53,f,0", "(another class of r3)"),
    ],
)
def test_a_row_that_changed_is_refused_by_name(tmp_path, monkeypatch, old, new, words):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("x.yaml").write_text(TABLE)
    rows = [f"r{row},{50 + row},{'fm'[row % 2 == 0]},{row % 2}" for row in range(12)]
    for site in ("alder", "birch"):
        Path(f"data/{site}.csv").write_text("\n".join(["id,age,sex,died", *rows]))
    stop_after_a_round(monkeypatch)
    before, path = states(), Path("data/birch.csv")
    sound = path.read_text()
    assert old in sound
    path.write_text(sound.replace(old, new))
    refused(call("resume", "run"), 3, "site birch: ", words, "put the old data back")
    assert states() == before
    path.write_text("\n".join(["id,age,sex,died", *reversed(rows)]))  # the same rows
    assert call("resume", "run").exit_code == 0
