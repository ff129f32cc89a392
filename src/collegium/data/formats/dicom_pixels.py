"""Pixel data of DICOM files as numbers: decompressed, rescaled, and separated from padding.

* Rescale slope and intercept (or the modality's table) give physical units; windows and other
  tables for display are not applied.
* ``MONOCHROME1``, where low values are bright, is inverted exactly once: a stored value v becomes
  lowest + highest - v, of the range that BitsStored can hold. After min-max scaling it equals
  ``MONOCHROME2``. Values in a physical unit (HU, Bq/ml) keep it and are not inverted.
* PixelPaddingValue, or the range to PixelPaddingRangeLimit, marks pixels that were not measured.
* Palettes and YBR become RGB.
"""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded_image import DecodedImage
from collegium.data.formats.dicom_files import read
from collegium.data.formats.dicom_headers import ImagePlane
from collegium.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

Array = NDArray[Any]

_INSTALL = {
    "JPEG Baseline": "pillow",
    "JPEG Extended": "pylibjpeg pylibjpeg-libjpeg",
    "JPEG Lossless": "pylibjpeg pylibjpeg-libjpeg",
    "JPEG-LS": "pyjpegls",
    "JPEG 2000": "pylibjpeg pylibjpeg-openjpeg",
    "High-Throughput JPEG 2000": "pylibjpeg pylibjpeg-openjpeg",
}
"""The packages that decode a transfer syntax, by the beginning of its name."""

_RLE_LENGTHS = re.compile(r"RLE segment .* (\d+) vs\. (\d+) bytes")
"""pydicom's warning that a plane holds more bytes than its header's size needs."""


def read_pixels(volumes: Sequence[Sequence[ImagePlane]], path: Path) -> DecodedImage:
    """Read the values of planes, each file once.

    Args:
        volumes: The slices of each channel.
        path: The file or folder, for notes and errors.

    Returns:
        An array (channel, slice, row, column), float32, without geometry; the samples of a colour
        are channels.

    Raises:
        DataError: A package that decompresses them is missing, a file is damaged or all is padding.
    """
    places: dict[Path, list[tuple[ImagePlane, int, int]]] = {}
    for volume, planes in enumerate(volumes):
        for level, plane in enumerate(planes):
            places.setdefault(plane.file, []).append((plane, volume, level))
    array = measured = scale = None
    inverted = 0
    for file, wanted in places.items():
        dataset, frames = stored_frames(file)
        for plane, volume, level in wanted:
            values, padding = _measurements(dataset, frames[plane.frame], plane)
            samples = len(values)
            if array is None:
                shape = (len(volumes) * samples, len(volumes[0]), *values.shape[1:])
                array = np.empty(shape, np.float32)
                scale = _full_scale(dataset, plane, values)
            array[volume * samples : (volume + 1) * samples, level] = values
            inverted += _is_inverted(dataset, plane)
            if padding is not None:
                measured = np.ones(array.shape, bool) if measured is None else measured
                measured[volume, level] = ~padding
    assert array is not None
    notes = _fill_padding(array, measured, path)
    if inverted:
        notes += (f"{path.name}: was inverted, as MONOCHROME1 shows low values bright",)
    return DecodedImage(array, notes=notes, full_scale=scale, measured=measured)


def _fill_padding(
    array: NDArray[np.float32], measured: NDArray[np.bool_] | None, path: Path
) -> tuple[str, ...]:
    """Set padding to the lowest measurement of its channel."""
    if measured is None:
        return ()
    for channel, inside in zip(array, measured, strict=True):
        if not inside.any():
            raise DataError(f"{path}: holds nothing but padding: export it again")
        channel[~inside] = channel[inside].min()
    count = measured.size - np.count_nonzero(measured)
    return (f"{path.name}: {count} pixels of padding were set to the least measured value",)


