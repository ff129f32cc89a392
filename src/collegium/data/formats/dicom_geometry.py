"""The geometry of DICOM slices: sorted into a grid, checked for gaps, and given an affine.

Slices are sorted by their position along the normal of their plane; instance numbers and file names
are ignored. They must lie on a straight line, evenly spaced to a tenth of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded_image import listed
from collegium.data.formats.dicom_headers import (
    VOLUME_ATTRIBUTES,
    ImagePlane,
    name_orientation,
    normal_of,
)
from collegium.errors import DataError

Vector = NDArray[np.float64]

_UNEVEN = 0.1  # of a step, or of a pixel across: how far a slice may be off the grid
_GAP = 1.5  # steps; from here on a slice is missing
_SAME = 0.01  # of a pixel: positions that differ by less are one
_ALIKE = 1e-3  # of a direction cosine, or of the spacing
_TILT = 0.1  # degrees
_TIMES = ("TriggerTime", "FrameReferenceTime", "AcquisitionTime")


@dataclass(frozen=True)
class VolumeGrid:
    """The grid of a volume.

    Attributes:
        volumes: For each channel its slices, sorted along the normal.
        affine: From (column, row, slice) to millimetres in RAS+.
        notes: One sentence for each oddity.
    """

    volumes: tuple[tuple[ImagePlane, ...], ...]
    affine: Vector
    notes: tuple[str, ...] = ()


def same_orientation(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Return whether two planes are parallel, with rows and columns in the same directions.

    Args:
        one: The directions of rows and columns of a plane; None if it is not a slice.
        other: The same of another plane.
    """
    if one is None or other is None:
        return one is other
    return bool(np.abs(np.subtract(one, other)).max() < _ALIKE)


def affine_of(plane: ImagePlane, step: Sequence[float] | Vector | None = None) -> Vector:
    """Return the affine of a slice from (column, row, slice) to millimetres in RAS+.

    Args:
        plane: A slice with a position.
        step: From it to the next, in LPS; None: 1 mm along the normal.
    """
    assert plane.position is not None
    assert plane.orientation is not None
    assert plane.spacing is not None
    affine = np.eye(4)
    affine[:3, 0] = np.multiply(plane.orientation[:3], plane.spacing[1])
    affine[:3, 1] = np.multiply(plane.orientation[3:], plane.spacing[0])
    affine[:3, 2] = normal_of(plane.orientation) if step is None else step
    affine[:3, 3] = plane.position
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine


def build_grid(planes: Sequence[ImagePlane], where: str, name: str) -> VolumeGrid:
    """Sort slices into a volume, or into several that become channels.

    Args:
        planes: Slices, all with positions.
        where: The path and the series' UID, which begin errors.
        name: The file or folder, which begins notes.

    Raises:
        DataError: They form no grid.
    """
    first = planes[0]
    assert first.orientation is not None
    assert first.spacing is not None
    _check_alike(planes, where)
    normal = normal_of(first.orientation)
    places = np.array([plane.position for plane in planes])
    heights = places @ normal
    levels = _levels(heights, _SAME * min(first.spacing))
    groups, notes = _volumes(planes, heights, levels, (where, name))
    _check_even(heights[groups[0]], where)
    step = None
    if len(groups[0]) > 1:
        step = (places[groups[0][-1]] - places[groups[0][0]]) / (len(groups[0]) - 1)
        _check_straight(places[groups], normal, _UNEVEN * min(first.spacing), where)
        tilt = float(np.degrees(np.arccos(min(1.0, step @ normal / np.linalg.norm(step)))))
        if tilt > _TILT:
            notes += (f"{name}: its slices are sheared (gantry tilt of {tilt:.1f} degrees)",)
    volumes = tuple(tuple(planes[index] for index in group) for group in groups)
    return VolumeGrid(volumes, affine_of(volumes[0][0], step), notes)


def _check_alike(planes: Sequence[ImagePlane], where: str) -> None:
    first = planes[0]
    for plane in planes:
        same = (
            plane.shape == first.shape,
            np.allclose(plane.spacing or (), first.spacing or (), rtol=_ALIKE),
            same_orientation(plane.orientation, first.orientation),
        )
        if not all(same):
            words = [
                f"{p.shape[0]}x{p.shape[1]} pixels of {p.spacing[0]:g}x{p.spacing[1]:g} mm, "
                f"{name_orientation(p.orientation)}"
                for p in (first, plane)
                if p.spacing is not None
            ]
            raise DataError(
                f"{where} mixes slices that differ ({' and '.join(words)}): export each kind as a "
                "series of its own"
            )


