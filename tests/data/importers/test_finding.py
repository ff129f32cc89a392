"""Which layout a folder has, and the one way to all of them."""

import json
from pathlib import Path

import pytest

from collegium.data.federation import list_cases
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.importers import detect_layout, find_in_folder
from collegium.data.settings import TaskConfig
from collegium.errors import ConfigError

LAYOUTS = {
    "nnunet": ("dataset.json", "imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz"),
    "datalist": ("list.json", "x/a.nii.gz", "y/a.nii.gz"),
    "bids": ("sub-1/anat/sub-1_T1w.nii.gz", "derivatives/m/sub-1/anat/sub-1_dseg.nii.gz"),
    "lists": ("Case00.npy", "Case00_segmentation.npy"),
    "images-labels": ("images/a.png", "masks/a.png"),
    "cases": ("1/t1.nii.gz", "1/t2.nii.gz", "1/seg.nii.gz"),
    "classes": ("ill/a.png", "well/b.png"),
}
WELL = TaskConfig("classification", classes=("well", "ill"), coding={"sick": "ill"})
CONTENT = {
    "dataset.json": {"channel_names": {"0": "T1"}, "labels": {"background": 0}},
    "list.json": {"training": [{"image": "x/a.nii.gz", "label": "y/a.nii.gz"}]},
}


def example(folder: Path, layout: str) -> Path:
    for file in LAYOUTS[layout]:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(CONTENT[file]) if file in CONTENT else "x", "utf-8")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_detected_and_found(tmp_path: Path, layout: str) -> None:
    folder = example(tmp_path / "Größe #1", layout)
    assert detect_layout(folder) == layout
    by_itself, problems = find_in_folder("A", folder)
    assert problems == []
    assert find_in_folder("A", folder, layout=layout) == (by_itself, [])
    assert len(by_itself) == (2 if layout == "classes" else 1)
    assert all(case.site == "A" and case.images[0].exists() for case in by_itself)


def test_an_unknown_folder_has_no_layout_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert detect_layout(tmp_path) is None
    (problem,) = find_in_folder("A", tmp_path)[1]
    assert problem.startswith(f"site A: the layout of {tmp_path} is not recognised (looked for: ")
    assert "subfolders images and labels, optionally below train, val and test; " in problem
    assert "with its images and one mask; a subfolder for each class" in problem
    assert problem.endswith("): name it by layout, or list the images in a manifest")
    assert "there is no folder" in find_in_folder("A", tmp_path / "no", layout="bids")[1][0]
    assert detect_layout(tmp_path / "no") is None


def test_images_without_labels_are_never_taken_for_classes(tmp_path: Path) -> None:
    for folder in ("images", "fov"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").touch()
    assert "has no subfolder labels" in find_in_folder("A", tmp_path)[1][0]


def test_a_folder_of_folders_is_read_as_the_task_needs_it(tmp_path: Path) -> None:
    cases, classes = (example(tmp_path / kind, kind) for kind in ("cases", "classes"))
    assert detect_layout(cases, task=TaskConfig()) == "cases"
    assert detect_layout(classes, task=WELL) == "classes"
    assert detect_layout(classes, task=TaskConfig()) is None
    assert detect_layout(cases, task=WELL) is None
    assert "one mask): name it" in find_in_folder("A", classes, task=TaskConfig())[1][0]
    assert "one mask" not in find_in_folder("A", tmp_path, task=WELL)[1][0]
    assert len(find_in_folder("A", classes, layout="classes", task=TaskConfig())[0]) == 2


@pytest.mark.parametrize(("name", "known"), [("ill", True), ("sick", True), ("else", False)])
def test_one_class_alone_is_known_by_its_name(tmp_path: Path, name: str, known: bool) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "1.png").touch()
    found, problems = find_in_folder("A", tmp_path, task=WELL)
    assert [case.target for case in found] == [name] * known
    assert bool(problems) is not known
    assert detect_layout(tmp_path) is None


