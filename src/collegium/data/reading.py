"""Reads one file into arrays, in any format: images, label maps, fields of view.

Arrays of images are float32 with the channels first; the spatial axes of a picture are (row,
column), those of a volume (x, y, z), brought to RAS+. Nothing is clipped, no value is cast back to
the type on disk, and every change is reported in `DecodedImage.notes`.

NaN and infinite voxels are replaced by the mean of their channel's finite voxels, and excluded from
the statistics of `normalise`.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from collegium.data import formats
from collegium.data.decoded_image import DecodedImage, DecodedRegions, listed
from collegium.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Channels = Literal["keep", "grey", "rgb", "green"]
Normalisation = Literal["zscore", "zscore_nonzero", "minmax", "symmetric", "scale", "none"]
CHANNELS: tuple[str, ...] = get_args(Channels)
NORMALISE: tuple[str, ...] = get_args(Normalisation)

_LUMA = (0.299, 0.587, 0.114)  # Rec. 601

_FEW_VALUES = 8
"""A mask of two classes with more values than these looks as if JPEG had blurred it."""


def read_image(
    path: Path, channels: str = "keep", *, series: str | None = None, both: bool = False
) -> DecodedImage:
    """Read an image as float32, channels first.

    Args:
        path: A picture or a volume; a DICOM series is a folder.
        channels: `keep` as stored, `grey` (Rec. 601 luma), `rgb` (a grey image three times) or
            `green` (a grey image as it is).
        series: Which DICOM series of the folder; None: the only one.
        both: Whether the file holds the label too.

    Raises:
        ConfigError: There is no such choice of channels.
        DataError: The file cannot be read, holds no finite value, or has other channels.
    """
    if channels not in CHANNELS:
        raise ConfigError(f"image.channels: {channels!r} is unknown: use {listed(CHANNELS)}")
    stored = formats.decode(path, series=series, both=both)
    with np.errstate(over="ignore"):
        array = stored.array.astype(np.float32)
    measured, notes = _replace_non_finite(array, stored.measured, path)
    array = _select_channels(array, channels, path)
    if measured is not None and len(measured) != len(array):
        measured = np.broadcast_to(measured.all(axis=0), array.shape)
    for index, values in enumerate(array):
        if values.min() == values.max():
            value = values.flat[0]
            notes.append(f"{path.name}: channel {index} is constant (constant value {value:g})")
    for note in notes:
        logger.warning(note)
    return replace(stored, array=array, measured=measured, notes=(*stored.notes, *notes))


def read_label(
    path: Path,
    *,
    classes: Sequence[str] | int,
    label_map: Mapping[int, int] | None = None,
    ignore: int | None = None,
    regions: Mapping[str, Sequence[int]] | None = None,
    like: DecodedImage | None = None,
    both: bool = False,
) -> DecodedImage:
    """Read a label map whose values are all classes.

    The indices of a palette are the labels. With two classes a mask drawn in black (0) and white
    (255 or 65535) becomes 0 and 1, whatever the palette's order. Values that a slope has moved off
    the integers by no more than 0.01 are rounded.

    If regions are given, the label may hold their masks instead: see `formats.decode_label` and
    `classes_of_regions`.

    Args:
        path: A picture or a volume.
        classes: The classes, background included: their names, or their number.
        label_map: New labels for stored values, applied first; other values stay. Masks of regions
            have none. With one, a DICOM segmentation's stored values are the numbers of its
            segments; without, segments with the names of classes are these.
        ignore: The value, after the map, of pixels that nobody annotated: they are background in
            the array, and `measured` is where the others are.
        regions: The classes of each region, by name.
        like: The image that the label map belongs to.
        both: Whether the file holds the image too.

    Raises:
        DataError: The file cannot be read, or holds a value that is not a label.
    """
    names, count = ((), classes) if isinstance(classes, int) else (classes, len(classes))
    regions, kind = regions or {}, np.min_scalar_type(count - 1)
    stored = formats.decode_label(
        path,
        palette="bilevel" if count == 2 else "indices",
        like=like,
        both=both,
        regions=tuple(regions),
        classes=names,
        by_name=not label_map,
    )
    if isinstance(stored, DecodedRegions):
        array = classes_of_regions(stored.array, regions, path).astype(kind)
        return DecodedImage(
            array, stored.spacing, stored.affine, stored.notes, orientation=stored.orientation
        )
    labels = _whole_numbers(stored.array, path, regions)
    mapped = labels.copy()
    for value, label in (label_map or {}).items():
        mapped[labels == value] = label
    annotated = None
    if ignore is not None and (mapped == ignore).any():
        annotated = mapped != ignore
        mapped[~annotated] = 0
    found, notes = np.unique(mapped), stored.notes
    white = int(found[-1])
    if count == 2 and white in (255, 65535) and set(found.tolist()) <= {0, white}:
        mapped, found = mapped // white, found // white
        notes += (f"{path.name}: the mask's values 0 and {white} were read as classes 0 and 1",)
    if found[0] < 0 or found[-1] >= count:
        unmapped = np.unique(labels if annotated is None else labels[annotated])
        _refuse_labels(path, unmapped, count, label_map or {})
    return replace(
        stored, array=mapped.astype(kind), notes=notes, full_scale=None, measured=annotated
    )


def classes_of_regions(
    masks: NDArray[np.bool_], regions: Mapping[str, Sequence[int]], path: Path
) -> NDArray[np.uint8]:
    """Return the class of each pixel: the one whose regions are exactly those that hold the pixel.

    Of several such classes it is the lowest; a pixel in no region is background.

    Args:
        masks: (region, *spatial), in the order of the regions.
        regions: The classes of each region, by name.
        path: The file, for errors.

    Raises:
        DataError: A pixel lies in regions that no class has in common.
    """
    labels, known = np.zeros(masks.shape[1:], np.uint8), ~masks.any(axis=0)
    for number in sorted(set().union(*regions.values()), reverse=True):
        member = np.array([number in made_of for made_of in regions.values()])
        here = (masks == member.reshape(-1, *[1] * labels.ndim)).all(axis=0)
        labels[here], known = number, known | here
    if not known.all():
        first = tuple(np.argwhere(~known)[0])
        there = [name for name, mask in zip(regions, masks, strict=True) if mask[first]]
        words = "; ".join(f"{name}: {listed(made_of)}" for name, made_of in regions.items())
        raise DataError(
            f"{path}: {np.count_nonzero(~known)} pixels lie in a set of regions that no class has, "
            f"the first in {' and '.join(there)} alone (task.regions is {words}): correct the "
            "masks or task.regions"
        )
    return labels


def read_mask(path: Path, like: DecodedImage | None = None) -> DecodedImage:
    """Read a field of view as bool: pixels with any channel not 0 are inside; it must not be empty.

    Args:
        path: A picture or a volume.
        like: The image that it belongs to.

    Raises:
        DataError: The file cannot be read, or nothing is inside.
    """
    stored = formats.decode_label(path, palette="bilevel", like=like)
    inside = ((stored.array != 0) & ~np.isnan(stored.array)).any(axis=0)
    if not inside.any():
        raise DataError(f"{path}: every pixel of the field of view is 0: nothing is inside it")
    return replace(stored, array=inside, full_scale=None)


def shades_of_grey(
    image: NDArray[Any], norm: float, *, full_scale: float | None, name: str = "the image"
) -> NDArray[np.float32]:
    """Take the colour of the light out of a picture, by the method shades of grey.

    Finlayson and Trezzi, Color Imaging Conference 2004: the light's colour e is estimated as
    e_c = (mean over pixels of f_c^p)^(1/p), channel by channel, scaled to the length 1, and each
    channel divided by sqrt(3) e_c, so that grey light changes nothing. As FLamby's preparation of
    ISIC 2019 does, values beyond the full scale are cut off; they are not rounded here.

    Args:
        image: (3, *spatial).
        norm: p; 1 is grey world, and large values approach the brightest pixel of each channel.
        full_scale: As in `DecodedImage`.
        name: The file, for errors.

    Returns:
        The picture in its range; a channel that is 0 everywhere stays so.

    Raises:
        DataError: It is no picture in colour.
    """
    if full_scale is None or len(image) != 3:
        raise DataError(
            f"{name}: image.colour_constancy needs a picture in colour, of 8 or 16 bits: set "
            f"image.channels to rgb, or leave image.colour_constancy out"
        )
    shares = image.astype(np.float64) / full_scale
    light = (shares**norm).reshape(3, -1).mean(1) ** (1 / norm)
    length = np.linalg.norm(light) / math.sqrt(3)
    factors = np.divide(length, light, out=np.ones(3), where=light > 0)
    corrected = shares * factors.reshape(3, *[1] * (image.ndim - 1)) * full_scale
    clipped: NDArray[np.float32] = np.clip(corrected, 0, full_scale).astype(np.float32)
    return clipped


def normalise(
    array: NDArray[Any],
    how: str,
    mask: NDArray[np.bool_] | None = None,
    measured: NDArray[np.bool_] | None = None,
    *,
    full_scale: float | None = None,
    name: str = "the image",
) -> NDArray[np.float32]:
    """Normalise an image channel by channel.

    Args:
        array: An image (channels, *spatial).
        how: `zscore` (mean 0 and population standard deviation 1), `zscore_nonzero` (the same from
            the voxels that are not 0, which alone are changed), `minmax` (0 to 1), `symmetric` (-1
            to 1), `scale` (divide by `full_scale`) or `none`.
        mask: The pixels that the statistics are taken from (*spatial); the whole image is
            normalised by them.
        measured: As in `DecodedImage`; other voxels are excluded from the statistics.
        full_scale: As in `DecodedImage`, for `scale`.
        name: The file, for errors and warnings.

    Returns:
        The image as float32. A channel that is constant in these pixels becomes 0.

    Raises:
        ConfigError: There is no such method.
        DataError: There are no pixels to take statistics from, or no full scale to divide by.
    """
    if how not in NORMALISE:
        raise ConfigError(f"image.normalise: {how!r} is unknown: use {listed(NORMALISE)}")
    if how == "none":
        return array.astype(np.float32)
    if how == "scale":
        if full_scale is None:
            raise DataError(f"{name}: scale needs a picture of 8 or 16 bits: use zscore or minmax")
        return (array / full_scale).astype(np.float32)
    result = np.zeros(array.shape, np.float32)
    for index, channel in enumerate(array):
        counts = np.ones(channel.shape, bool) if mask is None else np.asarray(mask, bool)
        if measured is not None:
            counts = counts & measured[index]
        if how == "zscore_nonzero":
            counts = counts & (channel != 0)
        values = channel[counts].astype(np.float64)
        if not values.size:
            raise DataError(f"{name}: no voxel to measure is in the field of view: correct it")
        low, high = values.min(), values.max()
        if low < high:
            shift, width = _scale(how, values)
            scaled = (channel.astype(np.float64) - shift) / width
            result[index] = np.where(channel != 0, scaled, 0) if "nonzero" in how else scaled
        elif channel.min() < channel.max():  # read_image has warned of channels constant all over
            logger.warning("%s: constant inside the mask (constant value %g): set to 0", name, low)
    return result


def _scale(how: str, values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the shift to subtract, and the width to divide by."""
    low, high = float(values.min()), float(values.max())
    if how == "minmax":
        return low, high - low
    if how == "symmetric":
        return (low + high) / 2, (high - low) / 2
    return float(values.mean()), float(values.std())


