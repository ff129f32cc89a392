"""DICOM images against SimpleITK's reading of the same files, and against closed forms."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
from pydicom.uid import ImplicitVRLittleEndian, JPEGLosslessSV1

from collegium.data.decoded_image import DecodedImage
from collegium.data.formats.dicom import decode, find_series, is_dicom, read_grid
from collegium.errors import DataError

Write = Callable[..., Path]


def ramp(*shape: int, dtype: str = "int16") -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def by_simpleitk(path: Path) -> Any:
    library = pytest.importorskip("SimpleITK")
    if path.is_file():
        return library.ReadImage(str(path))
    reader = library.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(path)))
    return reader.Execute()


def check_same(decoded: DecodedImage, image: Any) -> None:
    """Each voxel lies where SimpleITK's with the same value lies."""
    assert decoded.affine is not None
    channel = decoded.array[0]
    indices = np.stack(np.meshgrid(*map(np.arange, channel.shape), indexing="ij"), -1)
    points = nib.affines.apply_affine(decoded.affine, indices) * [-1, -1, 1]
    others = np.apply_along_axis(
        lambda point: image.TransformPhysicalPointToContinuousIndex(point.tolist()), -1, points
    )
    whole = np.rint(others).astype(int)
    assert sorted(image.GetSize()) == sorted(channel.shape)
    corners = np.array(list(np.ndindex(2, 2, 2))) * (np.array(channel.shape) - 1)
    for corner in map(tuple, corners):
        there = image.TransformIndexToPhysicalPoint(whole[corner].tolist())
        assert there == pytest.approx(points[corner], abs=1e-4)
    values = np.array([image[tuple(index.tolist())] for index in whole.reshape(-1, 3)])
    assert channel.ravel().tolist() == values.tolist()


# --- which files


def test_dicom_is_told_by_content_not_by_name(write_picture: Write, tmp_path: Path) -> None:
    path = write_picture("image", ramp(4, 5))
    renamed = path.rename(tmp_path / "image.nii.gz")
    assert is_dicom(renamed)
    (tmp_path / "text.dcm").write_text("\x08\x00 is how a file without preamble may begin" * 9)
    (tmp_path / "empty.dcm").touch()
    assert not is_dicom(tmp_path / "text.dcm")
    assert not is_dicom(tmp_path / "empty.dcm")
    assert not is_dicom(tmp_path / "absent")


def test_file_without_preamble_or_meta_information_is_read(
    write_picture: Write, tmp_path: Path
) -> None:
    dataset = pydicom.dcmread(write_picture("a", ramp(4, 5)))
    del dataset.file_meta
    dataset.preamble = None
    bare = tmp_path / "bare"
    pydicom.dcmwrite(bare, dataset, implicit_vr=True, little_endian=True)
    assert bare.read_bytes()[:2] == b"\x08\x00"
    assert is_dicom(bare)
    assert decode(bare).array.tolist() == [ramp(4, 5).tolist()]


def test_series_are_grouped_by_uid_and_sorted_along_the_normal(
    write_series: Write, tmp_path: Path
) -> None:
    write_series("exam/a", ramp(3, 4, 5), series=2, origin=(0, 0, 7))
    write_series("exam/b", ramp(2, 6, 5), series=1, orientation=(0, 1, 0, 0, 0, -1), modality="MR")
    (tmp_path / "exam" / "Thumbs.db").write_bytes(b"xx")
    first, second = find_series(tmp_path / "exam")[0]
    assert (first.number, first.planes[0].shape) == (1, (6, 5, 1))
    assert (first.orientation, second.orientation) == ("sagittal", "axial")
    heights = [pydicom.dcmread(path).ImagePositionPatient[2] for path in second.files]
    assert heights == [7, 9.5, 12]
    (note,) = find_series(tmp_path / "exam")[1]
    assert note == "exam: files that are not DICOM were left out: Thumbs.db"


@pytest.mark.parametrize(
    ("orientation", "word"),
    [
        ((1, 0, 0, 0, 1, 0), "axial"),
        ((0, 1, 0, 0, 0, -1), "sagittal"),
        ((1, 0, 0, 0, 0, -1), "coronal"),
        ((1, 0, 0, 0, 0.5**0.5, -(0.5**0.5)), "oblique"),
    ],
)
def test_orientation_is_named(
    write_series: Write, orientation: tuple[float, ...], word: str
) -> None:
    folder = write_series("s", ramp(2, 4, 5), orientation=orientation)
    assert find_series(folder)[0][0].orientation == word


