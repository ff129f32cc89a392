"""Distances between the surfaces of two structures on one grid of pixels or voxels."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Distances = NDArray[np.float64]

_LEAF = 32  # points in a leaf of the search tree; decides the time only


def surface_distances(
    first: Mask, second: Mask, spacing: Sequence[float] | None = None
) -> tuple[Distances, Distances]:
    """Return how far the surface of each structure is from that of the other, voxel by voxel.

    Euclidean distances between the centres of voxels, each to the nearest one of the other surface
    (see `surface`). Voxels that are on both surfaces are not searched for: their distance is 0.

    Args:
        first: A structure, with any number of axes; it is not empty.
        second: Another one of the same shape, not empty either.
        spacing: Millimetres per axis; None: 1, so that distances are in voxels.

    Returns:
        The distances of the first structure's surface voxels, then those of the second's, each in
        an order of its own.
    """
    surfaces = surface(first), surface(second)
    scale = np.ones(first.ndim) if spacing is None else np.asarray(spacing, np.float64)
    points = [np.argwhere(own) * scale for own in surfaces]
    shared = surfaces[0] & surfaces[1]
    apart = [all_[~shared[own]] for all_, own in zip(points, surfaces, strict=True)]
    zeros = np.zeros(np.count_nonzero(shared))
    to_second = np.concatenate([zeros, _nearest(apart[0], points[1])])
    to_first = np.concatenate([zeros, _nearest(apart[1], points[0])])
    return to_second, to_first


def surface_overlap(first: Mask, second: Mask, spacing: Sequence[float], tolerance: float) -> float:
    """Return surface Dice at a tolerance, as Nikolov et al. define and release it.

    The share of both surfaces that lies within the tolerance of the other one
    (https://doi.org/10.2196/26151, code https://github.com/google-deepmind/surface-distance). A
    surface runs between voxels: an element of it stands at each corner where inside and outside
    meet, with the area (of two axes the length) that marching cubes give it, and distances are
    those of corners.

    Args:
        first: A structure with two or three axes; it is not empty.
        second: Another one of the same shape, not empty either.
        spacing: Millimetres per axis.
        tolerance: The distance up to which a surface element is overlapping, in mm.

    Returns:
        A score in [0, 1].
    """
    (own, areas), (other, other_areas) = (_elements(s, spacing) for s in (first, second))
    near = areas[_nearest(own, other) <= tolerance].sum()
    other_near = other_areas[_nearest(other, own) <= tolerance].sum()
    return float((near + other_near) / (areas.sum() + other_areas.sum()))


def _elements(structure: Mask, spacing: Sequence[float]) -> tuple[Distances, Distances]:
    """Return the places of the surface elements, (n, axes) in mm, and their areas."""
    from monai.metrics import utils

    library: Any = utils
    table, kernel = library.get_code_to_measure_table(tuple(spacing))
    padded = np.pad(structure, 1).astype(np.uint8)
    codes = np.zeros([side - 1 for side in padded.shape], np.uint8)
    for corner in itertools.product((0, 1), repeat=structure.ndim):
        shifted = tuple(
            slice(c, side - 1 + c) for c, side in zip(corner, padded.shape, strict=True)
        )
        codes += int(kernel[0, 0, *corner]) * padded[shifted]
    outline = (codes > 0) & (codes < len(table) - 1)
    places: Distances = np.argwhere(outline).astype(np.float64) * np.asarray(spacing, np.float64)
    areas: Distances = table.numpy().astype(np.float64)[codes[outline]]
    return places, areas


def surface(structure: Mask) -> Mask:
    """Return the voxels of a structure that have a face in common with the outside.

    Beyond the border of the array is outside.
    """
    inner = structure.copy()
    for axis in range(structure.ndim):
        # views with this axis first: what is written there is written to `inner`
        own, here = np.moveaxis(structure, axis, 0), np.moveaxis(inner, axis, 0)
        here[1:] &= own[:-1]
        here[:-1] &= own[1:]
        here[[0, -1]] = False
    outline: Mask = structure & ~inner
    return outline


def bounding_box(structure: Mask) -> tuple[slice, ...]:
    """Return the smallest box that holds a structure, a slice for each axis; empty if it is."""
    box = []
    for axis in range(structure.ndim):
        others = tuple(other for other in range(structure.ndim) if other != axis)
        places = np.flatnonzero(structure.any(axis=others))
        box.append(slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0))
    return tuple(box)


def _nearest(points: Distances, to: Distances) -> Distances:
    """Return the distance of each of some points, (n, axes), to the nearest of others."""
    from scipy.spatial import KDTree

    if not len(points):
        return np.zeros(0)
    tree = KDTree(to, leafsize=_LEAF, compact_nodes=False, balanced_tree=False)
    distances: Distances = tree.query(points)[0]
    return distances
