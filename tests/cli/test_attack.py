"""The attacks as a user runs them: on an experiment, and on a finished run."""

import base64
import csv
import html
import inspect
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.cli.attack import attack
from collegium.core.seals import read_json
from collegium.data.phantoms import make_federation
from collegium.diagnostics.attacks.inversion import DEFAULT
from collegium.diagnostics.attacks.measurement import COMPARED
from collegium.diagnostics.attacks.writing import write_inversion, write_membership

NETWORK = """\
from torch import nn

def tiny(in_channels=1):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 32 * 32, 2),
    )
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, [*arguments])


def write(folder: Path, **changes: object) -> Path:
    data = {
        "name": "x", "federation": str(folder / "data" / "federation.yaml"),
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 0},
        "training": {"batch_size": 2, "local_steps": 1, "lr": 0.05, "optimizer": "sgd"},
        "rounds": 1, "algorithms": ["fedavg", "fedbn"], "output": str(folder / "run"),
    }  # fmt: skip
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_federation(tmp_path_factory.mktemp("drawn") / "data", 2, cases=8, size=32).parent


@pytest.fixture
def folder(tmp_path: Path, drawn: Path) -> Path:
    shutil.copytree(drawn, tmp_path / "data")
    return tmp_path


def test_an_inversion_is_written_as_numbers_tables_sentences_and_pictures(folder: Path) -> None:
    path = write(folder, model={"name": "unet", "in_channels": 1, "channels": [4, 8]})
    result = call(
        "attack", str(path), "--steps", "3", "--sites", "birch", "--defences", "none,noise 1,stc"
    )
    assert result.exit_code == 0, result.output
    written = folder / "run" / "attack"
    assert result.stdout.splitlines()[-1] == str(written)
    data = read_json(written / "inversion.json")
    names = [(r["algorithm"], r["site"], r["defence"]) for r in data["results"]]
    assert names == [
        (algorithm, "birch", defence)
        for algorithm in ("fedavg", "fedbn")
        for defence in ("none", "noise 1", "stc")
    ]
    sizes = {r["algorithm"]: (r["sent"], r["trained"]) for r in data["results"]}
    assert sizes["fedavg"][0] == sizes["fedavg"][1] == sizes["fedbn"][1] > sizes["fedbn"][0]
    assert data["settings"]["steps"] == 3
    start = "From what fedbn sends of one image of birch in one step, after the codec stc, "
    assert any(sentence.startswith(start) for sentence in data["sentences"])
    assert all(sentence in result.stdout for sentence in data["sentences"])
    with (written / "inversion.csv").open() as file:
        assert len([*csv.DictReader(file)]) == 6
    assert (written / "inversion.md").read_text().startswith("| algorithm | site | defence |")
    picture = Image.open(written / "fedavg-birch-noise-1.png")
    assert picture.size == (2 * 192, 192)
    left = np.asarray(picture)[:, :192]
    assert (left.min(), left.max()) == (0, 255)
    assert len([*written.glob("*.png")]) == 6


def test_pictures_of_patients_are_drawn_only_if_asked_for(folder: Path) -> None:
    description = folder / "data" / "federation.yaml"
    description.write_text(description.read_text().partition("\n")[2])
    arguments = ["attack", str(write(folder)), "algorithm=fedavg", "--steps", "1"]
    assert call(*arguments, "--defences", "none").exit_code == 0
    written = folder / "run" / "attack"
    assert [*written.glob("*.png")] == []
    assert call(*arguments, "--defences", "none", "--pictures").exit_code == 0
    assert [path.name for path in written.glob("*.png")] == ["fedavg-alder-none.png"]


def test_a_classifier_s_label_is_inferred_and_its_image_approached(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("left", "right"):
        (tmp_path / "data" / "a" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.kron(rng.integers(0, 255, (4, 4), np.uint8), np.ones((8, 8), np.uint8))
            Image.fromarray(pixels).save(tmp_path / "data" / "a" / name / f"{name}{number}.png")
    (tmp_path / "data" / "federation.yaml").write_text(
        "name: x\nsites: {a: {folder: a}}\ntask: {name: classification, classes: [left, right]}\n"
    )
    (tmp_path / "net.py").write_text(NETWORK)
    network = {"name": f"{tmp_path / 'net.py'}:tiny"}
    path = write(tmp_path, model=network, algorithms=["fedavg", "fedper"])
    common = ["attack", str(path), "--label", "inferred", "--defences", "none"]
    result = call(*common, "algorithm=fedavg", "--steps", "150")
    assert result.exit_code == 0, result.output
    (found,) = read_json(tmp_path / "run" / "attack" / "inversion.json")["results"]
    assert found["label_right"] is True
    assert found["likeness"]["correlation"] > 0.5
    assert "who infers the label" in result.stdout
    words = "fedper is left out: the head of the network is not sent, so that the label cannot"
    both = call(*common, "--steps", "1")
    assert both.exit_code == 0
    assert words in both.stdout
    data = read_json(tmp_path / "run" / "attack" / "inversion.json")
    assert [found["algorithm"] for found in data["results"]] == ["fedavg"]
    assert [text[: len(words)] for text in data["left_out"]] == [words]
    refused = call(*common, "--steps", "1", "algorithm=fedper")
    assert refused.exit_code == 2
    assert "the head of the network is not sent" in refused.stderr
    unknown = call("attack", str(path), "--label", "unknown")
    assert unknown.exit_code == 2
    assert "where it is a mask" in unknown.stderr


def test_a_mask_is_searched_for_and_scored(folder: Path) -> None:
    result = call(
        "attack", str(write(folder)), "algorithms=[local,fedavg]", "--steps", "3",
        "--label", "unknown", "--defences", "clip 1 + dp 1.1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (found,) = read_json(folder / "run" / "attack" / "inversion.json")["results"]
    assert 0 <= found["mask_dice"] <= 1
    assert found["label_right"] is False
    assert "local is left out: in 'local' no site receives a model, trains it and" in result.stdout
    assert "clipping to the norm 1 and noise of the multiplier 1.1" in result.stdout
    assert (folder / "run" / "attack" / "fedavg-alder-clip-1-dp-1.1.png").exists()


def test_a_batch_of_several_images_is_attacked(folder: Path) -> None:
    path, common = str(write(folder)), ("algorithm=fedavg", "--steps", "2", "--defences", "none")
    result = call("attack", path, *common, "--batch", "2", "--local-steps", "2")
    assert result.exit_code == 0, result.output
    data = read_json(folder / "run" / "attack" / "inversion.json")
    assert data["batch"] == 2
    assert data["results"][0]["mask_dice"] is None
    assert "From what fedavg sends of 2 images of alder in 2 steps" in result.stdout
    refused = call("attack", path, *common, "--batch", "99")
    assert refused.exit_code == 2
    assert "the batch is to hold 99; choose a number from 1 to" in refused.stderr


@pytest.mark.slow
def test_an_update_gives_the_image_of_a_phantom_away(tmp_path: Path) -> None:
    """The classifier of `docs/results/leaks.py`, which was 42, 31 and 15 dB in a first study."""
    leaks = Path(__file__).resolve().parents[2] / "docs" / "results" / "leaks.py"
    subprocess.run([sys.executable, str(leaks), str(tmp_path / "leaks")], check=True, timeout=120)
    result = call(
        "attack", str(tmp_path / "leaks" / "classification.yaml"), "algorithm=fedavg",
        "--defences", "none,noise 0.1,noise 1,noise 10",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = read_json(tmp_path / "leaks" / "classification" / "attack" / "inversion.json")
    found = [result["likeness"]["psnr"] for result in data["results"]]
    assert all(psnr >= least for psnr, least in zip(found, (41, 30, 14, 0), strict=True))
    assert found == sorted(found, reverse=True)


def test_memberships_are_inferred_from_a_run(folder: Path) -> None:
    path = write(folder, algorithms=["fedavg", "ditto"])
    assert call("run", str(path)).exit_code == 0
    result = call("attack", str(folder / "run"), "--kind", "membership", "--shadows", "2")
    assert result.exit_code == 0, result.output
    data = read_json(folder / "run" / "attack" / "membership.json")
    assert data["shadows"] == 2
    kinds = {(r["algorithm"], r["model"], r["attack"]) for r in data["results"]}
    assert kinds == {
        (*trained, attack)
        for trained in (("fedavg", "global"), ("ditto", "global"), ("ditto", "personal"))
        for attack in ("threshold", "lira")
    }
    assert {r["site"] for r in data["results"]} == {"alder", "birch", "all sites"}
    assert (len(data["results"]), len(data["sentences"])) == (18, 6)
    assert data["sentences"][0] in result.stdout
    inverted = call("attack", str(folder / "run"), "--steps", "1", "--defences", "none")
    assert inverted.exit_code == 0, inverted.output
    assert json.dumps(str(folder / "run" / "attack"))[1:-1] in inverted.stdout
    assert call("report", str(folder / "run")).exit_code == 0
    text = html.unescape((folder / "run" / "report.html").read_text())
    written = read_json(folder / "run" / "attack" / "inversion.json")
    for sentence in (*data["sentences"], *written["sentences"]):
        assert f"<li>{sentence}</li>" in text
    assert [entry["file"] for entry in written["pictures"]] == [
        "fedavg-alder-none.png", "ditto-alder-none.png"
    ]  # fmt: skip
    for entry in written["pictures"]:
        picture = (folder / "run" / "attack" / entry["file"]).read_bytes()
        assert base64.b64encode(picture).decode() in text


def test_a_score_stands_beside_what_a_model_tells(folder: Path) -> None:
    """It is the mean of the cases' scores in the table of results, which has them one by one."""
    assert call("run", str(write(folder, algorithms=["ditto"]))).exit_code == 0
    assert call("attack", str(folder / "run"), "--kind", "membership").exit_code == 0
    found = read_json(folder / "run" / "attack" / "membership.json")["results"]
    results = pd.read_csv(folder / "run" / "results.csv")
    tested = results[(results.split == "test") & (results.metric == "dice")]
    for model in ("global", "personal"):
        of_model = tested[tested.model == model]
        by_patient = of_model.groupby(["site", "patient"]).value.mean()
        wanted = by_patient.groupby("site").mean()
        scores = {r["site"]: r["score"] for r in found if r["model"] == model}
        assert scores == pytest.approx({**wanted, "all sites": wanted.mean()})
    assert {r["metric"] for r in found} == {"dice"}


