"""Reads one file into arrays: pictures through Pillow, volumes through nibabel.

Arrays of images are float32 with the channels first; the spatial axes of a picture are (row,
column), those of a volume (x, y, z), brought to RAS+. Nothing is clipped, no value is cast back to
the type on disk, and whatever was changed on the way is said in `Decoded.notes`.

NaN and infinite voxels are replaced by the mean of their channel's finite voxels, and left out of
the statistics of `normalise`.
"""

import logging
import struct
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CHANNELS", "NORMALISE", "SUFFIXES", "Decoded", "normalise"]
__all__ += ["read_image", "read_label", "read_mask"]

logger = logging.getLogger(__name__)

PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".gif", ".bmp")
VOLUMES = (".nii", ".nii.gz")
SUFFIXES = PICTURES + VOLUMES  # all that is read, in lower case
CHANNELS = ("keep", "grey", "rgb", "green")
NORMALISE = ("zscore", "minmax", "scale", "none")

_LUMA = (0.299, 0.587, 0.114)  # Rec. 601
_DAMAGE = (
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError,
    MemoryError, struct.error, zlib.error,
)  # fmt: skip
_BLACK_AND_WHITE = {(0, 0, 0), (255, 255, 255)}
_FORMATS = ("PNG", "JPEG", "TIFF", "GIF", "BMP")
_MM = {1: 1000.0, 3: 0.001}  # NIfTI's codes of metre and micron; all else is taken as mm


@dataclass(frozen=True)
class Decoded:
    """What a file holds.

    Attributes:
        array: An image (channels, *spatial), a label map or a mask (*spatial).
        spacing: Millimetres per spatial axis; None where the file does not say.
        affine: From voxel indices to millimetres in RAS+; None for pictures.
        notes: One sentence for each thing that was done to the file's content or is odd about it.
        full_scale: The largest value the stored type can hold (255, 65535); None for volumes, for
            32-bit pictures, for labels and masks.
        finite: Where an image was finite on disk, in the array's shape; None: everywhere.
    """

    array: NDArray[Any]
    spacing: tuple[float, ...] | None = None
    affine: NDArray[np.float64] | None = None
    notes: tuple[str, ...] = ()
    full_scale: float | None = None
    finite: NDArray[np.bool_] | None = None


def read_image(path: Path, channels: str = "keep") -> Decoded:
    """Read an image as float32, channels first.

    Args:
        path: A picture or a volume.
        channels: `keep` as stored, `grey` (Rec. 601 luma), `rgb` (a grey image three times) or
            `green` (a grey image as it is).

    Raises:
        DataError: The file cannot be read, holds no finite value, or has other channels.
    """
    if channels not in CHANNELS:
        raise ConfigError(f"image.channels: {channels!r} is unknown: use {_list(CHANNELS)}")
    stored = _decode(path, palette="colours")
    with np.errstate(over="ignore"):
        array = stored.array.astype(np.float32)
    finite, notes = _replace_non_finite(array, path)
    array = _select_channels(array, channels, path)
    if finite is not None and len(finite) != len(array):
        finite = np.broadcast_to(finite.all(axis=0), array.shape)
    for index, values in enumerate(array):
        if values.min() == values.max():
            value = values.flat[0]
            notes.append(f"{path.name}: channel {index} is constant (constant value {value:g})")
    for note in notes:
        logger.warning(note)
    return replace(stored, array=array, finite=finite, notes=(*stored.notes, *notes))


def read_label(path: Path, *, classes: int, label_map: Mapping[int, int] | None = None) -> Decoded:
    """Read a label map whose values are all in `range(classes)`.

    The indices of a palette are the labels. With two classes a mask drawn in black (0) and white
    (255 or 65535) becomes 0 and 1, whatever the palette's order. Values that a slope has moved off
    the integers by no more than 0.01 are rounded.

    Args:
        path: A picture or a volume.
        classes: The number of classes, background included.
        label_map: New labels for stored values, applied first; values it lacks stay.

    Raises:
        DataError: The file cannot be read, or holds a value that is no label.
    """
    stored = _decode(path, palette="bilevel" if classes == 2 else "indices")
    labels = _whole_numbers(stored.array, path)
    mapped = labels.copy()
    for value, label in (label_map or {}).items():
        mapped[labels == value] = label
    found, notes = np.unique(mapped), stored.notes
    white = int(found[-1])
    if classes == 2 and white in (255, 65535) and set(found.tolist()) <= {0, white}:
        mapped, found = mapped // white, found // white
        notes += (f"{path.name}: the mask's values 0 and {white} were read as classes 0 and 1",)
    if found[0] < 0 or found[-1] >= classes:
        _refuse_labels(path, np.unique(labels), classes, label_map or {})
    kind = np.min_scalar_type(classes - 1)
    return replace(stored, array=mapped.astype(kind), notes=notes, full_scale=None)


def read_mask(path: Path) -> Decoded:
    """Read a field of view as bool: any channel that is not 0 is inside; it must not be empty."""
    stored = _decode(path, palette="bilevel")
    inside = ((stored.array != 0) & ~np.isnan(stored.array)).any(axis=0)
    if not inside.any():
        raise DataError(f"{path}: every pixel of the field of view is 0: nothing is inside it")
    return replace(stored, array=inside, full_scale=None)