def test_objects_without_a_picture_are_no_series(
    write_series: Write, write_picture: Write, tmp_path: Path
) -> None:
    write_series("exam", ramp(2, 4, 5))
    path = write_picture("exam/state", ramp(4, 5))
    dataset = pydicom.dcmread(path)
    dataset.SOPClassUID = "1.2.840.10008.5.1.4.1.1.11.1"
    dataset.save_as(path)
    report = pydicom.dcmread(write_picture("exam/report", ramp(4, 5)))
    for keyword in ("Rows", "Columns", "PixelData"):
        delattr(report, keyword)
    report.SOPClassUID = "1.2.840.10008.5.1.4.1.1.88.11"
    report.save_as(tmp_path / "exam" / "report")
    series, notes = find_series(tmp_path / "exam")
    assert len(series) == 1
    assert notes == ["exam: DICOM files that hold no image were left out: report, state"]


def test_series_with_two_orientations_is_split_and_chosen_by_word(write_series: Write) -> None:
    write_series("exam", ramp(3, 4, 5), prefix="a")
    folder = write_series("exam", ramp(2, 6, 7), prefix="b", orientation=(1, 0, 0, 0, 0, -1))
    with pytest.raises(DataError, match=r"number 1: 3 images 4x5 axial.*2 images 6x7 coronal"):
        decode(folder)
    with pytest.raises(DataError, match="holds 2 series"):
        decode(folder, "1")
    assert decode(folder, "1 axial").array.shape == (1, 5, 4, 3)
    assert decode(folder, "1 coronal").array.shape == (1, 7, 2, 6)


def test_series_is_chosen_by_number_or_uid(write_series: Write, tmp_path: Path) -> None:
    write_series("exam/a", ramp(3, 4, 5), series=4)
    write_series("exam/b", ramp(2, 4, 5), series=11)
    uid = find_series(tmp_path / "exam")[0][1].uid
    assert decode(tmp_path / "exam", "4").array.shape[-1] == 3
    assert decode(tmp_path / "exam", "0011").array.shape[-1] == 2
    assert decode(tmp_path / "exam", uid).array.shape[-1] == 2
    with pytest.raises(DataError, match=r"has no series 1: .*number 4: 3 images"):
        decode(tmp_path / "exam", "1")


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="holds no DICOM image"):
        decode(tmp_path)


def test_neither_notes_nor_errors_name_the_patient(write_series: Write) -> None:
    folder = write_series("s", ramp(4, 4, 5), skip=[2], PhotometricInterpretation="MONOCHROME1")
    with pytest.raises(DataError, match="lacks slices") as caught:
        decode(folder)
    notes = decode(write_series("t", ramp(4, 4, 5))).notes
    for text in (str(caught.value), *notes):
        assert "Jane" not in text
        assert "SECRET" not in text


# --- geometry


def test_oblique_anisotropic_series_lies_where_simpleitk_puts_it(
    write_series: Write, oblique: tuple[float, ...]
) -> None:
    folder = write_series(
        "s",
        ramp(7, 5, 6),
        orientation=oblique,
        origin=(-31.5, 12.25, 80.125),
        spacing=(0.9, 0.45),
        gap=3.3,
    )
    decoded = decode(folder)
    check_same(decoded, by_simpleitk(folder))
    assert sorted(decoded.spacing or ()) == pytest.approx([0.45, 0.9, 3.3])
    assert decoded.affine is not None
    assert nib.aff2axcodes(decoded.affine) == ("R", "A", "S")


@pytest.mark.parametrize(
    "orientation",
    [(1, 0, 0, 0, 1, 0), (0, 1, 0, 0, 0, -1), (1, 0, 0, 0, 0, -1), (-1, 0, 0, 0, -1, 0)],
)
def test_planes_along_the_axes_lie_where_simpleitk_puts_them(
    write_series: Write, orientation: tuple[float, ...]
) -> None:
    folder = write_series("s", ramp(4, 5, 6), orientation=orientation, spacing=(0.5, 2))
    check_same(decode(folder), by_simpleitk(folder))


def test_slices_are_sorted_by_place_whatever_their_numbers(write_series: Write) -> None:
    each = [{"InstanceNumber": number} for number in (7, 7, 1, 3, 2)]
    volume = np.full((5, 3, 4), 10, "int16") * np.arange(5, dtype="int16")[:, None, None]
    decoded = decode(write_series("s", volume, each=each))
    assert decoded.array[0, 0, 0].tolist() == [0, 10, 20, 30, 40]


