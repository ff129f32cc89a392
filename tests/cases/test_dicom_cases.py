"""The field cases of DICOM."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from typer.testing import CliRunner

from collegium import cli
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.formats.dicom import decode, find_series
from collegium.data.inspection import inspect_federation
from collegium.data.reading import normalise, read_image
from collegium.errors import DataError

WITHOUT_DECODERS = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {blocked}:
                raise ModuleNotFoundError(f"no module named {{name}}", name=name)

    sys.meta_path.insert(0, Absent())

    from pathlib import Path
    from collegium.data.formats.dicom import decode
    from collegium.errors import DataError

    for name in ("plain", "rle", "jpeg2000"):
        try:
            print(int(decode(Path(sys.argv[1]) / f"{{name}}.dcm").array.sum()))
        except DataError as error:
            print(error)
"""
BLOCKED = {"pylibjpeg", "openjpeg", "libjpeg", "PIL", "gdcm", "_gdcm"}


def test_dcm01_unsorted_same_instance_number(folder: Path, values: dict[str, Any]) -> None:
    decoded = decode(folder / "series")
    rows, columns, slices = values["shape_rows_cols_slices"]
    assert decoded.array.shape == (1, columns, rows, slices)
    # the background is what most pixels of a slice hold
    background = [np.unique(z, return_counts=True) for z in np.moveaxis(decoded.array[0], -1, 0)]
    most = [float(found[counts.argmax()]) for found, counts in background]
    assert most == values["background_per_slice"]
    assert decoded.spacing is not None
    assert decoded.affine is not None
    assert decoded.spacing[2] == values["spacing_z"]
    assert decoded.affine[2, 3] == values["first_z"]


