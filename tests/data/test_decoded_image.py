"""Turning volumes to RAS+ and back, checked by where each voxel lies in the world."""

from itertools import permutations, product

import numpy as np
import pytest
from PIL import Image

from collegium.data.decoded_image import Array, from_ras, listed, resize_nearest, to_ras
from collegium.errors import DataError

SHAPE = (4, 3, 5)
ORDERS = [
    (order, signs) for order in permutations(range(3)) for signs in product((1, -1), repeat=3)
]


def affine_of(order: tuple[int, ...], signs: tuple[int, ...], tilt: float = 0.15) -> Array:
    """From indices, whose axis i goes along `signs[i]` times world axis `order[i]`, to mm."""
    cos, sin = np.cos(tilt), np.sin(tilt)
    turn = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    turn = turn @ np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    steps = np.zeros((3, 3))
    for axis, (world, sign, length) in enumerate(zip(order, signs, (0.7, 1.5, 3.0), strict=True)):
        steps[world, axis] = sign * length
    affine = np.eye(4)
    affine[:3, :3] = turn @ steps
    affine[:3, 3] = (10.0, -20.0, 5.5)
    return affine


def points(affine: Array, shape: tuple[int, ...]) -> Array:
    """Where each voxel lies, (3, *shape)."""
    indices = np.stack([*np.indices(shape), np.ones(shape)])
    return np.asarray(np.einsum("ij,jxyz->ixyz", affine, indices)[:3])


def test_there_are_48_orders() -> None:
    assert len(ORDERS) == 48


@pytest.mark.parametrize(("order", "signs"), ORDERS)
def test_every_voxel_keeps_its_place_in_the_world(
    order: tuple[int, ...], signs: tuple[int, ...]
) -> None:
    affine = affine_of(order, signs)
    decoded = to_ras(points(affine, SHAPE), affine, "x.nii")
    assert decoded.affine is not None
    there = points(decoded.affine, decoded.array.shape[1:])
    np.testing.assert_allclose(decoded.array, there, atol=1e-9)
    for axis in range(3):  # the first axis goes to the right, the second to the front, the third up
        assert (np.diff(decoded.array[axis], axis=axis) > 0).all()
    lengths = {world: (0.7, 1.5, 3.0)[axis] for axis, world in enumerate(order)}
    assert decoded.spacing == pytest.approx([lengths[axis] for axis in range(3)])
    letters = ("LR", "PA", "IS")
    stored = "".join(letters[w][s > 0] for w, s in zip(order, signs, strict=True))
    assert decoded.orientation == stored
    turned = (f"x.nii: was brought from {stored} to RAS axes",)
    assert decoded.notes == (() if stored == "RAS" else turned)


@pytest.mark.parametrize(("order", "signs"), ORDERS)
def test_as_stored_is_the_inverse_of_upright(
    order: tuple[int, ...], signs: tuple[int, ...]
) -> None:
    affine, stored = affine_of(order, signs), np.arange(60).reshape(SHAPE)
    decoded = to_ras(stored[None], affine, "x.nii", measured=stored[None] % 7 > 2)
    np.testing.assert_array_equal(from_ras(decoded.array[0], affine, SHAPE), stored)
    assert decoded.measured is not None
    np.testing.assert_array_equal(decoded.measured, decoded.array % 7 > 2)


@pytest.mark.parametrize(("order", "signs"), ORDERS[::5])
def test_a_label_map_of_half_the_size_is_brought_back_to_the_whole(
    order: tuple[int, ...], signs: tuple[int, ...]
) -> None:
    affine, whole = affine_of(order, signs), np.zeros((4, 6, 8), np.uint8)
    whole[2:, :4, 4:6] = 3  # in blocks of two, which survive halving
    half = to_ras(whole[None], affine, "x.nii").array[0][::2, ::2, ::2]
    np.testing.assert_array_equal(from_ras(half, affine, whole.shape), whole)


@pytest.mark.parametrize("across", [0, 1, 2])
@pytest.mark.parametrize(("order", "signs"), ORDERS)
def test_a_single_slice_has_two_axes_and_returns_to_three(
    order: tuple[int, ...], signs: tuple[int, ...], across: int
) -> None:
    affine = affine_of(order, signs)
    shape = tuple(1 if world == across else n for world, n in zip(order, SHAPE, strict=True))
    stored = np.arange(np.prod(shape)).reshape(shape)
    decoded = to_ras(stored[None], affine, "x.nii", measured=np.ones((1, *shape), bool))
    assert decoded.array.ndim == 3
    assert decoded.spacing is not None
    assert len(decoded.spacing) == 2
    assert decoded.measured is not None
    assert decoded.measured.shape == decoded.array.shape
    assert decoded.notes[-1] == "x.nii: holds a single slice and was read with two spatial axes"
    np.testing.assert_array_equal(from_ras(decoded.array[0], affine, shape), stored)
    lengths = {world: (0.7, 1.5, 3.0)[axis] for axis, world in enumerate(order)}
    assert decoded.spacing == pytest.approx([lengths[w] for w in range(3) if w != across])
    assert decoded.affine is not None
    there = to_ras(points(affine, shape), affine, "x.nii").array
    plane = (*decoded.array.shape[1:], 1)
    np.testing.assert_allclose(points(decoded.affine, plane)[..., 0], there, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "seen"), [((1, 1, 5), (1, 1, 5)), ((1, 4, 1), (1, 4)), ((1, 1, 1), (1, 1))]
)
def test_of_several_axes_of_length_one_only_the_third_goes(
    shape: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    decoded = to_ras(np.zeros((1, *shape)), np.eye(4), "x.nii")
    assert decoded.array.shape[1:] == seen
    assert from_ras(decoded.array[0], np.eye(4), shape).shape == shape


def test_channels_are_turned_alike() -> None:
    stored = np.random.default_rng(0).normal(size=(2, *SHAPE))
    decoded = to_ras(stored, affine_of((1, 0, 2), (-1, 1, -1), tilt=0.0), "x")
    expected = stored.transpose(0, 2, 1, 3)[:, :, ::-1, ::-1]
    np.testing.assert_array_equal(decoded.array, expected)


def test_an_axis_without_direction_is_refused() -> None:
    flat = np.diag([1.0, 1.0, 0.0, 1.0])
    with pytest.raises(DataError, match=r"x\.nii: the header's affine leaves an axis without"):
        to_ras(np.zeros((1, *SHAPE)), flat, "x.nii")


@pytest.mark.parametrize("shape", [(3, 4), (13, 16), (9, 8), (1, 1)])
def test_nearest_is_what_pillow_takes(shape: tuple[int, int]) -> None:
    labels = np.random.default_rng(1).integers(0, 9, (9, 8)).astype(np.uint8)
    theirs = Image.fromarray(labels).resize(shape[::-1], Image.Resampling.NEAREST)
    np.testing.assert_array_equal(resize_nearest(labels, shape), np.asarray(theirs))


def test_a_long_list_says_how_many_there_are() -> None:
    assert listed([3, 4]) == "3, 4"
    assert listed(range(13)).endswith("10, 11, ... (13 in all)")