def test_gantry_tilt_keeps_the_sheared_affine(write_series: Write) -> None:
    angle = np.radians(20)
    folder = write_series(
        "s", ramp(4, 5, 6), step=(0, 3 * np.sin(angle), 3 * np.cos(angle)), spacing=(0.7, 0.7)
    )
    decoded = decode(folder)
    assert decoded.affine is not None
    # LPS to RAS by hand: x and y change sign, and are counted from the other end
    assert decoded.affine[:3, 2] == pytest.approx([0, -3 * np.sin(angle), 3 * np.cos(angle)])
    assert decoded.affine[:3, 3] == pytest.approx([-5 * 0.7, -4 * 0.7, 0])
    assert decoded.spacing == pytest.approx((0.7, 0.7, 3))
    assert "s: its slices are sheared (gantry tilt of 20.0 degrees)" in decoded.notes


def test_jitter_of_rounding_is_no_tilt_and_no_gap(write_series: Write) -> None:
    folder = write_series("s", ramp(9, 4, 5), gap=0.625)
    for path in folder.iterdir():
        dataset = pydicom.dcmread(path)
        dataset.ImagePositionPatient[2] = round(float(dataset.ImagePositionPatient[2]), 2)
        dataset.save_as(path)
    decoded = decode(folder)
    assert decoded.spacing == pytest.approx((1, 1, 0.625))
    assert decoded.notes == ("s: was brought from LPS to RAS axes",)


def test_missing_slice_is_refused_with_its_place(write_series: Write) -> None:
    folder = write_series("s", ramp(8, 4, 5), skip=[3], origin=(0, 0, -10), gap=2)
    uid = find_series(folder)[0][0].uid
    with pytest.raises(
        DataError,
        match=r"from -6 to -2 mm .* gap of 4 mm where 2 mm is usual \(7 slices found, 8 expected\)",
    ) as caught:
        decode(folder)
    assert uid in str(caught.value)


def test_missing_slice_is_found_among_three(write_series: Write) -> None:
    with pytest.raises(DataError, match="3 slices found, 4 expected"):
        decode(write_series("s", ramp(4, 4, 5), skip=[2]))


def test_uneven_slices_are_refused(write_series: Write, rewrite: Callable[..., None]) -> None:
    folder = write_series("s", ramp(4, 4, 5))
    lowest = find_series(folder)[0][0].files[0]
    rewrite(lowest, ImagePositionPatient=[0, 0, -1])
    with pytest.raises(DataError, match=r"uneven slices, 2\.5 to 3\.5 mm apart"):
        decode(folder)


def test_slices_shifted_within_their_planes_are_refused(
    write_series: Write, rewrite: Callable[..., None]
) -> None:
    folder = write_series("s", ramp(4, 4, 5))
    second = find_series(folder)[0][0].files[1]
    rewrite(second, ImagePositionPatient=[4, 0, 2.5])
    with pytest.raises(DataError, match="shifted by up to 4 mm"):
        decode(folder)


def test_copies_at_one_place_are_refused(write_series: Write) -> None:
    folder = write_series("s", ramp(4, 4, 5))
    path = find_series(folder)[0][0].files[2]
    shutil.copy(path, folder / "copy")
    with pytest.raises(DataError, match=rf"2 slices at 5 mm .*\({path.name}, copy\)"):
        decode(folder)


def test_slices_of_different_sizes_are_refused(write_series: Write) -> None:
    write_series("s", ramp(2, 4, 5), prefix="a")
    folder = write_series("s", ramp(2, 4, 6), prefix="b", origin=(0, 0, 5))
    with pytest.raises(DataError, match=r"mixes slices that differ \(4x5 pixels .* 4x6 pixels"):
        decode(folder)


@pytest.mark.parametrize(
    "mark", ["TemporalPositionIdentifier", "AcquisitionNumber", "EchoTime", "TriggerTime"]
)
def test_volumes_at_one_place_become_channels(write_series: Write, mark: str) -> None:
    late, early = ramp(3, 4, 5) + 100, ramp(3, 4, 5)
    write_series("s", late, prefix="a", each=[{mark: 30}] * 3)
    folder = write_series("s", early, prefix="b", each=[{mark: 4}] * 3)
    decoded = decode(folder)
    assert decoded.array.shape == (2, 5, 4, 3)
    assert (decoded.array[1] - decoded.array[0] == 100).all()
    assert decoded.array[0, 4, 3, 0] == 0  # the first pixel, counted from R and A
    assert decoded.notes[0] == f"s: holds 2 volumes, told apart by {mark} (4, 30), as channels"