def _replace_non_finite(
    array: NDArray[np.float32], measured: NDArray[np.bool_] | None, path: Path
) -> tuple[NDArray[np.bool_] | None, list[str]]:
    """Replace in place; return where there are measurements (None: everywhere) and the notes."""
    finite = np.isfinite(array)
    if finite.all():
        return measured, []
    nan, plus, minus = (check(array).sum() for check in (np.isnan, np.isposinf, np.isneginf))
    good = finite if measured is None else finite & measured
    for channel, kept in zip(array, good, strict=True):
        if not kept.any():
            raise DataError(f"{path}: the image holds no finite value: export it again")
        channel[~np.isfinite(channel)] = channel[kept].mean(dtype=np.float64)
    return good, [
        f"{path.name}: {nan} NaN, {plus} +Inf and {minus} -Inf voxels were replaced by the mean of "
        "the finite ones"
    ]


def _select_channels(array: NDArray[np.float32], channels: str, path: Path) -> NDArray[np.float32]:
    if channels == "keep" or len(array) == 1:
        return np.repeat(array, 3, axis=0) if channels == "rgb" else array
    if len(array) != 3:
        raise DataError(
            f"{path}: image.channels {channels} needs 1 or 3 channels, and the file has "
            f"{len(array)}: use channels keep, or export the image with 1 or 3"
        )
    if channels == "grey":
        return np.tensordot(_LUMA, array.astype(np.float64), axes=1)[None].astype(np.float32)
    return array[1:2] if channels == "green" else array


