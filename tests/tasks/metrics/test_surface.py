"""Distances of surfaces, compared to the last bit with distance transforms and MONAI.

Surface Dice is compared with DeepMind's package `surface-distance`, and with MONAI.
"""

import csv
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from collegium.tasks.metrics.overlap import assd, hd95, structures_of, surface_dice
from collegium.tasks.metrics.surface import (
    bounding_box,
    surface,
    surface_distances,
    surface_overlap,
)

Mask = NDArray[np.bool_]

nib: Any = nibabel

SHAPES = ((1, 1), (1, 9), (23, 17), (5, 1, 6), (6, 13, 11))
SPACINGS = (None, (0.5, 3.0, 0.75))  # sums of their squares are exact, whatever their order


def blob(shape: tuple[int, ...], seed: int) -> Mask:
    noise = np.random.default_rng(seed).random(shape)
    found: Mask = ndimage.gaussian_filter(noise, 1.5) > 0.5
    return found


def voxel(shape: tuple[int, ...], *place: int) -> Mask:
    found = np.zeros(shape, bool)
    found[place or tuple(side // 2 for side in shape)] = True
    return found


def structures(shape: tuple[int, ...]) -> list[Mask]:
    """Structures that are not empty: smooth, scattered, at every border, one voxel, everything."""
    scattered = np.random.default_rng(5).random(shape) < 0.3
    ends = [voxel(shape, *corner) for corner in itertools.product((0, -1), repeat=len(shape))]
    found = [blob(shape, 1), blob(shape, 2), scattered, ends[0], np.logical_or.reduce(ends)]
    return [mask for mask in (*found, voxel(shape), np.ones(shape, bool)) if mask.any()]


def pairs() -> Iterator[tuple[Mask, Mask]]:
    for shape in SHAPES:
        yield from itertools.product(structures(shape), repeat=2)


def eroded_outline(structure: Mask) -> Mask:
    outline: Mask = structure ^ ndimage.binary_erosion(structure)
    return outline


def by_transforms(
    found: Mask, true: Mask, spacing: tuple[float, ...] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The distances of both surfaces by two distance transforms of the whole image."""
    a, b = eroded_outline(found), eroded_outline(true)
    to_b = ndimage.distance_transform_edt(~b, sampling=spacing)[a]
    to_a = ndimage.distance_transform_edt(~a, sampling=spacing)[b]
    return to_b, to_a


def by_monai(found: Mask, true: Mask, spacing: tuple[float, ...] | None) -> float:
    from monai.metrics.hausdorff_distance import compute_hausdorff_distance

    with warnings.catch_warnings():  # MONAI 1.5 and 1.6 warn about a call of their own
        warnings.filterwarnings("ignore", ".*always_return_as_numpy", FutureWarning)
        distance = compute_hausdorff_distance(
            torch.from_numpy(found)[None, None],
            torch.from_numpy(true)[None, None],
            include_background=True,
            percentile=95,
            spacing=spacing and list(spacing),
        )
    return float(distance)


def ours(found: Mask, true: Mask, spacing: tuple[float, ...] | None) -> float | None:
    prediction, label = torch.from_numpy(found).long(), torch.from_numpy(true).long()
    return hd95(structures_of(prediction, label, spacing=spacing))


def test_a_surface_is_what_an_erosion_takes_away() -> None:
    for shape in SHAPES:
        for structure in (*structures(shape), np.zeros(shape, bool)):
            before = structure.copy()
            np.testing.assert_array_equal(surface(structure), eroded_outline(structure))
            np.testing.assert_array_equal(structure, before)


@pytest.mark.parametrize("spacing", SPACINGS)
def test_distances_are_those_of_distance_transforms(spacing: tuple[float, ...] | None) -> None:
    for found, true in pairs():
        scale = spacing and spacing[: found.ndim]
        expected = by_transforms(found, true, scale)
        for ours, theirs in zip(surface_distances(found, true, scale), expected, strict=True):
            np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))


@pytest.mark.parametrize("spacing", SPACINGS)
def test_hd95_is_that_of_monai(spacing: tuple[float, ...] | None) -> None:
    for found, true in pairs():
        scale = spacing and spacing[: found.ndim]
        assert ours(found, true, scale) == by_monai(found, true, scale)


def test_any_spacing_gives_monai_s_hd95_within_rounding() -> None:
    for found, true in itertools.product(structures((6, 13, 11)), repeat=2):
        spacing = (2.7, 0.683, 0.71)
        theirs = by_monai(found, true, spacing)
        assert ours(found, true, spacing) == pytest.approx(theirs, rel=2e-7)


def test_distances_do_not_depend_on_the_background_around() -> None:
    found, true = blob((9, 12), 1), blob((9, 12), 2)
    wide = surface_distances(np.pad(found, 7), np.pad(true, 7))
    for near, far in zip(surface_distances(found, true), wide, strict=True):
        np.testing.assert_array_equal(near, far)


def by_deepmind(found: Mask, true: Mask, spacing: tuple[float, ...], tolerance: float) -> float:
    package = pytest.importorskip("surface_distance")
    with warnings.catch_warnings():  # it imports from namespaces that scipy will drop
        warnings.simplefilter("ignore", DeprecationWarning)
        distances = package.compute_surface_distances(true, found, spacing)
    return float(package.compute_surface_dice_at_tolerance(distances, tolerance))


@pytest.mark.parametrize("tolerance", [0.4, 1.3, 2.9])
@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.5, 3.0, 0.75), (2.7, 0.683, 0.71)])
def test_surface_dice_is_that_of_its_authors(spacing: tuple[float, ...], tolerance: float) -> None:
    values = []
    for found, true in pairs():
        scale = spacing[: found.ndim]
        values.append(surface_overlap(found, true, scale, tolerance))
        expected = by_deepmind(found, true, scale, tolerance)
        assert values[-1] == pytest.approx(expected, abs=1e-6), (found.shape, tolerance)
    assert 0.2 < np.mean(values) < 0.95


@pytest.mark.parametrize("spacing", SPACINGS)
def test_assd_is_that_of_monai(spacing: tuple[float, ...] | None) -> None:
    from monai.metrics.surface_distance import compute_average_surface_distance

    for found, true in pairs():
        scale = spacing and spacing[: found.ndim]
        first, second = (torch.from_numpy(mask)[None, None] for mask in (found, true))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*always_return_as_numpy", FutureWarning)
            expected = compute_average_surface_distance(
                first,
                second,
                include_background=True,
                symmetric=True,
                spacing=scale and list(scale),
            )
        ours = structures_of(first[0, 0].long(), second[0, 0].long(), spacing=scale)
        assert assd(ours) == pytest.approx(float(expected), rel=1e-6, abs=1e-12)


def test_surface_dice_of_two_squares_by_hand() -> None:
    found, true = np.zeros((2, 6, 7), bool)
    found[1:4, 1:4] = true[1:4, 2:5] = True  # one pixel of 2 mm apart
    assert surface_overlap(found, true, (1.0, 2.0), 2.0) == 1.0
    # a square of 3 x 3 pixels has 4 bent elements, 4 of 1 mm upright and 4 of 2 mm across; of
    # these the 4 across and 2 bent ones lie on the other square's surface
    bent = np.hypot(1, 2) / 2
    expected = (4 * 2 + 2 * bent) / (4 * 1 + 4 * 2 + 4 * bent)
    assert surface_overlap(found, true, (1.0, 2.0), 0.5) == pytest.approx(expected)


def test_surface_dice_of_one_side_is_zero_and_without_tolerance_or_spacing_undefined() -> None:
    square, nothing = torch.zeros(2, 6, 7, dtype=torch.int64)
    square[1:4, 1:4] = 1
    spaced: dict[str, Any] = {"spacing": (1.0, 1.0), "tolerances": [1.0]}
    assert surface_dice(structures_of(square, nothing, **spaced)) == 0.0
    assert surface_dice(structures_of(nothing, square, **spaced)) == 0.0
    assert surface_dice(structures_of(nothing, nothing, **spaced)) is None
    assert surface_dice(structures_of(square, square, spacing=(1.0, 1.0))) is None
    assert surface_dice(structures_of(square, square, tolerances=[1.0])) is None
    assert surface_dice(structures_of(square, square, **spaced)) == 1.0
    assert assd(structures_of(square, nothing)) is assd(structures_of(nothing, nothing)) is None


def test_a_box_holds_a_structure_and_no_more() -> None:
    structure = voxel((5, 6, 7), 1, 2, 3) | voxel((5, 6, 7), 4, 2, 0)
    assert bounding_box(structure) == (slice(1, 5), slice(2, 3), slice(0, 4))
    assert bounding_box(np.ones((2, 3), bool)) == (slice(0, 2), slice(0, 3))
    assert not structure[bounding_box(np.zeros((5, 6, 7), bool))].size


def labels(data: Path, site: str) -> Iterator[Mask]:
    """Two real labels of a site."""
    with (data / site / "manifest.csv").open(encoding="utf-8") as file:
        paths = [data / row["label"] for row in itertools.islice(csv.DictReader(file), 2)]
    for path in paths:
        stored = Image.open(path) if path.suffix == ".png" else nib.load(path).get_fdata()
        yield np.asarray(stored) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("site", "spacing"),
    [
        ("vessel/chase_db1", None), ("vessel/hrf", None), ("vessel/les_av", (0.02, 0.02)),
        ("hippocampus/intensity_mid", (1.0, 1.0, 1.0)),
        ("hippocampus/intensity_u8", (1.0, 0.5, 2.0)),
    ],
)  # fmt: skip
def test_real_structures_have_monai_s_hd95(
    shared_data: Path, site: str, spacing: tuple[float, ...] | None
) -> None:
    first, second = labels(shared_data, site)
    moved = ndimage.shift(first, [1] * first.ndim, order=0)
    predictions = [moved, ndimage.binary_dilation(first), first & moved]
    if first.shape == second.shape:
        predictions.append(second)
    for prediction in predictions:
        assert ours(prediction, first, spacing) == pytest.approx(
            by_monai(prediction, first, spacing), rel=0 if spacing is None else 2e-7
        )