def test_phases_of_a_heart_whose_times_differ_by_slice_become_channels(
    write_series: Write,
) -> None:
    late = write_series(
        "s", ramp(3, 4, 5) + 100, prefix="a", each=[{"TriggerTime": t} for t in (41, 43, 45)]
    )
    write_series("s", ramp(3, 4, 5), prefix="b", each=[{"TriggerTime": t} for t in (1, 3, 44)])
    decoded = decode(late)
    assert (decoded.array[1] - decoded.array[0] == 100).all()
    assert "told apart by the order of their TriggerTime (1, 2)" in decoded.notes[0]


def test_volume_that_lacks_a_slice_another_has_is_refused(write_series: Write) -> None:
    write_series("s", ramp(4, 4, 5), prefix="a", each=[{"EchoTime": 10}] * 4)
    folder = write_series("s", ramp(4, 4, 5), prefix="b", each=[{"EchoTime": 80}] * 4, skip=[1])
    with pytest.raises(DataError, match=r"volume with EchoTime 80 lacks 1 of 4 slices.* 2\.5 mm"):
        decode(folder)


def test_single_slice_is_read_as_displayed_with_its_place(write_series: Write) -> None:
    folder = write_series("s", ramp(1, 4, 5), origin=(-20, 30, 5), spacing=(0.5, 2))
    decoded = decode(folder)
    assert decoded.array.tolist() == [ramp(4, 5).tolist()]
    assert decoded.spacing == (0.5, 2)
    assert decoded.affine is not None
    (path,) = folder.iterdir()
    there = by_simpleitk(path).TransformIndexToPhysicalPoint((4, 3, 0))
    assert decoded.affine @ [3, 4, 0, 1] == pytest.approx([-there[0], -there[1], there[2], 1])


def test_pictures_without_place_make_no_volume(write_picture: Write, tmp_path: Path) -> None:
    write_picture("s/a", ramp(4, 5))
    write_picture("s/b", ramp(4, 5))
    with pytest.raises(DataError, match="holds 2 pictures without a position in space"):
        decode(tmp_path / "s")


def test_film_is_refused(write_picture: Write) -> None:
    path = write_picture("film", ramp(3, 4, 5, dtype="uint8"), modality="US")
    with pytest.raises(DataError, match="holds 3 pictures without a position"):
        decode(path)


@pytest.mark.parametrize(("modality", "placed"), [("DX", False), ("US", False), ("MR", True)])
def test_projection_has_no_place_even_where_it_claims_one(
    write_picture: Write, modality: str, placed: bool
) -> None:
    path = write_picture(
        "p",
        ramp(3, 4),
        modality=modality,
        ImagePositionPatient=[0, 0, 0],
        ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
        PixelSpacing=[2, 3],
    )
    decoded = decode(path)
    assert (decoded.affine is not None) == placed
    assert decoded.spacing == (2, 3)


# --- enhanced multi-frame


def test_enhanced_frames_lie_where_simpleitk_puts_them(
    write_enhanced: Write, oblique: tuple[float, ...]
) -> None:
    normal = np.cross(oblique[:3], oblique[3:])
    places = [np.array([5.0, -7, 11]) + 2.2 * index * normal for index in range(4)]
    path = write_enhanced(
        "e.dcm", ramp(4, 5, 6), positions=places, orientation=oblique, spacing=(0.8, 0.6)
    )
    check_same(decode(path), by_simpleitk(path))


@pytest.mark.parametrize("shared", [True, False])
def test_enhanced_frames_are_sorted_and_rescaled_each_by_its_own(
    write_enhanced: Write, shared: bool
) -> None:
    order = [2, 0, 3, 1]
    path = write_enhanced(
        "e.dcm",
        np.ones((4, 2, 3), "uint16") * 10,
        positions=[(0, 0, 1.5 * place) for place in order],
        rescale=[(place + 1, -place) for place in order],
        shared_orientation=shared,
    )
    assert decode(path).array[0, 0, 0].tolist() == [10, 19, 28, 37]


