"""A decoded file in the one form that the rest of the library knows, and its geometry."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class DecodedImage:
    """A decoded image, label map or mask, with its geometry.

    Attributes:
        array: An image (channels, *spatial), a label map or a mask (*spatial). The spatial axes of
            a picture are (row, column), those of a volume (x, y, z) in RAS+.
        spacing: Millimetres per spatial axis; None if the file does not state it.
        affine: From voxel indices to millimetres in RAS+; for a single slice the axis perpendicular
            to it is the third. None for pictures.
        notes: One sentence for each change to the file's content and each oddity of it.
        full_scale: The largest value that the stored type can hold (255, 65535); None for volumes,
            for 32-bit pictures, for labels and masks.
        measured: Where an image holds measurements, in the array's shape: values that were finite
            on disk and are not padding; where a label map is annotated. None: everywhere.
        orientation: The directions of a volume's axes on disk, such as "LPS"; None for pictures.
    """

    array: Array
    spacing: tuple[float, ...] | None = None
    affine: NDArray[np.float64] | None = None
    notes: tuple[str, ...] = ()
    full_scale: float | None = None
    measured: NDArray[np.bool_] | None = None
    orientation: str | None = None


@dataclass(frozen=True)
class DecodedRegions(DecodedImage):
    """Regions that may overlap: `array` is bool (region, *spatial), in the requested order."""


def to_ras(
    array: Array,
    affine: NDArray[np.float64],
    name: str,
    *,
    measured: NDArray[np.bool_] | None = None,
    notes: tuple[str, ...] = (),
) -> DecodedImage:
    """Bring a volume to RAS+ by permuting and flipping its axes; nothing is resampled.

    Args:
        array: (channels, i, j, k) as stored.
        affine: From stored indices (i, j, k) to millimetres in RAS+.
        name: The file, for notes and errors.
        measured: See `DecodedImage`, in the array's shape.
        notes: Earlier notes, to which new ones are added.

    Returns:
        The volume; a single slice, in whichever of the three planes, has two spatial axes.

    Raises:
        DataError: The affine leaves an axis without direction.
    """
    import nibabel as nib

    turn: Any = nib.orientations
    axes = turn.io_orientation(affine)
    if not np.isfinite(axes).all():
        raise DataError(f"{name}: the header's affine leaves an axis without direction: correct it")
    start = "".join(turn.aff2axcodes(affine))
    if start != "RAS":
        notes += (f"{name}: was brought from {start} to RAS axes",)
    places = turn.inv_ornt_aff(axes, array.shape[1:])

    def reoriented(values: Array) -> Array:
        moved = turn.apply_orientation(np.moveaxis(values, 0, -1), axes)
        return np.moveaxis(moved, -1, 0)

    array = reoriented(array)
    measured = None if measured is None else reoriented(measured)
    affine = affine @ places
    spacing = tuple(float(step) for step in np.linalg.norm(affine[:3, :3], axis=0))
    across = _across(array.shape[1:])
    if across is not None:
        plane = [axis for axis in range(3) if axis != across]
        array, affine = array.squeeze(across + 1), affine[:, [*plane, across, 3]]
        measured = None if measured is None else measured.squeeze(across + 1)
        spacing = (spacing[plane[0]], spacing[plane[1]])
        notes += (f"{name}: holds a single slice and was read with two spatial axes",)
    return DecodedImage(array, spacing, affine, notes, measured=measured, orientation=start)


def from_ras(labels: Array, affine: NDArray[np.float64], shape: tuple[int, ...]) -> Array:
    """Bring a label map from RAS+ back to the axes on disk: the inverse of `to_ras`.

    Args:
        labels: (x, y, z) or, for a single slice, without the axis perpendicular to it; one of
            another size is resized by nearest neighbour.
        affine: From stored indices to millimetres in RAS+.
        shape: The three spatial sizes on disk.
    """
    import nibabel as nib

    turn: Any = nib.orientations
    axes = turn.io_orientation(affine)
    ras = tuple(int(shape[int(axis)]) for axis in np.argsort(axes[:, 0]))
    across = _across(ras)
    if across is not None and labels.ndim == 2:
        labels = np.expand_dims(labels, across)
    whole = resize_nearest(labels, ras)
    back = turn.ornt_transform(turn.axcodes2ornt("RAS"), axes)
    return np.ascontiguousarray(turn.apply_orientation(whole, back))


def _across(shape: tuple[int, ...]) -> int | None:
    """Return the axis of length one of a volume that is a single slice; of several, the third."""
    thin = [axis for axis, length in enumerate(shape) if length == 1]
    return thin[-1] if len(thin) == 1 or 2 in thin else None


def resize_nearest(labels: Array, shape: tuple[int, ...]) -> Array:
    """Resize a label map: each new entry takes the old one whose centre is nearest.

    Args:
        labels: (*spatial).
        shape: The new spatial sizes.
    """
    rows = [
        np.minimum((np.arange(new) * 2 + 1) * old // (2 * new), old - 1)
        for old, new in zip(labels.shape, shape, strict=True)
    ]
    return labels[np.ix_(*rows)]


def listed(values: Any) -> str:
    """Return values as a list for a sentence: the first twelve, and how many there are if more."""
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:12], f"... ({len(shown)} in all)"])
