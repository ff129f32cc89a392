"""DICOM segmentations against highdicom's and SimpleITK's reading of the same files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import highdicom
import nibabel as nib
import numpy as np
import pydicom
import pytest
from pydicom.sr.codedict import codes

from collegium.data.decoded_image import DecodedImage, DecodedRegions
from collegium.data.formats.dicom import decode
from collegium.data.formats.dicom_segmentation import (
    decode_segmentation,
    is_segmentation,
    write_segmentation,
)
from collegium.data.preprocessing import decode_case
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case
from collegium.errors import DataError

Write = Callable[..., Path]
CLASSES = ("background", "liver", "tumour")
BRATS = ("background", "necrosis", "edema", "enhancing")
REGIONS = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}


@pytest.fixture
def series(write_series: Write, oblique: tuple[float, ...]) -> Path:
    """An oblique anisotropic series of 6 slices with 5 rows and 7 columns."""
    return write_series(
        "series",
        np.arange(210).reshape(6, 5, 7).astype("int16"),
        orientation=oblique,
        origin=(-40.5, 13.25, 77),
        spacing=(0.9, 0.45),
        gap=3.3,
    )


def drawn(like: DecodedImage) -> np.ndarray:
    """Labels on some of the slices only."""
    labels = np.zeros(like.array.shape[1:], "uint8")
    labels[2:4, 1:3] = 1
    labels[3, 2] = 2
    return labels


def points(affine: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Millimetres (LPS) of voxels whose affine is in RAS+, sorted to be compared as sets."""
    found = nib.affines.apply_affine(affine, indices) * [-1, -1, 1]
    ordered: np.ndarray = found[np.lexsort(np.round(found, 3).T)]
    return ordered


def by_highdicom(source: Path, path: Path, labels: Sequence[str] = (), **options: Any) -> Path:
    """Write a segmentation with highdicom itself, as another program would."""
    images = [pydicom.dcmread(file) for file in sorted(source.iterdir())]
    images.sort(key=lambda image: image.ImagePositionPatient[2])
    count = options["pixel_array"].shape[-1] if options["pixel_array"].ndim == 4 else 2
    labels = labels or [f"part {number}" for number in range(1, count + 1)]
    written = highdicom.seg.Segmentation(
        source_images=images,
        segment_descriptions=[
            highdicom.seg.SegmentDescription(
                segment_number=number,
                segment_label=label,
                segmented_property_category=codes.SCT.Organ,
                segmented_property_type=codes.SCT.Liver,
                algorithm_type="MANUAL",
            )
            for number, label in enumerate(labels, start=1)
        ],
        series_instance_uid=highdicom.UID(),
        series_number=9,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="a",
        manufacturer_model_name="b",
        software_versions="c",
        device_serial_number="d",
        **options,
    )
    written.save_as(path)
    return path


def test_written_segments_lie_on_the_same_points_for_highdicom(
    series: Path, tmp_path: Path
) -> None:
    like = decode(series)
    labels = drawn(like)
    write_segmentation(labels, series, tmp_path / "seg.dcm", CLASSES)
    read = highdicom.seg.segread(tmp_path / "seg.dcm")
    volume = read.get_volume(combine_segments=True)
    assert like.affine is not None
    for value in (1, 2):
        expected = points(like.affine, np.argwhere(labels == value))
        there = np.argwhere(volume.array == value)
        found = volume.map_indices_to_reference(there)
        assert found[np.lexsort(np.round(found, 3).T)] == pytest.approx(expected, abs=1e-4)
    assert [read.get_segment_description(n).segment_label for n in (1, 2)] == list(CLASSES[1:])


