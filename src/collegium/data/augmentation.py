"""Augmentation of training samples: rotation, zoom and shear, and cutout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from collegium.core.lazy import functional, torch
from collegium.data.decoded_image import Array
from collegium.data.preprocessing import CaseArrays


def deform(
    arrays: CaseArrays,
    degrees: float,
    *,
    zoom: float = 1.0,
    shear: tuple[float, float] = (0.0, 0.0),
) -> CaseArrays:
    """Shear, enlarge and rotate a case about its centre, in its first two spatial axes.

    The image is interpolated bilinearly, label and mask by nearest neighbour. Beyond the border all
    three are continued by reflection.

    Args:
        arrays: The case; its sizes stay.
        degrees: The angle from the first axis towards the second, as in `numpy.rot90`.
        zoom: The factor of enlargement.
        shear: The angles in degrees by which the first axis leans on the second, and the second on
            the first: before rotation and enlargement, the value at (row, column) from the centre
            is taken from (row + tan(a) column, column + tan(b) row).
    """
    rows, columns, *_ = arrays.shape
    sine, cosine = (f(math.radians(degrees)) / zoom for f in (math.sin, math.cos))
    down = torch.arange(rows, dtype=torch.float64)[:, None] - (rows - 1) / 2
    right = torch.arange(columns, dtype=torch.float64) - (columns - 1) / 2
    column, row = cosine * right - sine * down, sine * right + cosine * down
    leans = [math.tan(math.radians(angle)) for angle in shear]
    across = (column + leans[1] * row) / ((columns - 1) / 2 or 1)  # from -1 to 1
    along = (row + leans[0] * column) / ((rows - 1) / 2 or 1)
    grid = torch.stack([across, along], -1)[None].float()
    axes = len(arrays.shape)

    def resample(values: Array, mode: str) -> Array:
        planes = np.moveaxis(values, (-axes, 1 - axes), (-2, -1))
        flat = np.array(planes, np.float32, order="C").reshape(1, -1, rows, columns)
        found = functional.grid_sample(
            torch.from_numpy(flat), grid, mode, padding_mode="reflection", align_corners=True
        )
        back = found.numpy().reshape(planes.shape).astype(values.dtype)
        return np.moveaxis(back, (-2, -1), (-axes, 1 - axes))

    label = None if arrays.label is None else resample(arrays.label, "nearest")
    mask = None if arrays.mask is None else resample(arrays.mask, "nearest")
    return CaseArrays(resample(arrays.image, "bilinear"), label, mask)


def cut_out(image: torch.Tensor, max_holes: int, side: int, rng: torch.Generator) -> torch.Tensor:
    """Set random squares (in volumes, cubes) of an image to 0, as Cutout does; they may overlap.

    Args:
        image: (1, channels, *spatial); it is changed in place.
        max_holes: The number of holes is drawn uniformly from 1 to this.
        side: Their side in pixels; each hole lies inside the image.
        rng: Draws their number and positions.

    Returns:
        The image.
    """
    count = int(torch.randint(1, max_holes + 1, (), generator=rng))
    corners = [
        torch.randint(max(size - side, 0) + 1, (count,), generator=rng).tolist()
        for size in image.shape[2:]
    ]
    for corner in zip(*corners, strict=True):
        index: tuple[Any, ...] = (..., *(slice(start, start + side) for start in corner))
        image[index] = 0
    return image
