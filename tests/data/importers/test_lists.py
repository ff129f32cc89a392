"""The folders of arrays of IOP-FL, HarmoFL and FedDG."""

import logging
from pathlib import Path

import numpy as np
import pytest

from collegium.data.importers.lists import describe, from_lists, matches
from collegium.data.preprocessing import decode_case
from collegium.data.settings import ImageConfig, TaskConfig


def touch(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def prostate(root: Path, site: str, **lists: str) -> Path:
    names = [f"Case{number:02d}" for number in range(4)]
    files = [f"{site}/{name}{end}.npy" for name in names for end in ("", "_segmentation")]
    touch(root, *files)
    for split, text in lists.items():
        (root / f"{site}_{split}.txt").write_text(text, "utf-8")
    return root / site


def test_lists_name_the_splits(tmp_path: Path) -> None:
    folder = prostate(
        tmp_path / "Zürich #1",
        "ISBI_1.5",
        train="Case00.npy\nCase02.npy",
        val="Case01.npy\r\n\r\n",
        test="Case03.npy\n",
    )
    assert matches(folder)
    cases, problems = from_lists("A", folder)
    assert problems == []
    assert [(case.case, case.patient, case.split) for case in cases] == [
        ("Case00", "Case00", "train"), ("Case01", "Case01", "val"),
        ("Case02", "Case02", "train"), ("Case03", "Case03", "test"),
    ]  # fmt: skip
    assert cases[0].images == (folder / "Case00.npy",)
    assert cases[0].label == folder / "Case00_segmentation.npy"


def test_the_folder_above_serves_a_site_of_the_same_name(tmp_path: Path) -> None:
    prostate(tmp_path, "HK", train="Case00.npy", test="Case01.npy")
    cases, _ = from_lists("HK", tmp_path)
    assert [case.case for case in cases] == ["Case00", "Case01"]


def test_the_folder_above_serves_every_layout_of_these(tmp_path: Path) -> None:
    touch(tmp_path, "BIDMC/Case00.nii.gz", "BIDMC/Case00_segmentation.nii.gz")
    touch(tmp_path, "client1/data_npy/s1.npy", "client2/data_npy/s2.npy", "other/a.npy")
    assert [matches(tmp_path, name) for name in ("BIDMC", "client1", "other", "no")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert [case.images[0].name for case in from_lists("BIDMC", tmp_path)[0]] == ["Case00.nii.gz"]
    assert [case.case for case in from_lists("client2", tmp_path)[0]] == ["s2"]


def test_what_is_on_no_list_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "collegium")
    folder = prostate(tmp_path, "UCL", train="Case00.npy", test="Case01.npy")
    assert len(from_lists("A", folder)[0]) == 2
    assert "are on no list and are left out: Case02, Case03" in caplog.text


def test_lists_that_are_wrong_are_named(tmp_path: Path) -> None:
    folder = prostate(tmp_path, "HK", train="Case00.npy\nCase01.npy\nCase09.npy", test="Case01.npy")
    (folder / "Case00_segmentation.npy").unlink()
    cases, problems = from_lists("A", folder)
    assert [case.case for case in cases] == ["Case01"]
    assert len(problems) == 3
    assert "case Case09: " in problems[0]
    assert "HK_train.txt lists Case09.npy, which is not there" in problems[0]
    assert "case Case01: it is on the lists train and test: take it off one" in problems[1]
    assert "case Case00: there is no label" in problems[2]
    assert "Case00_segmentation.npy" in problems[2]


def test_volumes_with_their_segmentation_beside_them_need_no_lists(tmp_path: Path) -> None:
    folder = touch(
        tmp_path / "BIDMC", "Case00.nii.gz", "Case00_segmentation.nii.gz",
        "Case01.nii.gz", "case01_Segmentation.nii.gz", "Case02.nii.gz", "notes.txt",
    )  # fmt: skip
    assert matches(folder)
    cases, problems = from_lists("A", folder)
    assert [(case.case, case.split) for case in cases] == [("Case00", None), ("Case01", None)]
    assert cases[1].label == folder / "case01_Segmentation.nii.gz"
    (problem,) = problems
    assert "Case02_segmentation.nii.gz: add it or take the image out" in problem


def test_arrays_of_image_and_label_are_one_file_and_slices_share_a_patient(tmp_path: Path) -> None:
    names = ("Case03_slice_1", "Case03_slice_12", "Case04-7", "Case04 z8")
    folder = touch(tmp_path / "client1", *(f"data_npy/{name}.npy" for name in names))
    assert matches(folder)
    cases, problems = from_lists("A", folder)
    assert problems == []
    assert {case.case: case.patient for case in cases} == {
        "Case03_slice_1": "Case03", "Case03_slice_12": "Case03",
        "Case04-7": "Case04", "Case04 z8": "Case04",
    }  # fmt: skip
    assert all(case.images == (case.label,) for case in cases)


@pytest.mark.parametrize("names", [("sample1", "sample2"), ("g_001", "g_002"), ("s1_001", "s1_2")])
def test_names_without_a_patient_are_patients_of_their_own_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    folder = touch(tmp_path / "client2", *(f"npy/{name}.npy" for name in names))
    cases, _ = from_lists("A", folder)
    assert [case.patient for case in cases] == list(names)
    assert "use a manifest with the column patient" in caplog.text


def test_a_folder_without_arrays_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "npy").mkdir()
    assert "holds no arrays" in from_lists("A", tmp_path)[1][0]
    (tmp_path / "x").mkdir()
    assert not matches(tmp_path / "x")
    assert "holds no image beside files *_segmentation" in from_lists("A", tmp_path / "x")[1][0]


