"""Masks on the grid of their images, in every format but DICOM."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from collegium.data.formats import SUFFIXES, arrays, itk, nifti, pictures, write_mask
from collegium.data.preprocessing import preprocess
from collegium.data.reading import read_image, read_label
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case
from collegium.errors import DataError, StorageError

SHAPE = (6, 7, 5)


def oblique(axes: str) -> np.ndarray[Any, Any]:
    """An affine that is turned by a few degrees, stored with these axes, with uneven voxels."""
    angle = 0.2
    turn = np.array(
        [[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]]
    )
    ras = np.eye(4)
    ras[:3, :3] = turn @ np.diag([0.8, 0.9, 3.0])
    ras[:3, 3] = (11.0, -7.0, 3.0)
    own = nib.orientations.axcodes2ornt(tuple(axes))
    back = nib.orientations.inv_ornt_aff(own, SHAPE)
    return np.asarray(ras @ np.linalg.inv(back))


@pytest.mark.parametrize("axes", ["RAS", "LPS", "LAI", "PSR", "IAL"])
def test_a_mask_lies_on_the_same_voxels_as_its_image(tmp_path: Path, axes: str) -> None:
    affine = oblique(axes)
    rng = np.random.default_rng(0)
    stored = rng.normal(size=SHAPE).astype(np.float32)
    image = nib.Nifti1Image(stored, affine)
    image.set_qform(affine, 1)
    image.set_sform(affine, 0)
    nib.save(image, tmp_path / "scan.nii.gz")
    seen = read_image(tmp_path / "scan.nii.gz").array[0]  # in RAS+
    path = write_mask(
        (seen > 0.5).astype(np.int64), tmp_path / "scan.nii.gz", tmp_path, "prediction"
    )
    assert path.name == "prediction.nii.gz"
    mask: Any = nib.load(path)
    kept: Any = nib.load(tmp_path / "scan.nii.gz")
    np.testing.assert_array_equal(np.asarray(mask.dataobj), stored > 0.5)
    np.testing.assert_allclose(mask.affine, kept.affine, atol=1e-4)
    assert mask.get_data_dtype() == np.uint8
    for key in ("qform_code", "sform_code"):
        assert int(mask.header[key]) == int(kept.header[key])


@pytest.mark.parametrize("shape", [SHAPE, (6, 7)])
def test_a_mask_of_an_image_without_a_place_lies_on_it_for_every_program(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    sitk: Any = pytest.importorskip("SimpleITK")
    stored = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    image = nib.Nifti1Image(stored, None)
    image.header.set_zooms((0.5, 1.5, 2.5)[: len(shape)])
    image.header.set_xyzt_units("mm")
    nib.save(image, tmp_path / "scan.nii")
    seen = read_image(tmp_path / "scan.nii")
    assert "sform_code and qform_code are 0" in seen.notes[0]
    path = write_mask((seen.array[0] > 0).astype(int), tmp_path / "scan.nii", tmp_path, "mask")
    mask: Any = nib.load(path)
    kept: Any = nib.load(tmp_path / "scan.nii")
    assert [int(mask.header[key]) for key in ("sform_code", "qform_code")] == [0, 0]
    np.testing.assert_array_equal(mask.affine, kept.affine)
    np.testing.assert_array_equal(np.asarray(mask.dataobj).reshape(shape), stored > 0)
    scan, drawn = (sitk.ReadImage(str(file)) for file in (tmp_path / "scan.nii", path))
    if len(shape) == 2:
        drawn = drawn[:, :, 0]
    inside = sitk.GetArrayFromImage(sitk.Mask(scan, drawn))  # it refuses another geometry
    np.testing.assert_array_equal(inside.T, np.where(stored > 0, stored, 0))


@pytest.mark.parametrize(("axis", "axes"), [(0, "RAS"), (1, "LPS"), (2, "PIR"), (0, "AIL")])
def test_a_slice_in_any_plane_is_seen_whole_and_its_mask_lies_on_it(
    tmp_path: Path, axis: int, axes: str
) -> None:
    shape = tuple(1 if own == axis else length for own, length in enumerate((8, 6, 4)))
    stored = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    nib.save(nib.Nifti1Image(stored, oblique(axes)), tmp_path / "scan.nii")
    case = Case("C", "c", "p", (tmp_path / "scan.nii",), None)
    half = tuple(length // 2 for length in read_image(tmp_path / "scan.nii").array.shape[1:])
    arrays = preprocess(case, ImageConfig(size=half), TaskConfig()).arrays
    assert arrays.shape == half
    seen = read_image(tmp_path / "scan.nii").array[0]
    path = write_mask((seen > 0.5).astype(int), tmp_path / "scan.nii", tmp_path, "mask")
    mask: Any = nib.load(path)
    np.testing.assert_array_equal(np.asarray(mask.dataobj), stored > 0.5)
    np.testing.assert_allclose(mask.affine, oblique(axes), atol=1e-6)
    again = read_label(path, classes=2, like=read_image(tmp_path / "scan.nii"))
    np.testing.assert_array_equal(again.array, seen > 0.5)
    small = np.zeros(half, int)
    small[0] = 1
    path = write_mask(small, tmp_path / "scan.nii", tmp_path, "small")
    whole: Any = nib.load(path)
    assert np.asarray(whole.dataobj).shape == shape
    assert np.asarray(whole.dataobj).sum() == stored.size // half[0]


def test_a_volume_that_was_resized_is_brought_back(tmp_path: Path) -> None:
    nib.save(nib.Nifti1Image(np.zeros((8, 4, 2), np.int16), np.eye(4)), tmp_path / "scan.nii")
    half = np.zeros((4, 2, 2), int)
    half[1] = 3
    path = write_mask(half, tmp_path / "scan.nii", tmp_path, "p")
    whole = np.asarray(nib.load(path).dataobj)  # type: ignore[attr-defined]
    expected = np.zeros((8, 4, 2))
    expected[2:4] = 3
    np.testing.assert_array_equal(whole, expected)


def test_a_single_slice_keeps_its_third_axis(tmp_path: Path) -> None:
    nib.save(nib.Nifti1Image(np.ones((3, 4, 1), np.int16), np.eye(4)), tmp_path / "scan.nii")
    labels = np.arange(12).reshape(3, 4) % 2
    path = write_mask(labels, tmp_path / "scan.nii", tmp_path, "p")
    found: Any = nib.load(path)
    assert found.shape == (3, 4, 1)
    np.testing.assert_array_equal(np.asarray(found.dataobj)[..., 0], labels)


def test_a_picture_gets_a_mask_of_its_own_size(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((6, 4), np.uint8)).save(tmp_path / "a.jpg")
    path = write_mask(np.array([[0, 1], [2, 0], [1, 1]]), tmp_path / "a.jpg", tmp_path, "a")
    assert path.name == "a.png"
    with Image.open(path) as mask:
        assert mask.mode == "L"
        np.testing.assert_array_equal(
            np.asarray(mask), np.kron([[0, 1], [2, 0], [1, 1]], np.ones((2, 2)))
        )


def test_a_picture_taken_sideways_gets_an_upright_mask(tmp_path: Path) -> None:
    picture = Image.fromarray(np.zeros((6, 4), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    picture.save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").array.shape == (1, 4, 6)
    with Image.open(write_mask(np.eye(4, 6), tmp_path / "a.jpg", tmp_path, "a")) as mask:
        np.testing.assert_array_equal(np.asarray(mask), np.eye(4, 6))


FORMATS = (*pictures.SUFFIXES, *nifti.SUFFIXES, *itk.SUFFIXES, *arrays.SUFFIXES)


def image_file(path: Path) -> Path:
    """Write an image of an uneven shape in the format of its name, stored as LPS if it can be."""
    values = np.random.default_rng(0).integers(0, 200, SHAPE).astype(np.uint8)
    if path.suffix in pictures.SUFFIXES:
        Image.fromarray(values[..., 0]).save(path)
    elif path.name.endswith(nifti.SUFFIXES):
        nib.save(nib.Nifti1Image(values, oblique("LPS")), path)
    elif path.suffix in itk.SUFFIXES:
        sitk: Any = pytest.importorskip("SimpleITK")
        sitk.WriteImage(sitk.GetImageFromArray(values), str(path))
    elif path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".npz":
        np.savez(path, image=values)
    else:
        h5py: Any = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            file["image"] = values
    return path


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_mask_is_read_back_as_it_was_drawn(tmp_path: Path, suffix: str) -> None:
    path = image_file(tmp_path / f"scan.x{suffix}")
    image = read_image(path)
    labels = np.random.default_rng(1).integers(0, 4, image.array.shape[1:])
    written = write_mask(labels, path, tmp_path, "scan.x_mask")
    assert written.name.startswith("scan.x_mask.")
    again = read_label(written, classes=4, like=image)
    np.testing.assert_array_equal(again.array, labels)
    assert (again.affine is None) == (image.affine is None)
    if image.affine is not None and again.affine is not None:
        np.testing.assert_allclose(again.affine, image.affine, atol=1e-4)
        assert again.spacing == pytest.approx(image.spacing)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_mask_of_another_size_takes_that_of_its_image(tmp_path: Path, suffix: str) -> None:
    path = image_file(tmp_path / f"scan{suffix}")
    image = read_image(path)
    written = write_mask(np.full([2] * (image.array.ndim - 1), 3), path, tmp_path, "mask")
    again = read_label(written, classes=4, like=image)
    assert again.array.shape == image.array.shape[1:]
    assert (again.array == 3).all()


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_mask_that_cannot_be_written_is_a_storage_error(tmp_path: Path, suffix: str) -> None:
    path = image_file(tmp_path / f"scan{suffix}")
    labels = np.zeros(read_image(path).array.shape[1:], int)
    with pytest.raises(StorageError, match="the mask m cannot be written") as caught:
        write_mask(labels, path, tmp_path / "nowhere", "m")
    assert "\n" not in str(caught.value)


def test_a_kind_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "x.doc").write_text("letter")
    with pytest.raises(DataError, match=r"x\.doc: this kind of file is not read: convert it to \."):
        read_image(tmp_path / "x.doc")
    assert set(FORMATS) < set(SUFFIXES)
