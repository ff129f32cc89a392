"""The field cases of what masks do not annotate, and for each siblings of the same kind."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.core.dataset import Example
from collegium.core.randomness import generator
from collegium.data.augmentation import deform
from collegium.data.federation import open_federation
from collegium.data.formats.dicom import decode
from collegium.data.formats.dicom_segmentation import write_segmentation
from collegium.data.preprocessing import CaseArrays
from collegium.data.sampling import SamplingConfig
from collegium.experiment.config.experiment import load_federation
from collegium.tasks.segmentation import SegmentationTask

EXPERIMENT = """\
name: e
federation: {federation}
model: {{name: unet, in_channels: 1, out_channels: 2, channels: [4, 8], norm: instance}}
training: {{optimizer: adam, lr: 1e-2, batch_size: 4, local_steps: 2}}
algorithms: [fedavg]
rounds: 1
output: run
"""


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which a sibling is drawn."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    """Return what a command prints, in one line."""
    result: Result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def inspected(file: str, *overrides: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        CliRunner().invoke(cli.app, ["inspect", file, *overrides, "--json"]).stdout
    )
    return found


def federation(place: Path, name: str, task: str, sites: str = "a: {folder: a}") -> str:
    """Write a federation's file and return its name."""
    text = f"name: f\nsites: {{{sites}}}\ntask: {{name: segmentation, {task}}}\n"
    (place / name).write_text(text, "utf-8")
    return name


def draw(
    place: Path,
    site: str,
    mask: Callable[[np.random.Generator], np.ndarray],
    suffix: str = "png",
    count: int = 6,
) -> None:
    """Draw a site's images of 16 x 16 pixels, and their masks."""
    for kind in ("images", "masks"):
        (place / site / kind).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rng = np.random.default_rng([number, *site.encode()])
        image = rng.integers(0, 200, (16, 16)).astype(np.uint8)
        Image.fromarray(image).save(place / site / "images" / f"{site}{number}.png")
        drawn = Image.fromarray(mask(rng).astype(np.uint8))
        drawn.save(place / site / "masks" / f"{site}{number}.{suffix}")


def lesion_and_unknown(rng: np.random.Generator, unknown: int = 255) -> np.ndarray:
    """Return a mask with a lesion of 12 pixels, and 48 pixels of the value of the unknown."""
    mask = np.zeros((16, 16))
    row = int(rng.integers(0, 8))
    mask[row : row + 3, 2:6] = 1
    mask[13:] = unknown
    return mask


def examples(file: str, site: str) -> list[Example]:
    """Return all cases of a site as they are trained and scored on."""
    opened = open_federation(load_federation(Path(file)), Path("cache"), 0, None)[site]
    splits = (opened.train, opened.val, opened.test)
    return [split.example(index) for split in splits for index in range(len(split))]


def test_lab12_ignored_voxels_are_outside_loss_score_and_size(
    place: Path, values: dict[str, Any]
) -> None:
    found = inspected("f.yaml")
    assert found["good"]
    assert len(found["classes"]) == values["classes"]
    for site in found["sites"]:
        wanted = values["ignored_voxels_per_case"]
        ignored = site["ignored"]
        assert (ignored["cases"], ignored["least"], ignored["greatest"]) == (6, wanted, wanted)
        assert ignored["share"] == wanted / 2048
        (lesion,) = site["sizes"]
        voxel = 2 / 1000  # mL
        assert lesion["least"] == pytest.approx(values["lesion_voxels_per_case"] * voxel)
        assert site["labels"] == {"0": 6, "1": 6}
        assert site["foreground"] == values["lesion_voxels_per_case"] / (2048 - wanted)
        assert any("calls the value 2 ignore" in note for note in site["notes"])
    for example in examples("f.yaml", "a"):
        assert int((~example.batch["mask"]).sum()) == values["ignored_voxels_per_case"]
        inside = example.batch["label"][example.batch["mask"]]
        assert int((inside == 1).sum()) == values["lesion_voxels_per_case"]


def test_lab12_a_run_has_no_score_of_ignore(place: Path) -> None:
    (place / "e.yaml").write_text(EXPERIMENT.format(federation="f.yaml"), "utf-8")
    call("run", "e.yaml", "model.spatial_dims=3")
    metrics = set(pd.read_parquet(place / "run" / "results.parquet")["metric"])
    assert metrics - {"loss", "events"} == {"dice", "iou", "hd95"}


def test_lab12_ignore_is_no_class_of_a_task(place: Path) -> None:
    assert "task.classes names ignore" in call("inspect", "ignore_as_class.yaml", code=2)


