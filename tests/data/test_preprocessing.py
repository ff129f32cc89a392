"""From files to arrays: checks of geometry, resizing and normalising."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image

from collegium.data.preprocessing import (
    CaseArrays,
    decode_case,
    preprocess,
    resize,
    slice_axis,
    thick_axis,
)
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case
from collegium.errors import ConfigError, DataError

TASK = TaskConfig()


def volume(path: Path, values: np.ndarray, affine: np.ndarray) -> Path:
    nib.save(nib.Nifti1Image(values, affine), path)
    return path


def volume_case(folder: Path, *, label_shape=(6, 5, 4), shift=0.0) -> Case:
    rng = np.random.default_rng(0)
    affine = np.diag([2.0, 1.0, 3.0, 1.0])
    moved = affine.copy()
    moved[0, 3] = shift
    image = volume(folder / "i.nii.gz", rng.normal(size=(6, 5, 4)).astype(np.float32), affine)
    label = volume(folder / "l.nii.gz", rng.integers(0, 2, label_shape).astype(np.uint8), moved)
    return Case("C", "Case12", "p", (image,), label)


def picture_case(folder: Path, pixels: np.ndarray, inside: np.ndarray | None = None) -> Case:
    Image.fromarray(pixels).save(folder / "i.png")
    Image.fromarray(np.zeros(pixels.shape[:2], np.uint8)).save(folder / "l.png")
    if inside is not None:
        Image.fromarray((inside * 255).astype(np.uint8)).save(folder / "f.png")
    fov = None if inside is None else folder / "f.png"
    return Case("C", "Case12", "p", (folder / "i.png",), folder / "l.png", fov)


def arrays_of(case: Case, config: ImageConfig) -> tuple[CaseArrays, tuple[float, ...] | None]:
    made = preprocess(case, config, TASK)
    return made.arrays, made.spacing


def test_a_mask_of_another_shape_is_refused_with_both_shapes(tmp_path):
    with pytest.raises(
        DataError,
        match=r"site C, case Case12: mask shape \(6, 5, 3\) differs from image \(6, 5, 4\): .*l\.",
    ):
        decode_case(volume_case(tmp_path, label_shape=(6, 5, 3)), ImageConfig(), TASK)


def test_a_field_of_view_of_another_shape_is_refused(tmp_path):
    case = picture_case(tmp_path, np.arange(12, dtype=np.uint8).reshape(3, 4))
    Image.fromarray(np.full((4, 4), 255, np.uint8)).save(tmp_path / "f.png")
    with pytest.raises(
        DataError, match=r"field of view shape \(4, 4\) differs from image \(3, 4\)"
    ):
        decode_case(replace(case, fov=tmp_path / "f.png"), ImageConfig(), TASK)


def test_a_mask_elsewhere_in_the_world_is_refused_with_origins_and_distance(tmp_path):
    with pytest.raises(DataError, match=r"mask lies up to 5.0 mm .*\(0.0, 0.0, 0.0\) and \(5.0, 0"):
        decode_case(volume_case(tmp_path, shift=5.0), ImageConfig(), TASK)


def test_rounding_in_a_header_is_accepted(tmp_path):
    raw = decode_case(volume_case(tmp_path, shift=0.005), ImageConfig(), TASK)
    assert raw.spacing == (2.0, 1.0, 3.0)


def test_an_unreadable_file_names_its_site_and_case(tmp_path):
    case = picture_case(tmp_path, np.arange(12, dtype=np.uint8).reshape(3, 4))
    (tmp_path / "i.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"site C, case Case12: .*i.png"):
        decode_case(case, ImageConfig(), TASK)


def test_several_files_become_the_channels_of_one_image(tmp_path):
    first = volume_case(tmp_path)
    (tmp_path / "b").mkdir()
    both = replace(first, images=(*first.images, *volume_case(tmp_path / "b").images))
    raw = decode_case(both, ImageConfig(), TASK)
    assert raw.arrays.image.shape == (2, 6, 5, 4)


def test_spacing_grows_as_the_array_shrinks(tmp_path):
    arrays, spacing = arrays_of(volume_case(tmp_path), ImageConfig(size=(3, 5, 8)))
    assert arrays.image.shape == (1, 3, 5, 8)
    assert spacing == (4.0, 1.0, 1.5)


@pytest.mark.parametrize(("size", "shape"), [(8, (6, 8)), ((4, 4), (4, 4)), (None, (30, 40))])
def test_one_number_sets_the_longest_side_and_several_the_exact_size(tmp_path, size, shape):
    pixels = np.arange(1200).reshape(30, 40).astype(np.uint8)
    arrays, _ = arrays_of(picture_case(tmp_path, pixels), ImageConfig(size=size))
    assert arrays.image.shape == (1, *shape)
    assert arrays.label is not None
    assert arrays.label.shape == shape


def test_two_numbers_resize_the_slices_of_a_volume_and_keep_their_number(tmp_path):
    arrays, spacing = arrays_of(volume_case(tmp_path), ImageConfig(size=(3, 10)))
    assert arrays.shape == (3, 10, 4)
    assert arrays.label is not None
    assert arrays.label.shape == (3, 10, 4)
    assert spacing == (4.0, 0.5, 3.0)


def test_a_size_that_does_not_fit_the_image_is_refused(tmp_path):
    case = picture_case(tmp_path, np.arange(12, dtype=np.uint8).reshape(3, 4))
    with pytest.raises(ConfigError, match=r"image.size has 3 numbers, but site C, case Case12"):
        preprocess(case, ImageConfig(size=(2, 2, 2)), TASK)


@pytest.mark.parametrize("shape", [(3, 4), (13, 16), (9, 8)])
def test_labels_are_resized_as_pillow_takes_the_nearest(shape):
    label = np.random.default_rng(1).integers(0, 4, (9, 8)).astype(np.uint8)
    got = resize(CaseArrays(label[None].astype(np.float32), label, label > 1), shape)
    nearest = Image.fromarray(label).resize(shape[::-1], Image.Resampling.NEAREST)
    np.testing.assert_array_equal(got.label, np.asarray(nearest))
    np.testing.assert_array_equal(got.mask, np.asarray(nearest) > 1)


def test_a_shrunk_picture_is_smoothed_as_pillow_does():
    image = np.random.default_rng(2).random((1, 40, 60)).astype(np.float32)
    got = resize(CaseArrays(image, image[0], None), (10, 20)).image[0]
    expected = Image.fromarray(image[0]).resize((20, 10), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(got, np.asarray(expected), atol=1e-5)


def test_a_volume_is_halved_by_the_mean_of_its_eight_neighbours():
    image = np.random.default_rng(3).random((2, 4, 6, 8)).astype(np.float32)
    got = resize(CaseArrays(image, image[0], None), (2, 3, 4)).image
    expected = image.reshape(2, 2, 2, 3, 2, 4, 2).mean(axis=(2, 4, 6))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_slices_are_resized_one_by_one():
    image = np.random.default_rng(4).random((2, 8, 8, 3)).astype(np.float32)
    got = resize(CaseArrays(image, image[0], None), (4, 4, 3)).image
    for index in range(3):
        alone = resize(CaseArrays(image[..., index], image[0, ..., index], None), (4, 4)).image
        np.testing.assert_allclose(got[..., index], alone, rtol=1e-6)


def test_zscore_counts_inside_the_field_of_view_only(tmp_path):
    pixels = np.random.default_rng(5).integers(0, 255, (6, 6)).astype(np.uint8)
    inside = np.zeros((6, 6), bool)
    inside[:, :3] = True
    arrays, spacing = arrays_of(picture_case(tmp_path, pixels, inside), ImageConfig())
    seen = pixels[:, :3].astype(np.float64)
    np.testing.assert_allclose(arrays.image[0], (pixels - seen.mean()) / seen.std(), rtol=1e-5)
    np.testing.assert_array_equal(arrays.mask, inside)
    assert spacing is None


def test_what_nobody_annotated_leaves_the_field_of_view_but_not_the_statistics(tmp_path):
    pixels = np.random.default_rng(5).integers(0, 255, (6, 6)).astype(np.uint8)
    inside = np.zeros((6, 6), bool)
    inside[:, :3] = True
    case = picture_case(tmp_path, pixels, inside)
    label = np.zeros((6, 6), np.uint8)
    label[0], label[3:] = 1, 255
    Image.fromarray(label).save(tmp_path / "l.png")
    task = TaskConfig(ignore=255)
    made = preprocess(case, ImageConfig(), task).arrays
    seen = pixels[:, :3].astype(np.float64)
    np.testing.assert_allclose(made.image[0], (pixels - seen.mean()) / seen.std(), rtol=1e-5)
    np.testing.assert_array_equal(made.mask, inside & (label != 255))
    np.testing.assert_array_equal(made.label, label == 1)
    small = preprocess(case, ImageConfig(size=(3, 3)), task).arrays
    assert small.mask is not None
    assert small.mask.tolist() == [[True, False, False], [False] * 3, [False] * 3]
    Image.fromarray(np.where(inside, 255, label).astype(np.uint8)).save(tmp_path / "l.png")
    with pytest.raises(DataError, match=r"Case12: .*l\.png holds no annotated pixel in its field"):
        decode_case(case, ImageConfig(), task)


def test_what_nobody_annotated_moves_with_the_axes_of_a_volume(tmp_path):
    case = volume_case(tmp_path)
    label = np.zeros((6, 5, 4), np.uint8)
    label[1:3, 0, 3], label[4] = 1, 9
    assert case.label is not None
    volume(case.label, label, np.diag([2.0, 1.0, 3.0, 1.0]))
    made = preprocess(case, ImageConfig(slices_along="x"), TaskConfig(ignore=9)).arrays
    np.testing.assert_array_equal(made.mask, np.moveaxis(label != 9, 0, -1))
    np.testing.assert_array_equal(made.label, np.moveaxis(label == 1, 0, -1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ignore": 1}, "task.ignore is 1, which is the class foreground: map the value of what"),
        ({"name": "classification", "ignore": 255}, "task.ignore is a value of masks"),
        ({"classes": ("background", "Ignore")}, "task.classes names ignore"),
    ],
)
def test_a_value_to_ignore_that_is_a_class_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TaskConfig(**change)


def test_scale_divides_by_the_range_of_the_files_type(tmp_path):
    pixels = np.array([[0, 51], [102, 255]], np.uint8)
    arrays, _ = arrays_of(picture_case(tmp_path, pixels), ImageConfig(normalise="scale"))
    np.testing.assert_allclose(arrays.image[0], [[0, 0.2], [0.4, 1]], rtol=1e-6)


def colours(seed: int, bits: int = 8) -> np.ndarray:
    """A colourful picture under yellow light."""
    pixels = np.random.default_rng(seed).uniform(0, 2**bits - 1, (12, 9, 3))
    return (pixels * [0.9, 0.8, 0.4]).astype(np.uint8 if bits == 8 else np.uint16)


@pytest.mark.parametrize("norm", [1, 6, 2.5])
def test_colours_are_those_under_white_light_by_shades_of_grey(tmp_path, norm):
    """Against the norms of numpy, with FLamby's order of operations and its cut at 255."""
    pixels = colours(0)
    pixels[0, 0, 2] = 255  # and one pixel that becomes too bright
    config = ImageConfig(channels="rgb", colour_constancy=norm, normalise="none")
    found = arrays_of(picture_case(tmp_path, pixels), config)[0].image
    light = np.array([np.linalg.norm(pixels[..., c].ravel().astype(float), norm) for c in range(3)])
    light /= np.linalg.norm(light)
    expected = np.minimum(pixels / (light * np.sqrt(3)), 255)
    np.testing.assert_allclose(found, np.moveaxis(expected, -1, 0), rtol=1e-5)
    assert (expected == 255).any()


