"""File formats, one module each; every one decodes to `DecodedImage`, and most can write a mask.

DICOM is recognised by its content, all other formats by the suffix of the name.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded_image import DecodedImage, DecodedRegions, listed
from collegium.data.formats import arrays, dicom, dicom_segmentation, itk, nifti, pictures
from collegium.data.placeholders import missing_content
from collegium.errors import DataError, StorageError

FILE_SUFFIXES = (*pictures.SUFFIXES, *nifti.SUFFIXES, *itk.SUFFIXES, *arrays.SUFFIXES)
"""Suffixes of readable files that are not DICOM, in lower case."""

SUFFIXES = (*FILE_SUFFIXES, ".dcm", ".dicom", ".ima")
"""Suffixes of readable files; DICOM needs none of them."""

_DAMAGE = (
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError,
    AttributeError, NotImplementedError, MemoryError, struct.error, zlib.error,
    zipfile.BadZipFile,
)  # fmt: skip


def is_readable(path: Path) -> bool:
    """Return whether a file, or a folder of DICOM files, has a readable format."""
    return path.name.lower().endswith(SUFFIXES) or dicom.is_dicom(path)


def decode(path: Path, *, series: str | None = None, both: bool = False) -> DecodedImage:
    """Decode an image as stored, channels first; a palette is decoded to its colours.

    Args:
        path: The file, or the folder of a DICOM series.
        series: Which DICOM series of a folder.
        both: Whether the file holds the label too.

    Raises:
        DataError: The file cannot be read.
    """
    with _explained(path):
        return _decode(path, "colours", series, both=both)


def decode_label(
    path: Path,
    *,
    palette: str,
    like: DecodedImage | None = None,
    both: bool = False,
    regions: Sequence[str] = (),
    classes: Sequence[str] = (),
    by_name: bool = True,
) -> DecodedImage:
    """Decode a label map as stored, with an axis of channels before the spatial ones.

    Overlapping regions become `DecodedRegions`: those of a DICOM segmentation or, in all formats
    but pictures, as many channels of 0 and 1 as there are regions.

    Args:
        path: The file; a DICOM segmentation is brought to the grid of its image.
        palette: "indices", or "bilevel": the picture if the palette is black and white.
        like: The image that it belongs to; required for a DICOM segmentation.
        both: Whether the file holds the image too.
        regions: Names of the regions that it may hold, in the order of the channels.
        classes: Names of the classes.
        by_name: Whether segments of a DICOM segmentation are assigned to classes by name.

    Raises:
        DataError: The file cannot be read.
    """
    suffix = _suffix(path)
    with _explained(path):
        if like is not None and suffix is None and dicom_segmentation.is_segmentation(path):
            return dicom_segmentation.decode_segmentation(
                path, like, regions, classes, by_name=by_name
            )
        if suffix in arrays.SUFFIXES:
            axes = None if like is None else like.array.ndim - 1
            found = arrays.decode(path, "both: label" if both else "label", axes)
        else:
            found = _decode(path, palette, None, both=both)
    if suffix is None or suffix in pictures.SUFFIXES or len(found.array) != len(regions):
        return found
    return _as_regions(found, regions, path)


def segment_names(path: Path) -> dict[int, str]:
    """Return the names of the segments of a DICOM segmentation by their numbers.

    Args:
        path: The file; of any other kind, or unreadable, it has no segments.
    """
    if _suffix(path) is not None:
        return {}
    try:
        return dicom_segmentation.segment_names(path)
    except (DataError, *_DAMAGE):
        return {}  # reading it says what is wrong


def write_mask(
    labels: NDArray[Any],
    image: Path,
    folder: Path,
    name: str,
    *,
    classes: tuple[str, ...] = (),
    series: str | None = None,
) -> Path:
    """Write a label map on the grid of its image: in the image's format, for a picture as PNG.

    Args:
        labels: Classes (*spatial), in the axes in which the image is read; resized to the image by
            nearest neighbour if it was resized.
        image: The predicted file, or folder of a DICOM series.
        folder: The folder to write to, which exists.
        name: The file's name without suffix.
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
            dicom_segmentation.write_segmentation(labels, image, path, classes, series)
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
    """Return the suffix by which a format is known; None for DICOM."""
    name = path.name.lower()
    found = [suffix for suffix in FILE_SUFFIXES if name.endswith(suffix)]
    return max(found, key=len) if found and not path.is_dir() else None


def _decode(path: Path, palette: str, series: str | None, *, both: bool) -> DecodedImage:
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


def _as_regions(found: DecodedImage, regions: Sequence[str], path: Path) -> DecodedImage:
    """Interpret several channels of 0 and 1 as the masks of regions, in their order."""
    inside = found.array == 1
    if len(regions) < 2 or not (inside | (found.array == 0)).all():
        return found
    note = f"{path.name}: its channels were taken as the regions {listed(regions)}"
    return DecodedRegions(
        inside, found.spacing, found.affine, (*found.notes, note), orientation=found.orientation
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Refuse a file whose content is elsewhere; turn what its library raises into one sentence."""
    missing = missing_content(path)
    if missing:
        raise DataError(f"{path}: {missing}")
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(f"{path}: is not there or may not be read: correct that") from error
    except _DAMAGE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        reason = "no known picture" if "cannot identify" in reason else reason
        raise DataError(
            f"{path}: cannot be read ({reason}): it is damaged, cut short or not what its name "
            "says; copy it again from its source"
        ) from error