def normalise(
    array: NDArray[Any],
    how: str,
    mask: NDArray[np.bool_] | None = None,
    finite: NDArray[np.bool_] | None = None,
    *,
    full_scale: float | None = None,
    name: str = "the image",
) -> NDArray[np.float32]:
    """Normalise an image channel by channel.

    Args:
        array: An image (channels, *spatial).
        how: `zscore` (mean 0 and population standard deviation 1), `minmax` (0 to 1), `scale`
            (divide by `full_scale`) or `none`.
        mask: Where the statistics are taken (*spatial); the whole image is normalised by them.
        finite: As in `Decoded`; other voxels are left out of the statistics.
        full_scale: As in `Decoded`, for `scale`.
        name: The file, for errors and warnings.

    Returns:
        The image as float32. A channel that is constant where the statistics are taken becomes 0.
    """
    if how not in NORMALISE:
        raise ConfigError(f"image.normalise: {how!r} is unknown: use {_list(NORMALISE)}")
    if how == "none":
        return array.astype(np.float32)
    if how == "scale":
        if full_scale is None:
            raise DataError(f"{name}: scale needs a picture of 8 or 16 bits: use zscore or minmax")
        return (array / full_scale).astype(np.float32)
    result = np.zeros(array.shape, np.float32)
    for index, channel in enumerate(array):
        counts = np.ones(channel.shape, bool) if mask is None else np.asarray(mask, bool)
        if finite is not None:
            counts = counts & finite[index]
        values = channel[counts].astype(np.float64)
        if not values.size:
            raise DataError(f"{name}: no finite voxel is in the field of view: correct the mask")
        low, high = values.min(), values.max()
        if low < high:
            shift, width = (low, high - low) if how == "minmax" else (values.mean(), values.std())
            result[index] = (channel.astype(np.float64) - shift) / width
        elif channel.min() < channel.max():  # read_image has warned of channels constant all over
            logger.warning("%s: constant inside the mask (constant value %g): set to 0", name, low)
    return result


