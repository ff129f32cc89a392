"""From a finished run to masks of a hospital that took no part."""

import csv
import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from collegium import cli
from collegium.core.seals import read_json
from collegium.data.phantoms import make_federation
from collegium.deploy import Choice, adapt_folder, export_bundle, open_model, open_models
from collegium.experiment.config.experiment import AdapterConfig, parse_config, to_dict
from collegium.experiment.runner import run_experiment
from collegium.models.factory import build_model

MODEL: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two sites, ``run``, and the images of a third, ``data/cedar``."""
    folder = tmp_path_factory.mktemp("application")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(folder / "cache"))
        settings = {
            "name": "tiny",
            "federation": str(make_federation(folder / "data", 3, cases=8, size=32)),
            "model": MODEL,
            "algorithms": ["fedavg", "iopfl"],
            "rounds": 2,
            "seeds": [3],
            "training": {"batch_size": 2, "local_steps": 3, "lr": 0.02},
            "output": str(folder / "run"),
        }
        federation = to_dict(parse_config(settings))["federation"]
        federation["outside"] = ["cedar"]
        for site in federation["sites"].values():
            site["share"] = ["personal"]
        run_experiment(parse_config({**settings, "federation": federation}))
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("COLLEGIUM_CACHE", str(tmp_path / "cache"))


def adapt(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["adapt", *map(str, arguments)])
    return done.exit_code, done.output


def masks(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    found = {}
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as image:
            found[path.stem] = np.asarray(image)
    return found


def by_hand(place: Path, model: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Predict every image of the third site by plain Pillow, numpy and torch."""
    network = build_model(**MODEL)
    network.load_state_dict(load_file(model))
    network.eval()
    found = {}
    for path in sorted((place / "data/cedar/images").iterdir()):
        with Image.open(path) as image:
            pixels = np.asarray(image, dtype=np.float64)
        scaled = ((pixels - pixels.mean()) / pixels.std()).astype(np.float32)
        with torch.no_grad():
            logits = network(torch.from_numpy(scaled)[None, None])
        found[path.stem] = logits.argmax(1)[0].numpy()
    return found