def _levels(heights: Vector, tolerance: float) -> NDArray[np.intp]:
    """Return the rank of each slice's position along the normal, from the lowest."""
    order = np.argsort(heights, kind="stable")
    rises = np.diff(heights[order]) > tolerance
    levels = np.empty(len(heights), np.intp)
    levels[order] = np.concatenate([[0], np.cumsum(rises)])
    return levels


def _volumes(
    planes: Sequence[ImagePlane], heights: Vector, levels: NDArray[np.intp], names: tuple[str, str]
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Separate volumes at the same positions: the indices of the slices of each, sorted."""
    where, name = names
    deepest = int(np.bincount(levels).max())
    if deepest == 1:
        return [[int(index) for index in np.argsort(levels)]], ()
    for mark in dict.fromkeys(keyword for keyword, _ in VOLUME_ATTRIBUTES):
        values = [plane.volume_attributes.get(mark) for plane in planes]
        known = sorted({value for value in values if value is not None})
        if None in values or len(known) < deepest:
            continue
        ids, how = [known.index(value) for value in values if value is not None], mark
        if len(known) > deepest and mark in _TIMES:
            ids, how = _ranks(ids, levels), f"the order of their {mark}"
        groups = [[i for i, own in enumerate(ids) if own == index] for index in range(max(ids) + 1)]
        single = all(len({levels[i] for i in group}) == len(group) for group in groups)
        if len(groups) != deepest or not single:
            continue
        groups = [sorted(group, key=lambda i: int(levels[i])) for group in groups]
        shown = known if how == mark else range(1, deepest + 1)
        _check_complete(groups, shown, heights, levels, f"{where}: the volume with {how}")
        words = listed(f"{value:g}" for value in shown)
        note = f"{name}: holds {deepest} volumes, told apart by {how} ({words}), as channels"
        return groups, (note,)
    level = int(np.bincount(levels).argmax())
    twice = [planes[int(i)].file.name for i in np.flatnonzero(levels == level)]
    raise DataError(
        f"{where} holds {len(twice)} slices at {heights[levels == level][0]:g} mm along the normal "
        f"({listed(dict.fromkeys(twice))}) and no time, acquisition or echo distinguishes them: "
        "remove copies, or export each volume as a series of its own"
    )


def _ranks(order: Sequence[int], levels: NDArray[np.intp]) -> list[int]:
    """Rank the slices at one position by time, as the times of a beating heart differ by slice."""
    ranks = np.empty(len(order), int)
    for level in np.unique(levels):
        here = np.flatnonzero(levels == level)
        ranks[here[np.argsort(np.take(order, here), kind="stable")]] = range(len(here))
    return ranks.tolist()


def _check_complete(
    groups: Sequence[Sequence[int]],
    known: Sequence[float],
    heights: Vector,
    levels: NDArray[np.intp],
    what: str,
) -> None:
    for group, value in zip(groups, known, strict=True):
        lacking = sorted(set(levels.tolist()) - {int(levels[i]) for i in group})
        if lacking:
            height = float(heights[levels == lacking[0]][0])
            raise DataError(
                f"{what} {value:g} lacks {len(lacking)} of {levels.max() + 1} slices, the first at "
                f"{height:g} mm along the normal: copy the missing files from the source"
            )


def _check_even(heights: Vector, where: str) -> None:
    """Refuse a gap, and steps that differ; heights are sorted."""
    steps = np.diff(heights)
    if not len(steps):
        return
    usual = float(np.sort(steps)[(len(steps) - 1) // 2])  # the lower median: a step that occurs
    for (before, after), step in zip(pairwise(heights), steps, strict=True):
        if step > _GAP * usual:
            expected = round(float(heights[-1] - heights[0]) / usual) + 1
            raise DataError(
                f"{where} lacks slices: from {before:g} to {after:g} mm along the normal is a gap "
                f"of {step:g} mm where {usual:g} mm is usual ({len(heights)} slices found, "
                f"{expected} expected): copy the missing files from the source"
            )
    even = np.linspace(heights[0], heights[-1], len(heights))
    if np.abs(heights - even).max() > _UNEVEN * steps.mean():
        raise DataError(
            f"{where} has uneven slices, {steps.min():g} to {steps.max():g} mm apart: resample it "
            "evenly, or export the even part as a series of its own"
        )


def _check_straight(places: Vector, normal: Vector, tolerance: float, where: str) -> None:
    """Refuse slices (positions (volume, slice, 3), in mm) that do not form a straight stack."""
    off = places - np.linspace(places[0, 0], places[0, -1], places.shape[1])
    aside = float(np.linalg.norm(off - (off @ normal)[..., None] * normal, axis=-1).max())
    if aside > tolerance:
        raise DataError(
            f"{where} holds slices that are shifted by up to {aside:g} mm within their planes: "
            "resample it to a straight stack, or export each part as a series of its own"
        )
