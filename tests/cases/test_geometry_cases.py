"""The field cases of geometry, and for each a sibling of the same kind."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from collegium.data.decoded_image import Array
from collegium.data.federation import list_cases, open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.preprocessing import RawCase, decode_case, preprocess
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case
from collegium.errors import DataError

nib: Any = nibabel
INSIDE = np.zeros((12, 10, 8), bool)
INSIDE[3:7, 2:6, 4:7] = True  # 48 voxels
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def save(path: Path, array: Array, affine: Array | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
    return path


def case_in(folder: Path, image: str = "image.nii.gz", mask: str = "mask.nii.gz") -> Case:
    return Case("A", "p01", "p01", (folder / image,), folder / mask)


def read(case: Case, **image: Any) -> RawCase:
    return decode_case(case, ImageConfig(**image), TaskConfig())


def foreground(raw: RawCase) -> tuple[int, list[float]]:
    """How many voxels the mask has, and the mean of each channel under it."""
    assert raw.arrays.label is not None
    inside = raw.arrays.label == 1
    return int(inside.sum()), [float(channel[inside].mean()) for channel in raw.arrays.image]


def volume_mm3(raw: RawCase) -> float:
    assert raw.spacing is not None
    return foreground(raw)[0] * float(np.prod(raw.spacing))


def marked(inside: Array = INSIDE) -> Array:
    """An image that is 500 inside and 50 where another order of the voxels would look."""
    return np.where(inside, 500, 50).astype(np.int16)


def federation(root: Path, folder: str) -> FederationConfig:
    return FederationConfig("f", {"A": SiteConfig(folder)}, root=str(root))


def test_geo01_mask_stored_lps(folder: Path, values: dict[str, Any]) -> None:
    raw = read(case_in(folder))
    assert foreground(raw) == (values["fg_voxels"], [values["fg_mean"]])
    assert volume_mm3(raw) == pytest.approx(values["volume_mm3"])
    assert raw.orientation == values["image_axcodes"]
    assert any(f"mask.nii.gz: was brought from {values['mask_axcodes']}" in n for n in raw.notes)
    assert raw.arrays.label is not None
    affine = nib.load(folder / "image.nii.gz").affine  # stored as RAS, so it counts as it is
    centre = np.argwhere(raw.arrays.label).mean(axis=0)
    assert (affine @ [*centre, 1])[:3] == pytest.approx(values["centroid_world_ras"], abs=1e-4)


@pytest.mark.parametrize("axes", ["LPS", "RPI", "ASR", "ILP"])
def test_geo01_siblings_a_mask_stored_in_other_axes(tmp_path: Path, axes: str) -> None:
    affine = np.array([[0.7, 0.1, 0, -9], [-0.1, 0.9, 0, 4], [0, 0, 2.5, 1], [0, 0, 0, 1]])
    save(tmp_path / "image.nii.gz", marked(), affine)
    mask = nib.Nifti1Image(INSIDE.astype(np.uint8), affine)
    turn = nib.orientations.ornt_transform(
        nib.io_orientation(affine), nib.orientations.axcodes2ornt(axes)
    )
    nib.save(mask.as_reoriented(turn), tmp_path / "mask.nii.gz")
    assert foreground(read(case_in(tmp_path))) == (48, [500.0])


def test_geo01_sibling_a_mask_saved_by_simpleitk_as_nrrd(tmp_path: Path) -> None:
    sitk: Any = pytest.importorskip("SimpleITK")
    save(tmp_path / "image.nii.gz", marked(), np.diag([0.7, 0.9, 2.5, 1.0]))
    image = sitk.ReadImage(str(tmp_path / "image.nii.gz"))
    sitk.WriteImage(image > 100, str(tmp_path / "mask.nrrd"))
    assert foreground(read(case_in(tmp_path, mask="mask.nrrd"))) == (48, [500.0])


def test_geo02_shape_mismatch(folder: Path, values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_federation(federation(folder, "site_a"), tmp_path, 0, None)
    text = str(caught.value)
    assert str(tuple(values["image_shape"])) in text
    assert str(tuple(values["mask_shape"])) in text
    for name in ("images", "masks"):
        assert str(folder / "site_a" / name / "p01.nii.gz") in text


def test_geo02_sibling_a_second_channel_of_another_shape(tmp_path: Path) -> None:
    save(tmp_path / "image.nii.gz", marked())
    save(tmp_path / "mask.nii.gz", INSIDE.astype(np.uint8))
    second = save(tmp_path / "second.nii.gz", marked()[..., :-1])
    case = Case("A", "p01", "p01", (tmp_path / "image.nii.gz", second), tmp_path / "mask.nii.gz")
    with pytest.raises(DataError, match=r"image shape \(12, 10, 7\) differs from image \(12, 10, "):
        read(case)


def test_geo04_origin_shift_5mm(folder: Path, values: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        read(case_in(folder))
    text = str(caught.value)
    assert f"up to {values['offset_mm']:.1f} mm away" in text
    assert "(0.0, 0.0, 0.0) and (5.0, 0.0, 0.0)" in text
    assert "mask.nii.gz against" in text


@pytest.mark.parametrize(
    ("change", "distance"),
    [
        (np.diag([1.0, 1.0, 1.1, 1.0]), 0.7),  # of the last of 8 slices
        (np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, -3], [0, 0, 0, 1.0]]), 3.0),
    ],
)
def test_geo04_siblings_another_slice_distance_and_another_level(
    tmp_path: Path, change: Array, distance: float
) -> None:
    save(tmp_path / "image.nii.gz", marked())
    save(tmp_path / "mask.nii.gz", INSIDE.astype(np.uint8), change)
    with pytest.raises(DataError, match=rf"mask lies up to {distance} mm away from the image"):
        read(case_in(tmp_path))


def test_geo05_affine_rounding(folder: Path, values: dict[str, Any]) -> None:
    image, mask = (nib.load(folder / f"{name}.nii.gz").affine for name in ("image", "mask"))
    apart = float(np.abs(image - mask).max())  # headers hold single precision
    assert apart == pytest.approx(values["max_abs_affine_difference"], rel=0.1)
    assert foreground(read(case_in(folder))) == (values["fg_voxels"], [values["fg_mean"]])


@pytest.mark.parametrize(("share", "fits"), [(0.009, True), (0.09, True), (0.11, False)])
def test_geo05_siblings_a_tenth_of_the_smallest_voxel_counts(
    tmp_path: Path, share: float, fits: bool
) -> None:
    affine = np.diag([2.0, 0.5, 4.0, 1.0])
    save(tmp_path / "image.nii.gz", marked(), affine)
    moved = affine.copy()
    moved[1, 3] = share * 0.5
    save(tmp_path / "mask.nii.gz", INSIDE.astype(np.uint8), moved)
    if fits:
        assert foreground(read(case_in(tmp_path))) == (48, [500.0])
    else:
        with pytest.raises(DataError, match=r"mask lies up to 0\.1 mm away"):
            read(case_in(tmp_path))


def test_geo06_trailing_singleton_4d(folder: Path, values: dict[str, Any]) -> None:
    raw = read(case_in(folder))
    assert raw.arrays.image.shape == (1, *values["shape"])
    assert raw.arrays.shape == tuple(values["shape"])
    assert foreground(raw) == (values["fg_voxels"], [values["fg_mean"]])
    assert volume_mm3(raw) == pytest.approx(values["volume_mm3"])


@pytest.mark.parametrize("extra", [(1,), (1, 1), (1, 1, 1)])
def test_geo06_siblings_more_axes_of_length_one_in_other_directions(
    tmp_path: Path, extra: tuple[int, ...]
) -> None:
    save(tmp_path / "image.nii.gz", marked().reshape(*INSIDE.shape, *extra), LPS)
    save(tmp_path / "mask.nii.gz", INSIDE.astype(np.uint8), LPS)
    raw = read(case_in(tmp_path), inputs=1)
    assert raw.arrays.image.shape == (1, 12, 10, 8)
    assert foreground(raw) == (48, [500.0])


def test_geo06_sibling_a_series_of_one_volume_as_mha(tmp_path: Path) -> None:
    sitk: Any = pytest.importorskip("SimpleITK")
    for name, array in (("image", marked()), ("mask", INSIDE.astype(np.uint8))):
        volume = sitk.JoinSeries([sitk.GetImageFromArray(array)])
        sitk.WriteImage(volume, str(tmp_path / f"{name}.mha"))
    raw = read(case_in(tmp_path, "image.mha", "mask.mha"))
    assert raw.arrays.image.shape == (1, 8, 10, 12)  # SimpleITK counts z, y, x
    assert foreground(raw) == (48, [500.0])


def test_geo07_true_4d_image(folder: Path, values: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        read(case_in(folder), inputs=1)
    text = str(caught.value)
    channels_first = (values["shape"][-1], *values["shape"][:-1])
    assert f"3 channels (shape {channels_first}, channels first)" in text
    assert "image.inputs says 1" in text
    assert "pick one volume of image.nii.gz, or correct image.inputs" in text
    raw = read(case_in(folder), inputs=3)
    assert foreground(raw) == (values["fg_voxels"], values["channel_means"])


def test_geo07_siblings_two_echoes_and_a_dynamic_series(tmp_path: Path) -> None:
    echoes = np.stack([marked(), marked() + 7], axis=-1)
    save(tmp_path / "image.nii.gz", echoes, LPS)
    save(tmp_path / "mask.nii.gz", INSIDE.astype(np.uint8), LPS)
    assert foreground(read(case_in(tmp_path), inputs=2)) == (48, [500.0, 507.0])
    with pytest.raises(DataError, match=r"has 2 channels .* and image.inputs says 4"):
        read(case_in(tmp_path), inputs=4)
    save(tmp_path / "image.nii.gz", np.stack([echoes, echoes], axis=-1), LPS)
    with pytest.raises(DataError, match=r"shape \(12, 10, 8, 2, 2\) .*one axis of channels"):
        read(case_in(tmp_path))


def test_geo10_sheared_direction(folder: Path, values: dict[str, Any]) -> None:
    columns = nib.load(folder / "image.nii.gz").affine[:3, :3]
    columns = columns / np.linalg.norm(columns, axis=0)
    dots = np.abs(columns.T @ columns - np.eye(3))
    assert dots.max() == pytest.approx(values["column_dot_product"], abs=0.01)
    assert foreground(read(case_in(folder))) == (values["fg_voxels"], [values["fg_mean"]])


def test_geo10_sibling_a_tilted_gantry_stored_upside_down(tmp_path: Path) -> None:
    tilted = np.eye(4)
    tilted[1, 2] = np.tan(np.radians(20))
    tilted = tilted @ np.diag([0.8, -0.8, -3.0, 1.0])
    save(tmp_path / "image.nii.gz", marked(), tilted)
    save(tmp_path / "mask.nii.gz", INSIDE.astype(np.uint8), tilted)
    raw = read(case_in(tmp_path))
    assert raw.orientation == "RPI"
    assert foreground(raw) == (48, [500.0])
    np.testing.assert_array_equal(raw.arrays.image[0], marked()[:, ::-1, ::-1])


def test_geo11_missing_channel_one_case(folder: Path, values: dict[str, Any]) -> None:
    cases, (problem,) = list_cases(federation(folder, "."), "A")
    assert [case.case for case in cases] == values["complete"]
    assert f"case {values['incomplete_case']}: channel 0001 is missing" in problem
    assert str(folder / "images" / values["missing"]) in problem
    assert "2 of 3 cases are complete" in problem
    arrays = preprocess(cases[0], ImageConfig(inputs=2), TaskConfig()).arrays
    assert arrays.image.shape[0] == 2


def test_geo11_siblings_the_first_and_a_middle_channel_are_missing(tmp_path: Path) -> None:
    kept = {"a": "012", "b": "12", "c": "02", "d": "012"}
    for name, channels in kept.items():
        for channel in channels:
            save(tmp_path / "images" / f"{name}_000{channel}.nii", marked())
        save(tmp_path / "labels" / f"{name}.nii", INSIDE.astype(np.uint8))
    cases, problems = list_cases(federation(tmp_path, "."), "A")
    assert [case.case for case in cases] == ["a", "d"]
    assert [len(case.images) for case in cases] == [3, 3]
    first, middle = sorted(problems)
    assert "case b: channel 0000 is missing" in first
    assert str(tmp_path / "images" / "b_0000.nii") in first
    assert "case c: channel 0001 is missing" in middle
    assert all("2 of 4 cases are complete" in problem for problem in problems)