def test_what_cannot_be_attacked_ends_with_a_sentence(folder: Path) -> None:
    path, run = str(write(folder)), str(folder)
    for arguments, words in (
        ([path, "--sites", "oak"], "there is no site 'oak' that trains; choose from alder, birch"),
        ([path, "--case", "99"], "choose a smaller number, from 0"),
        ([path, "--defences", "noise"], "has no number after 'noise'; write the norm of"),
        ([path, "--defences", "zip"], "zip"),
        ([path, "--defences", "dp 1.1"], "e.g. 'clip 1 + noise 0.1' or 'clip 1 + dp 1.1'"),
        ([path, "algorithm=local", "--steps", "1"], "there is nothing to invert"),
        ([path, "--steps", "0"], "steps: should be at least 1"),
        ([path, "secure_mean={}"], "sees no update of a single site under secure_mean"),
        ([path, "--kind", "membership", "rounds=2"], "'rounds=2' would change"),
        ([run, "rounds=2"], "name the experiment's file instead"),
        ([path, "--kind", "membership", "--false-positives", "1,2"], "write one share"),
    ):
        result = call("attack", *arguments)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
    assert call("attack", run, "--kind", "membership").exit_code == 5


def test_the_defaults_of_the_command_are_those_of_python():
    """They are written twice, since the command loads no library to list its options."""
    options = {name: p.default for name, p in inspect.signature(attack).parameters.items()}
    settings = asdict(DEFAULT)
    assert {name: options.get(name) for name in settings if name != "lr"} == {
        name: value for name, value in settings.items() if name != "lr"
    }
    assert tuple(options["defences"].split(",")) == COMPARED
    for function in (write_inversion, write_membership):
        for name, found in inspect.signature(function).parameters.items():
            if name in ("case", "batch", "local_steps", "pictures", "shadows"):
                assert options[name] == found.default
    fpr = inspect.signature(write_membership).parameters["fpr"].default
    assert float(options["false_positives"]) == fpr