def test_lab12_a_label_map_never_makes_a_class_of_ignore(place: Path) -> None:
    text = (place / "f.yaml").read_text("utf-8").replace("classes", "label_map: {2: 1}, classes")
    (place / "mapped.yaml").write_text(text, "utf-8")
    said = call("inspect", "mapped.yaml", code=2)
    assert "label_map makes class 1 of the value 2, which dataset.json there calls ignore" in said
    assert "take 2 out of label_map" in said


def test_lab12_sibling_255_in_png_by_declaration_is_as_a_field_of_view(empty: Path) -> None:
    draw(empty, "a", lesion_and_unknown)
    declared = federation(empty, "f.yaml", "classes: [background, lesion], ignore: 255")
    (site,) = inspected(declared)["sites"]
    assert site["ignored"] == {
        "cases": 6, "least": 48, "middle": 48, "greatest": 48, "share": 48 / 256
    }  # fmt: skip
    assert [size["greatest"] for size in site["sizes"]] == [12]

    draw(empty, "b", lambda rng: lesion_and_unknown(rng, 0))
    shutil.rmtree(empty / "b" / "images")
    for kind in ("images", "fov"):
        (empty / "b" / kind).mkdir()
    view = np.full((16, 16), 255, np.uint8)
    view[13:] = 0
    for number in range(6):
        image = f"images/a{number}.png"
        shutil.copyfile(empty / "a" / image, empty / "b" / image)
        Image.fromarray(view).save(empty / "b" / "fov" / f"a{number}.png")
        (empty / "b" / "masks" / f"b{number}.png").unlink()
        mask = np.array(Image.open(empty / "a" / "masks" / f"a{number}.png"))
        Image.fromarray(mask * (mask < 2)).save(empty / "b" / "masks" / f"a{number}.png")
    viewed = federation(empty, "g.yaml", "classes: [background, lesion]", "b: {folder: b}")
    for file in (declared, viewed):
        with (empty / file).open("a") as more:
            more.write("image: {normalise: none}\n")
    pairs = zip(
        sorted(examples(declared, "a"), key=lambda e: e.case),
        sorted(examples(viewed, "b"), key=lambda e: e.case),
        strict=True,
    )
    for one, other in pairs:
        assert one.batch.keys() == other.batch.keys()
        assert all(torch.equal(one.batch[key], other.batch[key]) for key in one.batch)


def test_lab12_sibling_255_that_nobody_declared_is_asked_about(empty: Path) -> None:
    draw(empty, "a", lesion_and_unknown)
    said = call("inspect", federation(empty, "f.yaml", "classes: [background, lesion]"), code=3)
    assert "unexpected values 255 (found: 0, 1, 255; expected: 0, 1)" in said
    assert "where they mean not annotated" in said
    assert "set task.ignore: 255" in said
    assert "binarise a copy of the masks: what is above 127 is the structure" in said
    assert "{255: 1}" not in said
    assert "set task.ignore: 255" in call("init", ".", "e.yaml", code=3)
    assert not (empty / "e.yaml").exists()


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_lab12_siblings_ringing_of_jpeg_is_no_class_and_not_ignored(
    empty: Path, suffix: str
) -> None:
    def blurred(rng: np.random.Generator) -> np.ndarray:
        Image.fromarray((lesion_and_unknown(rng, 0) * 255).astype(np.uint8)).save("m.jpg")
        return np.array(Image.open("m.jpg"))

    draw(empty, "a", blurred, suffix)
    said = call("inspect", federation(empty, "f.yaml", "classes: [background, lesion]"), code=3)
    assert "JPEG blurs labels: export the mask as PNG from its source" in said
    assert "binarise a copy" in said
    assert "task.ignore" not in said
    assert "label_map" not in said


def test_lab12_sibling_the_value_of_a_class_elsewhere_is_ignored_where_it_is_named_so(
    place: Path,
) -> None:
    federation(
        place, "three.yaml", "classes: [background, lesion, oedema]",
        "a: {folder: a, labelled: [lesion]}, b: {folder: b, labelled: [lesion, oedema]}",
    )  # fmt: skip
    for site in inspected("three.yaml")["sites"]:
        assert site["ignored"]["greatest"] == 384
        assert site["labels"] == {"0": 6, "1": 6}


