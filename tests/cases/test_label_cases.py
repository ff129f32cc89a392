"""The field cases of labels and intensities, and for each a sibling of the same kind."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from collegium.data.pairing import pair_cases
from collegium.data.reading import normalise, read_image, read_label
from collegium.errors import DataError


def counts(array: np.ndarray) -> dict[str, int]:
    values, numbers = np.unique(array, return_counts=True)
    return {str(value): int(number) for value, number in zip(values, numbers, strict=True)}


def dice(a: np.ndarray, b: np.ndarray) -> float:
    return 2 * float((a & b).sum()) / float(a.sum() + b.sum())


def save(path: Path, array: np.ndarray, slope: float | None = None, inter: float = 0) -> Path:
    image = nib.Nifti1Image(array, np.eye(4))
    if slope is not None:
        image.header.set_slope_inter(slope, inter)
    nib.save(image, path)
    return path


def paletted(path: Path, indices: np.ndarray, colours: Mapping[int, int]) -> Path:
    image = Image.fromarray(indices.astype("uint8"))
    image.putpalette([colours.get(i // 3, 0) for i in range(3 * (max(colours) + 1))])
    image.save(path)
    return path


def test_lab01_mask_0_255(folder: Path, values: dict[str, Any]):
    label = read_label(folder / "masks" / "a.png", classes=2)
    assert label.array.sum() == values["fg_pixels"]
    assert dice(label.array == 1, label.array == 1) == values["dice_self"]
    assert set(np.unique(label.array)) == {0, 1}
    assert all(str(value) in label.notes[0] for value in values["values"])
    assert "a.png" in label.notes[0]
    assert read_image(folder / "images" / "a.png").array.shape[1:] == label.array.shape


@pytest.mark.parametrize("kind", ["L.png", "RGB.png", "RGBA.tif", "P.gif", "1.bmp", "I;16.tif"])
def test_lab01_siblings_are_read_as_0_and_1(tmp_path: Path, kind: str):
    drawn = np.zeros((6, 7), bool)
    drawn[2:4, 1:6] = True
    mode = kind.partition(".")[0]
    if mode == "I;16":
        image = Image.fromarray((drawn * 65535).astype("uint16"))
    else:
        image = Image.fromarray((drawn * 255).astype("uint8")).convert(mode)
    image.save(tmp_path / kind)
    label = read_label(tmp_path / kind, classes=2)
    assert (label.array == drawn).all()


def test_lab02_brats_label_4(folder: Path, values: dict[str, Any]):
    path = folder / "masks" / "b.nii.gz"
    with pytest.raises(DataError) as caught:
        read_label(path, classes=4)
    text = str(caught.value)
    assert "b.nii.gz" in text
    assert "unexpected values 4 " in text
    assert f"found: {', '.join(map(str, values['found']))};" in text
    assert "expected: 0, 1, 2, 3" in text
    assert "label_map" in text
    label = read_label(path, classes=4, label_map={4: 3})
    assert counts(label.array) == values["counts_after_map"]


def test_lab02_sibling_a_picture_with_codes_of_tissues(tmp_path: Path):
    codes = np.array([[0, 50, 150], [250, 50, 50]], "uint8")
    Image.fromarray(codes).save(tmp_path / "m.png")
    with pytest.raises(
        DataError, match=r"unexpected values 50, 150, 250 \(found: 0, 50, 150, 250;"
    ):
        read_label(tmp_path / "m.png", classes=4)
    label = read_label(tmp_path / "m.png", classes=4, label_map={50: 1, 150: 2, 250: 3})
    assert counts(label.array) == {"0": 1, "1": 3, "2": 1, "3": 1}


def test_lab03_float_labels_from_slope(folder: Path, values: dict[str, Any]):
    label = read_label(folder / "masks" / "m.nii.gz", classes=4)
    assert counts(label.array) == values["counts"]
    assert label.array.dtype.kind == "u"


def test_lab03_sibling_a_slope_just_above_and_one_far_off(tmp_path: Path):
    stored = np.arange(8, dtype="int16").reshape(2, 2, 2) * 100
    label = read_label(save(tmp_path / "m.nii", stored, 0.010001), classes=8)
    assert counts(label.array) == {str(value): 1 for value in range(8)}
    with pytest.raises(DataError, match=r"m\.nii.*no whole number"):
        read_label(save(tmp_path / "m.nii", stored, 0.0102), classes=8)


def test_lab04_nan_inf_voxels(
    folder: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        image = read_image(folder / "image.nii.gz")
    (note,) = image.notes
    reported = [int(number) for number in re.findall(r"(\d+) [NaInf+-]+", note)]
    assert reported == [values["nan"], values["posinf"], values["neginf"]]
    assert note.startswith("image.nii.gz:")
    assert note in caplog.text
    assert image.measured is not None
    assert image.measured.sum() == values["finite"]
    finite = image.array[image.measured].astype(np.float64)
    assert finite.mean() == pytest.approx(values["mean"], abs=5e-7)
    assert finite.std() == pytest.approx(values["std"], abs=5e-7)
    result = normalise(image.array, "zscore", None, image.measured)
    assert np.isfinite(result).all()
    back = result[image.measured] * values["std"] + values["mean"]
    assert back == pytest.approx(finite, abs=1e-4)
    assert result[~image.measured] == pytest.approx(0, abs=1e-6)  # the mean of the finite voxels


def test_lab04_sibling_one_channel_of_a_picture_series(tmp_path: Path):
    array = np.random.default_rng(0).normal(50, 10, (5, 6, 4, 2)).astype("float32")
    clean = array.copy()
    array[0, 0, 0, 1] = np.nan
    array[1, 0, 0, 1] = -np.inf
    image = read_image(save(tmp_path / "x.nii", array))
    result = normalise(image.array, "zscore", None, image.measured)
    finite = np.isfinite(array)
    for channel in (0, 1):
        inside = finite[..., channel]
        values = clean[..., channel][inside].astype(np.float64)
        expected = (values - values.mean()) / values.std()
        assert result[channel][inside] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("how", ["zscore", "minmax"])
def test_lab05_constant_image(
    folder: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture, how: str
):
    with caplog.at_level(logging.WARNING):
        image = read_image(folder / "image.nii.gz")
    assert f"constant value {values['constant']}" in image.notes[0]
    assert image.notes[0].startswith("image.nii.gz:")
    assert image.notes[0] in caplog.text
    result = normalise(image.array, how, None, image.measured)
    assert (result == values[how]).all()


def test_lab05_sibling_constant_once_the_holes_are_gone(tmp_path: Path):
    array = np.full((3, 3, 3), -0.1, "float32")
    array[0, 0] = np.nan
    image = read_image(save(tmp_path / "x.nii", array))
    assert any("constant value -0.1" in note for note in image.notes)
    assert (normalise(image.array, "zscore", None, image.measured) == 0).all()


def test_lab07_palette_png_mask(folder: Path, values: dict[str, Any]):
    label = read_label(folder / "masks" / "m.png", classes=3)
    assert counts(label.array) == values["counts"]


@pytest.mark.parametrize("suffix", ["png", "gif", "tif", "bmp"])
def test_lab07_siblings_in_other_formats_and_colours(tmp_path: Path, suffix: str):
    indices = np.repeat(np.arange(4), 5).reshape(4, 5)
    path = paletted(tmp_path / f"m.{suffix}", indices, {0: 255, 1: 255, 2: 128, 3: 7})
    assert (read_label(path, classes=4).array == indices).all()


def test_lab08_png16_image(folder: Path, values: dict[str, Any]):
    grey = read_image(folder / "images" / "x.png")
    assert grey.array.shape[0] == 1
    assert grey.array.max() == values["x_max"]
    assert len(np.unique(grey.array)) == values["x_distinct"]
    colour = read_image(folder / "images" / "y_rgba.png")
    assert colour.array.shape[0] == values["y_channels_after"]
    assert colour.array.max() == values["y_max"]
    assert (colour.array == colour.array[0]).all()
    assert "alpha" in colour.notes[0]
    one = read_image(folder / "images" / "y_rgba.png", "grey")
    assert (one.array == colour.array[:1]).all()
    assert read_image(folder / "images" / "x.png", "rgb").array.max() == values["x_max"]


def test_lab08_sibling_twelve_bits_in_a_tiff_with_alpha_beside(tmp_path: Path):
    array = (np.arange(400).reshape(20, 20) * 10).astype("uint16")
    Image.fromarray(array).save(tmp_path / "x.tif", compression="tiff_deflate")
    read = read_image(tmp_path / "x.tif", "grey")
    assert read.array.max() == 3990
    assert len(np.unique(read.array)) == 400
    half = np.dstack([array // 16, np.full_like(array, 128)]).astype("uint8")
    Image.fromarray(half).save(tmp_path / "y.png")
    assert (read_image(tmp_path / "y.png").array == half[None, ..., 0]).all()


def test_lab10_gif_and_tiff_mask(folder: Path, values: dict[str, Any]):
    pairing = pair_cases(
        sorted((folder / "images").iterdir()), sorted((folder / "masks").iterdir())
    )
    found = {case.case.split("_")[0]: case.mask for case in pairing.cases}
    assert {key: mask and mask.name for key, mask in found.items()} == values["pairs"]
    for case in pairing.cases:
        assert case.mask is not None
        label = read_label(case.mask, classes=2)
        assert label.array.sum() == values["fg_pixels"]
        assert label.array.shape == read_image(case.image).array.shape[1:]


def test_lab10_sibling_a_gif_with_the_palette_the_other_way_round(tmp_path: Path):
    drawn = np.zeros((6, 6), bool)
    drawn[1:3] = True
    path = paletted(tmp_path / "1_manual1.gif", ~drawn, {0: 255, 1: 0})
    assert (read_label(path, classes=2).array == drawn).all()


def test_lab11_int16_slope_overflow(folder: Path, values: dict[str, Any]):
    header: Any = nib.load(folder / "image.nii.gz").header
    assert header.get_data_dtype() == values["on_disk_dtype"]
    image = read_image(folder / "image.nii.gz")
    assert image.array.dtype == np.float32
    assert image.array.max() == values["max"]
    assert image.array.min() == values["min"]
    assert np.median(image.array) == values["background"]


def test_lab11_sibling_uint8_with_a_steep_slope_in_another_orientation(tmp_path: Path):
    image = nib.Nifti1Image(np.array([[[0, 255]], [[7, 1]]], "uint8"), np.diag([-1.0, -1, 1, 1]))
    image.header.set_slope_inter(1000, -500)
    nib.save(image, tmp_path / "x.nii.gz")
    read = read_image(tmp_path / "x.nii.gz")
    assert read.array.tolist() == [[[6500, 500], [-500, 254500]]]