def test_a_grey_picture_keeps_its_colours_and_a_channel_of_zeros_stays(tmp_path):
    config = ImageConfig(channels="rgb", colour_constancy=6, normalise="none")
    grey = colours(1)[..., 0]
    found = arrays_of(picture_case(tmp_path, grey), config)[0].image
    np.testing.assert_allclose(found, np.stack([grey] * 3), rtol=1e-6)
    pixels = colours(2) * np.array([1, 0, 1], np.uint8)
    found = arrays_of(picture_case(tmp_path, pixels), config)[0].image
    assert (found[1] == 0).all()
    assert np.isfinite(found).all()


def test_the_colour_of_light_cancels_out_before_intensities_are_scaled(tmp_path):
    """Of two pictures of one scene under two lights the corrected colours are proportional."""
    scene = np.random.default_rng(3).integers(1, 50, (8, 8, 3))
    made = []
    for gains in ([1, 1, 1], [2, 3, 1]):
        case = picture_case(tmp_path, (scene * gains).astype(np.uint8))
        made.append(arrays_of(case, ImageConfig(channels="rgb", colour_constancy=6))[0].image)
    np.testing.assert_allclose(made[0], made[1], atol=1e-4)


def test_colour_constancy_needs_a_picture_in_colour(tmp_path):
    with pytest.raises(
        DataError, match=r"i\.png: image\.colour_constancy needs a picture in colour"
    ):
        arrays_of(picture_case(tmp_path, colours(4)[..., 0]), ImageConfig(colour_constancy=6))
    with pytest.raises(DataError, match="needs a picture in colour, of 8 or 16 bits"):
        arrays_of(volume_case(tmp_path), ImageConfig(colour_constancy=6))