def test_the_task_of_a_federation_decides_about_the_layout(tmp_path: Path) -> None:
    example(tmp_path / "two", "classes")
    (tmp_path / "one" / "sick").mkdir(parents=True)
    (tmp_path / "one" / "sick" / "1.png").touch()
    sites = {name: SiteConfig(folder=name) for name in ("one", "two")}
    learnt = [list_cases(FederationConfig("f", sites, str(tmp_path), task=WELL), s) for s in sites]
    assert [[case.target for case in cases] for cases, _ in learnt] == [["sick"], ["ill", "well"]]
    for site in sites:
        cases, (problem,) = list_cases(FederationConfig("f", sites, str(tmp_path)), site)
        assert cases == []
        assert f"the layout of {tmp_path / site} is not recognised" in problem


def test_a_site_s_own_folder_of_arrays_is_found_in_the_one_named(tmp_path: Path) -> None:
    for site in ("HK", "UCL"):
        example(tmp_path / site, "lists")
    (tmp_path / "HK_train.txt").write_text("Case00.npy", "utf-8")
    for site, split in (("HK", "train"), ("UCL", None)):
        assert detect_layout(tmp_path, site=site, task=TaskConfig()) == "lists"
        (case,), problems = find_in_folder(site, tmp_path, task=TaskConfig())
        assert (case.split, problems) == (split, [])
        assert case.images == (tmp_path / site / "Case00.npy",)
    assert detect_layout(tmp_path / "HK", site="HK") == "lists"
    assert "is not recognised" in find_in_folder("A", tmp_path / "..", task=TaskConfig())[1][0]


def test_another_layout_can_be_named(tmp_path: Path) -> None:
    folder = example(tmp_path, "nnunet")
    cases, problems = find_in_folder("A", folder, layout="images-labels")
    assert ([case.case for case in cases], problems) == (["a_0000"], [])
    with pytest.raises(ConfigError, match="the layout 'bid' is unknown: choose one of auto"):
        find_in_folder("A", folder, layout="bid")


def test_options_reach_bids_and_are_refused_elsewhere(tmp_path: Path) -> None:
    folder = example(tmp_path / "b", "bids")
    _, problems = find_in_folder("A", folder, options={"modality": "T2w"})
    assert "holds no image T2w" in problems[0]
    _, problems = find_in_folder("A", folder, options={"derivative": "n"})
    assert "with the name n" in problems[0]
    with pytest.raises(ConfigError, match="the option 'mode' is unknown: choose among modality"):
        find_in_folder("A", folder, options={"mode": "T1w"})
    with pytest.raises(ConfigError, match="has the layout lists: leave them out"):
        find_in_folder("A", example(tmp_path / "l", "lists"), options={"modality": "T1w"})


def test_two_cases_of_one_name_are_a_problem(tmp_path: Path) -> None:
    entries = [{"image": f"{n}.png", "label": "l.png", "id": "same"} for n in "ab"]
    for name in ("a.png", "b.png", "l.png"):
        (tmp_path / name).touch()
    (tmp_path / "d.json").write_text(json.dumps({"training": entries}), "utf-8")
    _, problems = find_in_folder("A", tmp_path)
    assert problems == [
        f"site A: 2 images of {tmp_path} are called case same: rename them, or list them in a "
        "manifest"
    ]


def test_geo11_names_the_missing_channel_in_both_layouts(tmp_path: Path, cases: Path) -> None:
    source = cases / "geo11_missing_channel_one_case"
    values = json.loads((source / "case.json").read_text())["right_outcome"]["values"]
    about = {"channel_names": {"0": "A", "1": "B"}, "labels": {"background": 0, "x": 1}}
    (tmp_path / "imagesTr").symlink_to(source / "images")
    (tmp_path / "labelsTr").symlink_to(source / "labels")
    (tmp_path / "dataset.json").write_text(json.dumps(about), "utf-8")
    for folder, layout in ((source, "images-labels"), (tmp_path, "nnunet")):
        assert detect_layout(folder) == layout
        found, (problem,) = find_in_folder("A", folder)
        assert [case.case for case in found] == values["complete"]
        assert f"case {values['incomplete_case']}: channel 0001 is missing" in problem
        assert values["missing"] in problem
        assert "2 of 3 cases are complete" in problem