def stored_frames(path: Path) -> tuple["Dataset", Array]:
    """Read a file: all of its attributes, and its pixels as stored (frame, row, column, sample).

    Raises:
        DataError: A package that decompresses them is missing, or the file is damaged.
    """
    from pydicom.pixels.utils import pixel_array

    dataset = read(path, pixels=True)
    _check_decoder(dataset, path)
    _check_length(dataset, path)
    frames = int(dataset.get("NumberOfFrames", 1) or 1)
    samples = int(dataset.get("SamplesPerPixel", 1) or 1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            stored = pixel_array(dataset)
    except OSError:
        raise
    except Exception as error:  # decoders raise any class
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")
        raise DataError(
            f"{path}: its pixels cannot be read ({reason}): it is damaged or cut short; copy it "
            "again from its source"
        ) from error
    for warning in caught:
        lengths = _RLE_LENGTHS.search(str(warning.message))
        if lengths and int(lengths[1]) - int(lengths[2]) >= min(dataset.Rows, dataset.Columns):
            raise _other_size(path, lengths[1], lengths[2])
    return dataset, stored.reshape(frames, dataset.Rows, dataset.Columns, samples)


def _measurements(
    dataset: "Dataset", stored: Array, plane: ImagePlane
) -> tuple[Array, NDArray[np.bool_] | None]:
    """Return the values (sample, row, column) of a frame, and where they are padding."""
    if "PALETTE" in str(dataset.PhotometricInterpretation):
        from pydicom.pixels.processing import apply_color_lut

        stored = apply_color_lut(stored[..., 0], dataset)[..., :3]
    if stored.shape[-1] > 1:
        return np.moveaxis(stored, -1, 0), None
    values = stored[..., 0]
    padding = _padding(values, dataset)
    if _is_inverted(dataset, plane):
        lowest_and_highest = -1 if _is_signed(dataset) else 2 ** int(dataset.BitsStored) - 1
        values = lowest_and_highest - values.astype(np.int64)
    return _rescale(values, dataset, plane)[None], padding


def _is_inverted(dataset: "Dataset", plane: ImagePlane) -> bool:
    """Return whether bright means low and the values have no physical unit, which must be kept."""
    if dataset.PhotometricInterpretation != "MONOCHROME1":
        return False
    unit = str(dataset.get("RescaleType", "") or "US")
    nuclear_or_ct = plane.rescale is not None and dataset.get("Modality") in ("CT", "PT")
    return unit in ("US", "normalized") and not nuclear_or_ct


def _full_scale(dataset: "Dataset", plane: ImagePlane, values: Array) -> float | None:
    """Return the largest value that a picture can hold; None if it is rescaled or signed."""
    if "PALETTE" in str(dataset.PhotometricInterpretation):
        return float(np.iinfo(values.dtype).max)
    plain = plane.rescale in (None, (1.0, 0.0)) and not dataset.get("ModalityLUTSequence")
    bits = int(dataset.get("BitsStored", 32) or 32)
    return 2.0**bits - 1 if plain and not _is_signed(dataset) and bits < 32 else None


def _is_signed(dataset: "Dataset") -> bool:
    return bool(dataset.get("PixelRepresentation"))


def _rescale(values: Array, dataset: "Dataset", plane: ImagePlane) -> Array:
    if dataset.get("ModalityLUTSequence"):
        from pydicom.pixels.processing import apply_modality_lut

        return np.asarray(apply_modality_lut(values, dataset))
    slope, intercept = plane.rescale or (1.0, 0.0)
    if (slope, intercept) == (1.0, 0.0):
        return values
    return values.astype(np.float64) * slope + intercept


def _padding(values: Array, dataset: "Dataset") -> NDArray[np.bool_] | None:
    """Return where a picture is padding; None: nowhere."""
    first = dataset.get("PixelPaddingValue", dataset.get("FloatPixelPaddingValue"))
    if first is None:
        return None
    last = dataset.get("PixelPaddingRangeLimit", dataset.get("FloatPixelPaddingRangeLimit"))
    low, high = sorted(_as_stored(end, values) for end in (first, first if last is None else last))
    inside: NDArray[np.bool_] = (values >= low) & (values <= high)
    return inside if inside.any() else None


def _as_stored(value: Any, values: Array) -> float:
    """Return a padding value in the sign of the pixels, as some files state it in the other."""
    if values.dtype.kind not in "iu":
        return float(value)
    whole, span = int(value), 1 << (8 * int(values.dtype.itemsize))
    limits = np.iinfo(values.dtype)
    if whole > int(limits.max):
        return whole - span
    return whole + span if whole < int(limits.min) else whole


def _check_length(dataset: "Dataset", path: Path) -> None:
    """Refuse uncompressed pixels of which a row or a column is more than the header's size needs.

    A few bytes more are padding, which some devices write; fewer are refused by pydicom.
    """
    from pydicom.pixels.utils import get_expected_length

    if "PixelData" not in dataset or dataset.file_meta.TransferSyntaxUID.is_encapsulated:
        return
    needed, stored = get_expected_length(dataset), len(dataset.PixelData)
    samples = int(dataset.get("SamplesPerPixel", 1) or 1)
    line = min(dataset.Rows, dataset.Columns) * samples * int(dataset.BitsAllocated) // 8
    if stored - needed >= max(line, 2):
        raise _other_size(path, stored, needed)


def _other_size(path: Path, stored: int | str, needed: int | str) -> DataError:
    return DataError(
        f"{path}: it holds {stored} bytes of pixels, and its header's size needs {needed}: it is "
        "damaged; copy it again from its source"
    )


def _check_decoder(dataset: "Dataset", path: Path) -> None:
    """Refuse compressed pixels that no installed package reads."""
    from pydicom.pixels.decoders.base import get_decoder

    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_encapsulated:
        return
    try:
        known = get_decoder(syntax).is_available
    except NotImplementedError:
        raise DataError(
            f"{path}: its pixels are compressed as {syntax.name!r}, which is not read: export it "
            "uncompressed"
        ) from None
    twelve_bits = "Extended" in syntax.name and int(dataset.get("BitsStored", 8)) > 8
    if not known or (twelve_bits and "pylibjpeg" not in get_decoder(syntax).available_plugins):
        packages = next((p for name, p in _INSTALL.items() if syntax.name.startswith(name)), "")
        raise DataError(
            f"{path}: its pixels are compressed as {syntax.name!r}, which needs a package that is "
            f"not installed: pip install {packages or 'python-gdcm'}"
        )