def test_written_frames_lie_on_the_same_points_for_simpleitk(
    write_series: Write, oblique: tuple[float, ...], tmp_path: Path
) -> None:
    library = pytest.importorskip("SimpleITK")
    series = write_series(
        "series",
        np.zeros((6, 16, 8), "int16"),  # whole bytes a frame: GDCM reads no others of one bit
        orientation=oblique,
        origin=(-40.5, 13.25, 77),
        spacing=(0.9, 0.45),
        gap=3.3,
    )
    like = decode(series)
    labels = np.ones(like.array.shape[1:], "uint8")  # every frame is there
    labels[2, 3, 4] = 0
    write_segmentation(labels, series, tmp_path / "seg.dcm", CLASSES[:2])
    image = library.ReadImage(str(tmp_path / "seg.dcm"))
    values = library.GetArrayFromImage(image).transpose(2, 1, 0) > 0
    (hole,) = np.argwhere(~values).tolist()
    assert like.affine is not None
    expected = points(like.affine, np.array([[2, 3, 4]]))[0]
    assert image.TransformIndexToPhysicalPoint(hole) == pytest.approx(expected, abs=1e-4)
    assert sorted(image.GetSpacing()) == pytest.approx(sorted(like.spacing or ()), abs=1e-6)


def test_written_segmentation_refers_to_its_series(series: Path, tmp_path: Path) -> None:
    write_segmentation(drawn(decode(series)), series, tmp_path / "seg.dcm", CLASSES)
    sources = [pydicom.dcmread(path) for path in series.iterdir()]
    written = pydicom.dcmread(tmp_path / "seg.dcm")
    (reference,) = written.ReferencedSeriesSequence
    assert reference.SeriesInstanceUID == sources[0].SeriesInstanceUID
    assert written.SeriesInstanceUID != sources[0].SeriesInstanceUID
    assert written.StudyInstanceUID == sources[0].StudyInstanceUID
    assert written.FrameOfReferenceUID == sources[0].FrameOfReferenceUID
    by_place = {tuple(s.ImagePositionPatient): s.SOPInstanceUID for s in sources}
    for frame in written.PerFrameFunctionalGroupsSequence:
        place = tuple(frame.PlanePositionSequence[0].ImagePositionPatient)
        source = frame.DerivationImageSequence[0].SourceImageSequence[0]
        nearest = min(by_place, key=lambda key: np.linalg.norm(np.subtract(key, place)))
        assert source.ReferencedSOPInstanceUID == by_place[nearest]


@pytest.mark.parametrize("kind", ["series", "tilted", "enhanced", "slice", "picture"])
def test_labels_come_back_from_what_was_written(
    write_series: Write, write_enhanced: Write, write_picture: Write, tmp_path: Path, kind: str
) -> None:
    volume = np.arange(60).reshape(3, 4, 5).astype("int16")
    if kind == "enhanced":
        places = [(0, 0, 2.0 * place) for place in (2, 0, 1)]
        image = write_enhanced("image", volume, positions=places, shared_orientation=False)
    elif kind == "picture":
        image = write_picture("image", volume[0])
    else:
        step = (0, 1, 3) if kind == "tilted" else None
        image = write_series("image", volume[:1] if kind == "slice" else volume, step=step)
    like = decode(image)
    labels = np.random.default_rng(0).integers(0, 3, like.array.shape[1:]).astype("uint8")
    write_segmentation(labels, image, tmp_path / "seg.dcm", CLASSES)
    back = decode_segmentation(tmp_path / "seg.dcm", like)
    assert back.array.tolist() == [labels.tolist()]
    assert back.spacing == like.spacing