@pytest.mark.parametrize("loss", ["dice", "ce", "dice_ce"])
@pytest.mark.parametrize("kind", ["classes", "labelled", "regions"])
def test_lab12_no_loss_and_no_score_sees_what_is_ignored(empty: Path, loss: str, kind: str) -> None:
    draw(empty, "a", lesion_and_unknown)
    file = federation(empty, "f.yaml", "classes: [background, lesion, other], ignore: 255")
    example = examples(file, "a")[0]
    regions = {"both": (1, 2), "lesion": (1,)} if kind == "regions" else None
    names = ["background", "lesion", "other"]
    task = SegmentationTask(names, loss, regions=regions, exclusion=0.5)
    task = task.with_labelled(["lesion"]) if kind == "labelled" else task
    inside = example.batch["mask"]
    logits = torch.randn(1, task.channels, 16, 16, requires_grad=True)
    task.loss(logits, example.batch).backward()
    assert logits.grad is not None
    assert not logits.grad.movedim(1, -1)[~inside].any()
    assert logits.grad.movedim(1, -1)[inside].any()
    prediction = example.batch["label"].clone()
    prediction[:, 0, 0] = 1
    expected = task.scores(prediction, example)
    assert expected["dice"] is not None
    prediction[~inside] = 1
    assert task.scores(prediction, example) == expected
    seen = example.batch | {"label": example.batch["label"].masked_fill(~inside, 1)}
    assert task.scores(prediction, replace(example, batch=seen)) == expected


def test_lab12_crops_of_the_foreground_and_turned_images_keep_the_unknown_unknown(
    empty: Path,
) -> None:
    draw(empty, "a", lesion_and_unknown)
    file = federation(empty, "f.yaml", "classes: [background, lesion], ignore: 255")
    sampling = SamplingConfig(crop=(1, 1), foreground=1.0, patches=20)
    config = replace(load_federation(Path(file)), sampling=sampling)
    train = open_federation(config, empty / "cache", 0, None)["a"].train
    batch = train.batch([0, 1], [generator(0, "lab12", case) for case in range(2)])
    assert (batch["label"] == 1).all()
    known = np.zeros((32, 32), bool)
    known[12:20, 12:20] = True
    turned = deform(CaseArrays(known[None].astype("f4"), known.astype("u1"), known), 45.0)
    assert turned.mask is not None
    assert 60 <= turned.mask.sum() <= 68  # nothing that lay beyond the border is known
    assert turned.label is not None
    np.testing.assert_array_equal(turned.label, turned.mask)


def write_nnunet(place: Path, site: str, labels: dict[str, Any], values: tuple[int, ...]) -> None:
    """Write a raw data set of nnU-Net whose four masks hold these values."""
    for kind in ("imagesTr", "labelsTr"):
        (place / site / kind).mkdir(parents=True)
    for number in range(4):
        image = np.random.default_rng(number).integers(0, 200, (16, 16)).astype(np.uint8)
        mask = np.zeros((16, 16), np.uint8)
        for value in values:
            mask[4 * value : 4 * value + 3, 4:9] = value
        Image.fromarray(image).save(place / site / "imagesTr" / f"{site}{number}_0000.png")
        Image.fromarray(mask).save(place / site / "labelsTr" / f"{site}{number}.png")
    about = {"channel_names": {"0": "MR"}, "labels": labels, "numTraining": 4}
    text = json.dumps({**about, "file_ending": ".png"})
    (place / site / "dataset.json").write_text(text, "utf-8")


def test_lab14_a_class_that_a_site_does_not_name_asks_for_a_decision(
    place: Path, values: dict[str, Any]
) -> None:
    site, missing = values["site"], values["missing_class"]
    said = call("inspect", "part.yaml", code=3)
    assert f"site {site}: dataset.json there does not name {missing}" in said
    assert "learnt and scored as background" in said
    assert "set labelled: [kidney] there" in said
    assert "say so by labelled: [kidney, tumor] there" in said
    (problem,) = inspected("part.yaml")["problems"]
    (place / "e.yaml").write_text(EXPERIMENT.format(federation="part.yaml"), "utf-8")
    overrides = ("model.spatial_dims=3", "model.out_channels=3")
    assert " ".join(problem.split()) in call("run", "e.yaml", *overrides, code=3)


@pytest.mark.parametrize("labelled", [["kidney"], ["kidney", "tumor"]])
def test_lab14_either_decision_is_taken(place: Path, labelled: list[str]) -> None:
    decided = f"federation.sites.b.labelled=[{', '.join(labelled)}]"
    assert inspected("part.yaml", decided)["good"]
    config = load_federation(Path("part.yaml"), [decided])
    opened = open_federation(config, place / "cache", 0, None)
    assert opened["b"].labelled == (None if len(labelled) == 2 else ("kidney",))
    assert opened["a"].labelled is None


