"""A folder for each case, as KiTS and BraTS have it."""

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from collegium.data.federation import check_names, list_cases
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.importers import describe_dataset
from collegium.data.importers.cases import describe, from_cases, matches
from collegium.data.preprocessing import decode_case
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.errors import DataError


def touch(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def volume(path: Path, seed: int) -> np.ndarray:
    """Write whole numbers in RAS+ and give them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 2, (4, 5, 6)).astype(np.uint8)
    nib.save(nib.Nifti1Image(values, np.eye(4)), path)
    return values


def brats(folder: Path, *cases: str, between: str = "_") -> Path:
    names = [f"{case}/{case}{between}{name}.nii.gz" for case in cases for name in BRATS]
    return touch(folder, *names)


BRATS = ("t2", "seg", "flair", "t1ce", "t1")


def test_kits_and_brats_are_found_by_themselves_and_read(tmp_path: Path) -> None:
    kits = [volume(tmp_path / f"k/case_00000/{name}.nii.gz", seed)
            for seed, name in enumerate(("imaging", "segmentation"))]  # fmt: skip
    there = {name: volume(tmp_path / f"b/B_1/B_1_{name}.nii.gz", 7 + seed)
             for seed, name in enumerate(BRATS)}  # fmt: skip
    sites = {name: SiteConfig(folder=name) for name in "kb"}
    config = FederationConfig("f", sites, str(tmp_path))
    (case,), problems = list_cases(config, "k")
    assert (case.case, case.patient, case.stated, problems) == (
        "case_00000", "case_00000", False, [],
    )  # fmt: skip
    arrays = decode_case(case, ImageConfig(), TaskConfig()).arrays
    np.testing.assert_array_equal(arrays.image, kits[0][None])
    np.testing.assert_array_equal(arrays.label, kits[1])
    (case,), problems = list_cases(config, "b")
    arrays = decode_case(case, ImageConfig(), TaskConfig()).arrays
    wanted = np.stack([there[name] for name in ("flair", "t1", "t1ce", "t2")])
    np.testing.assert_array_equal(arrays.image, wanted)
    np.testing.assert_array_equal(arrays.label, there["seg"])
    assert (case.case, problems) == ("B_1", [])


@pytest.mark.parametrize("between", ["_", "-", " "])
def test_the_words_beside_the_case_s_name_are_the_channels(tmp_path: Path, between: str) -> None:
    folder = brats(tmp_path / "ü #1", "B-GLI-1", "B-GLI-12", between=between)
    assert matches(folder)
    assert describe("A", folder).channels == ("flair", "t1", "t1ce", "t2")
    assert describe_dataset("A", folder, task=TaskConfig()).channels == (
        "flair",
        "t1",
        "t1ce",
        "t2",
    )
    cases, problems = from_cases("A", folder)
    assert ([case.case for case in cases], problems) == (["B-GLI-1", "B-GLI-12"], [])


@pytest.mark.parametrize("mask", ["P_Segmentation", "seg", "tumour-MASK", "label", "p labels"])
def test_a_mask_is_told_by_a_whole_word(tmp_path: Path, mask: str) -> None:
    folder = touch(tmp_path, f"P/{mask}.nii.gz", "P/P.nii.gz", "P/segmented.nii.gz", "P/a.txt")
    (case,), _ = from_cases("A", folder)
    assert case.label == folder / "P" / f"{mask}.nii.gz"
    assert [path.name for path in case.images] == ["P.nii.gz", "segmented.nii.gz"]
    assert describe("A", folder).channels == ("image", "segmented")


def test_the_name_of_a_case_makes_no_mask(tmp_path: Path) -> None:
    folder = touch(tmp_path, "seg_1/seg_1_ct.nii.gz", "seg_1/seg_1_seg.nii.gz")
    (case,), _ = from_cases("A", folder)
    assert [path.name for path in case.images] == ["seg_1_ct.nii.gz"]


def test_what_a_case_lacks_is_a_sentence_with_its_remedy(tmp_path: Path) -> None:
    folder = brats(tmp_path, "a", "b", "c", "d", "e", "f")
    (folder / "b/b_t1.nii.gz").unlink()
    (folder / "c/c_seg.nii.gz").unlink()
    touch(folder, "d/d_mask.nii.gz")
    for name in ("t1", "t2", "flair", "t1ce"):
        (folder / f"e/e_{name}.nii.gz").unlink()
    cases, problems = from_cases("A", folder)
    assert [case.case for case in cases] == ["a", "f"]
    where = [f"site A, case {case}: its folder {folder / case}" for case in "bcde"]
    assert problems == [
        f"{where[0]} holds the channels flair, t1ce, t2, and other cases have flair, t1, t1ce, t2: "
        "add what is missing, name the files as there, or take the folder out",
        f"{where[1]} holds no mask, a file with one of the words segmentation, seg, mask, label, "
        "labels in its name: add it or take the folder out",
        f"{where[2]} holds the masks d_mask.nii.gz, d_seg.nii.gz: leave one there, or list the "
        "cases in a manifest",
        f"{where[3]} holds no image beside the mask: add it or take the folder out",
    ]
    assert "holds no subfolder" in from_cases("A", folder / "a")[1][0]


def test_images_that_are_called_otherwise_are_never_mixed(tmp_path: Path) -> None:
    folder = touch(tmp_path, *(f"{n}/{n}_seg.nii.gz" for n in "ab"), "a/t1.mha", "b/flair.mha")
    (case,), (problem,) = from_cases("A", folder)
    assert case.case == "a"
    assert "case b: its folder" in problem
    assert "holds the channels flair, and other cases have t1" in problem


def test_channels_are_sorted_without_regard_to_case_and_most_cases_decide(tmp_path: Path) -> None:
    files = [f"{case}/{name}.mha" for case in "ab" for name in ("T2", "flair", "SEG")]
    folder = touch(tmp_path, *files, *(f"c/{name}.mha" for name in ("t2", "flair", "x", "seg")))
    cases, (problem,) = from_cases("A", folder)
    for case in cases:
        assert [path.name for path in case.images] == ["flair.mha", "T2.mha"]
    assert [case.case for case in cases] == ["a", "b"]
    assert "holds the channels flair, t2, x, and other cases have flair, t2" in problem


@pytest.mark.parametrize(
    "files",
    [
        ("x.nii.gz", "seg.nii.gz"),
        ("a/x.nii.gz", "b/x.nii.gz"),
        ("a/seg.nii.gz", "b/x.nii.gz"),
        ("a/x.nii.gz", "a/seg.nii.gz", "b/x.nii.gz"),
        ("HK/1.npy", "HK/1_segmentation.npy", "HK/2.npy", "HK/2_segmentation.npy"),
    ],
)
def test_other_folders_do_not_look_like_it(tmp_path: Path, files: tuple[str, ...]) -> None:
    assert not matches(touch(tmp_path, *files))


def test_a_folder_of_a_series_is_an_image_and_its_loose_slices_are_not(tmp_path: Path) -> None:
    folder = touch(tmp_path, "a/seg.nii.gz", "a/ct/1.dcm", "b/seg.nii.gz", "b/1.dcm", "b/2.dcm")
    for path in folder.rglob("*.dcm"):
        path.write_bytes(bytes(128) + b"DICM")
    (case,), (problem,) = from_cases("A", folder)
    assert case.images == (folder / "a" / "ct",)
    assert "case b" in problem
    assert "holds no image beside the mask" in problem


def test_channels_in_another_order_than_elsewhere_are_refused(tmp_path: Path) -> None:
    brats(tmp_path / "north", "x")
    dataset = {"channel_names": dict(enumerate(("T1", "T1ce", "T2", "FLAIR"))), "labels": {}}
    files = [f"imagesTr/a_000{n}.nii.gz" for n in range(4)]
    touch(tmp_path / "south", *files, "labelsTr/a.nii.gz")
    (tmp_path / "south" / "dataset.json").write_text(json.dumps(dataset), "utf-8")
    sites = {name: SiteConfig(folder=name) for name in ("north", "south")}
    config = FederationConfig("f", sites, str(tmp_path), image=ImageConfig(inputs=4))
    with pytest.raises(DataError, match=r"channel 0 is flair at north and T1 at south") as caught:
        check_names(config, ["north", "south"])
    assert r"set channels: [1, 2, 3, 0] at site south" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
