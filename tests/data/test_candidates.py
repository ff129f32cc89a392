"""Patches around positions: against functions of the place in space, and what is refused."""

import csv
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.data.candidates import PatchConfig, read_candidates, write_patches
from collegium.data.reading import read_image
from collegium.errors import DataError

SLOPES = np.array([3.0, -2.0, 5.0])  # intensity per mm towards left, back and head
TURN = np.deg2rad(20)
DIRECTIONS = {
    "straight": np.eye(3),
    "flipped in plane": np.diag([-1.0, -1.0, 1.0]),
    "flipped along the body": np.diag([1.0, 1.0, -1.0]),
    "all flipped": -np.eye(3),
    "axes exchanged": np.array([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]]),
    "oblique": np.array([
        [np.cos(TURN), -np.sin(TURN), 0], [np.sin(TURN), np.cos(TURN), 0], [0, 0, 1],
    ]),
}  # fmt: skip


def write_volume(
    path: Path, direction: NDArray[np.float64], size: tuple[int, int, int] = (40, 36, 24)
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Write a volume whose intensities are a linear function of the place in space, by SimpleITK.

    Returns its middle in mm in LPS and the voxels' lengths, by stored axis.
    """
    itk = pytest.importorskip("SimpleITK")
    spacing, origin = np.array([0.7, 0.8, 1.5]), np.array([-17.0, 30.0, -210.0])
    grid = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1) * spacing
    places = grid @ direction.T + origin
    image = itk.GetImageFromArray((places @ SLOPES).astype(np.float32).transpose(2, 1, 0))
    image.SetSpacing(spacing.tolist())
    image.SetOrigin(origin.tolist())
    image.SetDirection(direction.ravel().tolist())
    path.parent.mkdir(parents=True, exist_ok=True)
    itk.WriteImage(image, str(path))
    middle = image.TransformContinuousIndexToPhysicalPoint([(n - 1) / 2 for n in size])
    return np.array(middle), spacing


def write_table(path: Path, rows: list[Any], header: str = "seriesuid,coordX,coordY,coordZ,class"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def plane(direction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the unit vectors in LPS of a volume's axes nearest to right and front, (3, 2)."""
    steps = []
    for towards in (np.array([-1.0, 0, 0]), np.array([0, -1.0, 0])):
        along = direction.T @ towards
        axis = int(np.abs(along).argmax())
        steps.append(direction[:, axis] * np.sign(along[axis]))
    return np.stack(steps, 1)


@pytest.mark.parametrize("name", DIRECTIONS)
def test_a_patch_shows_the_intensities_around_its_place_in_space(tmp_path: Path, name: str) -> None:
    direction = DIRECTIONS[name]
    middle, _ = write_volume(tmp_path / "volumes" / "subset0" / "1.2.3.mhd", direction)
    position = middle + np.array([1.3, -0.9, 2.2])
    table = write_table(tmp_path / "c.csv", [("1.2.3", *position, 1)])
    write_patches(tmp_path / "volumes", table, tmp_path / "out", PatchConfig(8, 1.25))
    found = read_image(tmp_path / "out" / "images" / "1.2.3" / "00001.nii.gz")
    offsets = (np.arange(8) - 3.5) * 1.25
    right, front = plane(direction).T
    places = position + offsets[:, None, None] * right + offsets[None, :, None] * front
    assert found.array.shape[1:] in {(8, 8), (8, 8, 1)}
    np.testing.assert_allclose(found.array.reshape(8, 8), places @ SLOPES, atol=2e-3)
    stored: Any = nib.load(tmp_path / "out" / "images" / "1.2.3" / "00001.nii.gz")
    corner = stored.affine @ [0, 0, 0, 1]  # in RAS
    np.testing.assert_allclose(corner[:3] * [-1, -1, 1], places[0, 0], atol=1e-3)
    np.testing.assert_allclose(stored.header.get_zooms()[:2], 1.25, rtol=1e-6)


@pytest.mark.parametrize("name", ["straight", "flipped in plane", "all flipped"])
def test_with_spacing_0_a_patch_is_a_window_of_the_voxels(tmp_path: Path, name: str) -> None:
    direction = DIRECTIONS[name]
    middle, _ = write_volume(tmp_path / "volumes" / "a.mha", direction)
    table = write_table(tmp_path / "c.csv", [("a", *middle, 0)])
    write_patches(tmp_path / "volumes", table, tmp_path / "out", PatchConfig(6, 0))
    volume = read_image(tmp_path / "volumes" / "a.mha")
    affine = volume.affine
    assert affine is not None
    x, y, z = np.rint(np.linalg.inv(affine) @ [*(middle * [-1, -1, 1]), 1])[:3].astype(int)
    patch = read_image(tmp_path / "out" / "images" / "a" / "00001.nii.gz").array.reshape(6, 6)
    np.testing.assert_array_equal(patch, volume.array[0, x - 3 : x + 3, y - 3 : y + 3, z])


def test_beyond_the_border_is_the_smallest_value(tmp_path: Path) -> None:
    write_volume(tmp_path / "v" / "a.nrrd", np.eye(3))
    volume = read_image(tmp_path / "v" / "a.nrrd")
    array, affine = volume.array[0], volume.affine
    assert affine is not None
    corner = (affine @ [0.0, 0.0, 23.4, 1])[:3]  # within the half voxel above the last slice
    table = write_table(tmp_path / "c.csv", [("a", *corner, 0)])
    config = PatchConfig(4, 0, coordinates="RAS")
    write_patches(tmp_path / "v", table, tmp_path / "out", config)
    patch = read_image(tmp_path / "out" / "images" / "a" / "00001.nii.gz").array.reshape(4, 4)
    assert (patch[:2] == array.min()).all()
    assert (patch[:, :2] == array.min()).all()
    np.testing.assert_array_equal(patch[2:, 2:], array[:2, :2, 23])


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path, NDArray[np.float64]]:
    """Two volumes and the candidates in them, one outside and one without a volume."""
    middle, _ = write_volume(tmp_path / "v" / "a.mhd", np.eye(3))
    other, _ = write_volume(tmp_path / "v" / "b.mhd", np.diag([-1.0, -1.0, 1.0]))
    rows = [
        ("b", *other, 1, "p1"), ("a", *middle, 0, "p1"), ("a", *(middle + 2), 1, "p1"),
        ("a", *(middle + 500), 0, "p1"), ("c", *middle, 0, "p2"),
    ]  # fmt: skip
    table = write_table(tmp_path / "c.csv", rows, "seriesuid,coordX,coordY,coordZ,class,person")
    return tmp_path / "v", table, middle