def test_lab14_sibling_regions_a_site_without_et(empty: Path) -> None:
    write_nnunet(empty, "a", {"background": 0, "WT": [1, 2, 3], "TC": [2, 3], "ET": 3}, (1, 2, 3))
    write_nnunet(empty, "b", {"background": 0, "WT": [1, 2, 3], "TC": [2, 3]}, (1, 2))
    file = federation(
        empty, "f.yaml",
        "classes: [background, oedema, core, et], regions: {WT: [1, 2, 3], TC: [2, 3], ET: [3]}",
        "a: {folder: a}, b: {folder: b}",
    )  # fmt: skip
    (problem,) = inspected(file)["problems"]
    assert problem.startswith("site b: dataset.json there does not name ET, so that")
    assert "take the site out, as the loss of regions cannot leave some of them out" in problem
    accepted = "federation.sites.b.labelled=[oedema, core, et]"
    assert inspected(file, accepted)["good"]
    (empty / "e.yaml").write_text(EXPERIMENT.format(federation=file), "utf-8")
    call("run", "e.yaml", "model.out_channels=3", accepted)
    refused = call("inspect", file, "federation.sites.b.labelled=[oedema, core]", code=2)
    assert "site b says which classes it has labelled" in refused


def test_lab14_sibling_a_label_that_is_called_otherwise_is_named_by_its_value(
    empty: Path,
) -> None:
    write_nnunet(empty, "a", {"background": 0, "kidney": 1, "tumor": 2}, (1, 2))
    write_nnunet(empty, "b", {"background": "0", "Niere": "1", "Tumor": "2"}, (1, 2))
    sites = "a: {folder: a}, b: {folder: b}"
    file = federation(empty, "f.yaml", "classes: [background, kidney, tumor]", sites)
    assert inspected(file)["good"]


def test_lab14_sibling_a_class_folder_that_a_site_lacks_is_noted(
    empty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for site, words in {"a": ("benign", "malignant"), "b": ("benign",)}.items():
        for number, word in enumerate(words):
            (empty / site / word).mkdir(parents=True)
            for case in range(4):
                rng = np.random.default_rng([number, case, *site.encode()])
                image = Image.fromarray(rng.integers(0, 200, (16, 16)).astype(np.uint8))
                image.save(empty / site / word / f"{word}{case}.png")
    text = "name: f\nsites: {a: {folder: a}, b: {folder: b}}\n"
    text += "task: {name: classification, classes: [benign, malignant]}\n"
    (empty / "f.yaml").write_text(text, "utf-8")
    found = inspected("f.yaml")
    notes = {
        site["name"]: [n for n in site["notes"] if "no folder" in n] for site in found["sites"]
    }
    assert found["good"]
    assert [note[:42] for note in notes["b"]] == ["it has no folder of the class malignant: i"]
    assert not notes["a"]
    open_federation(load_federation(Path("f.yaml")), empty / "cache", 0, None)
    assert f"site b: {notes['b'][0]}" in caplog.text


def test_lab14_sibling_segments_of_dicom_that_a_site_lacks(cases: Path, empty: Path) -> None:
    shutil.copytree(cases / "dcm01_unsorted_same_instance_number" / "series", empty / "series")
    image = decode(empty / "series")
    labels = np.zeros(image.array.shape[1:], np.uint8)
    labels[2:4, 2:4] = 1
    write_segmentation(labels, empty / "series", empty / "one.dcm", ("background", "Kidney"))
    write_segmentation(labels, empty / "series", empty / "two.dcm", ("", "kidney", "tumor"))
    for site in ("one", "two"):
        (empty / f"{site}.csv").write_text(f"image,label\nseries,{site}.dcm\n", "utf-8")
    sites = "a: {manifest: one.csv}, b: {manifest: two.csv}"
    file = federation(empty, "f.yaml", "classes: [background, kidney, tumor]", sites)
    (problem,) = inspected(file)["problems"]
    assert problem.startswith("site a: its DICOM segments do not name tumor, so that")
    (empty / "e.yaml").write_text(EXPERIMENT.format(federation=file), "utf-8")
    overrides = ("model.spatial_dims=3", "model.out_channels=3")
    assert problem in call("run", "e.yaml", *overrides, code=3)
    assert inspected(file, "federation.sites.a.labelled=[kidney]")["good"]
