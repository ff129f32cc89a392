from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image

from collegium.data.formats import decode
from collegium.data.unlabelled import list_images
from collegium.errors import DataError


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(path)
    return path


def cases(place: Path, labels: Path | None = None) -> dict[str, tuple[list[str], str | None]]:
    found, problems = list_images(place, labels)
    assert not problems
    return {
        case.case: ([path.name for path in case.images], case.label.name if case.label else None)
        for case in found
    }


def test_a_folder_of_images_without_labels(tmp_path: Path) -> None:
    for name in ("b.png", "a.tif", ".hidden.png"):
        picture(tmp_path / name)
    (tmp_path / "notes.txt").write_text("hello")
    assert cases(tmp_path) == {"a": (["a.tif"], None), "b": (["b.png"], None)}


def test_a_folder_with_images_and_fields_of_view(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a.png")
    picture(tmp_path / "fov" / "a_fov.png")
    picture(tmp_path / "labels" / "a.png")
    (case,), problems = list_images(tmp_path)
    assert not problems
    assert case.fov == tmp_path / "fov" / "a_fov.png"
    assert case.label is None  # labels are used only where they are asked for


def test_labels_are_paired_by_name_and_none_may_be_missing(tmp_path: Path) -> None:
    for name in ("images/a.png", "images/b.png", "truth/a_mask.png", "truth/b_mask.png"):
        picture(tmp_path / name)
    assert cases(tmp_path, tmp_path / "truth") == {
        "a": (["a.png"], "a_mask.png"),
        "b": (["b.png"], "b_mask.png"),
    }
    (tmp_path / "truth/b_mask.png").unlink()
    _, problems = list_images(tmp_path, tmp_path / "truth")
    assert problems == [
        f"case b: it has no mask in {tmp_path / 'truth'}; add it, or adapt without labels"
    ]


def test_the_channels_of_an_image_are_one_case(tmp_path: Path) -> None:
    for name in ("p1_0000.png", "p1_0001.png", "p2_0000.png", "p2_0001.png"):
        picture(tmp_path / name)
    assert cases(tmp_path) == {
        "p1": (["p1_0000.png", "p1_0001.png"], None),
        "p2": (["p2_0000.png", "p2_0001.png"], None),
    }
    (tmp_path / "p2_0001.png").unlink()
    found, problems = list_images(tmp_path)
    assert [case.case for case in found] == ["p1"]
    assert problems == ["case p2: channel 0001 is missing; add it or leave it out"]


def test_a_manifest_may_name_labels_or_not(tmp_path: Path) -> None:
    for name in ("x/a.png", "x/b.png", "y/a.png", "y/b.png"):
        picture(tmp_path / name)
    plain, full = tmp_path / "plain.csv", tmp_path / "full.csv"
    plain.write_text("\ufeffImage;Patient\nx/a.png;007\nx/b.png;007\n")
    full.write_text("image,label,case\nx/a.png,y/a.png,one\nx/b.png,y/b.png,two\n")
    assert cases(plain) == {"a": (["a.png"], None), "b": (["b.png"], None)}
    assert {case.patient for case in list_images(plain)[0]} == {"007"}
    assert cases(full) == {"one": (["a.png"], "a.png"), "two": (["b.png"], "b.png")}
    full.write_text("image\nx/a.png\nx/c.png\nx/a.png\n")
    found, problems = list_images(full)
    assert len(found) == 1
    assert [text.partition(": ")[0] for text in problems] == [f"{full}, line 3", f"{full}, line 4"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "holds no image; add some of the kinds .png"),
        (["scan.dcm"], "holds no image; add some of the kinds .png"),
        (["a.png", "a.tif"], "a.png and a.tif are both the case a; rename one"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, files: list[str], says: str) -> None:
    for name in files:
        if name.endswith(".dcm"):
            (tmp_path / name).write_bytes(b"DICM")
        else:
            picture(tmp_path / name)
    with pytest.raises(DataError, match=says):
        list_images(tmp_path)


def test_a_place_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder or manifest"):
        list_images(tmp_path / "nowhere")


# --- DICOM


def series(
    folder: Path, number: int | None, *, uid: str | None = None, sagittal: bool = False
) -> Path:
    """Write three slices of 4 rows and 5 columns as a series."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(3):
        slice_ = pydicom.Dataset()
        slice_.file_meta = pydicom.dataset.FileMetaDataset()
        slice_.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        slice_.SOPClassUID = slice_.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
        slice_.SOPInstanceUID = pydicom.uid.generate_uid()
        slice_.file_meta.MediaStorageSOPInstanceUID = slice_.SOPInstanceUID
        slice_.SeriesInstanceUID = uid or f"1.2.{number or 9}"
        slice_.StudyInstanceUID, slice_.Modality, slice_.SeriesNumber = "1.2", "CT", number
        slice_.ImagePositionPatient = [2 * place, 0, 0] if sagittal else [0, 0, 2 * place]
        slice_.ImageOrientationPatient = [0, 1, 0, 0, 0, -1] if sagittal else [1, 0, 0, 0, 1, 0]
        slice_.PixelSpacing, slice_.Rows, slice_.Columns = [1, 1], 4, 5
        slice_.SamplesPerPixel, slice_.PhotometricInterpretation = 1, "MONOCHROME2"
        slice_.BitsAllocated, slice_.BitsStored, slice_.HighBit = 16, 16, 15
        slice_.PixelRepresentation = 0
        slice_.PixelData = np.full((4, 5), number or 7, np.uint16).tobytes()
        name = f"{uid or number}-{place}{'s' if sagittal else ''}"
        slice_.save_as(folder / name, enforce_file_format=True)
    return folder


def scans(place: Path, labels: Path | None = None) -> dict[str, tuple[str, str | None]]:
    found, problems = list_images(place, labels)
    assert not problems
    return {case.case: (case.images[0].name, case.series) for case in found}


def test_a_folder_of_dicom_files_is_one_image(tmp_path: Path) -> None:
    series(tmp_path / "scan", 3)
    assert scans(tmp_path / "scan") == {"scan": ("scan", None)}


def test_the_folder_itself_may_be_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(series(tmp_path / "scan", 3))
    assert [*scans(Path())] == ["scan"]


def test_subfolders_of_dicom_files_are_images_beside_other_files(tmp_path: Path) -> None:
    series(tmp_path / "p.1" / "deep", 3)
    series(tmp_path / "p.2", 4)
    series(tmp_path / ".hidden", 5)
    picture(tmp_path / "p3.png")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme").write_text("hello")
    assert scans(tmp_path) == {"p.1": ("p.1", None), "p.2": ("p.2", None), "p3": ("p3.png", None)}


def test_several_series_of_a_folder_are_as_many_images(tmp_path: Path) -> None:
    for number in (3, 12):
        series(tmp_path / "p", number)
    assert scans(tmp_path) == {"p-3": ("p", "1.2.3"), "p-12": ("p", "1.2.12")}


def test_series_of_one_number_and_orientations_of_one_series_are_told_apart(tmp_path: Path) -> None:
    for uid in ("1.2.7", "1.2.8"):
        series(tmp_path / "p", 3, uid=uid)
    series(tmp_path / "p", 3, uid="1.2.8", sagittal=True)
    found, problems = list_images(tmp_path)
    assert not problems
    assert {case.series for case in found} == {"1.2.7", "1.2.8 axial", "1.2.8 sagittal"}
    assert len({case.case for case in found}) == 3
    shapes = {
        case.series: decode(case.images[0], series=case.series).array.shape for case in found
    }  # by hand: columns, rows and slices lie along x, y, z; or y, z, x
    assert shapes == {
        "1.2.7": (1, 5, 4, 3), "1.2.8 axial": (1, 5, 4, 3), "1.2.8 sagittal": (1, 3, 5, 4),
    }  # fmt: skip


def test_masks_of_dicom_images_are_paired_by_the_names_of_cases(tmp_path: Path) -> None:
    for number in (3, 4):
        series(tmp_path / "in" / "p", number)
        picture(tmp_path / "truth" / f"p-{number}.png")
    found, problems = list_images(tmp_path / "in", tmp_path / "truth")
    assert not problems
    assert [(case.series, case.label) for case in found] == [
        ("1.2.3", tmp_path / "truth" / "p-3.png"),
        ("1.2.4", tmp_path / "truth" / "p-4.png"),
    ]


def test_a_series_and_a_file_of_one_name_are_refused(tmp_path: Path) -> None:
    series(tmp_path / "p", 3)
    picture(tmp_path / "p.png")
    with pytest.raises(DataError, match="there are several images called p in"):
        list_images(tmp_path)