def _whole_numbers(array: NDArray[Any], path: Path, regions: Collection[str]) -> NDArray[np.int64]:
    """Return the one channel of a label map as integers."""
    if not np.isfinite(array).all():
        raise DataError(f"{path}: the label map holds NaN or infinite values: export it again")
    values: NDArray[Any] = array[0]
    if (array != values).any():
        against = f" and are no masks of the regions {listed(regions)}" if regions else ""
        raise DataError(
            f"{path}: the {len(array)} channels of the label map differ{against}: save the labels "
            "as grey values or with a palette, or, as NIfTI, a channel of 0 and 1 for each region "
            "of task.regions"
        )
    rounded = np.rint(values) if values.dtype.kind == "f" else values
    wrong = values[np.abs(values - rounded) > 0.01] if values.dtype.kind == "f" else values[:0]
    if wrong.size:
        raise DataError(
            f"{path}: the label map holds {wrong[0]:g}, which is no whole number: it was resampled "
            "with interpolation or is no label map; export it again with nearest neighbour"
        )
    return rounded.astype(np.int64)


def _refuse_labels(
    path: Path, found: NDArray[np.int64], classes: int, label_map: Mapping[int, int]
) -> None:
    reach = [int(value) for value in found if not 0 <= label_map.get(int(value), value) < classes]
    binary = classes == 2 and int(found[-1]) in (255, 65535)
    binarise = (
        f"binarise a copy of the masks: what is above {found[-1] // 2} is the structure, the rest "
        f"background"
    )
    if path.suffix.lower() in (".jpg", ".jpeg") or (binary and len(found) > _FEW_VALUES):
        remedy = "JPEG blurs labels: export the mask as PNG from its source"
        remedy += f"; or, if it was black and white, {binarise}" if binary else ""
    else:
        remedy = (
            "where they are structures, name these in task.classes and give each its class in "
            "task.label_map; where they mean not annotated, as ignore of nnU-Net and often 255 "
            f"does, set task.ignore: {reach[-1]}: nothing is then trained or scored on these pixels"
        )
        remedy += f"; where the mask is black and white, {binarise}" if binary else ""
    raise DataError(
        f"{path}: the label map holds the unexpected values {listed(reach)} (found: "
        f"{listed(found)}; expected: {listed(range(classes))}): {remedy}"
    )