def test_masks_are_those_that_the_global_model_predicts(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    code, said = adapt(place / "run", place / "data/cedar", "--adapter", "none", "--algorithm",
                       "fedavg", "--output", output)  # fmt: skip
    assert (code, said.strip()) == (0, str(output / "account.html"))
    expected = by_hand(place, place / "run/fedavg/seed-3/server/deployed/global.safetensors")
    found = masks(output / "predictions")
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    account = json.loads((output / "account.json").read_text())
    assert account["adapter"] == {"name": "none", "label": "none", "batch_size": 4}
    assert (account["models"], account["sources"], account["cases"], account["steps"]) == (
        "tiny: fedavg, seed 3", ["global"], 8, 0,
    )  # fmt: skip
    page = (output / "account.html").read_text()
    assert "8 cases were predicted with\nthe model global" in page
    assert page.count("<img ") == 8
    assert not (output / "scores.csv").exists()
    assert set(load_file(output / "adapted.safetensors")) == set(build_model(**MODEL).state_dict())


def dice_of(folder: Path) -> np.ndarray[Any, Any]:
    with (folder / "scores.csv").open() as file:
        return np.array([float(row["dice"]) for row in csv.DictReader(file)])


def test_the_answer_stands_before_the_path(place: Path, tmp_path: Path) -> None:
    site = place / "data/cedar"
    run, labels = (place / "run", site), ("--labels", site / "masks")
    said = {}
    for name in ("none", "tent"):
        options = ("--adapter", name, "--algorithm", "iopfl", "--output", tmp_path / name, *labels)
        code, text = adapt(*run, *options)
        assert code == 0
        said[name] = text.splitlines()
    assert len(said["none"]) == 1
    question, answer, page = said["tent"]
    assert question == "Does adapting help this hospital?"
    assert page == str(tmp_path / "tent" / "account.html")
    plain, adapted = dice_of(tmp_path / "none").mean(), dice_of(tmp_path / "tent").mean()
    assert answer.startswith("cedar: ")
    assert f"IOP-FL + Tent, Dice {plain:.3f} unadapted, {adapted:.3f} adapted" in answer
    account = json.loads((tmp_path / "tent" / "account.json").read_text())
    assert account["answer"] == [question, answer]
    assert html.escape(answer, quote=False) in Path(page).read_text()
    code, text = adapt(
        *run, "--adapter", "tent", "--algorithm", "iopfl", "--output", tmp_path / "x"
    )
    assert (code, text.splitlines()[0]) == (
        0, "Whether adapting helps is not known: no labels score the predictions.",
    )  # fmt: skip


def test_steps_are_scored_where_there_are_labels(place: Path, tmp_path: Path) -> None:
    site = place / "data/cedar"
    arguments = (place / "run", site / "images", "epochs=2", "--adapter", "routing",
                 "--algorithm", "iopfl", "--labels", site / "masks")  # fmt: skip
    for name, more in (("plain", []), ("steps", ["record_steps=true"])):
        assert adapt(*arguments, *more, "--output", tmp_path / name)[0] == 0
    plain, steps = (
        json.loads((tmp_path / name / "account.json").read_text()) for name in ("plain", "steps")
    )
    assert "by_step" not in plain
    assert steps["losses"] == plain["losses"]
    with (tmp_path / "steps" / "scores.csv").open() as file:
        scores = [float(row["dice"]) for row in csv.DictReader(file)]
    found = steps["by_step"]
    assert (found["steps"], found["cases"]) == ([0, 1, 2], [len(scores)] * 3)
    assert found["mean"][steps["chosen"]] == pytest.approx(np.mean(scores), abs=1e-4)


def test_labels_only_score(place: Path, tmp_path: Path) -> None:
    site = place / "data/cedar"
    arguments = (place / "run", site, "lr=0.01", "steps=2", "--adapter", "tent", "--algorithm",
                 "iopfl")  # fmt: skip
    assert adapt(*arguments, "--output", tmp_path / "plain")[0] == 0
    assert adapt(*arguments, "--output", tmp_path / "scored", "--labels", site / "masks")[0] == 0
    plain, scored = (masks(tmp_path / name / "predictions") for name in ("plain", "scored"))
    assert all((plain[name] == scored[name]).all() for name in plain)
    with (tmp_path / "scored/scores.csv").open() as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    assert rows.keys() == scored.keys()
    for name, mask in scored.items():
        with Image.open(site / "masks" / f"{name}.png") as image:
            truth = np.asarray(image) > 0
        dice = 2 * (truth & (mask > 0)).sum() / (truth.sum() + (mask > 0).sum())
        assert float(rows[name]["dice"]) == pytest.approx(dice)
    account = json.loads((tmp_path / "scored/account.json").read_text())
    assert account["adapter"]["lr"] == 0.01
    assert account["steps"] == 4  # two batches of four, two steps each
    page = (tmp_path / "scored/account.html").read_text()
    assert "the labels only scored" in page
    assert "<svg " in page


def test_exported_models_do_with_the_experiment_that_they_are_of(
    place: Path, tmp_path: Path
) -> None:
    models = place / "run/iopfl/seed-3/server/deployed"
    config = tmp_path / "trained.yaml"
    settings = json.loads((place / "run/run.json").read_text())["config"]
    config.write_text(
        json.dumps({**settings, "federation": {**settings["federation"], "root": "$X"}})
    )
    code, said = adapt(models, place / "data/cedar", "--adapter", "none", "--output",
                       tmp_path / "out", "--config", config)  # fmt: skip
    assert code == 0, said
    expected = by_hand(place, models / "global.safetensors")
    found = masks(tmp_path / "out/predictions")
    assert all((found[name] == expected[name]).all() for name in expected)
    old = tmp_path / "old"  # as earlier versions wrote it
    shutil.copytree(models, old, ignore=shutil.ignore_patterns("settings.json"))
    code, said = adapt(old, place / "data/cedar", "--adapter", "none", "--output",
                       tmp_path / "other")  # fmt: skip
    assert code == 2
    assert "models need the experiment that they were trained with; name" in said


ROUTING = ("--adapter", "routing", "--algorithm", "iopfl", "epochs=1", "terms=[consistency]")


def test_models_travel_with_all_that_it_takes_to_use_them(place: Path, tmp_path: Path) -> None:
    models, shipped = place / "run/iopfl/seed-3/server/deployed", tmp_path / "shipped"
    shutil.copytree(models, shipped)
    told = (shipped / "settings.json").read_text()
    assert not re.search(rf"{place}|/|alder|birch|cedar", told)
    assert json.loads(told)["model"] == MODEL
    for name, source in (("there", place / "run"), ("here", shipped)):
        code, said = adapt(source, place / "data/cedar", *ROUTING, "--output", tmp_path / name)
        assert code == 0, said
    there, here = (masks(tmp_path / name / "predictions") for name in ("there", "here"))
    assert all((there[case] == here[case]).all() for case in there)
    files = [tmp_path / name / "adapted.safetensors" for name in ("there", "here")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"name": "unet"', '"name": "net.py:make"', "is not what Collegium writes beside models"),
        ('"name": "tiny"', '"algorithms": [{"name": "x.py:X"}]', "is not what Collegium writes"),
        ('"normalise": "zscore"', '"normalise": "zz"', r"image.normalise: should be .* not 'zz'"),
        ('"channels": [', '"channels": [ 2, ', "does not fit the network 'unet' .* has the shape"),
        ('"seeds": [', '"seeds": ', "not valid YAML"),
    ],
)
def test_settings_beside_models_run_no_code_and_are_checked(
    place: Path, tmp_path: Path, old: str, new: str, says: str
) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(place / "run/fedavg/seed-3/server/deployed", shipped)
    settings = read_json(shipped / "settings.json")  # without the seal, which would tell
    text = json.dumps(settings, indent=1)
    assert old in text
    (shipped / "settings.json").write_text(text.replace(old, new, 1))
    code, said = adapt(shipped, place / "data/cedar", "--adapter", "none", "--output",
                       tmp_path / "out")  # fmt: skip
    assert code == 2, said
    assert re.search(says, " ".join(said.split()))