def test_the_shortest_side_may_be_set_instead_of_the_longest(tmp_path):
    case = picture_case(tmp_path, np.zeros((30, 41), np.uint8))
    config = ImageConfig(size=20, side="shortest", normalise="none")
    assert arrays_of(case, config)[0].shape == (20, 27)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"channels": "green", "colour_constancy": 6},
            "image.colour_constancy needs colours, and image.channels is green",
        ),
        (
            {"channels": "hsv"},
            "ImageConfig.channels: should be 'keep', 'grey', 'rgb' or 'green', not 'hsv'",
        ),
        (
            {"normalise": "max"},
            "ImageConfig.normalise: should be 'zscore', .*, not 'max'; did you mean 'minmax'",
        ),
        ({"size": 0}, "ImageConfig.size: should be at least 1, not 0"),
        ({"size": (4, 0)}, r"ImageConfig.size: each should be at least 1, not \(4, 0\)"),
    ],
)
def test_an_impossible_recipe_is_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        ImageConfig(**change)


def test_an_impossible_task_is_refused():
    with pytest.raises(ConfigError, match=r"TaskConfig\.name: should be 'segmentation' or"):
        TaskConfig("detection")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names 1 classes"):
        TaskConfig(classes=("vessel",))


def test_arrays_are_indexed_from_their_last_axes():
    label = torch.arange(24).reshape(2, 3, 4).numpy()
    picked = CaseArrays(label[None], label, None).at([1])
    np.testing.assert_array_equal(picked.label, label[:, :, 1])
    assert picked.image.shape == (1, 2, 3)