def test_what_cannot_be_cut_is_named_and_left_out_only_where_that_is_said(
    two: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    volumes, table, _ = two
    refused = call("patches", volumes, table, "--output", tmp_path / "out")
    assert refused.exit_code == 3
    assert "holds no volume of 1 series: c" in " ".join(refused.stderr.split())
    write_volume(volumes / "c.mhd", np.eye(3))
    refused = call("patches", volumes, table, "--output", tmp_path / "out")
    assert refused.exit_code == 3
    assert "1 candidates lie outside a.mhd, in the rows 4" in " ".join(refused.stderr.split())
    assert not (tmp_path / "out").exists()
    (volumes / "c.mhd").unlink()
    made = call("patches", volumes, table, "--output", tmp_path / "out", "--leave-out", "--patient",
                "person", "--size", 8)  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "row 4 (series a) is left out: it lies outside its volume" in made.stderr
    assert "row 5 (series c) is left out: there is no volume of its series" in made.stderr
    assert [line.split() for line in made.stdout.splitlines()[1:3]] == [["0", "1"], ["1", "2"]]
    out = read(tmp_path / "out" / "left-out.csv")
    assert [(row["row"], row["seriesuid"], row["class"]) for row in out] == [
        ("4", "a", "0"), ("5", "c", "0"),
    ]  # fmt: skip
    manifest = read(tmp_path / "out" / "manifest.csv")
    assert [(row["case"], row["patient"], row["class"]) for row in manifest] == [
        ("b_00001", "p1", "1"), ("a_00001", "p1", "0"), ("a_00002", "p1", "1"),
    ]  # fmt: skip
    assert call("patches", volumes, table, "--output", tmp_path / "out").exit_code == 3


def test_a_site_without_a_patch_is_refused(two: tuple[Path, Path, Any], tmp_path: Path) -> None:
    volumes, table, _ = two
    made = call("patches", volumes, table, "--output", tmp_path / "out", "--leave-out",
                "--coordinates", "RAS")  # fmt: skip
    assert made.exit_code == 3
    assert "no candidate lies in a volume" in " ".join(made.stderr.split())
    assert not (tmp_path / "out").exists()


def test_the_manifest_is_a_site_that_keeps_a_series_together(tmp_path: Path) -> None:
    rows: list[Any] = []
    for number in range(6):
        middle, _ = write_volume(tmp_path / "v" / f"s{number}.mhd", np.eye(3))
        rows += [(f"s{number}", *(middle + shift), shift % 2) for shift in range(3)]
    table = write_table(tmp_path / "c.csv", rows)
    assert call("patches", tmp_path / "v", table, "--output", tmp_path / "out").exit_code == 0
    (tmp_path / "f.yaml").write_text(f"""
name: nodules
root: {tmp_path}
sites: {{a: {{manifest: out/manifest.csv}}}}
task: {{name: classification, classes: ["0", "1"]}}
image: {{clip: [-1000, 400], normalise: symmetric}}
sampling: {{crop: [32, 32]}}
""")
    looked = call("inspect", tmp_path / "f.yaml", "--json")
    assert looked.exit_code == 0, looked.output
    assert '"cases": 18' in looked.stdout
    assert '"patients": 6' in looked.stdout


@pytest.mark.parametrize(
    ("row", "header", "words"),
    [
        (("a", 1, 2, "x", 1), None, "row 1: a coordinate is no number"),
        (("a", 1, 2, "nan", 1), None, "row 1: a coordinate is no number"),
        (("a", 1, 2, 3, ""), None, "row 1: the series, patient or class is empty"),
        (("a", 1, 2, 3), "series,coordX,coordY,coordZ", "has no column seriesuid, class"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_row(
    tmp_path: Path, row: tuple[Any, ...], header: str | None, words: str
) -> None:
    more = {} if header is None else {"header": header}
    with pytest.raises(DataError, match=words):
        read_candidates(write_table(tmp_path / "c.csv", [row], **more))


def test_a_series_of_two_patients_and_two_volumes_of_one_name_are_refused(tmp_path: Path) -> None:
    header = "seriesuid,coordX,coordY,coordZ,class,person"
    rows = [("a", 0, 0, 0, 1, "p"), ("a", 0, 0, 0, 1, "q")]
    table = write_table(tmp_path / "c.csv", rows, header)
    with pytest.raises(DataError, match="row 2: series a is of another patient than above"):
        read_candidates(table, "person")
    for place in ("x", "y"):
        (tmp_path / "v" / place).mkdir(parents=True)
        nib.save(
            nib.Nifti1Image(np.zeros((2, 2, 2), np.float32), np.eye(4)),
            tmp_path / "v" / place / "a.nii.gz",
        )
    with pytest.raises(DataError, match="have one name; take one of them away"):
        write_patches(tmp_path / "v", table, tmp_path / "out", PatchConfig())
