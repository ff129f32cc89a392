"""Subfolders of images and labels, also below those of splits."""

import logging
from pathlib import Path

import pytest

from collegium.data.importers import detect_layout, find_in_folder
from collegium.data.settings import TaskConfig


def pairs(folder: Path, *files: str) -> Path:
    """Write images, and labels of the same names."""
    for file in files:
        part, _, name = file.rpartition("/")
        for kind in ("images", "Labels"):
            path = folder / part / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
    return folder


def splits(folder: Path) -> dict[str, tuple[str, str | None, Path | None]]:
    cases, problems = find_in_folder("A", folder, task=TaskConfig())
    assert problems == []
    return {case.case: (case.patient, case.split, case.label) for case in cases}


def test_folders_of_splits_are_the_splits(tmp_path: Path) -> None:
    folder = pairs(tmp_path / "ä #1", "train/a.png", "train/b.png", "Valid/c.png", "test/d.png")
    assert detect_layout(folder) == detect_layout(folder, task=TaskConfig()) == "images-labels"
    assert splits(folder) == {
        "a": ("a", "train", folder / "train/Labels/a.png"),
        "b": ("b", "train", folder / "train/Labels/b.png"),
        "c": ("c", "val", folder / "Valid/Labels/c.png"),
        "d": ("d", "test", folder / "test/Labels/d.png"),
    }
    assert find_in_folder("A", folder, layout="images-labels") == find_in_folder("A", folder)


def test_equal_names_in_two_splits_are_two_cases_and_patients(tmp_path: Path) -> None:
    found = splits(pairs(tmp_path, "train/1.png", "test/1.png"))
    assert {case: (who, split) for case, (who, split, _) in found.items()} == {
        "train_1": ("train_1", "train"), "test_1": ("test_1", "test"),
    }  # fmt: skip


def test_a_split_without_labels_is_left_out_and_the_only_other_is_shared_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "collegium")
    folder = pairs(tmp_path, "train/1.png", "train/2.png", "test/3.png")
    (folder / "test/Labels/3.png").unlink()
    (folder / "test/Labels").rmdir()
    assert {case: split for case, (_, split, _) in splits(folder).items()} == {"1": None, "2": None}
    assert f"site A: {folder / 'test'} has no images and labels and is left out" in caplog.text


def test_problems_of_every_split_are_named(tmp_path: Path) -> None:
    folder = pairs(tmp_path, "train/1.png", "train/2.png", "test/3.png", "test/4.png")
    for name in ("train/Labels/2.png", "test/images/4.png"):
        (folder / name).unlink()
    cases, problems = find_in_folder("A", folder)
    assert [case.case for case in cases] == ["3", "1"]
    assert "the mask 4.png in" in problems[0]
    assert "case 2: its image in" in problems[1]


def test_a_pair_of_its_own_hides_the_folders_of_splits(tmp_path: Path) -> None:
    assert list(splits(pairs(tmp_path, "a.png", "train/b.png"))) == ["a"]