def test_a_spacing_resamples_to_the_nearest_whole_number_of_voxels(tmp_path: Path) -> None:
    # 6 x 5 x 4 voxels of 2 x 1 x 3 mm: 12 x 5 x 12 mm
    case = volume_case(tmp_path)
    arrays, spacing = arrays_of(case, ImageConfig(spacing=(1.0, 2.0, 4.0)))
    assert arrays.shape == (12, 2, 3)
    assert spacing == (1.0, 2.5, 4.0)
    arrays, spacing = arrays_of(case, ImageConfig(spacing=(4.0, 0.5)))
    assert arrays.shape == (3, 10, 4)  # the third axis stays
    assert spacing == (4.0, 0.5, 3.0)


def test_a_spacing_needs_files_that_say_theirs(tmp_path: Path) -> None:
    case = picture_case(tmp_path, np.arange(12, dtype=np.uint8).reshape(3, 4))
    with pytest.raises(DataError, match="site C, case Case12: its file does not state its spacing"):
        preprocess(case, ImageConfig(spacing=(1.0, 1.0)), TASK)


def test_clip_cuts_intensities_off_before_they_are_scaled(tmp_path: Path) -> None:
    pixels = np.array([[0, 50, 100], [150, 200, 250]], np.uint8)
    config = ImageConfig(clip=(50, 150), normalise="minmax")
    arrays, _ = arrays_of(picture_case(tmp_path, pixels), config)
    np.testing.assert_allclose(arrays.image[0], np.array([[0, 0, 0.5], [1, 1, 1]]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spacing": (1.0,)}, r"image\.spacing is \(1\.0,\)"),
        ({"spacing": (1.0, 0.0)}, r"ImageConfig\.spacing: each should be above 0, not \(1\.0, 0"),
        ({"spacing": (1.0, 1.0), "size": 4}, "image.spacing and image.size both say how large"),
        ({"clip": (3.0, 3.0)}, r"image\.clip is \(3\.0, 3\.0\)"),
        ({"inputs": 0}, r"ImageConfig\.inputs: should be at least 1, not 0"),
    ],
)
def test_an_impossible_geometry_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ImageConfig(**change)


