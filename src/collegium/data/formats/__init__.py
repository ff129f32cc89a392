"""Kinds of files, one module each; every one gives `Decoded`, and most can write a mask back.

What is DICOM is told by its content, all else by the end of its name.
"""

import struct
import zipfile
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded import Decoded, Regions, listed
from collegium.data.formats import arrays, dicom, dicomseg, itk, nifti, pictures
from collegium.errors import DataError, StorageError

__all__ = ["FILES", "SUFFIXES", "decode", "decode_label", "is_readable", "write_mask"]

FILES = (*pictures.SUFFIXES, *nifti.SUFFIXES, *itk.SUFFIXES, *arrays.SUFFIXES)
"""How the names of readable files that are not DICOM end, in lower case."""

SUFFIXES = (*FILES, ".dcm", ".dicom", ".ima")
"""How the names of readable files end; DICOM needs no such end."""

_DAMAGE = (
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError,
    AttributeError, NotImplementedError, MemoryError, struct.error, zlib.error,
    zipfile.BadZipFile,
)  # fmt: skip


def is_readable(path: Path) -> bool:
    """Whether a file, or a folder of DICOM files, is of a kind that is read."""
    return path.name.lower().endswith(SUFFIXES) or dicom.is_dicom(path)


def decode(path: Path, *, series: str | None = None, both: bool = False) -> Decoded:
    """Decode an image as stored, channels first; of a palette its colours.

    Args:
        path: The file, or the folder of a DICOM series.
        series: Which DICOM series of a folder.
        both: Whether the file holds the label too.

    Raises:
        DataError: The file cannot be read.
    """
    return _guarded(path, lambda: _decode(path, "colours", series, both=both))


def decode_label(
    path: Path,
    *,
    palette: str,
    like: Decoded | None = None,
    both: bool = False,
    regions: Sequence[str] = (),
    classes: Sequence[str] = (),
    by_name: bool = True,
) -> Decoded:
    """Decode a label map as stored, with an axis of channels before the spatial ones.

    What holds overlapping regions becomes `Regions`: a DICOM segmentation, or of all but pictures
    as many channels of 0 and 1 as there are regions.

    Args:
        path: The file; a DICOM segmentation is brought to the grid of its image.
        palette: "indices", or "bilevel": the picture where the palette is black and white.
        like: The image that it belongs to; a DICOM segmentation needs it.
        both: Whether the file holds the image too.
        regions: Names of the regions that it may hold, in the order of the channels.
        classes: Names of the classes.
        by_name: Whether segments of a DICOM segmentation are the classes that they are called as.

    Raises:
        DataError: The file cannot be read.
    """
    suffix = _suffix(path)
    if like is not None and suffix is None and dicomseg.is_segmentation(path):
        decode = partial(dicomseg.decode_segmentation, path, like, regions, classes)
        return _guarded(path, lambda: decode(by_name=by_name))
    if suffix not in arrays.SUFFIXES:
        found = _guarded(path, lambda: _decode(path, palette, None, both=both))
    else:
        axes = None if like is None else like.array.ndim - 1
        role: arrays.Role = "both: label" if both else "label"
        found = _guarded(path, lambda: arrays.decode(path, role, axes))
    if suffix is None or suffix in pictures.SUFFIXES or len(found.array) != len(regions):
        return found
    return _as_regions(found, regions, path)


def write_mask(
    labels: NDArray[Any],
    image: Path,
    folder: Path,
    name: str,
    *,
    classes: tuple[str, ...] = (),
    series: str | None = None,
) -> Path:
    """Write a label map on the grid of its image: in the image's format, a picture as PNG.

    Args:
        labels: Classes, in the axes in which the image is read; brought back to the size of the
            image by nearest neighbour where it was resized.
        image: The file, or folder of a DICOM series, that was predicted.
        folder: Where to write; it is there.
        name: Names the file.
        classes: Names of the classes, for a DICOM segmentation.
        series: Which DICOM series.

    Returns:
        The path.

    Raises:
        StorageError: The file cannot be written.
    """
    kind = np.uint8 if labels.max(initial=0) < 256 else np.uint16
    labels = labels.astype(kind)
    suffix = _suffix(image)
    try:
        if suffix is None:
            path = folder / f"{name}.dcm"
            dicomseg.write_segmentation(labels, image, path, classes, series)
        elif suffix in nifti.SUFFIXES:
            path = folder / f"{name}.nii.gz"
            nifti.write_mask(labels, image, path)
        elif suffix in itk.SUFFIXES:
            path = folder / f"{name}{'.mha' if suffix in ('.mha', '.mhd') else '.nrrd'}"
            itk.write_mask(labels, image, path)
        elif suffix in arrays.SUFFIXES:
            path = folder / f"{name}.npy"
            arrays.write_mask(labels, image, path)
        else:
            path = folder / f"{name}.png"
            pictures.write_mask(labels, image, path)
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"the mask {name} cannot be written ({reason})") from error
    return path


def _suffix(path: Path) -> str | None:
    """Return how the name ends, as a format knows it; None for DICOM."""
    name = path.name.lower()
    found = [suffix for suffix in FILES if name.endswith(suffix)]
    return max(found, key=len) if found and not path.is_dir() else None


def _decode(path: Path, palette: str, series: str | None, *, both: bool) -> Decoded:
    suffix = _suffix(path)
    if suffix in pictures.SUFFIXES:
        return pictures.decode(path, palette)
    if suffix in nifti.SUFFIXES:
        return nifti.decode(path)
    if suffix in itk.SUFFIXES:
        return itk.decode(path)
    if suffix in arrays.SUFFIXES:
        return arrays.decode(path, "both: image" if both else "image")
    if not path.exists():
        raise FileNotFoundError(path)
    if path.is_dir() or dicom.is_dicom(path):
        return dicom.decode(path, series)
    raise DataError(f"{path}: this kind of file is not read: convert it to {listed(SUFFIXES)}")


def _as_regions(found: Decoded, regions: Sequence[str], path: Path) -> Decoded:
    """Take several channels of 0 and 1 for the masks of regions, in their order."""
    inside = found.array == 1
    if len(regions) < 2 or not (inside | (found.array == 0)).all():
        return found
    note = f"{path.name}: its channels were taken as the regions {listed(regions)}"
    return Regions(inside, found.spacing, found.affine, (*found.notes, note), stored=found.stored)


def _guarded(path: Path, read: Any) -> Decoded:
    """Say in one sentence what a file is not, whatever its library raises."""
    try:
        decoded: Decoded = read()
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(f"{path}: is not there or may not be read: correct that") from error
    except _DAMAGE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        reason = "no known picture" if "cannot identify" in reason else reason
        raise DataError(
            f"{path}: cannot be read ({reason}): it is damaged, cut short or not what its name "
            "says; copy it again from its source"
        ) from error
    return decoded
