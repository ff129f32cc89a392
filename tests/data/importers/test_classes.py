"""A folder for each class."""

from pathlib import Path

import pytest

from collegium.data.importers.classes import from_classes, matches


def touch(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def test_the_subfolder_is_the_class(tmp_path: Path) -> None:
    folder = touch(tmp_path / "ö #1", "gutartig/a 1.png", "bösartig/b.jpg", "bösartig/readme.txt")
    assert matches(folder)
    cases, problems = from_classes("A", folder)
    assert problems == []
    assert [(case.case, case.patient, case.target, case.label, case.split) for case in cases] == [
        ("b", "b", "bösartig", None, None), ("a 1", "a 1", "gutartig", None, None),
    ]  # fmt: skip


def test_same_names_in_two_classes_stay_apart(tmp_path: Path) -> None:
    folder = touch(tmp_path, "ill/1.png", "well/1.png")
    assert [case.case for case in from_classes("A", folder)[0]] == ["ill_1", "well_1"]


def test_folders_of_splits_may_stand_above_the_classes(tmp_path: Path) -> None:
    folder = touch(tmp_path, "train/ill/1.png", "Valid/ill/2.png", "test/well/1.png")
    assert matches(folder)
    found = [(case.case, case.split, case.target) for case in from_classes("A", folder)[0]]
    assert found == [("ill_2", "val", "ill"), ("well_1", "test", "well"), ("ill_1", "train", "ill")]


@pytest.mark.parametrize(
    "files",
    [("one/a.png",), ("images/a.png", "fov/a.png"), ("a/x.txt", "b/y.txt"), ("a.png", "b.png")],
)
def test_other_folders_do_not_look_like_it(tmp_path: Path, files: tuple[str, ...]) -> None:
    assert not matches(touch(tmp_path, *files))


def test_one_class_alone_needs_a_known_name(tmp_path: Path) -> None:
    folder = touch(tmp_path, "train/ill/a.png", "test/ill/b.png")
    assert matches(folder, {"ill", "well"})
    assert not matches(folder, {"well", "Ill"})
    assert not matches(touch(tmp_path / "none", "ill/a.txt"), {"ill"})


def test_a_folder_without_classes_is_a_problem(tmp_path: Path) -> None:
    assert "holds no images in subfolders" in from_classes("A", touch(tmp_path, "a.png"))[1][0]