def test_channels_that_a_site_lacks_are_zero_where_the_network_expects_them(tmp_path: Path) -> None:
    pixels = np.random.default_rng(6).integers(0, 255, (6, 6, 3)).astype(np.uint8)
    case = replace(picture_case(tmp_path, pixels), channels=(3, 0, 2))
    arrays, _ = arrays_of(case, ImageConfig(inputs=4, normalise="none"))
    expected = np.stack([pixels[..., 1], 0 * pixels[..., 0], pixels[..., 2], pixels[..., 0]])
    np.testing.assert_array_equal(arrays.image, expected)
    with pytest.raises(DataError, match=r"has 3 channels .* and channels of the site says 2"):
        preprocess(replace(case, channels=(0, 1)), ImageConfig(inputs=4), TASK)
    for inputs in (None, 3):
        with pytest.raises(ConfigError, match=r"site C has the channels 3, 0, 2, and image.inputs"):
            preprocess(case, ImageConfig(inputs=inputs), TASK)


def test_regions_are_the_channels_of_the_network(tmp_path: Path) -> None:
    names = ("background", "a", "b")
    assert TaskConfig(classes=names).channels == 3
    assert TaskConfig(classes=names, regions={"all": (1, 2)}).channels == 1
    for wrong in ((), (0, 1), (3,)):
        with pytest.raises(ConfigError, match=r"task\.regions\.x should list classes from 1 to 2"):
            TaskConfig(classes=names, regions={"x": wrong})