def test_a_stack_of_slices_is_read_with_its_channels_first_and_its_slices_last(
    tmp_path: Path,
) -> None:
    image = np.arange(12 * 24 * 20 * 3, dtype=np.float64).reshape(12, 24, 20, 3)
    label = np.arange(12 * 24 * 20).reshape(12, 24, 20) % 2
    np.save(tmp_path / "Case00.npy", image)
    np.save(tmp_path / "Case00_segmentation.npy", label)
    (case,), _ = from_lists("A", tmp_path)
    arrays = decode_case(case, ImageConfig(), TaskConfig()).arrays
    assert arrays.image.shape == (3, 24, 20, 12)
    assert arrays.image[2, 1, 3, 0] == image[0, 1, 3, 2]
    assert arrays.label is not None
    assert arrays.label[1, 3, 2] == label[2, 1, 3]


def test_an_array_of_image_and_label_is_read_as_both(tmp_path: Path) -> None:
    (tmp_path / "data_npy").mkdir()
    whole = np.arange(16 * 20 * 4, dtype=np.float64).reshape(16, 20, 4)
    whole[..., 3] = np.arange(16 * 20).reshape(16, 20) % 3 == 0
    np.save(tmp_path / "data_npy" / "a.npy", whole)
    (case,), _ = from_lists("A", tmp_path)
    arrays = decode_case(case, ImageConfig(), TaskConfig()).arrays
    assert np.array_equal(arrays.image, whole[..., :3].transpose(2, 0, 1))
    assert arrays.label is not None
    assert np.array_equal(arrays.label, whole[..., 3])


def test_splits_by_slice_of_harmofl_are_said_not_to_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "collegium")
    folder = touch(tmp_path / "BIDMC", "Case00.nii.gz", "Case00_segmentation.nii.gz")
    assert describe("A", folder).notes == ()
    touch(tmp_path, "BIDMC-dir.npy", "BIDMC-index.npy", "HK-dir.npy")
    (case,), problems = from_lists("A", folder)
    assert (case.case, case.split, problems) == ("Case00", None, [])
    (note,) = describe("A", folder).notes
    assert note.startswith("the split in BIDMC-dir.npy and BIDMC-index.npy is not used")
    assert "a manifest with a column split" in note
    assert f"site A: {note}" in caplog.text
