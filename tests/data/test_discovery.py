"""Manifests with classes and series, and folders of images with their labels."""

from pathlib import Path

import pytest

from collegium.data.discovery import from_folder, from_manifest
from collegium.errors import DataError


def manifest(folder: Path, text: str, *files: str) -> Path:
    for file in files:
        (folder / file).touch()
    (folder / "m.csv").write_text(text, "utf-8")
    return folder / "m.csv"


def test_a_manifest_may_give_a_class_and_no_label(tmp_path: Path) -> None:
    text = "image,class,split\nä 1.png,benign,train\nb.png,,test\n"
    file = manifest(tmp_path, text, "ä 1.png", "b.png")
    (case,), (problem,) = from_manifest("A", tmp_path, file)
    assert (case.case, case.target, case.label, case.split) == ("ä 1", "benign", None, "train")
    assert problem.startswith("site A, case b: the manifest names no label")


def test_a_manifest_may_give_both_a_class_and_a_label(tmp_path: Path) -> None:
    text = "image,label,class\na.png,l.png,0\nb.png,,1\n"
    cases, problems = from_manifest("A", tmp_path, manifest(tmp_path, text, "a.png", "b.png",
                                                            "l.png"))  # fmt: skip
    assert problems == []
    assert [(case.target, case.label) for case in cases] == [
        ("0", tmp_path / "l.png"), ("1", None),
    ]  # fmt: skip


def test_without_label_and_class_both_ways_out_are_said(tmp_path: Path) -> None:
    file = manifest(tmp_path, "image,case\na.png,x\n", "a.png")
    with pytest.raises(DataError, match=r"no column label: .* \(or a column class, where cases"):
        from_manifest("A", tmp_path, file)


def test_an_empty_manifest_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^site A: the manifest .*m\.csv is empty: write a"):
        from_manifest("A", tmp_path, manifest(tmp_path, "\ufeff\n"))


def test_a_series_of_a_folder_is_kept_and_uids_name_cases_whole(tmp_path: Path) -> None:
    for name in ("1.2.840.1", "1.2.840.2", "p.q"):
        (tmp_path / name).mkdir()
    text = "image,class,series\n1.2.840.1,x,4\n1.2.840.2,x,\np.q,x,1.2.3\n"
    cases, problems = from_manifest("A", tmp_path, manifest(tmp_path, text))
    assert problems == []
    assert [(case.case, case.series) for case in cases] == [
        ("1.2.840.1", "4"), ("1.2.840.2", None), ("p", "1.2.3"),
    ]  # fmt: skip


def test_an_image_may_be_several_files_and_lack_channels(tmp_path: Path) -> None:
    files = [f"{case}_000{channel}.nii.gz" for case in "ab" for channel in (0, 1)]
    text = (
        "image,class,channels\n"
        "a_0000.nii.gz|a_0001.nii.gz,x,\nb_0000.nii.gz | b_0001.nii.gz,y,2 0\n"
    )
    cases, problems = from_manifest("A", tmp_path, manifest(tmp_path, text, *files))
    assert problems == []
    assert [(case.case, case.channels) for case in cases] == [("a", None), ("b", (2, 0))]
    assert [case.images for case in cases] == [
        tuple(tmp_path / name for name in files[:2]), tuple(tmp_path / name for name in files[2:]),
    ]  # fmt: skip
    (tmp_path / files[3]).unlink()
    (case,), (problem,) = from_manifest("A", tmp_path, tmp_path / "m.csv")
    assert case.case == "a"
    assert problem.startswith(f"site A, case b: there is no image {tmp_path / files[3]}: correct")


@pytest.mark.parametrize("channels", ["one", "0;2", "1 1", "-1"])
def test_channels_that_are_no_numbers_are_told(tmp_path: Path, channels: str) -> None:
    text = f"image,class,channels\na.png,x,{channels}\n"
    cases, (problem,) = from_manifest("A", tmp_path, manifest(tmp_path, text, "a.png"))
    assert cases == []
    assert f"case a: the channels '{channels}' are not distinct whole numbers" in problem


def test_the_voxels_beside_a_header_are_no_images(tmp_path: Path) -> None:
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
        for name in ("a.mhd", "a.raw", "b.mhd", "b.zraw"):
            (tmp_path / folder / name).write_bytes(b"x")
    cases, problems = from_folder("A", tmp_path)
    assert problems == []
    assert [(case.case, case.images[0].name) for case in cases] == [("a", "a.mhd"), ("b", "b.mhd")]
