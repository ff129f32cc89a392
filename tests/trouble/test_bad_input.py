"""What the command line does with bad input: one sentence, and its exit code."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.core.message import pack
from collegium.runtime.state import Store

REPORT = "run/report.html\n"
CELL = Path("run/ditto/seed-0")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def ends_well(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("report.html\n")
    return result


def refused(result: Result, code: int, *words: str) -> None:
    """The command ended with this code and one sentence, in which these words stand."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    *before, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert not [line for line in before if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in last


def rows_of(site: str, split: str) -> list[dict[str, str]]:
    with Path("run/results.csv").open(newline="") as file:
        return [r for r in csv.DictReader(file) if (r["site"], r["split"]) == (site, split)]


# Files


def remove(path: Path) -> None:
    path.unlink()


def halve(path: Path) -> None:
    with Image.open(path) as image:
        image.crop((0, 0, 32, 16)).save(path)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


FOLDER = "federation.sites.birch={folder: birch}"
MASK, IMAGE = "masks/birch_002.png", "images/birch_002.png"


@pytest.mark.parametrize(
    ("file", "damage", "settings", "words"),
    [
        (MASK, remove, (), ("there is no label", "correct the manifest", "restore the file")),
        (MASK, remove, (FOLDER,), ("has no mask in", "birch/masks: add the mask or take")),
        (MASK, halve, (), ("mask shape (16, 32) differs from image (32, 32)", "the same series")),
        (IMAGE, cut_short, (), ("birch_002.png: cannot be read", "copy it again")),
        (IMAGE, empty, (FOLDER,), ("birch_002.png: cannot be read", "copy it again")),
    ],
)
def test_an_unusable_file_stops_before_training_until_it_is_mended(
    folder: Path, file, damage, settings, words
):
    path = folder / "data/birch" / file
    sound = path.read_bytes()
    damage(path)
    refused(call("run", "x.yaml", "rounds=1", *settings), 3, "site birch, case birch_002", *words)
    assert not CELL.exists()
    path.write_bytes(sound)
    assert ends_well(call("resume", "run")).stdout == REPORT


# Settings


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("local_steps", "local_step", ("training.local_step: ", "did you mean 'local_steps'?",
                                       "(x.yaml, line 6)")),
        ("ditto", "dito", ("'dito'", "did you mean 'ditto'?", "(x.yaml, line 4)")),
        ("ditto", "{name: ditto, lamb: 1}", ("algorithm.lamb: unknown field for ditto",
                                             "did you mean 'lam'?", "(x.yaml, line 4)")),
        ("unet", "unett", ("model.name: ", "did you mean 'unet'?", "(x.yaml, line 3)")),
    ],
)  # fmt: skip
def test_a_wrong_name_in_the_file_is_shown_with_its_line(folder: Path, experiment, old, new, words):
    (folder / "x.yaml").write_text(experiment.replace(old, new))
    refused(call("run", "x.yaml"), 2, *words)
    assert not (folder / "run").exists()


def test_an_unset_variable_in_the_root_is_named_with_both_remedies(folder: Path, monkeypatch):
    monkeypatch.delenv("COLLEGIUM_NOWHERE", raising=False)
    file = folder / "data/federation.yaml"
    file.write_text(file.read_text().replace("root: .", "root: $COLLEGIUM_NOWHERE"))
    words = ("variable COLLEGIUM_NOWHERE is not set", "set it, or pass federation.root=<folder>")
    refused(call("run", "x.yaml"), 2, *words, "federation.yaml, line 3)")
    assert call("config", "show", "x.yaml", "federation.root=data").exit_code == 0
    monkeypatch.setenv("COLLEGIUM_NOWHERE", str(folder / "data"))
    assert call("config", "show", "x.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        ("model.chanels=[4,8]", "model.channels=[4,8]",
         ("model.chanels: unknown field for unet", "did you mean 'channels'?")),
        ("federation.sites.birch.forbid=[model]", "federation.sites.birch.forbid=[nothing]",
         ("Ditto sends 'model'", "the policy of site 'birch' forbids", "allow it there or choose")),
        ("model.in_channels=3", "model.in_channels=1",
         ("the model 'unet' cannot take the images of site", "have 1 channels", "in_channels")),
        ("model.out_channels=5", "model.out_channels=2",
         ("5 channels for 2 classes", "set its out_channels to 2")),
        ("model.channels=[4,-8]", "model.channels=[4,8]",
         ("model.channels: each should be at least 1, not [4, -8]",)),
        ("engine.name=flower", "engine.name=inprocess",
         ("engine.name: should be 'inprocess' or 'flare', not 'flower'",)),
        ("engine.device=gpu7", "engine.device=cpu",
         ("engine.device is 'gpu7'", "write cpu, cuda or cuda:0")),
        ("algorithm=scaffold", "training.optimizer=sgd",
         ("Scaffold is right with plain sgd only, not with adam", "set training.optimizer to sgd")),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_stop_before_training_and_do_not_claim_the_folder(
    folder: Path, wrong: str, right: str, words
):
    refused(call("run", "x.yaml", "rounds=1", wrong), 2, *words)
    assert not list((folder / "run").rglob("*.state"))
    ends_well(call("run", "x.yaml", "rounds=1", right))


def test_splits_are_drawn_anew_for_the_settings_that_train_in_the_end(folder: Path):
    refused(call("run", "x.yaml", "rounds=1", "model.out_channels=5"), 2)
    file = folder / "run/splits/alder.json"
    assert "test" in json.loads(file.read_text())["splits"].values()
    ends_well(call("run", "x.yaml", "rounds=1", "federation.splits.test=0"))
    assert set(json.loads(file.read_text())["splits"].values()) == {"train", "val"}


