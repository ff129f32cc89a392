"""Turning, zooming and holes, against numpy and scipy."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

from collegium.core.randomness import generator
from collegium.data.augmentation import cut_out, deform
from collegium.data.preprocessing import CaseArrays


def picture(*shape: int) -> NDArray[np.float32]:
    """Noise of two channels."""
    return np.random.default_rng(3).normal(size=(2, *shape)).astype(np.float32)


@pytest.mark.parametrize("shape", [(9, 9), (8, 13), (2, 3), (7, 1), (6, 8, 3)])
def test_turning_by_nothing_changes_nothing(shape: tuple[int, ...]) -> None:
    image, label = picture(*shape), np.arange(np.prod(shape)).reshape(shape).astype(np.uint8)
    found = deform(CaseArrays(image, label, label % 2), 0.0)
    np.testing.assert_allclose(found.image, image, atol=1e-5)
    assert found.label is not None
    np.testing.assert_array_equal(found.label, label)
    assert found.label.dtype == np.uint8


@pytest.mark.parametrize("shape", [(9, 9), (8, 13), (2, 3)])
@pytest.mark.parametrize("degrees", [30.0, -50.0, 137.0])
def test_an_angle_is_that_of_scipy_mirrored_at_the_border(
    shape: tuple[int, ...], degrees: float
) -> None:
    image = picture(*shape)
    found = deform(CaseArrays(image, None, None), degrees)
    expected = ndimage.rotate(
        image.astype(float), degrees, axes=(2, 1), reshape=False, order=1, mode="mirror"
    )
    np.testing.assert_allclose(found.image, expected, atol=1e-5)
    assert (found.label, found.mask) == (None, None)


def test_a_right_angle_is_a_quarter_turn_of_image_label_and_mask() -> None:
    image, label = picture(7, 7), np.arange(49, dtype=np.uint8).reshape(7, 7)
    found = deform(CaseArrays(image, label, label % 3 == 0), 90.0)
    np.testing.assert_allclose(found.image, np.rot90(image, 1, (1, 2)), atol=1e-5)
    for values, expected in ((found.label, label), (found.mask, label % 3 == 0)):
        assert values is not None
        np.testing.assert_array_equal(values, np.rot90(expected))
        assert values.dtype == expected.dtype


def test_a_volume_is_turned_slice_by_slice() -> None:
    image, label = picture(8, 9, 3), np.arange(216, dtype=np.uint8).reshape(8, 9, 3)
    found = deform(CaseArrays(image, label, None), 25.0, zoom=1.3)
    assert found.label is not None
    for z in range(3):
        alone = deform(CaseArrays(image[..., z], label[..., z], None), 25.0, zoom=1.3)
        np.testing.assert_array_equal(found.image[..., z], alone.image)
        np.testing.assert_array_equal(found.label[..., z], alone.label)


@pytest.mark.parametrize("zoom", [0.8, 1.25])
def test_zoom_is_about_the_middle_with_angle_as_an_affine_map_of_scipy(zoom: float) -> None:
    image, angle = picture(10, 7), np.deg2rad(20.0)
    found = deform(CaseArrays(image, None, None), 20.0, zoom=zoom).image
    back = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]) / zoom
    middle = np.array([4.5, 3.0])
    for channel, plane in zip(found, image, strict=True):
        expected = ndimage.affine_transform(
            plane.astype(float), back, middle - back @ middle, order=1, mode="mirror"
        )
        np.testing.assert_allclose(channel, expected, atol=1e-5)


@pytest.mark.parametrize("shear", [(20.0, 0.0), (0.0, -15.0), (12.0, 30.0)])
def test_shear_comes_before_angle_and_zoom_as_an_affine_map_of_scipy(
    shear: tuple[float, float],
) -> None:
    image, angle, zoom = picture(10, 7), np.deg2rad(20.0), 1.25
    found = deform(CaseArrays(image, None, None), 20.0, zoom=zoom, shear=shear).image
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]) / zoom
    lean = np.array([[1, np.tan(np.deg2rad(shear[0]))], [np.tan(np.deg2rad(shear[1])), 1]])
    back, middle = lean @ turn, np.array([4.5, 3.0])
    for channel, plane in zip(found, image, strict=True):
        expected = ndimage.affine_transform(
            plane.astype(float), back, middle - back @ middle, order=1, mode="mirror"
        )
        np.testing.assert_allclose(channel, expected, atol=1e-5)


@pytest.mark.parametrize(("shape", "sides"), [((20, 12), (4, 4)), ((9, 8, 3), (4, 4, 3))])
def test_holes_are_squares_inside_the_image_as_many_as_asked(
    shape: tuple[int, ...], sides: tuple[int, ...]
) -> None:
    seen: set[Any] = set()
    for seed in range(200):
        image = cut_out(torch.ones(1, 2, *shape), 1, 4, generator(seed, "holes"))
        assert torch.equal(image[0, 0], image[0, 1])
        zeros = (image[0, 0] == 0).nonzero()
        extent = zeros.amax(0) - zeros.amin(0) + 1
        assert tuple(extent.tolist()) == sides
        assert len(zeros) == np.prod(sides)
        seen.add(tuple(zeros[0].tolist()))
    places = [size - side + 1 for size, side in zip(shape, sides, strict=True)]
    for axis, count in enumerate(places):
        assert {corner[axis] for corner in seen} == set(range(count))


def test_every_number_of_holes_is_equally_likely() -> None:
    found = [
        int((cut_out(torch.ones(1, 1, 900, 900), 3, 1, generator(seed, "n")) == 0).sum())
        for seed in range(90)
    ]
    _, counts = np.unique(found, return_counts=True)
    assert len(counts) == 3
    assert ((counts - 30) ** 2 / 30).sum() < 13.8  # the 99.9 % quantile for 2 degrees of freedom
