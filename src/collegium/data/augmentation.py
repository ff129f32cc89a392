"""What training samples go through beside flips and quarter turns: angles, zoom and holes."""

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from collegium.data.decoded import Array
from collegium.data.recipe import Arrays


def turned(arrays: Arrays, degrees: float, zoom: float = 1.0) -> Arrays:
    """Turn a case about its middle and enlarge it, in its first two spatial axes.

    The image is interpolated bilinearly, label and mask take the nearest pixel. What comes in from
    outside is the mirror image at the border, of all three alike.

    Args:
        arrays: The case; its sizes stay.
        degrees: From the first axis towards the second, as `numpy.rot90` turns.
        zoom: How many times as large things become.
    """
    rows, columns, *_ = arrays.shape
    sine, cosine = (f(math.radians(degrees)) / zoom for f in (math.sin, math.cos))
    down = torch.arange(rows, dtype=torch.float64)[:, None] - (rows - 1) / 2
    right = torch.arange(columns, dtype=torch.float64) - (columns - 1) / 2
    across = (cosine * right - sine * down) / ((columns - 1) / 2 or 1)  # from -1 to 1
    along = (sine * right + cosine * down) / ((rows - 1) / 2 or 1)
    grid = torch.stack([across, along], -1)[None].float()
    axes = len(arrays.shape)

    def look_up(values: Array, mode: str) -> Array:
        planes = np.moveaxis(values, (-axes, 1 - axes), (-2, -1))
        flat = np.array(planes, np.float32, order="C").reshape(1, -1, rows, columns)
        found = functional.grid_sample(
            torch.from_numpy(flat), grid, mode, padding_mode="reflection", align_corners=True
        )
        back = found.numpy().reshape(planes.shape).astype(values.dtype)
        return np.moveaxis(back, (-2, -1), (-axes, 1 - axes))

    label = None if arrays.label is None else look_up(arrays.label, "nearest")
    mask = None if arrays.mask is None else look_up(arrays.mask, "nearest")
    return Arrays(look_up(arrays.image, "bilinear"), label, mask)


def holed(image: torch.Tensor, most: int, side: int, rng: torch.Generator) -> torch.Tensor:
    """Set squares (of volumes cubes) of an image to 0; they may overlap.

    Args:
        image: (1, channels, *spatial); it is changed in place.
        most: There are 1 to so many, every number as likely as the other.
        side: Their side in pixels; each lies inside the image.
        rng: Decides how many there are, and where.

    Returns:
        The image.
    """
    count = int(torch.randint(1, most + 1, (), generator=rng))
    corners = [
        torch.randint(max(size - side, 0) + 1, (count,), generator=rng).tolist()
        for size in image.shape[2:]
    ]
    for corner in zip(*corners, strict=True):
        index: tuple[Any, ...] = (..., *(slice(start, start + side) for start in corner))
        image[index] = 0
    return image