def test_enhanced_volumes_become_channels(write_enhanced: Write) -> None:
    frames = ramp(6, 2, 3)
    path = write_enhanced(
        "e.dcm",
        frames,
        positions=[(0, 0, float(index // 2)) for index in range(6)],
        temporal=[1, 2] * 3,
    )
    decoded = decode(path)
    assert decoded.array.shape == (2, 3, 2, 3)
    assert decoded.array[:, 2, 1].tolist() == frames[:, 0, 0].reshape(3, 2).T.tolist()
    assert "told apart by TemporalPositionIndex (1, 2)" in decoded.notes[0]


# --- values


def test_each_slice_has_its_own_slope(write_series: Write) -> None:
    each = [{"RescaleSlope": slope, "RescaleIntercept": -1} for slope in (0.5, 1.25, 3)]
    decoded = decode(write_series("s", np.full((3, 2, 2), 40, "uint16"), modality="PT", each=each))
    assert decoded.array[0, 0, 0].tolist() == [19, 49, 119]
    assert decoded.full_scale is None


def test_unsigned_values_do_not_wrap_below_zero(write_picture: Write) -> None:
    pixels = np.array([[0, 24], [1024, 4095]], "uint16")
    path = write_picture("p", pixels, modality="CT", RescaleSlope=1, RescaleIntercept=-1024)
    assert decode(path).array.tolist() == [[[-1024, -1000], [0, 3071]]]


@pytest.mark.parametrize(
    ("dtype", "bits", "lowest", "highest"),
    [("uint16", 12, 0, 4095), ("uint8", 8, 0, 255), ("int16", 12, -2048, 2047)],
)
def test_monochrome1_is_inverted_once_within_its_bits(
    write_picture: Write, dtype: str, bits: int, lowest: int, highest: int
) -> None:
    pixels = np.array([[lowest, lowest + 5], [highest - 1, highest]], dtype)
    path = write_picture(
        "p",
        pixels,
        BitsStored=bits,
        HighBit=bits - 1,
        PhotometricInterpretation="MONOCHROME1",
        PresentationLUTShape="INVERSE",
    )
    decoded = decode(path)
    assert decoded.array.tolist() == [[[highest, highest - 5], [lowest + 1, lowest]]]
    assert "MONOCHROME1" in decoded.notes[0]


def test_monochrome1_in_hounsfield_units_keeps_them(write_picture: Write) -> None:
    path = write_picture(
        "p",
        ramp(2, 2),
        modality="CT",
        PhotometricInterpretation="MONOCHROME1",
        RescaleSlope=1,
        RescaleIntercept=-1000,
    )
    assert decode(path).array.tolist() == [[[-1000, -999], [-998, -997]]]


def test_padding_becomes_the_least_measurement(write_series: Write) -> None:
    volume = ramp(2, 3, 4) + 50
    volume[0, 1, 1] = volume[1, 2, 2] = -2000
    decoded = decode(
        write_series("s", volume, PixelPaddingValue=-2000, RescaleSlope=2, RescaleIntercept=0)
    )
    assert decoded.measured is not None
    assert np.argwhere(~decoded.measured).tolist() == [[0, 1, 0, 1], [0, 2, 1, 0]]
    assert decoded.array[~decoded.measured].tolist() == [100, 100]
    assert decoded.array[decoded.measured].sum() == 2 * volume[volume > 0].sum()
    assert decoded.notes[0] == "s: 2 pixels of padding were set to the least measured value"


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 0)])
def test_padding_may_be_a_range(write_picture: Write, first: int, last: int) -> None:
    path = write_picture(
        "p",
        ramp(2, 4, dtype="uint16"),
        PhotometricInterpretation="MONOCHROME1",
        PixelPaddingValue=first,
        PixelPaddingRangeLimit=last,
    )
    decoded = decode(path)
    assert decoded.measured is not None
    assert decoded.measured.tolist() == [[[False] * 4, [True] * 4]]
    assert decoded.array.tolist() == [[[65528] * 4, [65531, 65530, 65529, 65528]]]


def test_padding_stated_in_the_other_sign_is_understood(
    write_picture: Write, tmp_path: Path
) -> None:
    pixels = np.array([[-2000, 5, 9, 7]], "int16")
    dataset = pydicom.dcmread(write_picture("p", pixels))
    dataset.add_new("PixelPaddingValue", "US", 65536 - 2000)
    dataset.save_as(tmp_path / "q")
    decoded = decode(tmp_path / "q")
    assert decoded.array.tolist() == [[[5, 5, 9, 7]]]


def test_picture_of_nothing_but_padding_is_refused(write_picture: Write) -> None:
    with pytest.raises(DataError, match="nothing but padding"):
        decode(write_picture("p", np.zeros((3, 3), "uint16"), PixelPaddingValue=0))


