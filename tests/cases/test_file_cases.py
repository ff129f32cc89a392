"""The field cases of files that are damaged, and for each siblings of the same kind."""

import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.data.decoded_image import Array
from collegium.data.formats import decode
from collegium.errors import DataError

nib: Any = nibabel


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The current folder: a copy of the field case that the test is named after."""
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    monkeypatch.chdir(copy)
    return copy


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def inspected(*arguments: str, code: int) -> str:
    """Return what `collegium inspect` prints, in one line."""
    result = call("inspect", *arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def save(path: Path, array: Array) -> Path:
    """Write a volume or a picture of any kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".nii" in path.name:
        nib.save(nib.Nifti1Image(array, np.eye(4)), path)
    elif path.suffix in (".nrrd", ".mha"):
        sitk: Any = pytest.importorskip("SimpleITK")
        compress = path.name.startswith("z")
        sitk.WriteImage(sitk.GetImageFromArray(array), str(path), useCompression=compress)
    elif path.suffix == ".npy":
        np.save(path, array)
    else:
        Image.fromarray(array).save(path)
    return path


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        decode(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert text.endswith("copy it again from its source")
    assert "\n" not in text
    return text


VOLUME = (np.arange(8 * 10 * 12).reshape(8, 10, 12) % 900).astype(np.int16)
PICTURE = np.random.default_rng(0).integers(0, 255, (40, 50)).astype(np.uint8)


def test_geo12_gzip_crc_error(place: Path, values: dict[str, Any]) -> None:
    words = inspected("f.yaml", code=3)
    for file in values["damaged"]:
        case = Path(file).name.removesuffix(".nii.gz")
        where = f"site a, case {case}: {place / file}: cannot be read"
        assert f"{where} (the checksum of its gzip stream does not agree)" in words
    assert "case p2" not in words
    assert str(values["maximum_read"]) not in words
    assert decode(place / "a/images/p2.nii.gz").array.max() < values["true_maximum_below"]


def test_geo12_sibling_a_run_refuses_what_inspect_refuses(place: Path) -> None:
    federation = "federation: {name: f, sites: {a: {folder: a}, b: {folder: a}}}"
    (place / "e.yaml").write_text(
        f"name: e\nalgorithm: fedavg\nrounds: 1\nmodel: {{name: unet, spatial_dims: 3}}\n"
        f"output: run\n{federation}\n"
    )
    result = call("run", "e.yaml")
    assert result.exit_code == 3, result.output
    words = " ".join(result.output.split())
    assert f"site a, case p0: {place / 'a/images/p0.nii.gz'}: cannot be read" in words
    assert "copy it again from its source" in words


def test_geo12_sibling_a_float_image_of_a_damaged_stream(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).normal(size=(12, 10, 8)).astype(np.float32)
    path = save(tmp_path / "x.nii.gz", noise)
    content = path.read_bytes()
    silent = 0
    for place in range(400, len(content) - 8, 37):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        silent += "checksum" in refused(path)
    assert silent > 10  # streams that can be decoded, to other values


@pytest.mark.parametrize(
    "name",
    ["x.nii.gz", "x.nii", "x.nrrd", "zx.nrrd", "x.mha", "zx.mha", "x.npy", "x.png", "x.tif",
     "x.gif", "x.bmp", "x.jpg"],
)  # fmt: skip
def test_geo12_siblings_the_last_eight_bytes_are_missing(tmp_path: Path, name: str) -> None:
    volume = name.endswith((".nii.gz", ".nii", ".nrrd", ".mha"))
    path = save(tmp_path / name, VOLUME if volume else PICTURE)
    decode(path)
    path.write_bytes(path.read_bytes()[:-8])
    refused(path)


def nifti_of_fewer_slices(content: bytes) -> bytes:
    return content[:46] + struct.pack("<h", 7) + content[48:]


def nrrd_of_fewer_slices(content: bytes) -> bytes:
    return content.replace(b"sizes: 12 10 8", b"sizes: 12 10 7")


def meta_of_fewer_slices(content: bytes) -> bytes:
    return content.replace(b"DimSize = 12 10 8", b"DimSize = 12 10 7")


def numpy_of_fewer_rows(content: bytes) -> bytes:
    return content.replace(b"(40, 50)", b"(39, 50)")


def tiff_of_fewer_rows(content: bytes) -> bytes:
    return content.replace(struct.pack("<HHII", 257, 4, 1, 40), struct.pack("<HHII", 257, 4, 1, 39))


def png_of_fewer_rows(content: bytes) -> bytes:
    head = content[12:20] + struct.pack(">I", 39) + content[24:29]
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


@pytest.mark.parametrize(
    ("name", "change", "stored", "needed"),
    [
        ("x.nii", nifti_of_fewer_slices, 2272, 2032),
        ("x.nrrd", nrrd_of_fewer_slices, 1920, 1680),
        ("zx.nrrd", nrrd_of_fewer_slices, 1920, 1680),
        ("x.mha", meta_of_fewer_slices, 1920, 1680),
        ("zx.mha", meta_of_fewer_slices, 1920, 1680),
        ("x.tif", tiff_of_fewer_rows, 2000, 1950),
        ("x.png", png_of_fewer_rows, 2040, 1989),
    ],
)
def test_geo12_siblings_a_size_that_disagrees_with_the_data(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], stored: int, needed: int
) -> None:
    three = VOLUME.transpose(2, 1, 0) if "nii" in name else VOLUME
    path = save(tmp_path / name, PICTURE if name in ("x.tif", "x.png") else three)
    content = path.read_bytes()
    path.write_bytes(change(content))
    assert path.read_bytes() != content
    text = refused(path)
    assert f"it holds {stored} bytes" in text
    assert f"its header's size needs {needed}" in text


def test_geo12_sibling_an_array_of_more_rows_than_its_header_says(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", PICTURE)
    path.write_bytes(numpy_of_fewer_rows(path.read_bytes()))
    assert "it holds more than its header says" in refused(path)


def test_geo12_siblings_a_dicom_picture(cases: Path, tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    (source,) = cases.glob("dcm05_*/site_a_mono2.dcm")
    path = tmp_path / "x.dcm"
    path.write_bytes(source.read_bytes()[:-8])
    assert "its pixels cannot be read" in refused(path)
    for key in ("Rows", "Columns"):
        dataset = pydicom.dcmread(source)
        needed = len(dataset.PixelData) * (dataset[key].value - 1) // dataset[key].value
        dataset[key].value -= 1
        dataset.save_as(path)
        stored = f"it holds {len(dataset.PixelData)} bytes of pixels"
        assert f"{stored}, and its header's size needs {needed}" in refused(path)


def test_geo12_sibling_compressed_voxels_of_a_metaimage(tmp_path: Path) -> None:
    path = save(tmp_path / "zx.mha", VOLUME)
    content = path.read_bytes()
    place = len(content) - 200
    path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    assert "its compressed voxels are damaged" in refused(path)
