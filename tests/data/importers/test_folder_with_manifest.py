"""Manifests that tell by their ids what the images of a folder are."""

from pathlib import Path

import pytest

from collegium.data.federation import find_cases
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.importers.folder_with_manifest import from_folder_and_manifest
from collegium.data.settings import TaskConfig
from collegium.errors import DataError


def place(folder: Path, text: str, *images: str) -> Path:
    for image in images:
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        (folder / image).write_bytes(b"x")
    (folder / "m.csv").write_text(text, "utf-8")
    return folder / "m.csv"


def test_ids_belong_to_images_by_the_rules_of_names(tmp_path: Path) -> None:
    text = "case;patient;class;split\n7;p1;ill;train\n12;p1;well;train\n"
    manifest = place(tmp_path, text, "img_0007.png", "img_012.png")
    cases, problems = from_folder_and_manifest("A", tmp_path, manifest)
    assert problems == []
    assert [(c.site, c.case, c.patient, c.target, c.split) for c in cases] == [
        ("A", "img_0007", "p1", "ill", "train"), ("A", "img_012", "p1", "well", "train"),
    ]  # fmt: skip
    assert [case.images[0].name for case in cases] == ["img_0007.png", "img_012.png"]


def test_the_channels_of_an_image_are_files_of_one_id(tmp_path: Path) -> None:
    files = [f"images/p{case}_000{channel}.png" for case in (1, 2) for channel in (0, 1)]
    manifest = place(tmp_path, "case,class\np1,x\np2,y\n", *files)
    cases, problems = from_folder_and_manifest("A", tmp_path, manifest)
    assert problems == []
    assert [(case.case, len(case.images), case.target) for case in cases] == [
        ("p1", 2, "x"), ("p2", 2, "y"),
    ]  # fmt: skip


def test_what_is_left_over_on_either_side_is_a_problem(tmp_path: Path) -> None:
    manifest = place(tmp_path, "patient,label\n01,a\n02,b\n04,\n", "01.png", "03.png", "04.png")
    (case,), problems = from_folder_and_manifest("A", tmp_path, manifest)
    assert (case.case, case.patient, case.target) == ("01", "01", "a")
    assert [problem.partition(":")[0] for problem in problems] == [
        "site A, case 03", f"site A, line 4 of {manifest}", f"site A, line 3 of {manifest}",
    ]  # fmt: skip
    assert "its image has no line" in problems[0]
    assert "names no class" in problems[1]
    assert "has no image of 02" in problems[2]


def test_a_folder_with_masks_keeps_them_and_learns_patients_and_splits(tmp_path: Path) -> None:
    text = "case,patient,split,site\na,p,test,A\nb,q,train,A\nc,r,train,B\n"
    files = [f"{kind}/{name}.png" for kind in ("images", "masks") for name in "ab"]
    cases, problems = from_folder_and_manifest("A", tmp_path, place(tmp_path, text, *files))
    assert problems == []
    assert [(c.case, c.patient, c.split, c.label, c.target) for c in cases] == [
        ("a", "p", "test", tmp_path / "masks/a.png", None),
        ("b", "q", "train", tmp_path / "masks/b.png", None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,case,class\na.png,a,x\n", "names images itself: leave out the site's folder"),
        ("age,class\n1,x\n", "has no column patient: add it"),
        ("patient,class\na,x\na,y\n", r"line 3 of .*: the id a occurs twice"),
        ("patient,class\n,y\n", r"line 2 of .*: the id is missing"),
        ("patient,class\nzebra,y\n", "lines and images cannot be matched by their names"),
    ],
)
def test_a_manifest_that_cannot_be_joined_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        from_folder_and_manifest("A", tmp_path, place(tmp_path, text, "a.png", "b.png"))


def test_an_unknown_split_is_a_problem_of_its_line(tmp_path: Path) -> None:
    manifest = place(tmp_path, "case,class,split\na,x,fold1\n", "a.png")
    assert from_folder_and_manifest("A", tmp_path, manifest) == (
        [], [f"site A, line 2 of {manifest}: the split fold1 is unknown: write train, val or test"],
    )  # fmt: skip


def test_a_site_may_have_a_folder_and_a_manifest(tmp_path: Path) -> None:
    place(tmp_path, "patient,class\n7,x\n", "scans/7.png")
    site = SiteConfig(folder="scans", manifest="m.csv")
    task = TaskConfig("classification", ("x", "y"))
    (case,) = find_cases(FederationConfig("f", {"A": site}, str(tmp_path), task=task), "A")
    assert (case.site, case.case, case.target) == ("A", "7", "x")