def test_the_seed_of_an_adaptation_is_that_of_the_job(place: Path, tmp_path: Path) -> None:
    written = []
    for number, chosen in enumerate(([], ["--seed", 3])):
        output = tmp_path / str(number)
        code, said = adapt(place / "run", place / "data/cedar", *ROUTING, *chosen, "--output",
                           output)  # fmt: skip
        assert code == 0, said
        assert json.loads((output / "account.json").read_text())["seed"] == 3
        written.append((output / "adapted.safetensors").read_bytes())
    assert written[0] == written[1]
    opened = replace(open_models(place / "run", Choice("iopfl")), seed=0)
    adapter = AdapterConfig("routing", {"epochs": 1, "terms": ["consistency"]})
    adapt_folder(opened, place / "data/cedar", adapter, tmp_path / "other")
    assert (tmp_path / "other/adapted.safetensors").read_bytes() != written[0]


def test_a_bundle_is_adapted_as_the_global_model_of_its_run(place: Path, tmp_path: Path) -> None:
    bundle = export_bundle(open_model(place / "run", Choice("fedavg")), tmp_path / "bundle")
    code, said = adapt(bundle, place / "data/cedar", "--adapter", "none", "--output",
                       tmp_path / "out")  # fmt: skip
    assert code == 0, said
    expected = by_hand(place, place / "run/fedavg/seed-3/server/deployed/global.safetensors")
    found = masks(tmp_path / "out/predictions")
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)
    account = json.loads((tmp_path / "out/account.json").read_text())
    assert (account["handed_out"], account["seed"]) == (["global"], 3)


