"""NRRD and MetaImage against SimpleITK's own points, and against nibabel for the same volume."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from collegium.data.decoded_image import Array
from collegium.data.formats import write_mask
from collegium.data.formats.itk import decode
from collegium.data.reading import read_image, read_label
from collegium.errors import DataError, StorageError

SUFFIXES = (".nrrd", ".nhdr", ".mha", ".mhd")
SIZE = (6, 5, 4)  # x, y, z, as ITK counts
TO_RAS = np.array([-1.0, -1.0, 1.0])
library: Any = pytest.importorskip("SimpleITK")
nib: Any = nibabel


def direction(axes: tuple[int, ...], signs: tuple[int, ...]) -> Array:
    """Oblique directions whose columns go roughly along the given axes of LPS."""
    cos, sin = np.cos(0.2), np.sin(0.2)
    turn = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    turn = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]]) @ turn
    columns = np.zeros((3, 3))
    for column, (axis, sign) in enumerate(zip(axes, signs, strict=True)):
        columns[axis, column] = sign
    return np.asarray(turn @ columns)


def volume(values: Array, turned: Array | None = None) -> Any:
    """An image (z, y, x) with uneven voxels, off the origin."""
    image = library.GetImageFromArray(values)
    image.SetSpacing((0.7, 1.5, 3.0))
    image.SetOrigin((-12.5, 40.25, 7.0))
    image.SetDirection((np.eye(3) if turned is None else turned).ravel().tolist())
    return image


def save(image: Any, path: Path) -> Path:
    library.WriteImage(image, str(path))
    return path


DIRECTIONS = {
    "LPS": direction((0, 1, 2), (1, 1, 1)),
    "RAS": direction((0, 1, 2), (-1, -1, 1)),
    "PSL": direction((1, 2, 0), (1, 1, 1)),
    "IRA": direction((2, 0, 1), (-1, -1, -1)),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("axes", DIRECTIONS)
def test_voxels_lie_where_simpleitk_says(tmp_path: Path, suffix: str, axes: str) -> None:
    values = np.arange(120, dtype=np.int16).reshape(SIZE[::-1])
    image = volume(values, DIRECTIONS[axes])
    decoded = decode(save(image, tmp_path / f"x{suffix}"))
    assert decoded.orientation == axes
    assert decoded.affine is not None
    for index in np.ndindex(SIZE):
        value = image.GetPixel(*index)
        (found,) = np.argwhere(decoded.array[0] == value)
        mine = decoded.affine @ [*found, 1]
        theirs = np.array(image.TransformIndexToPhysicalPoint(index)) * TO_RAS
        np.testing.assert_allclose(mine[:3], theirs, atol=1e-4)


@pytest.mark.parametrize("axes", DIRECTIONS)
def test_a_volume_is_read_as_nibabel_reads_the_same_one_as_nifti(tmp_path: Path, axes: str) -> None:
    values = np.random.default_rng(0).normal(size=SIZE[::-1]).astype(np.float32)
    image = volume(values, DIRECTIONS[axes])
    mine = decode(save(image, tmp_path / "x.nrrd"))
    theirs = nib.as_closest_canonical(nib.load(save(image, tmp_path / "x.nii.gz")))
    np.testing.assert_array_equal(mine.array[0], theirs.get_fdata(dtype=np.float32))
    assert mine.affine is not None
    np.testing.assert_allclose(mine.affine, theirs.affine, atol=1e-4)
    assert mine.spacing == pytest.approx(theirs.header.get_zooms(), abs=1e-5)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("axes", DIRECTIONS)
def test_a_mask_lies_on_the_voxels_of_its_image(tmp_path: Path, suffix: str, axes: str) -> None:
    values = np.random.default_rng(1).integers(0, 5, SIZE[::-1]).astype(np.float32)
    path = save(volume(values, DIRECTIONS[axes]), tmp_path / f"x{suffix}")
    written = write_mask(read_image(path).array[0].astype(int), path, tmp_path, "mask")
    assert written.name == ("mask.nrrd" if suffix in (".nrrd", ".nhdr") else "mask.mha")
    mask, source = library.ReadImage(str(written)), library.ReadImage(str(path))
    stored = library.GetArrayFromImage(mask)
    assert stored.dtype == np.uint8
    np.testing.assert_array_equal(stored, values)
    for key in ("GetSpacing", "GetOrigin", "GetDirection"):
        assert getattr(mask, key)() == pytest.approx(getattr(source, key)(), abs=1e-4)
    again = read_label(written, classes=5, like=read_image(path))
    np.testing.assert_array_equal(again.array, read_image(path).array[0])


def test_a_mask_lies_on_the_same_voxels_for_nibabel(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 3, SIZE[::-1]).astype(np.int16)
    image = volume(values, DIRECTIONS["IRA"])
    path = save(image, tmp_path / "x.mha")
    written = write_mask(read_image(path).array[0].astype(int), path, tmp_path, "mask")
    nifti = save(library.ReadImage(str(written)), tmp_path / "mask.nii.gz")
    mine, theirs = nib.load(nifti), nib.load(save(image, tmp_path / "x.nii.gz"))
    np.testing.assert_array_equal(np.asarray(mine.dataobj), np.asarray(theirs.dataobj))
    np.testing.assert_allclose(mine.affine, theirs.affine, atol=1e-4)


def test_a_label_above_255_is_written_in_16_bits(tmp_path: Path) -> None:
    path = save(volume(np.zeros(SIZE[::-1], np.int16)), tmp_path / "x.nrrd")
    written = write_mask(np.full(SIZE, 300), path, tmp_path, "mask")
    stored = library.GetArrayFromImage(library.ReadImage(str(written)))
    assert stored.dtype == np.uint16
    assert (stored == 300).all()


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_the_components_of_a_voxel_are_channels(tmp_path: Path, suffix: str) -> None:
    values = np.arange(360, dtype=np.float32).reshape(*SIZE[::-1], 3)
    image = library.GetImageFromArray(values, isVector=True)
    decoded = decode(save(image, tmp_path / f"x{suffix}"))
    ras = values.transpose(3, 2, 1, 0)[:, ::-1, ::-1]  # without directions the axes are LPS
    np.testing.assert_array_equal(decoded.array, ras)
    labels = (ras[0] > 100).astype(int)
    written = write_mask(labels, tmp_path / f"x{suffix}", tmp_path, "mask")
    assert library.ReadImage(str(written)).GetNumberOfComponentsPerPixel() == 1
    np.testing.assert_array_equal(read_label(written, classes=2).array, labels)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha", ".mhd"])
def test_a_two_dimensional_image_has_rows_and_columns(tmp_path: Path, suffix: str) -> None:
    values = np.arange(12, dtype=np.uint8).reshape(3, 4)
    image = library.GetImageFromArray(values)
    image.SetSpacing((0.5, 2.0))  # of columns, then of rows
    path = save(image, tmp_path / f"x{suffix}")
    decoded = decode(path)
    np.testing.assert_array_equal(decoded.array, values[None])
    assert decoded.spacing == (2.0, 0.5)
    written = write_mask(values % 3, path, tmp_path, "mask")
    mask = library.ReadImage(str(written))
    np.testing.assert_array_equal(library.GetArrayFromImage(mask), values % 3)
    assert mask.GetSpacing() == (0.5, 2.0)
    np.testing.assert_array_equal(read_label(written, classes=3).array, values % 3)


def test_one_slice_is_read_with_two_axes_and_written_with_three(tmp_path: Path) -> None:
    values = np.arange(30, dtype=np.int16).reshape(1, 5, 6)
    path = save(volume(values), tmp_path / "x.nrrd")
    image = read_image(path)
    assert image.array.shape == (1, 6, 5)
    written = write_mask(image.array[0].astype(int) % 4, path, tmp_path, "mask")
    stored = library.GetArrayFromImage(library.ReadImage(str(written)))
    np.testing.assert_array_equal(stored, values % 4)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_a_fourth_axis_of_length_one_is_dropped(tmp_path: Path, suffix: str) -> None:
    values = np.arange(120, dtype=np.int16).reshape(SIZE[::-1])
    path = save(library.JoinSeries([volume(values)]), tmp_path / f"x{suffix}")
    alone = decode(save(volume(values), tmp_path / "alone.nrrd"))
    decoded = decode(path)
    np.testing.assert_array_equal(decoded.array, alone.array)
    assert decoded.affine is not None
    assert alone.affine is not None
    np.testing.assert_allclose(decoded.affine, alone.affine, atol=1e-6)
    written = write_mask(decoded.array[0] % 5, path, tmp_path, "mask")
    stored = library.GetArrayFromImage(library.ReadImage(str(written)))
    np.testing.assert_array_equal(stored, values % 5)


def test_a_series_of_volumes_in_one_file_is_refused(tmp_path: Path) -> None:
    one = volume(np.zeros(SIZE[::-1], np.int16))
    path = save(library.JoinSeries([one, one]), tmp_path / "x.nrrd")
    with pytest.raises(DataError, match=r"x\.nrrd: an image of 4 axes is not read: save every"):
        read_image(path)


@pytest.mark.parametrize("suffix", [".nrrd", ".mha", ".mhd"])
@pytest.mark.parametrize("share", [0, 0.02, 0.4, 0.95])
def test_a_file_cut_short_is_one_sentence_with_its_name(
    tmp_path: Path, suffix: str, share: float
) -> None:
    values = np.random.default_rng(0).normal(size=(20, 20, 20))
    path = save(volume(values), tmp_path / f"x{suffix}")
    cut = tmp_path / "x.raw" if suffix == ".mhd" else path
    content = cut.read_bytes()
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError) as caught:
        read_image(path)
    assert str(caught.value).startswith(f"{path}: cannot be read (")
    assert "copy it again" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "itk" not in str(caught.value).removeprefix(str(path)).lower()


def test_text_with_a_volume_s_name_and_voxels_that_are_not_there_are_refused(
    tmp_path: Path,
) -> None:
    for suffix in SUFFIXES:
        (tmp_path / f"t{suffix}").write_text("<html>404</html>" * 100)
        with pytest.raises(DataError, match=rf"t{suffix}: cannot be read"):
            read_image(tmp_path / f"t{suffix}")
    path = save(volume(np.zeros(SIZE[::-1], np.int16)), tmp_path / "x.mhd")
    (tmp_path / "x.raw").unlink()
    with pytest.raises(DataError, match=r"x\.mhd: cannot be read"):
        read_image(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.mha: is not there"):
        read_image(tmp_path / "x.mha")


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_capital_extensions_are_read(tmp_path: Path, suffix: str) -> None:
    values = np.arange(120, dtype=np.int16).reshape(SIZE[::-1])
    path = save(volume(values), tmp_path / f"x{suffix}")
    capital = path.rename(tmp_path / f"X{suffix.upper()}")
    assert read_image(capital).array.sum() == values.sum()
    written = write_mask(np.ones(SIZE), capital, tmp_path, "mask")
    assert library.ReadImage(str(written)).GetSize() == SIZE


def test_a_mask_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    path = save(volume(np.zeros(SIZE[::-1], np.int16)), tmp_path / "x.nrrd")
    with pytest.raises(StorageError, match="the mask m cannot be written") as caught:
        write_mask(np.zeros(SIZE), path, tmp_path / "nowhere", "m")
    assert "\n" not in str(caught.value)


NRRD_UNITS = 'space units: "{0}" "{0}" "{0}"\nkinds:'
META_UNITS = "DistanceUnits = {0}\nElementSpacing"


def with_unit(path: Path, unit: str) -> Path:
    """State the unit of a file's lengths in its header."""
    text = (META_UNITS if path.suffix == ".mha" else NRRD_UNITS).format(unit).encode()
    content = path.read_bytes()
    path.write_bytes(content.replace(text.rpartition(b"\n")[2], text, 1))
    return path


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
@pytest.mark.parametrize(
    ("unit", "mm"),
    [("um", 0.001), ("\u00b5m", 0.001), ("micron", 0.001), ("cm", 10), ("m", 1000), ("mm", 1)],
)
def test_a_stated_unit_is_converted_to_millimetres(
    tmp_path: Path, suffix: str, unit: str, mm: float
) -> None:
    image = volume(np.arange(120, dtype=np.int16).reshape(SIZE[::-1]))
    image.SetSpacing((2.0, 3.0, 4.0))
    image.SetOrigin((10.0, 20.0, 30.0))
    path = with_unit(save(image, tmp_path / f"x{suffix}"), unit)
    read = read_image(path)
    assert read.spacing == pytest.approx((2 * mm, 3 * mm, 4 * mm))
    assert read.affine is not None
    first = read.affine @ [SIZE[0] - 1, SIZE[1] - 1, 0, 1]  # LPS is read from the other end
    assert first[:3] == pytest.approx((-10 * mm, -20 * mm, 30 * mm))
    assert any("were converted to mm" in note for note in read.notes) == (mm != 1)
    mask = library.ReadImage(str(write_mask(np.ones(SIZE, np.uint8), path, tmp_path, "mask")))
    assert mask.GetSpacing() == pytest.approx((2 * mm, 3 * mm, 4 * mm))
    assert mask.GetOrigin() == pytest.approx((10 * mm, 20 * mm, 30 * mm))


@pytest.mark.parametrize("suffix", [".nrrd", ".mha"])
def test_an_unknown_unit_is_refused(tmp_path: Path, suffix: str) -> None:
    path = with_unit(save(volume(np.zeros(SIZE[::-1], np.int16)), tmp_path / f"x{suffix}"), "ell")
    with pytest.raises(DataError, match=r"states its lengths in ell.*: export it in millimetres"):
        read_image(path)


def test_axes_of_several_units_are_refused(tmp_path: Path) -> None:
    path = save(volume(np.zeros(SIZE[::-1], np.int16)), tmp_path / "x.nrrd")
    units = b'space units: "mm" "mm" "cm"\nkinds:'
    path.write_bytes(path.read_bytes().replace(b"kinds:", units, 1))
    with pytest.raises(DataError, match=r"states its lengths in mm, mm, cm: export it"):
        read_image(path)