def test_picture_has_rows_and_columns_and_its_own_spacing(write_picture: Write) -> None:
    path = write_picture(
        "p", ramp(3, 4, dtype="uint16"), ImagerPixelSpacing=[0.2, 0.1], BitsStored=10, HighBit=9
    )
    decoded = decode(path)
    assert decoded.array.shape == (1, 3, 4)
    assert (decoded.spacing, decoded.affine, decoded.full_scale) == ((0.2, 0.1), None, 1023)


def test_colours_become_channels(write_picture: Write) -> None:
    pixels = ramp(3, 4, 3, dtype="uint8")
    decoded = decode(write_picture("p", pixels, modality="OP"))
    assert decoded.array.tolist() == np.moveaxis(pixels, -1, 0).tolist()
    assert decoded.full_scale == 255


def test_ybr_becomes_rgb(write_picture: Write) -> None:
    pixels = np.array([[[76, 85, 255], [150, 44, 21]]], "uint8")  # red and green, JFIF's equations
    path = write_picture("p", pixels, modality="US", PhotometricInterpretation="YBR_FULL")
    red, green = decode(path).array[:, 0].T.tolist()
    assert red == pytest.approx([255, 0, 0], abs=2)
    assert green == pytest.approx([0, 255, 0], abs=2)


def test_palette_becomes_rgb(write_picture: Write) -> None:
    tables = np.array([[0, 255, 17, 1], [0, 128, 34, 2], [9, 0, 51, 3]], "uint8")
    path = write_picture(
        "p",
        np.array([[0, 1, 2, 1]], "uint8"),
        modality="US",
        PhotometricInterpretation="PALETTE COLOR",
        **{
            f"{colour}PaletteColorLookupTable{part}": value
            for colour, table in zip(("Red", "Green", "Blue"), tables, strict=True)
            for part, value in (("Descriptor", [4, 0, 8]), ("Data", table.tobytes()))
        },
    )
    decoded = decode(path)
    assert decoded.array[:, 0].tolist() == tables[:, [0, 1, 2, 1]].tolist()
    assert decoded.full_scale == 255


def test_missing_decoder_is_named_with_its_package(write_picture: Write, tmp_path: Path) -> None:
    dataset = pydicom.dcmread(write_picture("p", ramp(4, 5)))
    dataset.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xd9"])
    dataset["PixelData"].VR = "OB"
    dataset.file_meta.TransferSyntaxUID = JPEGLosslessSV1
    dataset.save_as(tmp_path / "q.dcm")
    with pytest.raises(DataError, match=r"q\.dcm.*JPEG Lossless.*pip install .*pylibjpeg-libjpeg"):
        decode(tmp_path / "q.dcm")


def test_file_that_is_cut_short_is_damaged(write_picture: Write) -> None:
    path = write_picture("p", ramp(40, 50))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DataError, match="its pixels cannot be read"):
        decode(path)


@pytest.mark.parametrize("length", [140, 400, 700])
def test_file_cut_short_within_its_header_is_refused(write_series: Write, length: int) -> None:
    folder = write_series("s", ramp(3, 4, 5))
    last = folder / "002"
    last.write_bytes(last.read_bytes()[:length])
    with pytest.raises(DataError, match=r"002: its DICOM header (cannot be read|states no size)"):
        decode(folder)


def test_geometry_agrees_with_nibabel_without_pixels(
    write_series: Write, rewrite: Callable[..., None]
) -> None:
    folder = write_series("s", ramp(3, 4, 5), origin=(1, 2, 3), spacing=(0.5, 0.25))
    rewrite(*folder.iterdir(), PixelData=None)
    grid = read_grid(folder)
    assert [plane.position for plane in grid.volumes[0]] == [(1, 2, 3), (1, 2, 5.5), (1, 2, 8)]
    assert grid.affine.tolist() == [
        [-0.25, 0, 0, -1],
        [0, -0.5, 0, -2],
        [0, 0, 2.5, 3],
        [0, 0, 0, 1],
    ]


def test_implicit_file_is_read(write_picture: Write, tmp_path: Path) -> None:
    dataset = pydicom.dcmread(write_picture("p", ramp(3, 4)))
    dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    dataset.save_as(tmp_path / "implicit", implicit_vr=True)
    assert decode(tmp_path / "implicit").array.tolist() == [ramp(3, 4).tolist()]