def test_labels_of_another_size_are_brought_to_the_input_grid(series: Path, tmp_path: Path) -> None:
    like = decode(series)
    small = drawn(like)[::1, ::1, :3]
    write_segmentation(small, series, tmp_path / "seg.dcm", CLASSES)
    back = decode_segmentation(tmp_path / "seg.dcm", like).array[0]
    length = like.array.shape[3]
    expected = small[..., (np.arange(length) * 3) // length]
    assert length % 3 == 0
    assert back.tolist() == expected.tolist()


def test_empty_foreground_is_written_and_read(series: Path, tmp_path: Path) -> None:
    like = decode(series)
    write_segmentation(np.zeros(like.array.shape[1:], "uint8"), series, tmp_path / "s", CLASSES)
    assert highdicom.seg.segread(tmp_path / "s").number_of_segments == 2
    assert not decode_segmentation(tmp_path / "s", like).array.any()


def test_classes_without_names_get_numbers(series: Path, tmp_path: Path) -> None:
    like = decode(series)
    write_segmentation(drawn(like), series, tmp_path / "s", ())
    read = highdicom.seg.segread(tmp_path / "s")
    labels = [read.get_segment_description(number).segment_label for number in (1, 2)]
    assert labels == ["class 1", "class 2"]


def test_image_without_patient_or_frame_of_reference_gets_a_segmentation(
    series: Path, tmp_path: Path, rewrite: Callable[..., None]
) -> None:
    rewrite(*series.iterdir(), PatientID=None, StudyDate=None, FrameOfReferenceUID=None)
    like = decode(series)
    write_segmentation(drawn(like), series, tmp_path / "s", CLASSES)
    assert decode_segmentation(tmp_path / "s", like).array[0].tolist() == drawn(like).tolist()


@pytest.mark.parametrize("key", ["PixelSpacing", "ImagerPixelSpacing", None])
def test_segmentation_of_a_picture_is_read_by_highdicom(
    write_picture: Write, tmp_path: Path, key: str | None
) -> None:
    sizes = {} if key is None else {key: [0.2, 0.1]}
    image = write_picture("image", np.arange(20, dtype="uint16").reshape(4, 5), **sizes)
    labels = (np.arange(20).reshape(4, 5) % 3).astype("uint8")
    write_segmentation(labels, image, tmp_path / "seg.dcm", CLASSES)
    read = highdicom.seg.segread(tmp_path / "seg.dcm")
    uid = pydicom.dcmread(image).SOPInstanceUID
    pixels = read.get_pixels_by_source_instance([uid], combine_segments=True)
    assert pixels[0].tolist() == labels.tolist()
    assert (
        decode_segmentation(tmp_path / "seg.dcm", decode(image)).array[0].tolist()
        == labels.tolist()
    )


def test_labels_of_one_slice_at_two_times_lie_where_they_were_seen(
    write_series: Write, tmp_path: Path
) -> None:
    one = np.arange(20, dtype="int16").reshape(1, 4, 5)
    image = write_series("s", one, AcquisitionNumber=1)
    write_series("s", one + 1, prefix="b", AcquisitionNumber=2)
    like = decode(image)
    assert like.array.shape == (2, 5, 4)
    write_segmentation((like.array[0] == 7).astype("uint8"), image, tmp_path / "seg", CLASSES[:2])
    stored = pydicom.dcmread(tmp_path / "seg").pixel_array
    assert np.argwhere(stored).tolist() == [[1, 2]]  # the row and column where 7 is stored
    back = decode_segmentation(tmp_path / "seg", like)
    assert back.array[0].tolist() == (like.array[0] == 7).tolist()


def test_image_that_belongs_to_no_study_is_refused(
    series: Path, tmp_path: Path, rewrite: Callable[..., None]
) -> None:
    rewrite(*series.iterdir(), StudyInstanceUID=None)
    with pytest.raises(DataError, match=r"no segmentation can refer to them.*StudyInstanceUID"):
        write_segmentation(drawn(decode(series)), series, tmp_path / "s", CLASSES)
    assert not (tmp_path / "s").exists()


def test_segmentation_is_told_by_content(series: Path, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    path = tmp_path / "masks" / "mask.nii"
    write_segmentation(drawn(decode(series)), series, path, CLASSES)
    assert is_segmentation(path)
    assert is_segmentation(tmp_path / "masks")
    assert not is_segmentation(series)
    assert decode_segmentation(tmp_path / "masks", decode(series)).array.max() == 2


def test_segments_written_by_highdicom_lie_where_it_puts_them(
    write_series: Write, tmp_path: Path
) -> None:
    image = write_series("s", np.zeros((4, 3, 5), "int16"), origin=(10, 20, -5), spacing=(2, 0.5))
    stored = np.zeros((4, 3, 5), "uint8")
    stored[1, 2, 4], stored[3, 0, 1] = 1, 2  # (slice, row, column); two slices are empty
    path = by_highdicom(image, tmp_path / "seg", pixel_array=stored, segmentation_type="BINARY")
    labels = decode_segmentation(path, decode(image)).array[0]
    assert labels.shape == (5, 3, 4)
    # x and y are counted from the other end in RAS+
    assert np.argwhere(labels == 1).tolist() == [[0, 0, 1]]
    assert np.argwhere(labels == 2).tolist() == [[3, 2, 3]]
    assert len(pydicom.dcmread(path).PerFrameFunctionalGroupsSequence) == 2


def test_label_map_segmentation_is_read(write_series: Write, tmp_path: Path) -> None:
    image = write_series("s", np.zeros((2, 3, 5), "int16"))
    stored = np.zeros((2, 3, 5), "uint8")
    stored[0, 0, 0], stored[1, 2, 4] = 2, 1
    path = by_highdicom(image, tmp_path / "seg", pixel_array=stored, segmentation_type="LABELMAP")
    assert is_segmentation(path)
    labels = decode_segmentation(path, decode(image)).array[0]
    assert np.argwhere(labels == 2).tolist() == [[4, 2, 0]]
    assert np.argwhere(labels == 1).tolist() == [[0, 0, 1]]


def test_overlapping_segments_are_no_label_map(write_series: Write, tmp_path: Path) -> None:
    image = write_series("s", np.zeros((2, 3, 5), "int16"))
    stored = np.zeros((2, 3, 5, 2), "uint8")
    stored[0, :, :, 0] = 1
    stored[:, 1, 1, 1] = 1
    path = by_highdicom(image, tmp_path / "seg", pixel_array=stored, segmentation_type="BINARY")
    like, words = decode(image), r"segments 1 \(part 1\) and 2 \(part 2\) overlap.*task\.regions"
    with pytest.raises(DataError, match=words):
        decode_segmentation(path, like)
    inside = decode_segmentation(path, like, ("a", "b"))
    assert isinstance(inside, DecodedRegions)
    assert inside.array.tolist() == stored[:, ::-1, ::-1].transpose(3, 2, 1, 0).tolist()
    assert inside.notes == (
        "seg: its segments were taken in their order: part 1 as a, part 2 as b",
    )


def brats_case(write_series: Write, truth: np.ndarray, order: Sequence[str], **named: str) -> Case:
    """Write the regions of a label map (slice, row, column) as segments in some order."""
    image = write_series("s", np.zeros(truth.shape, "int16"))
    stored = np.stack([np.isin(truth, REGIONS[name]) for name in order], axis=-1).astype("uint8")
    labels = [named.get(name, name) for name in order]
    path = image.parent / "seg"
    by_highdicom(image, path, labels, pixel_array=stored, segmentation_type="BINARY")
    return Case("C", "Case12", "p", (image,), path)


def label_of(case: Case, **task: Any) -> list[Any]:
    """The label of a case of BraTS in the order (slice, row, column) in which it was drawn."""
    with_regions = TaskConfig(classes=BRATS, regions=REGIONS, **task)
    label = decode_case(case, ImageConfig(), with_regions).arrays.label
    assert label is not None
    drawn: list[Any] = label.T[:, ::-1, ::-1].tolist()
    return drawn


TUMOUR = np.array([[[0, 2, 2, 1, 3], [0, 0, 2, 2, 0]], [[3, 1, 0, 2, 0], [3, 3, 1, 0, 0]]])


@pytest.mark.parametrize("order", [("WT", "TC", "ET"), ("ET", "WT", "TC")])
def test_segments_called_as_regions_become_the_classes(
    write_series: Write, order: tuple[str, ...]
) -> None:
    case = brats_case(write_series, TUMOUR, order, WT="wt", TC="Tc")
    assert label_of(case) == TUMOUR.tolist()
    assert label_of(case, label_map={1: 2, 2: 1}) == TUMOUR.tolist()


def test_segments_called_as_regions_are_regions_where_they_do_not_overlap(
    write_series: Write,
) -> None:
    case = brats_case(write_series, 2 * (TUMOUR > 0), ("WT",))
    assert label_of(case) == (2 * (TUMOUR > 0)).tolist()  # as a label map it were 1
    notes = decode_case(case, ImageConfig(), TaskConfig(classes=BRATS, regions=REGIONS)).notes
    assert "seg: has no segment TC, ET, taken as empty" in notes


def test_other_segments_that_overlap_are_regions_by_their_order(write_series: Write) -> None:
    case = brats_case(write_series, TUMOUR, ("WT", "TC", "ET"), WT="a", TC="b", ET="c")
    assert label_of(case) == TUMOUR.tolist()


@pytest.mark.parametrize(
    ("labels", "listed"), [(("a", "b"), "a, b"), (("ET", "core", "b"), "ET, core, b")]
)
def test_segments_that_are_not_the_regions_are_refused_with_both(
    write_series: Write, labels: tuple[str, ...], listed: str
) -> None:
    names = dict(zip(REGIONS, labels, strict=False))
    case = brats_case(write_series, TUMOUR, tuple(names), **names)
    words = rf"C, case Case12: .*seg: its segments \({listed}\) overlap .* \(WT, TC, ET\)"
    with pytest.raises(DataError, match=words):
        label_of(case)


def test_segments_with_names_of_both_are_regions_only_where_they_overlap(
    write_series: Write, tmp_path: Path
) -> None:
    image = write_series("s", np.zeros((2, 3, 4), "int16"))
    classes, regions = ("background", "disc", "cup"), {"disc": (1, 2), "cup": (2,)}
    truth = np.zeros((2, 3, 4), "uint8")
    truth[:, 0], truth[1, 2] = 1, 2
    expected = truth[:, ::-1, ::-1].T
    write_segmentation(np.ascontiguousarray(expected), image, tmp_path / "apart", classes)
    stored = np.stack([truth > 0, truth == 2], axis=-1).astype("uint8")
    options = {"pixel_array": stored, "segmentation_type": "BINARY"}
    by_highdicom(image, tmp_path / "nested", tuple(regions), **options)
    for name in ("apart", "nested"):
        case = Case("C", "c", "p", (image,), tmp_path / name)
        task = TaskConfig(classes=classes, regions=regions)
        label = decode_case(case, ImageConfig(), task).arrays.label
        np.testing.assert_array_equal(label, expected)


@pytest.mark.parametrize(("named", "notes"), [(BRATS[1:], 0), (("a", "b", "c"), 1)])
def test_segments_without_overlap_stay_classes_beside_regions(
    write_series: Write, tmp_path: Path, named: tuple[str, ...], notes: int
) -> None:
    image = write_series("s", np.zeros(TUMOUR.shape, "int16"))
    like = decode(image)
    labels = np.ascontiguousarray(TUMOUR[:, ::-1, ::-1].T, "uint8")
    write_segmentation(labels, image, tmp_path / "seg", ("background", *named))
    found = decode_segmentation(tmp_path / "seg", like, tuple(REGIONS), BRATS)
    assert found.array.tolist() == [labels.tolist()]
    assert (
        len([note for note in found.notes if "read as the classes of their numbers" in note])
        == notes
    )


def test_fractional_segments_are_cut_at_one_half(write_series: Write, tmp_path: Path) -> None:
    image = write_series("s", np.zeros((1, 1, 4), "int16"))
    stored = np.array([[[[0.0], [0.49], [0.51], [1.0]]]])
    path = by_highdicom(image, tmp_path / "seg", pixel_array=stored, segmentation_type="FRACTIONAL")
    back = decode_segmentation(path, decode(image))
    assert back.array.tolist() == [[[0, 0, 1, 1]]]
    assert back.notes == ("seg: its fractional segments were cut at one half",)


def test_slice_takes_its_own_frame_of_a_segmentation(series: Path, tmp_path: Path) -> None:
    like = decode(series)
    write_segmentation(drawn(like), series, tmp_path / "seg", CLASSES)
    whole = highdicom.seg.segread(tmp_path / "seg").get_volume(combine_segments=True)
    for path in series.iterdir():
        place = pydicom.dcmread(path).ImagePositionPatient
        level = round(float(whole.map_reference_to_indices(np.array([place]))[0, 0]))
        there = 0 <= level < len(whole.array)
        expected = whole.array[level] if there else np.zeros((5, 7))
        back = decode_segmentation(tmp_path / "seg", decode(path))
        assert back.array[0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"origin": (0.3, 0, 0)}, "0.3 voxels off"),
        ({"spacing": (2, 2)}, "does not lie on the grid"),
        ({"orientation": (0, 1, 0, 0, 0, -1)}, "does not lie on the grid"),
        ({"origin": (0, 0, 50)}, "lie outside"),
    ],
)
def test_segmentation_on_another_grid_is_refused(
    write_series: Write, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    volume = np.zeros((4, 6, 6), "int16")
    one = write_series("one", volume)
    other = write_series("other", volume, **change)
    labels = np.ones((6, 6, 4), "uint8")
    write_segmentation(labels, one, tmp_path / "seg", CLASSES)
    with pytest.raises(DataError, match=words):
        decode_segmentation(tmp_path / "seg", decode(other))


def test_folder_with_two_segmentations_is_refused(series: Path, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    for name in ("a", "b"):
        write_segmentation(drawn(decode(series)), series, tmp_path / "masks" / name, CLASSES)
    with pytest.raises(DataError, match=r"holds 2 DICOM segmentations \(a, b\)"):
        decode_segmentation(tmp_path / "masks", decode(series))


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
@pytest.mark.parametrize(
    ("labels", "classes"),
    [(("Tumour", "liver"), (0, 2, 1)), (("tumour",), (0, 2)), (("liver", "tumour"), (0, 1, 2)),
     (("part 1", "part 2"), (0, 1, 2))],
)  # fmt: skip
def test_segments_are_the_classes_that_they_are_called_as(
    write_series: Write, tmp_path: Path, kind: str, labels: tuple[str, ...], classes: Sequence[int]
) -> None:
    image = write_series("s", np.zeros((2, 3, 5), "int16"))
    stored = np.arange(30).reshape(2, 3, 5).astype("uint8") % (len(labels) + 1)
    by_highdicom(image, tmp_path / "seg", labels, pixel_array=stored, segmentation_type=kind)
    case = Case("C", "c", "p", (image,), tmp_path / "seg")
    raw = decode_case(case, ImageConfig(), TaskConfig(classes=CLASSES))
    expected = np.array(classes)[stored][:, ::-1, ::-1].T
    np.testing.assert_array_equal(raw.arrays.label, expected)
    renamed = [note for note in raw.notes if "were read by their names" in note]
    assert len(renamed) == (classes != (0, 1, 2))
    numbered = TaskConfig(classes=CLASSES, label_map={1: 1, 2: 2})
    by_number = decode_case(case, ImageConfig(), numbered).arrays.label
    np.testing.assert_array_equal(by_number, stored[:, ::-1, ::-1].T)


def test_segments_of_which_only_some_are_called_as_classes_are_refused(
    write_series: Write, tmp_path: Path
) -> None:
    image = write_series("s", np.zeros((2, 3, 5), "int16"))
    stored = np.arange(30).reshape(2, 3, 5).astype("uint8") % 3
    options = {"pixel_array": stored, "segmentation_type": "BINARY"}
    by_highdicom(image, tmp_path / "seg", ("liver", "bone"), **options)
    words = r"segments 1 \(liver\), 2 \(bone\) have names of classes .* in label_map"
    with pytest.raises(DataError, match=words):
        decode_segmentation(tmp_path / "seg", decode(image), (), CLASSES)
    numbers = decode_segmentation(tmp_path / "seg", decode(image), (), CLASSES, by_name=False)
    assert numbers.array.max() == 2
