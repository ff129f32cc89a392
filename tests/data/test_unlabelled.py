from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image

from collegium.data.discovery import from_manifest
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
    for name in ("q_0001.png", "q_0002.png"):  # which are no channels
        (tmp_path / name).touch()
    every = cases(tmp_path)
    assert {name: files for name, (files, _) in every.items() if name.startswith("q")} == {
        "q_0001": ["q_0001.png"], "q_0002": ["q_0002.png"],
    }  # fmt: skip
    (tmp_path / "p2_0001.png").unlink()
    found, problems = list_images(tmp_path)
    assert [case.case for case in found] == ["p1", "q_0001", "q_0002"]
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


def test_classes_count_where_every_line_names_one_and_nothing_is_segmented(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        picture(tmp_path / name)
    manifest = tmp_path / "m.csv"
    for last, wanted in (("ill", ["well", "ill"]), ("", [None, None])):
        manifest.write_text(f"image,class\na.png,well\nb.png,{last}\n")
        found = [list_images(manifest, masks=masks)[0] for masks in (False, True)]
        assert [[case.target for case in cases] for cases in found] == [wanted, [None, None]]


def test_manifests_are_read_as_those_of_training_are(tmp_path: Path) -> None:
    for name in ("x.1.png", "z_0000.png", "z_0001.png", "m.png"):
        picture(tmp_path / name)
    text = (
        "case_id;Image;mask;channels\n;x.1.png;m.png;\n\n"
        '"0007";z_0000.png | z_0001.png;m.png;2 0\n;z_0000.png|z_0001.png;m.png;\n'
    )
    (tmp_path / "m.csv").write_text(text, "utf-8-sig")
    found, problems = list_images(tmp_path / "m.csv")
    learnt, other = from_manifest("A", tmp_path, tmp_path / "m.csv")
    assert (problems, other) == ([], [])
    assert [case.case for case in found] == ["0007", "x", "z"]
    for case, like in zip(found, sorted(learnt, key=lambda case: case.case), strict=True):
        assert (case.case, case.patient, case.images, case.label, case.channels) == (
            like.case, like.patient, like.images, like.label, like.channels,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["../../evil", "P/01", "a\\b", "..", ".", "a\0b"])
def test_an_id_that_no_file_can_be_called_by_is_refused(tmp_path: Path, name: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "m.csv").write_text(f"image,case\na.png,fine\na.png,{name}\n")
    found, (problem,) = list_images(tmp_path / "m.csv")
    assert [case.case for case in found] == ["fine"]
    assert problem == (
        f"{tmp_path / 'm.csv'}, line 3: the case id {name!r} cannot be a file's name; give it an "
        "id without / and \\"
    )
    found, problems = list_images(tmp_path / "m.csv", masks=False)
    assert ([case.case for case in found], problems) == (sorted(["fine", name]), [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image\na.png\n".encode("utf-16"), "is not UTF-8 text: save it as 'CSV UTF-8'"),
        ("image\nä.png\n".encode("latin-1"), "is not UTF-8 text: save it as 'CSV UTF-8'"),
        (b"\n", "is empty: write a line of columns, and one for each image"),
        (b"case\na\n", "has no column image: add it to the columns case$"),
        (b"image\n", "holds no line below its columns; add one for each image"),
        (b"image\na.png,b\n", "line 2 of .*: 2 cells for 1 columns"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "m.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list_images(tmp_path / "m.csv")


def test_a_line_without_an_image_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("image,case\n,one\n")
    found, problems = list_images(tmp_path / "m.csv")
    message = "it names no image; fill in the line or take it out"
    assert (found, problems) == ([], [f"{tmp_path / 'm.csv'}, line 2: {message}"])


def test_of_nnunet_the_test_images_are_taken_where_there_are_any(tmp_path: Path) -> None:
    for name in ("imagesTr/p1_0000.png", "labelsTr/p1.png", "imagesTs/.hidden"):
        picture(tmp_path / name.replace(".hidden", ".hidden.png"))
    assert cases(tmp_path, tmp_path / "labelsTr") == {"p1": (["p1_0000.png"], "p1.png")}
    for channel in range(2):
        picture(tmp_path / "imagesTs" / f"p2_000{channel}.png")
    assert cases(tmp_path) == {"p2": (["p2_0000.png", "p2_0001.png"], None)}


def test_images_in_subfolders_only_are_told(tmp_path: Path) -> None:
    for name in ("well/a.png", "ill/deep/b.png"):
        picture(tmp_path / name)
    (tmp_path / "notes").mkdir()
    message = (
        r"no image itself, only its subfolders do \(ill, well\); name one of them, or list the"
    )
    with pytest.raises(DataError, match=message):
        list_images(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no image; add some of the kinds .png"),
        (["scan.dcm"], "holds no image; add some of the kinds .png"),
        (["a.png", "a.tif"], "a.png and a.tif are both the case a; rename one"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        if name.endswith(".dcm"):
            (tmp_path / name).write_bytes(b"DICM")
        else:
            picture(tmp_path / name)
    with pytest.raises(DataError, match=message):
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


def dicom(path: Path, kind: str, uid: str, **values: Any) -> None:
    """Write a picture of 4 rows and 5 columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = pydicom.Dataset()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID = pydicom.uid.UID(kind)
    file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID = pydicom.uid.generate_uid()
    file.StudyInstanceUID, file.SeriesInstanceUID, file.SeriesNumber = "1.2", uid, 1
    file.Rows, file.Columns, file.PixelSpacing = 4, 5, [1, 1]
    for keyword, value in values.items():
        setattr(file, keyword, value)
    file.save_as(path, enforce_file_format=True)


def nested(sequence: str, **values: Any) -> pydicom.Dataset:
    """A functional group of a frame."""
    inner, outer = pydicom.Dataset(), pydicom.Dataset()
    for keyword, value in values.items():
        setattr(inner, keyword, value)
    setattr(outer, sequence, [inner])
    return outer


def test_pictures_and_multi_frame_files_of_a_folder_are_images_by_their_names(
    tmp_path: Path,
) -> None:
    images, uid = tmp_path / "images", "1.2.840.10008.5.1.4.1.1."
    for number, name in enumerate(("c2.dcm", "c10", "1.2.840.1.7", "1.2.840.1.8")):
        series_uid = f"1.{9 - number // 2}"  # two views in each series, in another order
        dicom(images / name, uid + "1", series_uid, Modality="CR")
    shared = nested("PlaneOrientationSequence", ImageOrientationPatient=[1, 0, 0, 0, 1, 0])
    volume = {
        "NumberOfFrames": 3,
        "SharedFunctionalGroupsSequence": [shared],
        "PerFrameFunctionalGroupsSequence": [
            nested("PlanePositionSequence", ImagePositionPatient=[0, 0, 2 * frame])
            for frame in range(3)
        ],
    }
    for name in ("mr1.dcm", "mr2.dcm"):
        dicom(images / name, uid + "4.1", "1.3", Modality="MR", **volume)
    place = {"ImagePositionPatient": [0, 0, 9], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}
    dicom(images / "lone.dcm", uid + "2", "1.4", Modality="CT", **place)
    singles = {
        "c2": "c2.dcm", "c10": "c10", "1.2.840.1.7": "1.2.840.1.7", "1.2.840.1.8": "1.2.840.1.8",
        "mr1": "mr1.dcm", "mr2": "mr2.dcm", "lone": "lone.dcm",
    }  # fmt: skip
    assert scans(images) == {case: (name, None) for case, name in singles.items()}
    for case in singles:
        picture(tmp_path / "truth" / f"{case}.png")
    found, problems = list_images(tmp_path, tmp_path / "truth")
    assert not problems
    assert {case.case: case.label for case in found} == {
        case: tmp_path / "truth" / f"{case}.png" for case in singles
    }
    series(images, 3)
    dicom(images / "deep" / "x1.dcm", uid + "1", "1.5", Modality="CR", SeriesNumber=6)
    assert scans(images) == {
        **{case: (name, None) for case, name in singles.items()},
        "images-3": ("images", "1.2.3"), "images-6": ("images", "1.5"),
    }  # fmt: skip
    dicom(images / "c2", uid + "1", "1.6", Modality="CR")
    with pytest.raises(DataError, match=r"there are several images called c2 in .*images; rename"):
        list_images(images)
