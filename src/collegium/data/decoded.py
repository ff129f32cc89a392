"""What a file holds, in the one form that the rest of the library knows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class Decoded:
    """What a file holds.

    Attributes:
        array: An image (channels, *spatial), a label map or a mask (*spatial). The spatial axes of
            a picture are (row, column), those of a volume (x, y, z) in RAS+.
        spacing: Millimetres per spatial axis; None where the file does not say.
        affine: From voxel indices to millimetres in RAS+, for a single slice with the axis across
            it third; None for pictures.
        notes: One sentence for each thing that was done to the file's content or is odd about it.
        full_scale: The largest value the stored type can hold (255, 65535); None for volumes, for
            32-bit pictures, for labels and masks.
        measured: Where an image holds a measurement, in the array's shape: it was finite on disk
            and no padding. None: everywhere.
        stored: The directions of the axes of a volume on disk, such as "LPS"; None for pictures.
    """

    array: Array
    spacing: tuple[float, ...] | None = None
    affine: NDArray[np.float64] | None = None
    notes: tuple[str, ...] = ()
    full_scale: float | None = None
    measured: NDArray[np.bool_] | None = None
    stored: str | None = None


@dataclass(frozen=True)
class Regions(Decoded):
    """Regions that may overlap: `array` is bool (region, *spatial), in the order asked for."""


def upright(
    array: Array,
    affine: NDArray[np.float64],
    name: str,
    *,
    measured: NDArray[np.bool_] | None = None,
    notes: tuple[str, ...] = (),
) -> Decoded:
    """Bring a volume to RAS+ by turning and flipping its axes; nothing is resampled.

    Args:
        array: (channels, i, j, k) as stored.
        affine: From stored indices (i, j, k) to millimetres in RAS+.
        name: The file, for notes and errors.
        measured: See `Decoded`, in the array's shape.
        notes: What was noticed before.

    Returns:
        The volume; a single slice, whichever of the three planes it lies in, has two spatial axes.

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

    def turned(values: Array) -> Array:
        moved = turn.apply_orientation(np.moveaxis(values, 0, -1), axes)
        return np.moveaxis(moved, -1, 0)

    array = turned(array)
    measured = None if measured is None else turned(measured)
    affine = affine @ places
    spacing = tuple(float(step) for step in np.linalg.norm(affine[:3, :3], axis=0))
    across = _across(array.shape[1:])
    if across is not None:
        plane = [axis for axis in range(3) if axis != across]
        array, affine = array.squeeze(across + 1), affine[:, [*plane, across, 3]]
        measured = None if measured is None else measured.squeeze(across + 1)
        spacing = (spacing[plane[0]], spacing[plane[1]])
        notes += (f"{name}: holds a single slice and was read with two spatial axes",)
    return Decoded(array, spacing, affine, notes, measured=measured, stored=start)


def as_stored(labels: Array, affine: NDArray[np.float64], shape: tuple[int, ...]) -> Array:
    """Bring a label map from RAS+ back to the axes on disk: the inverse of `upright`.

    Args:
        labels: (x, y, z) or, of a single slice, without the axis across it; of another size it is
            resized by nearest neighbour.
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
    whole = nearest(labels, ras)
    back = turn.ornt_transform(turn.axcodes2ornt("RAS"), axes)
    return np.ascontiguousarray(turn.apply_orientation(whole, back))


def _across(shape: tuple[int, ...]) -> int | None:
    """Return the axis of length one of a volume that is a single slice; of several the third."""
    thin = [axis for axis, length in enumerate(shape) if length == 1]
    return thin[-1] if len(thin) == 1 or 2 in thin else None


def nearest(labels: Array, shape: tuple[int, ...]) -> Array:
    """Resize a label map: each new entry is the one whose centre is nearest."""
    rows = [
        np.minimum((np.arange(new) * 2 + 1) * old // (2 * new), old - 1)
        for old, new in zip(labels.shape, shape, strict=True)
    ]
    return labels[np.ix_(*rows)]


def listed(values: Any) -> str:
    """Write values for a sentence, the first twelve of many."""
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:12], f"... ({len(shown)} in all)"])