BRATS = TaskConfig(
    classes=("background", "necrosis", "edema", "enhancing"),
    regions={"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)},
)


def regions_case(folder: Path, suffix: str, masks: np.ndarray) -> Case:
    """A case whose label has a channel (x, y, z, region) for each region, stored as LAS."""
    affine = np.diag([-2.0, 1.0, 3.0, 1.0])
    image = volume(folder / "i.nii.gz", np.zeros(masks.shape[:3], np.int16), affine)
    label = folder / f"l{suffix}"
    if suffix == ".nii.gz":
        volume(label, masks.astype(np.uint8), affine)
    elif suffix == ".nrrd":
        sitk: Any = pytest.importorskip("SimpleITK")
        vectors = sitk.GetImageFromArray(masks.transpose(2, 1, 0, 3).astype(np.uint8), True)
        vectors.SetSpacing((2.0, 1.0, 3.0))
        vectors.SetDirection((1.0, 0, 0, 0, -1.0, 0, 0, 0, 1.0))
        sitk.WriteImage(vectors, str(label))
    else:
        np.save(label, masks[::-1].transpose(2, 0, 1, 3))  # it is taken as RAS
    return Case("C", "Case12", "p", (image,), label)


@pytest.mark.parametrize("suffix", [".nii.gz", ".nrrd", ".npy"])
def test_channels_of_regions_are_the_same_label_as_a_label_map(tmp_path: Path, suffix: str) -> None:
    truth = np.random.default_rng(0).integers(0, 4, (6, 5, 4)).astype(np.uint8)
    assert BRATS.regions is not None
    masks = np.stack([np.isin(truth, made_of) for made_of in BRATS.regions.values()], axis=-1)
    case = regions_case(tmp_path, suffix, masks)
    plain = volume(tmp_path / "plain.nii", truth, np.diag([-2.0, 1.0, 3.0, 1.0]))
    expected = decode_case(replace(case, label=plain), ImageConfig(), BRATS).arrays.label
    found = decode_case(case, ImageConfig(), BRATS).arrays.label
    assert found is not None
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found, truth[::-1])
    with pytest.raises(DataError, match=r"C, case Case12: .* 3 channels of the label map differ"):
        decode_case(case, ImageConfig(), replace(BRATS, regions=None))


def test_regions_without_a_class_name_file_case_and_regions(tmp_path: Path) -> None:
    masks = np.zeros((6, 5, 4, 3), bool)
    masks[1, 2, 3, 2] = True
    with pytest.raises(
        DataError, match=r"C, case Case12: .*l\.nii\.gz: 1 pixels .* in ET alone \(task\.regions"
    ):
        decode_case(regions_case(tmp_path, ".nii.gz", masks), ImageConfig(), BRATS)


def test_a_class_is_found_by_its_name_or_by_its_coding() -> None:
    task = TaskConfig("classification", ("healthy", "ill"), coding={"0": "healthy", "2": "ill"})
    assert [task.class_of(word, "here") for word in ("ill", "2", "0", "healthy")] == [1, 1, 0, 0]
    assert task.class_of("2.0", "here") == task.class_of("2", "here")
    with pytest.raises(DataError, match=r"^here has no class: fill it in or leave the case out$"):
        task.class_of("", "here")
    with pytest.raises(DataError, match="here: the class '1' is unknown: write one of healthy, il"):
        task.class_of("1", "here")
    with pytest.raises(ConfigError, match=r"task\.coding names 'sick'"):
        TaskConfig("classification", ("healthy", "ill"), coding={"2": "sick"})
    with pytest.raises(ConfigError, match="for segmentations: leave both"):
        TaskConfig("classification", ("healthy", "ill"), label_map={2: 1})


def test_a_case_without_a_label_gets_zeros_in_a_segmentation_only(tmp_path: Path) -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4)
    case = replace(picture_case(tmp_path, pixels), label=None)
    label = decode_case(case, ImageConfig(), TASK).arrays.label
    assert label is not None
    assert label.shape == (3, 4)
    assert not label.any()
    assert decode_case(case, ImageConfig(), TaskConfig("classification")).arrays.label is None


def test_channels_in_another_order_are_put_into_that_of_the_network(tmp_path: Path) -> None:
    pixels = np.random.default_rng(8).integers(0, 255, (6, 6, 3)).astype(np.uint8)
    case = replace(picture_case(tmp_path, pixels), channels=(1, 2, 0))
    arrays, _ = arrays_of(case, ImageConfig(inputs=3, normalise="none"))
    np.testing.assert_array_equal(arrays.image, pixels.transpose(2, 0, 1)[[2, 0, 1]])