@pytest.mark.parametrize("command", ["adapt", "predict", "export"])
def test_a_network_that_is_not_the_models_is_named(
    place: Path, tmp_path: Path, command: str
) -> None:
    models, config = place / "run/fedavg/seed-3/server/deployed", tmp_path / "wrong.yaml"
    settings = json.loads((place / "run/run.json").read_text())["config"]
    config.write_text(json.dumps({**settings, "model": {**MODEL, "channels": [4, 16]}}))
    what = models if command == "adapt" else models / "global.safetensors"
    images = [] if command == "export" else [place / "data/cedar"]
    words = [command, what, *images, "--config", config, "--output", tmp_path / "out"]
    done = CliRunner().invoke(cli.app, [*map(str, words)])
    assert done.exit_code == 2, done.output
    assert "does not fit the network 'unet' of the experiment 'tiny'" in done.output
    assert "has the shape (8, 4, 3, 3), the network's (16, 4, 3, 3)" in done.output
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["adapt", "predict"])
def test_a_device_that_is_not_there_is_said(place: Path, tmp_path: Path, command: str) -> None:
    words = [command, place / "run", place / "data/cedar", "--algorithm", "fedavg", "--output",
             tmp_path / "out"]  # fmt: skip
    for device, says in (("cuda", "but torch finds no CUDA device"), ("gpu", "write cpu, cuda")):
        done = CliRunner().invoke(cli.app, [*map(str, words), "--device", device])
        assert (done.exit_code, f"--device is '{device}'" in done.output) == (2, True)
        assert says in done.output


def test_average_gives_a_folder_for_each_model_and_needs_labels(
    place: Path, tmp_path: Path
) -> None:
    site = place / "data/cedar"
    arguments = (place / "run", site, "--adapter", "average", "--algorithm", "iopfl", "--output",
                 tmp_path / "out")  # fmt: skip
    code, said = adapt(*arguments)
    assert (code, "choose ensemble" in said) == (2, True)
    assert not (tmp_path / "out").exists()
    assert adapt(*arguments, "--labels", site / "masks")[0] == 0
    deployed = place / "run/iopfl/seed-3/server/deployed"
    for name in ("alder", "birch"):
        expected = by_hand(place, deployed / f"{name}.safetensors")
        found = masks(tmp_path / "out/predictions" / name)
        assert all((found[case] == expected[case]).all() for case in expected)


FEDAVG = ["run", "data/cedar", "--algorithm", "fedavg"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "data/cedar"], 2, r"2 jobs; choose one by --algorithm \(fedavg, seed 3; iopfl"),
        (["run", "data/cedar", "--algorithm", "ditto"], 2, "has no such job; there is fedavg"),
        (["run", "nowhere", "--algorithm", "fedavg"], 3, "there is no such folder or manifest"),
        ([*FEDAVG, "--adapter", "tant"], 2, "did you mean 'tent'"),
        ([*FEDAVG, "--adapter", "tent", "lr=0"], 2, "adapter.lr: should be above 0, not 0"),
        ([*FEDAVG, "--adapter", "tent", "lr"], 2, "write key=value"),
        ([*FEDAVG, "--adapter", "ensemble"], 2, "ensemble needs personal models, but no site"),
        (["data", "data/cedar"], 2, "is no run, and models need"),
        (["nothere", "one"], 2, "nothere: there is no such folder"),
    ],
)
def test_what_cannot_be_is_said_and_leaves_nothing(
    place: Path, tmp_path: Path, monkeypatch, arguments: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(place)
    chosen = [] if "--adapter" in arguments else ["--adapter", "none"]
    found, said = adapt(*arguments, *chosen, "--output", tmp_path / "out")
    assert found == code, said
    assert re.search(says, " ".join(said.split()))
    assert list(tmp_path.glob("*out*")) == []


def test_an_image_that_does_not_suit_the_network_is_named(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "volumes"
    folder.mkdir()
    for name in ("a_0000", "a_0001"):
        Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save(folder / f"{name}.png")
    code, said = adapt(place / "run", folder, "--algorithm", "fedavg", "--adapter", "none",
                       "--output", tmp_path / "out")  # fmt: skip
    assert code == 3
    assert "case a: its image has 2 channels, and the models were trained on 1" in said


def test_an_output_folder_that_holds_something_is_left_alone(place: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    code, said = adapt(place / "run", place / "data/cedar", "--algorithm", "fedavg", "--adapter",
                       "none", "--output", tmp_path / "out")  # fmt: skip
    assert (code, "holds something already" in said) == (3, True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