# The output folder


@pytest.mark.parametrize("place", [".", "nowhere"])
def test_a_folder_without_a_run_cannot_be_resumed(folder: Path, place: str):
    refused(call("resume", place), 5, "holds no run (there is no run.json)", "'collegium run'")
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize("output", ["x.yaml", "x.yaml/run"])
def test_a_file_in_the_place_of_the_output_folder_is_named(
    folder: Path, experiment: str, output: str
):
    result = call("run", "x.yaml", f"output={output}")
    refused(result, 5, "x.yaml", "a file stands in the place of a folder; choose another")
    assert (folder / "x.yaml").read_text() == experiment


def test_an_output_folder_without_permission_is_named(folder: Path):
    closed = Path("/sys") if os.geteuid() == 0 else folder / "closed"
    if not closed.is_dir():
        closed.mkdir()
        closed.chmod(0o500)
    words = (f"no permission to write in {closed}", "choose another output folder")
    refused(call("run", "x.yaml", f"output={closed}/run"), 5, *words)


def test_a_cache_that_cannot_be_written_is_named(folder: Path, monkeypatch, cache: Path):
    monkeypatch.setenv("COLLEGIUM_CACHE", str(folder / "x.yaml/cache"))
    words = (f"the cache {folder}/x.yaml/cache cannot be written", "choose another folder")
    refused(call("run", "x.yaml", "rounds=1"), 5, *words)
    monkeypatch.setenv("COLLEGIUM_CACHE", str(cache))
    ends_well(call("resume", "run"))


# Training


STILL = '''
from dataclasses import dataclass

from collegium.core.algorithm import Client, Message, handler
from collegium.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Still(FedAvg):
    """FedAvg of clients that do not train, so that no learning rate is too high."""

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Return the model as it came."""
        return Message.of(model=request["model"], num_examples=client.num_examples)
'''


def test_a_client_that_diverges_is_named_and_the_other_algorithms_run_to_their_end(folder: Path):
    """The first step is taken with a finite loss; what it leaves has none."""
    (folder / "still.py").write_text(STILL)
    settings = ("algorithms=[fedavg,still.py:Still]", "training.optimizer=sgd", "training.lr=1e30")
    result = call("run", "x.yaml", *settings)
    place = "fedavg, seed 0: client 'alder', round 2, train: the loss became "
    words = (place, "at step 1 (lr 1e+30)", "lower training.lr or set clip_norm")
    refused(result, 4, *words)
    assert "its finished rounds are kept" in result.stderr
    assert Store(folder / "run/fedavg/seed-0/server").names() == ["000000", "000001"]
    still = (folder / "run/Still/seed-0/rows.jsonl").read_bytes()
    assert still.count(b'"test"') > 0
    assert call("report", "run").stdout == REPORT
    report = (folder / REPORT.strip()).read_text()
    assert "No test scores yet of: FedAvg, seed 0." in report
    again = call("resume", "run")
    refused(again, 4, *words)
    assert "round 1/2" not in again.stderr
    assert (folder / "run/Still/seed-0/rows.jsonl").read_bytes() == still


ROUNDS = {("local", "1"), ("local", "2"), ("ditto", "1"), ("ditto", "2")}


def trained(site: str) -> set[tuple[str, str]]:
    """The rounds of each algorithm in which a site had a loss."""
    return {(r["algorithm"], r["round"]) for r in rows_of(site, "train") if r["value"]}


def keep_lines(manifest: Path, words: str) -> None:
    header, *lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text(header + "".join(line for line in lines if re.search(words, line)))


def test_a_site_with_one_patient_trains_without_scores_of_its_own(folder: Path):
    keep_lines(folder / "data/alder/manifest.csv", "alder_p004")
    ends_well(call("run", "x.yaml", "algorithms=[local,ditto]"))
    assert trained("alder") == trained("birch") == ROUNDS
    scores = rows_of("alder", "val")
    assert {(r["algorithm"], r["model"]) for r in scores} == {
        ("local", "personal"), ("ditto", "personal"), ("ditto", "global"),
    }  # fmt: skip
    assert {r["value"] for r in scores} == {""}
    assert rows_of("alder", "test") == []
    assert len(rows_of("birch", "test")) > 0
    kept = Store(folder / CELL / "clients/alder/kept")
    last = Store(folder / CELL / "clients/alder/states").load("000002-0000")["personal"]
    assert kept.names() == ["000002"]
    assert pack(kept.load("000002")["model"]) == pack(last)
    (folder / REPORT.strip()).unlink()
    assert call("report", "run").stdout == REPORT
    report = (folder / REPORT.strip()).read_text()
    assert "Tested on alder (no scores), birch (2 patients" in " ".join(report.split())


def test_a_site_whose_cases_are_all_tested_is_scored_and_never_trained(folder: Path):
    manifest = folder / "data/alder/manifest.csv"
    header, *lines = manifest.read_text().splitlines()
    manifest.write_text("\n".join([f"{header},split", *(f"{line},test" for line in lines)]))
    ends_well(call("run", "x.yaml", "algorithms=[local,ditto]"))
    assert trained("alder") == set()
    assert trained("birch") == ROUNDS
    tested = {(r["algorithm"], r["model"], r["case"]) for r in rows_of("alder", "test")}
    assert len(tested) == 4 * 6  # of Ditto's global model also that of the federation's choice
    clients = folder / "run/local/seed-0/clients"
    assert Store(clients / "alder/states").names() == ["000000-0000"]
    assert Store(clients / "birch/states").names()[-1] == "000002-0000"
