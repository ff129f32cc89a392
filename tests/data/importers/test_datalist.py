"""Datalists of MONAI and the Decathlon."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from collegium.data.importers import describe_dataset
from collegium.data.importers.datalist import describe, from_datalist, matches
from collegium.errors import DataError


def datalist(folder: Path, content: dict[str, Any], name: str = "dataset.json") -> Path:
    """Write a datalist and all files that it names but those called missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for value in json.dumps(content, ensure_ascii=False).split('"'):
        if value.endswith(".nii") and "missing" not in value:
            (folder / value).parent.mkdir(parents=True, exist_ok=True)
            (folder / value).write_bytes(b"x")
    (folder / name).write_text(json.dumps(content), "utf-8")
    return folder


def test_lists_become_splits_and_patients_and_channels_are_kept(tmp_path: Path) -> None:
    content = {
        "training": [
            {"image": ["i/ä 1_t1.nii", "i/ä 1_flair.nii"], "label": "l/ä 1.nii", "patient": 7},
            {"image": "i/b.nii", "label": ["l/b.nii"], "subject": "S2"},
        ],
        "validation": [{"image": "i/c.nii", "label": "l/c.nii"}],
        "test": ["i/d.nii", {"image": "i/e.nii"}],
    }
    folder = datalist(tmp_path / "x #1", content)
    assert matches(folder)
    cases, problems = from_datalist("A", folder)
    assert problems == []
    assert [(case.case, case.patient, case.split) for case in cases] == [
        ("ä 1", "7", "train"), ("b", "S2", "train"), ("c", "c", "val"),
    ]  # fmt: skip
    assert cases[0].images == (folder / "i/ä 1_t1.nii", folder / "i/ä 1_flair.nii")
    assert cases[1].label == folder / "l/b.nii"


def test_without_labelled_others_no_split_is_named_and_folds_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "collegium")
    entries = [{"image": f"{n}.nii", "label": f"{n}_l.nii", "fold": n} for n in range(2)]
    folder = datalist(tmp_path, {"training": entries, "testing": [{"image": "t.nii"}]})
    cases, problems = from_datalist("A", folder)
    assert [case.split for case in cases] == [None, None]
    assert problems == []
    assert "the folds of" in caplog.text
    assert "1 images of" in caplog.text


def test_same_names_in_different_folders_stay_apart(tmp_path: Path) -> None:
    entries = [{"image": f"{who}/img.nii", "label": f"{who}/seg.nii"} for who in ("p1", "p2")]
    cases, _ = from_datalist("A", datalist(tmp_path, {"training": entries}))
    assert [case.case for case in cases] == ["p1_img", "p2_img"]
    deep = [{"image": f"{w}/a/img.nii", "label": f"{w}/a/seg.nii"} for w in ("p1", "p2")]
    cases, _ = from_datalist("A", datalist(tmp_path / "deep", {"training": deep}))
    assert [case.case for case in cases] == ["p1_a_img", "p2_a_img"]


def test_a_label_that_is_no_file_is_a_class(tmp_path: Path) -> None:
    entries = [{"image": f"{n}.nii", "label": label, "id": f"k{n}"}
               for n, label in enumerate([0, 1, "benign"])]  # fmt: skip
    cases, problems = from_datalist("A", datalist(tmp_path, {"training": entries}))
    assert [(case.case, case.target, case.label) for case in cases] == [
        ("k0", "0", None), ("k1", "1", None), ("k2", "benign", None),
    ]  # fmt: skip
    assert problems == []


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"image": "missing.nii", "label": "l.nii"}, "there is no image"),
        ({"image": "i.nii", "label": "missing.nii"}, "there is no label"),
        ({"image": ["i.nii", "missing.nii"], "label": "l.nii"}, "there is no image"),
        ({"image": "i.nii"}, "has no label: add it"),
        ({"label": "l.nii"}, "names no image: write"),
        ({"image": "i.nii", "label": ["l.nii", "m.nii"]}, "names 2 labels"),
        (5, "names no image: write"),
    ],
)
def test_a_faulty_entry_is_named_by_its_place(tmp_path: Path, entry: Any, error: str) -> None:
    good = {"image": "g.nii", "label": "h.nii"}
    cases, problems = from_datalist("A", datalist(tmp_path, {"training": [good, entry]}))
    assert [case.case for case in cases] == ["g"]
    (problem,) = problems
    assert problem.startswith("site A, training[1] of ")
    assert error in problem


def test_several_datalists_are_told_apart_by_name(tmp_path: Path) -> None:
    content = {"training": [{"image": "i.nii", "label": "l.nii"}]}
    datalist(tmp_path, content, "a.json")
    datalist(tmp_path, content, "b.json")
    (tmp_path / "other.json").write_text("[1]", "utf-8")
    with pytest.raises(DataError, match=r"holds a\.json, b\.json: name the file as the site's"):
        from_datalist("A", tmp_path)
    assert matches(tmp_path / "b.json")
    assert [case.case for case in from_datalist("A", tmp_path / "b.json")[0]] == ["i"]


def test_a_folder_without_a_datalist_is_refused(tmp_path: Path) -> None:
    assert not matches(tmp_path)
    with pytest.raises(DataError, match="holds none: name the file"):
        from_datalist("A", tmp_path)


def test_names_of_labels_and_channels_are_read_where_they_are_written(tmp_path: Path) -> None:
    entries = {"training": [{"image": "i.nii", "label": "l.nii"}]}
    decathlon = {
        "modality": {"1": "FLAIR", "0": "T1"},
        "labels": {"0": "background", "1": "edema", "2": "tumour", "3": "tumour"},
    }
    folder = datalist(tmp_path / "a", {**entries, **decathlon})
    description = describe("A", folder)
    assert description.channels == ("T1", "FLAIR")
    assert description.labels == {"background": (0,), "edema": (1,), "tumour": (2, 3)}
    assert describe_dataset("A", folder) == description
    for other in ({}, {"modality": "MRI", "labels": ["l.nii"]}, {"labels": {"train": "l.nii"}}):
        folder = datalist(tmp_path / "b", {**entries, **other})
        assert (describe("A", folder).labels, describe("A", folder).channels) == ({}, ())
