"""One file to arrays: formats, palettes, labels, non-finite voxels, normalisation, damage."""

import gzip
import logging
import struct
import zlib
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from collegium.data.formats import nifti, pictures
from collegium.data.reading import (
    classes_of_regions,
    normalise,
    read_image,
    read_label,
    read_mask,
)
from collegium.errors import ConfigError, DataError


def grid(*shape: int, step: int = 1, dtype: str = "uint8") -> np.ndarray:
    return (np.arange(np.prod(shape)).reshape(shape) * step).astype(dtype)


def picture(path: Path, array: np.ndarray, **options) -> Path:
    Image.fromarray(array).save(path, **options)
    return path


def paletted(path: Path, indices: np.ndarray, *colours: tuple[int, int, int], **options) -> Path:
    image = Image.fromarray(indices.astype("uint8"))
    image.putpalette([value for colour in colours for value in colour])
    image.save(path, **options)
    return path


def volume(path: Path, array: np.ndarray, affine: np.ndarray | None = None) -> Path:
    nib.save(nib.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
    return path


def png(path: Path, rows: np.ndarray, *, bits: int, colour: int, width: int) -> Path:
    """Write a PNG of packed rows, for kinds that Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )
    return path


def tiff(path: Path, array: np.ndarray, *, sample_format: int) -> Path:
    """Write a grey or RGB TIFF by hand, for kinds that Pillow does not write."""
    height, width, *channels = array.shape
    count, bits, data = (channels or [1])[0], array.dtype.itemsize * 8, array.tobytes()
    end = 8 + 2 + 12 * 10 + 4
    extra = struct.pack("<HHHH", bits, bits, bits, 0) if count == 3 else b""
    tags = [
        (256, 3, 1, width), (257, 3, 1, height), (258, 3, count, end if extra else bits),
        (259, 3, 1, 1), (262, 3, 1, 2 if extra else 1), (273, 4, 1, end + len(extra)),
        (277, 3, 1, count), (278, 3, 1, height), (279, 4, 1, len(data)), (339, 3, 1, sample_format),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    path.write_bytes(head + entries + struct.pack("<I", 0) + extra + data)
    return path


class TestPictures:
    @pytest.mark.parametrize("suffix", ["png", "tif", "bmp", "gif"])
    def test_grey_pictures_come_back_as_stored(self, tmp_path: Path, suffix: str):
        array = grid(9, 11, step=2)
        read = read_image(picture(tmp_path / f"x.{suffix}", array))
        assert read.array.dtype == np.float32
        assert read.array.shape[1:] == (9, 11)
        assert (read.array == array).all()
        assert read.full_scale == 255
        assert read.spacing is None
        assert read.affine is None
        assert read.measured is None

    @pytest.mark.parametrize("suffix", ["png", "tiff", "bmp"])
    def test_colours_become_three_leading_channels(self, tmp_path: Path, suffix: str):
        array = grid(4, 5, 3, step=4)
        read = read_image(picture(tmp_path / f"x.{suffix}", array))
        assert (read.array == array.transpose(2, 0, 1)).all()

    @pytest.mark.parametrize("suffix", ["png", "tif"])
    def test_sixteen_bits_are_kept(self, tmp_path: Path, suffix: str):
        array = grid(20, 20, step=150, dtype="uint16")
        read = read_image(picture(tmp_path / f"x.{suffix}", array))
        assert read.array.max() == 399 * 150
        assert len(np.unique(read.array)) == 400
        assert read.full_scale == 65535

    @pytest.mark.parametrize(
        ("array", "sample_format"),
        [
            (np.array([[3_000_000_000, 1]], "<u4"), 1),
            (np.array([[-70_000, 1]], "<i4"), 2),
            (np.array([[-3, 1]], "<i2"), 2),
            (np.array([[0.25, -1.5]], "<f4"), 3),
        ],
    )
    def test_tiffs_of_other_types_keep_their_values(self, tmp_path, array, sample_format):
        read = read_image(tiff(tmp_path / "x.tif", array, sample_format=sample_format))
        assert (read.array[0] == array.astype(np.float32)).all()
        assert read.full_scale is None

    def test_a_palette_gives_its_colours(self, tmp_path: Path):
        path = paletted(
            tmp_path / "x.png", np.array([[0, 1], [2, 1]]), (9, 8, 7), (6, 5, 4), (3, 2, 1)
        )
        assert read_image(path).array.tolist() == [
            [[9, 6], [3, 6]],
            [[8, 5], [2, 5]],
            [[7, 4], [1, 4]],
        ]

    def test_a_palette_with_transparency_gives_its_colours(self, tmp_path: Path):
        path = paletted(
            tmp_path / "x.png", np.array([[0, 1]]), (9, 8, 7), (6, 5, 4), transparency=b"\x00\xff"
        )
        read = read_image(path)
        assert read.array.tolist() == [[[9, 6]], [[8, 5]], [[7, 4]]]
        assert read.notes[0] == "x.png: the alpha channel was dropped"

    @pytest.mark.parametrize(("channels", "left"), [(4, 3), (2, 1)])
    def test_alpha_is_dropped_and_said(self, tmp_path: Path, channels: int, left: int):
        array = grid(4, 5, channels, step=2)
        read = read_image(picture(tmp_path / "x.png", array))
        assert (read.array == array[..., :left].transpose(2, 0, 1)).all()
        assert read.notes == ("x.png: the alpha channel was dropped",)

    def test_one_bit_is_black_and_white(self, tmp_path: Path):
        image = Image.fromarray(np.array([[0, 255, 0]], "uint8")).convert("1")
        image.save(tmp_path / "x.png")
        assert read_image(tmp_path / "x.png").array.tolist() == [[[0, 255, 0]]]
        assert read_label(tmp_path / "x.png", classes=2).array.tolist() == [[0, 1, 0]]

    def test_cmyk_becomes_rgb(self, tmp_path: Path):
        Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "x.tif")
        assert read_image(tmp_path / "x.tif").array[:, 0, 0].tolist() == [255, 0, 0]

    def test_exif_orientation_of_a_jpeg_is_applied(self, tmp_path: Path):
        array = np.zeros((16, 32), "uint8")
        array[:, 16:] = 240  # bright on the right
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned clockwise: right becomes bottom
        read = read_image(picture(tmp_path / "x.jpg", array, exif=exif))
        assert read.array.shape == (1, 32, 16)
        assert read.array[0, :16].max() < 20 < 220 < read.array[0, 16:].min()
        assert "EXIF" in read.notes[0]

    def test_the_first_frame_of_a_gif_is_read_and_said(self, tmp_path: Path):
        frames = [Image.fromarray(np.full((4, 4), value, "uint8")) for value in (10, 20, 30)]
        frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
        read = read_image(tmp_path / "x.gif")
        assert read.array.max() == 10
        assert "first of 3 frames" in read.notes[0]

    def test_a_tiff_of_several_pages_is_refused(self, tmp_path: Path):
        pages = [Image.fromarray(grid(4, 4)) for _ in range(3)]
        pages[0].save(tmp_path / "x.tif", save_all=True, append_images=pages[1:])
        with pytest.raises(DataError, match=r"x\.tif: the TIFF holds 3 pages"):
            read_image(tmp_path / "x.tif")

    def test_colour_of_sixteen_bits_is_refused_not_cut_to_eight(self, tmp_path: Path):
        rows = grid(4, 15, step=1000, dtype=">u2")
        path = png(tmp_path / "x.png", rows, bits=16, colour=2, width=5)
        with pytest.raises(DataError, match="16 bits per channel"):
            read_image(path)
        path = tiff(tmp_path / "x.tif", grid(2, 2, 3, step=5000, dtype="<u2"), sample_format=1)
        with pytest.raises(DataError, match="16 bits per channel"):
            read_image(path)

    def test_a_large_picture_is_read_and_a_huge_one_refused(self, tmp_path, monkeypatch):
        path = picture(tmp_path / "x.png", grid(10, 15))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # 150 pixels: Pillow only warns
        assert read_image(path).array.max() == 149
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
        with pytest.raises(DataError, match="too large"):
            read_image(path)


class TestChannels:
    def test_grey_is_the_luma_of_rec_601_and_keeps_fractions(self, tmp_path: Path):
        array = np.array([[[10, 20, 40], [250, 250, 250]]], "uint8")
        read = read_image(picture(tmp_path / "x.png", array), "grey")
        assert read.array.shape == (1, 1, 2)
        assert read.array[0, 0] == pytest.approx([2.99 + 11.74 + 4.56, 250], abs=1e-4)

    def test_green_is_the_second_channel(self, tmp_path: Path):
        array = grid(2, 2, 3)
        read = read_image(picture(tmp_path / "x.png", array), "green")
        assert (read.array == array[None, ..., 1]).all()

    def test_rgb_repeats_a_grey_image_and_keeps_sixteen_bits(self, tmp_path: Path):
        array = grid(2, 2, step=20000, dtype="uint16")
        read = read_image(picture(tmp_path / "x.png", array), "rgb")
        assert read.array.shape == (3, 2, 2)
        assert (read.array == array).all()

    @pytest.mark.parametrize("channels", ["grey", "green"])
    def test_one_channel_stays_as_it_is(self, tmp_path: Path, channels: str):
        array = grid(2, 3)
        assert (read_image(picture(tmp_path / "x.png", array), channels).array == array).all()

    def test_other_numbers_of_channels_and_other_words_are_refused(self, tmp_path: Path):
        path = volume(tmp_path / "x.nii", grid(3, 3, 3, 2))
        with pytest.raises(DataError, match=r"x\.nii: image.channels grey needs 1 or 3 .* has 2"):
            read_image(path, "grey")
        with pytest.raises(ConfigError, match=r"image\.channels: 'gray'"):
            read_image(path, "gray")


class TestVolumes:
    def test_axes_are_brought_to_ras_with_the_same_place_in_the_world(self, tmp_path: Path):
        array = grid(3, 4, 5)
        affine = np.array([[0, 0, 2.5, 7], [-0.5, 0, 0, 9], [0, -1.5, 0, 3], [0, 0, 0, 1.0]])
        read = read_image(volume(tmp_path / "x.nii.gz", array, affine))
        assert read.array.shape == (1, 5, 3, 4)
        assert read.spacing == pytest.approx((2.5, 0.5, 1.5))
        assert read.affine is not None
        place = affine @ [1, 2, 3, 1]
        index = np.rint(np.linalg.inv(read.affine) @ place).astype(int)[:3]
        assert read.array[(0, *index)] == array[1, 2, 3]
        assert (np.diag(read.affine)[:3] > 0).all()
        assert "to RAS" in read.notes[0]

    def test_image_and_label_stored_differently_fall_onto_each_other(self, tmp_path: Path):
        array = grid(4, 3, 2) % 2
        flipped = np.diag([-1.0, -1, 1, 1])
        flipped[:2, 3] = (3, 2)
        image = read_image(volume(tmp_path / "x.nii", array))
        label = read_label(volume(tmp_path / "m.nii", array[::-1, ::-1].copy(), flipped), classes=2)
        assert (image.array[0] == label.array).all()
        assert image.affine == pytest.approx(label.affine)

    def test_trailing_axes_of_length_one_go_and_a_fourth_axis_is_channels(self, tmp_path: Path):
        assert read_image(volume(tmp_path / "a.nii", grid(3, 4, 2, 1))).array.shape == (1, 3, 4, 2)
        array = grid(3, 4, 2, 3)
        read = read_image(volume(tmp_path / "b.nii", array))
        assert (read.array == np.moveaxis(array, -1, 0)).all()
        vectors = read_image(volume(tmp_path / "c.nii", array[:, :, :, None]))
        assert (vectors.array == read.array).all()

    @pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (3, 4, 1, 1)])
    def test_a_single_slice_has_two_spatial_axes(self, tmp_path: Path, shape: tuple[int, ...]):
        affine = np.diag([2.0, 3, 9, 1])
        read = read_image(volume(tmp_path / "x.nii", grid(*shape), affine))
        assert (read.array == grid(3, 4)).all()
        assert read.array.shape == (1, 3, 4)
        assert read.spacing == (2, 3)

    def test_slope_is_applied_without_casting_back(self, tmp_path: Path):
        image = nib.Nifti1Image(np.array([[[-2, 20000]]] * 2, "int16"), np.eye(4))
        image.header.set_slope_inter(1.5, -4)
        nib.save(image, tmp_path / "x.nii")
        read = read_image(tmp_path / "x.nii")
        assert read.array.min() == -7
        assert read.array.max() == 29996

    def test_spacing_in_micrometres_is_given_in_millimetres(self, tmp_path: Path):
        image = nib.Nifti1Image(grid(2, 2, 2), np.diag([250.0, 500, 1000, 1]))
        image.header.set_xyzt_units("micron")
        nib.save(image, tmp_path / "x.nii")
        read = read_image(tmp_path / "x.nii")
        assert read.spacing == pytest.approx((0.25, 0.5, 1))
        assert "x.nii: its lengths were converted to mm" in read.notes

    def test_metres_are_given_in_millimetres_and_an_unknown_unit_is_refused(self, tmp_path: Path):
        image = nib.Nifti1Image(grid(2, 2, 2), np.diag([0.001, 0.002, 0.003, 1]))
        image.header.set_xyzt_units("meter")
        nib.save(image, tmp_path / "x.nii")
        assert read_image(tmp_path / "x.nii").spacing == pytest.approx((1, 2, 3))
        image.header["xyzt_units"] = 5
        nib.save(image, tmp_path / "x.nii")
        with pytest.raises(DataError, match=r"x\.nii: its unit of length is unknown"):
            read_image(tmp_path / "x.nii")

    @pytest.mark.parametrize(("unit", "distance"), [("mm", "5"), ("micron", "0.005")])
    def test_sform_and_qform_that_disagree_are_told_with_the_distance(
        self, tmp_path: Path, unit: str, distance: str
    ):
        affine = np.diag([2.0, 2, 2, 1])
        image = nib.Nifti1Image(grid(4, 3, 2), affine)
        image.header.set_xyzt_units(unit)
        moved = affine.copy()
        moved[:3, 3] = (3, 0, 4)
        image.set_sform(moved, 1)
        image.set_qform(affine, 1)
        nib.save(image, tmp_path / "x.nii")
        read = read_image(tmp_path / "x.nii")
        note = f"x.nii: its sform and qform lie up to {distance} mm apart: its sform was used"
        assert note in read.notes
        assert read.affine is not None
        assert read.affine[0, 3] == pytest.approx(3 if unit == "mm" else 0.003)
        image.set_qform(moved + np.diag([0.01, 0, 0, 0]), 1)  # as rounding moves it
        nib.save(image, tmp_path / "x.nii")
        assert not [note for note in read_image(tmp_path / "x.nii").notes if "apart" in note]

    def test_a_qform_that_makes_no_sense_is_told_if_there_is_an_sform(self, tmp_path: Path):
        image = nib.Nifti1Image(grid(4, 3, 2), np.eye(4))
        image.set_sform(np.eye(4), 1)
        image.header["qform_code"], image.header["quatern_b"] = 1, 5
        nib.save(image, tmp_path / "x.nii")
        assert (
            "x.nii: its qform makes no sense: its sform was used"
            in read_image(tmp_path / "x.nii").notes
        )

    def test_five_axes_and_complex_numbers_are_refused(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"shape \(2, 2, 2, 2, 2\)"):
            read_image(volume(tmp_path / "x.nii", grid(2, 2, 2, 2, 2)))
        with pytest.raises(DataError, match="type complex64"):
            read_image(volume(tmp_path / "y.nii", grid(2, 2, 2, dtype="complex64")))

    def test_an_affine_without_direction_is_refused(self, tmp_path: Path):
        volume(tmp_path / "x.nii", grid(2, 2, 2))
        content = bytearray((tmp_path / "x.nii").read_bytes())
        content[296:312] = bytes(16)  # srow_y
        (tmp_path / "x.nii").write_bytes(content)
        with pytest.raises(DataError, match="affine leaves an axis without direction"):
            read_image(tmp_path / "x.nii")


class TestNonFinite:
    def test_replaced_by_the_mean_of_the_channel_and_counted(self, tmp_path: Path, caplog):
        array = np.arange(24, dtype="float32").reshape(2, 3, 2, 2)
        array[0, 0, 0] = (np.nan, 1000)
        array[1, 0, 0] = (np.inf, -np.inf)
        with caplog.at_level(logging.WARNING):
            read = read_image(volume(tmp_path / "x.nii", array))
        first = [array[i, j, k, 0] for i, j, k in np.ndindex(2, 3, 2)]
        mean = np.mean([value for value in first if np.isfinite(value)])
        assert read.array[0, 0, 0, 0] == read.array[0, 1, 0, 0] == pytest.approx(mean)
        assert read.measured is not None
        assert read.measured.shape == read.array.shape
        assert (~read.measured).sum() == 3
        assert "x.nii: 1 NaN, 1 +Inf and 1 -Inf voxels" in read.notes[0]
        assert "x.nii: 1 NaN, 1 +Inf and 1 -Inf voxels" in caplog.text

    def test_a_picture_is_treated_alike(self, tmp_path: Path):
        array = np.array([[np.nan, 1, 3]], "<f4")
        read = read_image(tiff(tmp_path / "x.tif", array, sample_format=3))
        assert read.array.tolist() == [[[2, 1, 3]]]

    @pytest.mark.parametrize(("channels", "count"), [("grey", 1), ("green", 1), ("rgb", 3)])
    def test_finite_has_the_shape_of_the_chosen_channels(self, tmp_path, channels, count):
        array = (
            np.ones((2, 2, 2, 3), "float32") * np.arange(2, dtype="float32")[:, None, None, None]
        )
        array[0, 0, 0, 1] = np.nan
        read = read_image(volume(tmp_path / "x.nii", array), channels)
        assert read.measured is not None
        assert read.measured.shape == read.array.shape
        assert read.array.shape[0] == count
        assert not read.measured[count // 2, 0, 0, 0]

    def test_an_image_without_a_finite_value_is_refused(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"x\.nii: the image holds no finite value"):
            read_image(volume(tmp_path / "x.nii", np.full((2, 2, 2), np.nan, "float32")))

    def test_values_beyond_float32_count_as_infinite(self, tmp_path: Path):
        array = np.array([[[1e300, 1.0], [3.0, -1e300]]])
        read = read_image(volume(tmp_path / "x.nii", array))
        assert read.array.tolist() == [[[2, 1], [3, 2]]]
        assert "0 NaN, 1 +Inf and 1 -Inf" in read.notes[-1]


class TestLabels:
    def test_palette_indices_are_the_labels(self, tmp_path: Path):
        indices = np.array([[0, 1, 2, 3]])
        path = paletted(tmp_path / "m.png", indices, (0, 0, 0), (128, 0, 0), (0, 128, 0), (9, 9, 9))
        label = read_label(path, classes=4)
        assert label.array.tolist() == [[0, 1, 2, 3]]
        assert label.array.dtype == np.uint8
        assert label.notes == ()

    @pytest.mark.parametrize("suffix", ["gif", "png"])
    @pytest.mark.parametrize("white", [0, 1])
    def test_a_black_and_white_palette_is_read_as_it_looks(self, tmp_path, suffix, white):
        colours = [(0, 0, 0), (0, 0, 0)]
        colours[white] = (255, 255, 255)
        path = paletted(tmp_path / f"m.{suffix}", np.array([[0, 0, 0, 1]]), *colours)
        label = read_label(path, classes=2)
        assert label.array.tolist() == ([[0, 0, 0, 1]] if white else [[1, 1, 1, 0]])
        assert "0 and 255 were read as classes 0 and 1" in label.notes[0]

    @pytest.mark.parametrize(("index", "label"), [(0, 1), (1, 0)])
    def test_an_empty_and_a_full_mask_with_white_first_are_read_as_they_look(
        self, tmp_path: Path, index: int, label: int
    ):
        indices = np.full((2, 2), index)
        path = paletted(tmp_path / "m.png", indices, (255, 255, 255), (0, 0, 0))
        assert np.unique(read_label(path, classes=2).array).tolist() == [label]

    def test_a_palette_of_two_colours_keeps_its_indices(self, tmp_path: Path):
        path = paletted(tmp_path / "m.png", np.array([[0, 1, 1]]), (255, 255, 255), (255, 0, 0))
        assert read_label(path, classes=2).array.tolist() == [[0, 1, 1]]

    def test_a_palette_without_colours_keeps_its_indices(self, tmp_path: Path):
        path = paletted(tmp_path / "m.png", np.array([[0, 1, 1]]), (0, 0, 0), (0, 0, 0))
        assert read_label(path, classes=2).array.tolist() == [[0, 1, 1]]

    def test_a_grey_palette_with_indices_0_and_255_is_two_valued(self, tmp_path: Path):
        greys = [(value, value, value) for value in range(256)]
        path = paletted(tmp_path / "m.png", np.array([[0, 255, 0]]), *greys)
        assert read_label(path, classes=2).array.tolist() == [[0, 1, 0]]

    @pytest.mark.parametrize("channels", [1, 2, 3, 4])
    def test_black_and_white_drawings_become_0_and_1(self, tmp_path: Path, channels: int):
        array = np.zeros((2, 3, channels), "uint8")
        array[0, 1:] = 255
        array[..., -1:] = array[..., -1:] if channels % 2 else 255
        label = read_label(picture(tmp_path / "m.png", array.squeeze()), classes=2)
        assert label.array.tolist() == [[0, 1, 1], [0, 0, 0]]
        assert "m.png: the mask's values 0 and 255" in label.notes[-1]

    @pytest.mark.parametrize(("value", "count"), [(0, 0), (255, 4)])
    def test_an_empty_or_a_full_mask_is_read_too(self, tmp_path: Path, value: int, count: int):
        path = picture(tmp_path / "m.png", np.full((2, 2), value, "uint8"))
        assert read_label(path, classes=2).array.sum() == count

    def test_white_of_sixteen_bits_and_of_a_volume_are_white(self, tmp_path: Path):
        path = picture(tmp_path / "m.png", np.array([[0, 65535]], "uint16"))
        assert read_label(path, classes=2).array.tolist() == [[0, 1]]
        path = volume(tmp_path / "m.nii", np.array([[[0, 255]]] * 2, "uint8"))
        assert read_label(path, classes=2).array.tolist() == [[0, 1]] * 2

    def test_white_is_no_class_where_there_are_three(self, tmp_path: Path):
        path = picture(tmp_path / "m.png", np.array([[0, 1, 255]], "uint8"))
        for classes in (2, 3):
            with pytest.raises(
                DataError, match=r"m\.png.*unexpected values.*255.*found: 0, 1, 255"
            ):
                read_label(path, classes=classes)
        label = read_label(path, classes=3, label_map={255: 2})
        assert label.array.tolist() == [[0, 1, 2]]

    def test_grey_of_four_bits_holds_its_stored_values(self, tmp_path: Path):
        rows = np.array([[0x01, 0x23]], "uint8")  # four pixels of four bits
        path = png(tmp_path / "m.png", rows, bits=4, colour=0, width=4)
        assert read_label(path, classes=4).array.tolist() == [[0, 1, 2, 3]]

    def test_colours_and_drawings_in_alpha_are_refused(self, tmp_path: Path):
        array = np.zeros((2, 2, 4), "uint8")
        array[0, 0, 0] = 255
        with pytest.raises(DataError, match=r"m\.png: the 3 channels of the label map differ"):
            read_label(picture(tmp_path / "m.png", array), classes=2)
        array[...] = 0
        array[0, 0, 3] = 255
        with pytest.raises(DataError, match="drawn in the alpha channel"):
            read_label(picture(tmp_path / "m.png", array), classes=2)

    def test_a_map_can_swap_labels(self, tmp_path: Path):
        path = picture(tmp_path / "m.png", np.array([[0, 1, 2]], "uint8"))
        assert read_label(path, classes=3, label_map={1: 2, 2: 1}).array.tolist() == [[0, 2, 1]]

    def test_the_error_names_file_values_and_remedy(self, tmp_path: Path):
        path = volume(tmp_path / "m.nii.gz", np.array([[[0, 1, 7, 9]]] * 2, "int16"))
        with pytest.raises(DataError) as caught:
            read_label(path, classes=3, label_map={7: 2})
        text = str(caught.value)
        assert "m.nii.gz" in text
        assert "unexpected values 9 (found: 0, 1, 7, 9; expected: 0, 1, 2)" in text
        assert "label_map" in text
        assert "{" not in text  # no class is proposed for what nobody may have annotated
        assert "set task.ignore: 9: nothing is then trained or scored" in text
        assert "JPEG" not in text

    def test_a_negative_label_is_refused(self, tmp_path: Path):
        path = volume(tmp_path / "m.nii", np.array([[[0, -1]]] * 2, "int16"))
        with pytest.raises(DataError, match="unexpected values -1"):
            read_label(path, classes=2)

    def test_a_jpeg_is_told_why(self, tmp_path: Path):
        noise = np.random.default_rng(0).integers(0, 2, (32, 32)).astype("uint8") * 255
        with pytest.raises(DataError, match="JPEG blurs labels") as caught:
            read_label(picture(tmp_path / "m.jpg", noise, quality=40), classes=2)
        assert "label_map" not in str(caught.value)

    @pytest.mark.parametrize(("value", "label"), [(1.9901, 2), (2.0099, 2), (-0.009, 0)])
    def test_almost_whole_numbers_are_rounded(self, tmp_path: Path, value: float, label: int):
        path = volume(tmp_path / "m.nii", np.full((2, 2, 2), value))
        assert np.unique(read_label(path, classes=3).array).tolist() == [label]

    @pytest.mark.parametrize(("value", "word"), [(1.5, "1.5"), (1.02, "1.02"), (np.nan, "NaN")])
    def test_other_fractions_are_refused(self, tmp_path: Path, value: float, word: str):
        array = np.zeros((2, 2, 2))
        array[1, 1, 1] = value
        with pytest.raises(DataError, match=rf"m\.nii: the label map holds {word}"):
            read_label(volume(tmp_path / "m.nii", array), classes=3)

    def test_many_classes_get_a_wider_type(self, tmp_path: Path):
        path = volume(tmp_path / "m.nii", np.array([[[0, 299]]] * 2, "int16"))
        label = read_label(path, classes=300)
        assert label.array.dtype == np.uint16
        assert label.array.max() == 299


BRATS = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}


class TestRegions:
    def test_classes_are_told_by_the_regions_that_hold_them(self, tmp_path: Path):
        labels = np.random.default_rng(0).integers(0, 4, (5, 4, 3))
        masks = np.stack([np.isin(labels, made_of) for made_of in BRATS.values()])
        found = classes_of_regions(masks, BRATS, tmp_path)
        np.testing.assert_array_equal(found, labels)

    def test_of_classes_in_the_same_regions_the_lowest_is_taken(self, tmp_path: Path):
        masks, regions = np.array([[True, True, False], [True, False, False]]), {"a": (3, 2, 1)}
        assert classes_of_regions(masks, {**regions, "b": (1,)}, tmp_path).tolist() == [1, 2, 0]

    def test_a_set_of_regions_that_no_class_has_is_refused(self, tmp_path: Path):
        masks = np.zeros((3, 2, 2), bool)
        masks[1:, 0, 1] = masks[0, 0, 0] = True
        words = r"m\.nii: 1 pixels lie .* first in TC and ET alone .*WT: 1, 2, 3; TC: 1, 3; ET: 3"
        with pytest.raises(DataError, match=words):
            classes_of_regions(masks, BRATS, tmp_path / "m.nii")

    def test_equal_channels_are_regions_too(self, tmp_path: Path):
        array = np.zeros((3, 4, 2, 3), "uint8")
        array[1, 2, 1] = 1  # inside all three
        path = volume(tmp_path / "m.nii", array)
        label = read_label(path, classes=4, regions=BRATS)
        assert np.argwhere(label.array).tolist() == [[1, 2, 1]]
        assert label.array.max() == 3
        assert label.notes == ("m.nii: its channels were taken as the regions WT, TC, ET",)
        assert read_label(path, classes=4).array.max() == 1

    def test_pictures_and_other_channels_are_label_maps(self, tmp_path: Path):
        grey = np.array([[0, 1, 0], [1, 1, 0]], "uint8")
        path = picture(tmp_path / "m.png", np.stack([grey] * 3, axis=-1))
        label = read_label(path, classes=4, regions=BRATS)
        np.testing.assert_array_equal(label.array, grey)
        array = np.repeat(grid(2, 3, 2, 1) % 4, 3, axis=3)
        label = read_label(volume(tmp_path / "m.nii", array), classes=4, regions=BRATS)
        np.testing.assert_array_equal(label.array, array[..., 0])
        two = volume(tmp_path / "two.nii", (array[..., :2] == [1, 0]).astype("uint8"))
        with pytest.raises(DataError, match=r"2 channels .* no masks of the regions WT, TC, ET:"):
            read_label(two, classes=4, regions=BRATS)


class TestFieldOfView:
    def test_not_zero_is_inside_in_any_channel(self, tmp_path: Path):
        array = np.zeros((2, 2, 3), "uint8")
        array[0, 1, 2] = 7
        mask = read_mask(picture(tmp_path / "f.png", array))
        assert mask.array.dtype == bool
        assert mask.array.tolist() == [[False, True], [False, False]]

    def test_a_gif_whose_first_colour_is_white_is_read_as_it_looks(self, tmp_path: Path):
        path = paletted(tmp_path / "f.gif", np.array([[0, 1, 1]]), (255, 255, 255), (0, 0, 0))
        assert read_mask(path).array.tolist() == [[True, False, False]]

    def test_a_volume_keeps_its_place(self, tmp_path: Path):
        array = np.array([[[0, np.nan, 0.5]] * 2] * 2)
        mask = read_mask(volume(tmp_path / "f.nii", array, np.diag([1.0, 2, 3, 1])))
        assert mask.array.tolist() == [[[False, False, True]] * 2] * 2
        assert mask.spacing == (1, 2, 3)

    def test_an_empty_one_is_refused(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"f\.png.*nothing is inside"):
            read_mask(picture(tmp_path / "f.png", np.zeros((2, 2), "uint8")))


class TestNormalise:
    def test_zscore_is_per_channel_with_the_population_deviation(self):
        array = np.stack([np.array([[1.0, 3]]), np.array([[10.0, 50]])])
        assert normalise(array, "zscore").tolist() == [[[-1, 1]], [[-1, 1]]]

    def test_zscore_inside_a_mask_normalises_all_by_the_inside(self):
        array = np.array([[[2.0, 4, 100]]])
        mask = np.array([[True, True, False]])
        assert normalise(array, "zscore", mask).tolist() == [[[-1, 1, 97]]]

    def test_statistics_leave_out_what_was_not_finite(self):
        array = np.array([[[2.0, 4, 100]]])
        finite = np.array([[[True, True, False]]])
        assert normalise(array, "zscore", None, finite)[0, 0, :2].tolist() == [-1, 1]
        assert normalise(array, "minmax", None, finite)[0, 0, :2].tolist() == [0, 1]

    def test_minmax_scale_and_none(self):
        array = np.array([[[-5.0, 0, 15]]])
        assert normalise(array, "minmax").tolist() == [[[0, 0.25, 1]]]
        assert normalise(array, "scale", full_scale=5).tolist() == [[[-1, 0, 3]]]
        assert normalise(array, "none").tolist() == array.tolist()
        assert normalise(array, "none").dtype == np.float32

    def test_scale_goes_by_the_bits_on_disk(self, tmp_path: Path):
        for dtype, full in (("uint8", 255), ("uint16", 65535)):
            path = picture(tmp_path / f"{dtype}.png", np.array([[0, full // 5, full]], dtype))
            read = read_image(path)
            scaled = normalise(read.array, "scale", full_scale=read.full_scale)
            assert scaled[0, 0] == pytest.approx([0, 0.2, 1])

    def test_scale_of_a_volume_is_refused_with_the_remedy(self):
        with pytest.raises(DataError, match=r"x\.nii: scale needs .* use zscore or minmax"):
            normalise(np.ones((1, 2, 2)), "scale", name="x.nii")

    @pytest.mark.parametrize("how", ["zscore", "minmax"])
    @pytest.mark.parametrize("value", [0, 37, 0.1])
    def test_a_constant_channel_becomes_zero_exactly(self, how: str, value: float):
        array = np.stack([np.full((50, 50), value), np.arange(2500.0).reshape(50, 50)])
        result = normalise(array.astype(np.float32), how)
        assert (result[0] == 0).all()
        assert result[1].max() > 0.9

    def test_a_large_offset_does_not_drown_a_small_contrast(self):
        array = np.tile(np.array([2**24 - 2, 2**24 - 1], np.float32), 5_000)[None]
        assert normalise(array, "zscore")[0, :2] == pytest.approx([-1, 1], abs=1e-6)

    def test_constant_inside_the_mask_only_becomes_zero_with_a_warning(self, caplog):
        array = np.array([[[5.0, 5, 9]]])
        with caplog.at_level(logging.WARNING):
            result = normalise(array, "zscore", np.array([[True, True, False]]), name="x.png")
        assert (result == 0).all()
        assert "x.png: constant inside the mask (constant value 5)" in caplog.text

    def test_no_voxel_to_count_and_unknown_words_are_refused(self):
        with pytest.raises(DataError, match=r"x\.png: no voxel to measure is in the field of view"):
            normalise(np.ones((1, 2, 2)), "zscore", np.zeros((2, 2), bool), name="x.png")
        with pytest.raises(ConfigError, match=r"image\.normalise: 'z'"):
            normalise(np.ones((1, 2, 2)), "z")

    def test_a_constant_image_is_named_when_it_is_read(self, tmp_path: Path, caplog):
        array = np.zeros((3, 3, 3), "uint8")
        array[..., 0] = grid(3, 3)
        with caplog.at_level(logging.WARNING):
            read = read_image(picture(tmp_path / "x.png", array))
        assert read.notes == tuple(
            f"x.png: channel {index} is constant (constant value 0)" for index in (1, 2)
        )
        assert "x.png: channel 1 is constant" in caplog.text


class TestDamage:
    @pytest.mark.parametrize("suffix", [*pictures.SUFFIXES, *nifti.SUFFIXES])
    @pytest.mark.parametrize("share", [0, 0.02, 0.5, 0.95])
    def test_a_file_cut_short_is_one_sentence_with_its_name(self, tmp_path, suffix, share):
        path = tmp_path / f"x{suffix}"
        noise = np.random.default_rng(0).integers(0, 200, (40, 40, 3)).astype("uint8")
        volume(path, noise) if ".nii" in suffix else picture(path, noise)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(DataError) as caught:
            read_image(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "copy it again" in str(caught.value)

    @pytest.mark.parametrize("suffix", [*pictures.SUFFIXES, *nifti.SUFFIXES])
    def test_text_with_an_image_s_name_is_refused(self, tmp_path: Path, suffix: str):
        path = tmp_path / f"x{suffix}"
        path.write_text("<html>404</html>" * 100)
        for read in (read_image, read_mask):
            with pytest.raises(DataError, match="cannot be read"):
                read(path)

    def test_a_file_that_is_not_there_and_an_unknown_kind(self, tmp_path: Path):
        for name in ("x.png", "x.nii.gz", "x.mha", "x.npy"):
            with pytest.raises(DataError, match=rf"{name}: is not there"):
                read_image(tmp_path / name)
        (tmp_path / "x.doc").write_text("letter")
        with pytest.raises(DataError, match=r"x\.doc: this kind .* \.png, .*\.nii\.gz"):
            read_image(tmp_path / "x.doc")

    def test_gzip_around_something_else_is_refused(self, tmp_path: Path):
        (tmp_path / "x.nii.gz").write_bytes(gzip.compress(b"no volume" * 100))
        with pytest.raises(DataError, match=r"x\.nii\.gz: cannot be read"):
            read_image(tmp_path / "x.nii.gz")

    def test_capital_extensions_and_a_png_called_jpg_are_read(self, tmp_path: Path):
        picture(tmp_path / "x.PNG", grid(3, 3), format="PNG")
        picture(tmp_path / "x.jpg", grid(3, 3), format="PNG")
        for name in ("x.PNG", "x.jpg"):
            assert (read_image(tmp_path / name).array == grid(3, 3)).all()