@pytest.mark.parametrize(
    ("along", "axis", "spacing"),
    [
        ("z", 2, (2.0, 1.5, 2.5)),
        ("y", 1, (2.0, 2.5, 1.5)),
        ("x", 0, (1.5, 2.5, 2.0)),
        ("acquisition", 0, (1.5, 2.5, 2.0)),
    ],
)
def test_slices_are_taken_along_an_axis_of_the_patient(
    tmp_path: Path, along: Any, axis: int, spacing: tuple[float, ...]
) -> None:
    """Stored as (superior, anterior, left), so that the third axis on disk is x."""
    affine = np.array([[0, 0, -2.0, 9], [0, 1.5, 0, 0], [2.5, 0, 0, 0], [0, 0, 0, 1]])
    rng = np.random.default_rng(3)
    values = rng.normal(size=(4, 5, 6)).astype(np.float32)
    label = rng.integers(0, 2, (4, 5, 6)).astype(np.uint8)
    case = Case("C", "1", "p", (volume(tmp_path / "i.nii", values, affine),),
                volume(tmp_path / "l.nii", label, affine))  # fmt: skip
    made = preprocess(case, ImageConfig(slices_along=along, normalise="none"), TASK)
    assert made.arrays.label is not None
    assert (made.slice_axis, made.spacing) == (axis, spacing)
    for found, stored in ((made.arrays.image[0], values), (made.arrays.label, label)):
        ras = nib.as_closest_canonical(nib.Nifti1Image(stored, affine)).get_fdata()
        for place in range(ras.shape[axis]):
            np.testing.assert_array_equal(found[..., place], np.take(ras, place, axis))


def test_sizes_and_spacings_count_the_axes_of_the_slices_first(tmp_path: Path) -> None:
    case = volume_case(tmp_path)  # 6 x 5 x 4 voxels of 2 x 1 x 3 mm
    made = preprocess(case, ImageConfig(slices_along="x", size=(10, 8)), TASK)
    assert (made.arrays.shape, made.spacing) == ((10, 8, 6), (0.5, 1.5, 2.0))
    made = preprocess(case, ImageConfig(slices_along="y", spacing=(1.0, 1.0)), TASK)
    assert (made.arrays.shape, made.spacing) == ((12, 12, 5), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("spacing", "stored", "axis"),
    [
        ((0.5, 0.5, 3.0), "LPS", 2),
        ((3.3, 0.6, 0.6), "RAS", 0),  # a sagittal volume that was turned
        ((0.6, 3.3, 0.6), "LPS", 1),
        ((0.98, 0.98, 0.5), "LPS", 2),  # thin slices: longer along two axes is not thick
        ((1.0, 1.0, 1.0), "PIR", 0),
        ((1.0, 1.4, 1.0), "RSA", 1),
        ((1.0, 1.0, 1.0), "RAI", 2),
        (None, None, 2),
    ],
)
def test_slices_are_as_acquired_by_thickness_and_by_the_third_axis_on_disk(
    spacing: tuple[float, ...] | None, stored: str | None, axis: int
) -> None:
    assert slice_axis("acquisition", spacing, stored) == axis
    assert [slice_axis(along, spacing, stored) for along in "xyz"] == [0, 1, 2]


def test_voxels_are_thick_along_one_axis_or_none() -> None:
    assert thick_axis((1.0, 1.5, 1.0)) == 1
    assert thick_axis((1.0, 1.49, 1.0)) is None
    assert thick_axis((2.0, 2.0, 1.0)) is None
    assert thick_axis((1.0, 4.0)) is None
    with pytest.raises(ConfigError, match=r"slices_along: should be 'x', 'y', 'z' or 'acq"):
        ImageConfig(slices_along="w")  # type: ignore[arg-type]
