"""Masks on the grid of their images, in every format but DICOM."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from collegium.data.formats import SUFFIXES, arrays, itk, nifti, pictures, write_mask
from collegium.data.reading import read_image, read_label
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