def test_dcm02_missing_slice(folder: Path, values: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        decode(folder / "series")
    text = str(caught.value)
    below, above = values["gap_between"]
    assert f"from {below:g} to {above:g} mm" in text
    assert f"gap of {values['gap_step']:g} mm where {values['usual_step']:g} mm is usual" in text
    extent, step = values["true_extent_mm"], values["usual_step"]
    expected = round(extent / step) + 1
    assert f"{values['n_slices']} slices found, {expected} expected" in text
    assert pydicom.dcmread(folder / "series" / "s00.dcm").SeriesInstanceUID in text


def test_dcm03_mixed_series_and_stray_files(folder: Path, values: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        decode(folder / "exam")
    text = str(caught.value)
    assert "number 1: 3 images 20x14 sagittal" in text
    assert "number 3: 6 images 12x12 axial" in text
    assert all(uid in text for uid in values["series"])
    series, notes = find_series(folder / "exam")
    assert {found.uid: len(found.files) for found in series} == values["series"]
    assert all(any(name in note for note in notes) for name in values["stray"])
    decoded = decode(folder / "exam", "3")
    assert decoded.array.shape == (1, 12, 12, 6)
    assert decoded.array.mean(axis=(0, 1, 2)).tolist() == values["chosen_means"]
    assert any("Thumbs.db, notes.xml" in note for note in decoded.notes)


def test_dcm04_rescale_and_unsigned(folder: Path, values: dict[str, Any]) -> None:
    ct = decode(folder / "ct").array[0]
    assert ct[::-1, 0, 0].tolist() == values["ct_columns"]  # x is counted from the other end
    assert (ct == ct[:, :1, :1]).all()
    pet = decode(folder / "pet").array[0]
    assert pet[0, 0].tolist() == values["pet_slices"]
    assert (pet == pet[:1, :1]).all()


def test_dcm05_monochrome1(folder: Path, values: dict[str, Any]) -> None:
    one, other = (
        normalise(read_image(folder / name).array, "minmax")[0]
        for name in ("site_a_mono2.dcm", "site_b_mono1.dcm")
    )
    assert np.abs(one - other).max() == values["max_abs_difference"]
    assert (other[5:10, 5:10] == values["block_value"]).all()
    assert other[0, 0] == values["corner_0_0"]


def test_dcm07_compressed_transfer_syntax(folder: Path, values: dict[str, Any]) -> None:
    plain = decode(folder / "plain.dcm").array
    assert plain.shape == (1, *values["shape"])
    for name in ("plain", "rle", "jpeg2000"):
        array = decode(folder / f"{name}.dcm").array
        assert array.sum(dtype=np.float64) == values["sum"]
        assert (array == plain).all()
    for name, uid in values["transfer_syntaxes"].items():
        assert pydicom.dcmread(folder / f"{name}.dcm").file_meta.TransferSyntaxUID == uid


def test_dcm07_without_plugin(folder: Path, values: dict[str, Any]) -> None:
    program = textwrap.dedent(WITHOUT_DECODERS.format(blocked=BLOCKED))
    run = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    plain, rle, jpeg2000 = run.stdout.splitlines()
    assert int(plain) == int(rle) == values["sum"]
    assert "jpeg2000.dcm" in jpeg2000
    assert "'JPEG 2000 Image Compression (Lossless Only)'" in jpeg2000
    assert "pip install pylibjpeg pylibjpeg-openjpeg" in jpeg2000


def test_dcm08_pixel_padding(folder: Path, values: dict[str, Any]) -> None:
    decoded = decode(folder / "series")
    assert decoded.measured is not None
    inside = decoded.measured[0]
    assert np.count_nonzero(inside, axis=(0, 1)).tolist() == [values["valid_pixels_per_slice"]] * 2
    assert decoded.array[0][inside].mean(dtype=np.float64) == values["mean_valid"]
    image = read_image(folder / "series")
    result = normalise(image.array, "zscore", None, image.measured)
    assert result[decoded.measured].mean(dtype=np.float64) == pytest.approx(0, abs=1e-6)
    assert result[~decoded.measured].max() == result.min()


def test_dcm09_rtstruct_as_label(folder: Path, values: dict[str, Any]) -> None:
    result = CliRunner().invoke(cli.app, ["inspect", str(folder / "f.yaml"), "--json"])
    assert result.exit_code == 3
    (site,) = json.loads(result.output)["sites"]
    (problem,) = site["problems"]
    label = folder / "labels" / "c1.dcm"
    (name,) = values["roi"]
    assert problem.startswith(
        f"site a, case c1: {label}: is a radiotherapy structure set (RTSTRUCT)"
    )
    assert f"with the ROIs {name}, whose contours are not read" in problem
    assert "convert it on its series to a DICOM segmentation or a label map" in problem
    assert site["cases"] == 1


def problem_of(folder: Path, place: Path, change: pydicom.Dataset) -> str:
    """Return the problem of the case if its label holds something else."""
    shutil.copytree(folder, place, copy_function=shutil.copyfile)
    dataset = pydicom.dcmread(place / "labels" / "c1.dcm")
    dataset.update(change)
    dataset.save_as(place / "labels" / "c1.dcm")
    config = FederationConfig("f", {"a": SiteConfig(manifest="m.csv")}, root=str(place))
    (problem,) = inspect_federation(config).sites[0].problems
    assert problem.startswith(f"site a, case c1: {place / 'labels' / 'c1.dcm'}: ")
    return problem


@pytest.mark.parametrize(
    ("uid", "words"),
    [
        ("88.33", "is a structured report and holds no image"),
        ("11.1", "is a presentation state and holds no image"),
        ("481.5", "is an object of radiotherapy and holds no image"),
        ("104.1", "is a DICOM object of the class 1.2.840.10008.5.1.4.1.1.104.1 and holds no"),
    ],
)
def test_dcm09_siblings_other_objects_as_label(
    folder: Path, tmp_path: Path, uid: str, words: str
) -> None:
    change = pydicom.Dataset()
    change.SOPClassUID = f"1.2.840.10008.5.1.4.1.1.{uid}"
    problem = problem_of(folder, tmp_path / "s", change)
    assert words in problem
    assert "as a label a DICOM segmentation or a label map" in problem
    assert "lesion" not in problem


def test_dcm09_sibling_several_regions_of_odd_names(folder: Path, tmp_path: Path) -> None:
    change, regions = pydicom.Dataset(), []
    for name in ("GTV\n 1", "", "Lung_L"):
        region = pydicom.Dataset()
        region.ROIName = name
        regions.append(region)
    change.StructureSetROISequence = regions
    problem = problem_of(folder, tmp_path / "s", change)
    assert "with the ROIs GTV 1, without a name, Lung_L, whose contours" in problem


def test_dcm09_sibling_a_structure_set_as_image_and_in_a_folder(folder: Path) -> None:
    for path in (folder / "labels" / "c1.dcm", folder / "labels"):
        with pytest.raises(DataError, match=r"c1\.dcm: is a radiotherapy structure set"):
            decode(path)
    assert decode(folder / "images" / "c1").array.shape[-1] == 5