def _replace_non_finite(
    array: NDArray[np.float32], path: Path
) -> tuple[NDArray[np.bool_] | None, list[str]]:
    """Replace in place; return where the array was finite (None: everywhere) and what to say."""
    finite = np.isfinite(array)
    if finite.all():
        return None, []
    nan, plus, minus = (check(array).sum() for check in (np.isnan, np.isposinf, np.isneginf))
    for channel, good in zip(array, finite, strict=True):
        if not good.any():
            raise DataError(f"{path}: the image holds no finite value: export it again")
        channel[~good] = channel[good].mean(dtype=np.float64)
    return finite, [
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


def _whole_numbers(array: NDArray[Any], path: Path) -> NDArray[np.int64]:
    """Return the one channel of a label map as integers."""
    if not np.isfinite(array).all():
        raise DataError(f"{path}: the label map holds NaN or infinite values: export it again")
    values: NDArray[Any] = array[0]
    if (array != values).any():
        raise DataError(
            f"{path}: the {len(array)} channels of the label map differ: save the labels as grey "
            "values or with a palette"
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
    jpeg = path.suffix.lower() in (".jpg", ".jpeg")
    blurred = " (JPEG blurs labels: export the mask as PNG)" if jpeg else ""
    raise DataError(
        f"{path}: the label map holds the unexpected values {_list(reach)} (found: {_list(found)}; "
        f"expected: {_list(range(classes))}){blurred}: give task.label_map a class for each, as in "
        f"{{{reach[0]}: {classes - 1}}}, or name more task.classes"
    )


def _decode(path: Path, *, palette: str) -> Decoded:
    """Decode as stored, channels first.

    Args:
        path: The file.
        palette: A picture's palette gives `colours`, or the `indices` are kept, or (`bilevel`) the
            picture is taken where the palette is black and white, else the indices.
    """
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise DataError(f"{path}: this kind of file is not read: convert it to {_list(SUFFIXES)}")
    try:
        return _decode_volume(path) if name.endswith(VOLUMES) else _decode_picture(path, palette)
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(f"{path}: is not there or may not be read: correct that") from error
    except _DAMAGE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        reason = "no known picture" if "cannot identify" in reason else reason
        raise DataError(
            f"{path}: cannot be read ({reason}): it is damaged, cut short or not what its name "
            "says; copy it again from its source"
        ) from error


def _decode_picture(path: Path, palette: str) -> Decoded:
    from PIL import Image, ImageOps

    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        warnings.simplefilter("ignore", UserWarning)  # odd metadata; damaged pixels raise
        try:
            opened = Image.open(path, formats=_FORMATS)
        except Image.DecompressionBombError as error:
            raise DataError(f"{path}: too large to be read whole: cut it into tiles") from error
        with opened as image:
            bits = _check_picture(image, path, notes)
            if image.format in ("JPEG", "MPO") and image.getexif().get(0x0112, 1) != 1:
                image = ImageOps.exif_transpose(image)
                notes.append(f"{path.name}: was turned upright as its EXIF orientation says")
            array = _pixels(image, palette, path, notes)
            if image.mode == "L" and bits in (2, 4) and palette == "indices":
                array = array // (255 // (2**bits - 1))  # Pillow spreads 0..3 and 0..15 to 0..255
            if image.mode == "I" and getattr(image, "tag_v2", {}).get(339, (2,))[0] == 1:
                array = array.view(np.uint32)  # Pillow reads unsigned as signed
    whole = array.dtype.kind in "ub" and array.dtype.itemsize < 4
    return Decoded(
        array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0),
        notes=tuple(notes),
        full_scale=2.0 ** max(bits, 8) - 1 if whole else None,
    )


def _check_picture(image: "Image", path: Path, notes: list[str]) -> int:
    """Refuse what Pillow would read with a loss; return the bits per channel."""
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format == "TIFF":
        raise DataError(
            f"{path}: the TIFF holds {frames} pages: save each as a file, or a volume as NIfTI"
        )
    if frames > 1:
        notes.append(f"{path.name}: the first of {frames} frames was read")
    if image.format == "PNG":
        with path.open("rb") as file:
            bits = file.read(25)[24]
    else:
        bits = max(getattr(image, "tag_v2", {}).get(258, (8,)))
    if bits > 8 and len(image.getbands()) > 1:
        raise DataError(
            f"{path}: colour pictures with {bits} bits per channel are not read without loss: "
            "save it with 8 bits, as one grey channel of 16 bits or as NIfTI"
        )
    return bits


def _pixels(image: "Image", palette: str, path: Path, notes: list[str]) -> NDArray[Any]:
    """Return (rows, columns) or (rows, columns, channels) without alpha."""
    mode, drawn = image.mode, palette == "colours"
    if mode == "P" and not drawn:
        indices = np.asarray(image)
        colours = np.array(image.getpalette("RGB")).reshape(-1, 3)
        return _black_and_white(indices, colours) if palette == "bilevel" else indices
    if mode == "P":
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    elif mode == "1" and drawn:
        image = image.convert("L")
    elif mode in ("RGBa", "La"):
        image = image.convert(mode.upper())
    elif mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        image = image.convert("RGB")
    array = np.asarray(image)
    if image.getbands()[-1] not in ("A", "X"):
        return array
    colour, alpha = array[..., :-1], array[..., -1]
    if not drawn and alpha.min() < alpha.max() and (colour == colour[0, 0]).all():
        raise DataError(f"{path}: the mask is drawn in the alpha channel: save it as grey values")
    notes.append(f"{path.name}: the alpha channel was dropped")
    return colour


def _black_and_white(indices: NDArray[Any], colours: NDArray[Any]) -> NDArray[Any]:
    """Return the picture (0, 255) where the palette's used colours are black and white."""
    used = np.unique(indices)
    if used[-1] <= 1:
        used = np.arange(min(2, len(colours)))
    if used[-1] < len(colours) and {tuple(colours[i].tolist()) for i in used} == _BLACK_AND_WHITE:
        indices = colours[indices, 0]
    return indices


def _decode_volume(path: Path) -> Decoded:
    import nibabel as nib

    turn: Any = nib.orientations
    try:
        image: Any = nib.load(path)
        shape, dtype = image.shape, image.get_data_dtype()
        real = dtype.kind in "biuf"
        array = image.get_fdata(dtype=np.float64, caching="unchanged") if real else None
    except (nib.filebasedimages.ImageFileError, nib.spatialimages.HeaderDataError) as error:
        raise ValueError(str(error).replace(str(path), path.name)) from error
    extra = tuple(length for length in shape[3:] if length > 1)
    if array is None or not array.size or len(extra) > 1:
        raise DataError(
            f"{path}: a volume of shape {shape} and type {dtype} is not read: save it with up to 3 "
            "spatial axes, one axis of channels and real numbers"
        )
    affine = image.affine.astype(np.float64)
    affine[:3] *= _MM.get(int(image.header["xyzt_units"]) & 7, 1.0)
    spatial = (*shape[:3], 1, 1)[:3]
    axes = turn.io_orientation(affine)
    if not np.isfinite(axes).all():
        raise DataError(f"{path}: the header's affine leaves an axis without direction: correct it")
    notes, start = [], "".join(turn.aff2axcodes(affine))
    if start != "RAS":
        notes.append(f"{path.name}: was brought from {start} to RAS axes")
    array = turn.apply_orientation(array.reshape(*spatial, *extra), axes)
    affine = affine @ turn.inv_ornt_aff(axes, spatial)
    array = np.moveaxis(array, -1, 0) if extra else array[None]
    spacing = tuple(float(step) for step in np.linalg.norm(affine[:3, :3], axis=0))
    if array.shape[-1] == 1:
        array, spacing = array[..., 0], spacing[:2]
        notes.append(f"{path.name}: holds a single slice and was read with two spatial axes")
    return Decoded(array, spacing, affine, tuple(notes))


def _list(values: Any) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:12], f"... ({len(shown)} in all)"])
