"""NIfTI volumes through nibabel: the sform decides if it is set, otherwise the qform.

No other library reads geometry from these files, so that there is a single rule. A file that sets
neither has voxel sizes only: its axes are taken as LAS around the middle of the volume.

nibabel reads as many bytes as the header asks for. Here a file is read to its end, so that the
checksum of gzip is compared, and one that holds more than its header says is refused.
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded_image import DecodedImage, from_ras, to_ras
from collegium.errors import DataError

SUFFIXES = (".nii", ".nii.gz")

_MM = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}
"""Millimetres per unit of length by its code: none, metre, millimetre and micron."""

_APART = 0.1  # of a voxel, from which sform and qform are said to disagree
_CHUNK = 1 << 20  # bytes that are held at a time
_GEOMETRY = (
    "sform_code", "srow_x", "srow_y", "srow_z", "qform_code", "quatern_b", "quatern_c", "quatern_d",
    "qoffset_x", "qoffset_y", "qoffset_z", "xyzt_units",
)  # fmt: skip


def decode(path: Path) -> DecodedImage:
    """Decode a volume in physical units, brought to RAS+.

    The fourth axis is one of channels; axes of length one after the third are dropped.

    Raises:
        DataError: The volume has another number of axes, an unknown unit of length or no real
            numbers.
        ValueError: The file is damaged.
    """
    import nibabel as nib

    try:
        image: Any = nib.load(path)
        shape, dtype = image.shape, image.get_data_dtype()
        array = _values(image, path) if dtype.kind in "biuf" else None
    except (nib.filebasedimages.ImageFileError, nib.spatialimages.HeaderDataError) as error:
        raise ValueError(str(error).replace(str(path), path.name)) from error
    extra = tuple(length for length in shape[3:] if length > 1)
    if array is None or not array.size or len(extra) > 1:
        raise DataError(
            f"{path}: a volume of shape {shape} and type {dtype} is not read: save it with up to 3 "
            "spatial axes, one axis of channels and real numbers"
        )
    array = array.reshape(*_spatial(shape), *extra)
    channels = np.moveaxis(array, -1, 0) if extra else array[None]
    mm = _MM.get(int(image.header["xyzt_units"]) & 7)
    if mm is None:
        raise DataError(f"{path}: its unit of length is unknown: export it in millimetres")
    affine = np.diag([mm, mm, mm, 1.0]) @ image.affine.astype(np.float64)
    notes = tuple(f"{path.name}: {note}" for note in _placement(image, mm))
    return to_ras(channels, affine, path.name, notes=notes)


def write_mask(labels: NDArray[Any], image: Path, path: Path) -> None:
    """Write a label map with the shape, axes and affine of an image.

    Sform, qform and voxel sizes of the mask are those of the image, with their codes, so that every
    program places both alike, even if neither is set.

    Args:
        labels: (x, y, z) in RAS+.
        image: The file of the image.
        path: The file to write.
    """
    import nibabel

    library: Any = nibabel  # it is not typed throughout
    source = library.load(image)
    stored = from_ras(labels, source.affine, _spatial(source.shape))
    mask = library.Nifti1Image(stored, None)
    for key in _GEOMETRY:
        mask.header[key] = source.header[key]
    mask.header["pixdim"][:4] = source.header["pixdim"][:4]
    library.save(mask, path)


def _values(image: Any, path: Path) -> NDArray[np.float64]:
    """Return the values in physical units; the file is read to its end.

    Raises:
        ValueError: It is damaged, or holds more than its header says.
    """
    needed = image.dataobj.offset + math.prod(image.shape) * image.get_data_dtype().itemsize
    if not path.name.lower().endswith(".gz"):
        values = image.get_fdata(dtype=np.float64, caching="unchanged")
        _check_size(path.stat().st_size, needed)
        return np.asarray(values)
    try:
        # values of a damaged stream are refused below, and need no warnings before
        with gzip.open(path) as stream, np.errstate(invalid="ignore", over="ignore"):
            streamed = type(image).from_stream(stream)
            values = streamed.get_fdata(dtype=np.float64, caching="unchanged")
            while stream.read(_CHUNK):
                continue
            _check_size(stream.tell(), needed)
    except gzip.BadGzipFile as error:
        raise ValueError("the checksum of its gzip stream does not agree") from error
    except (EOFError, zlib.error) as error:
        raise ValueError(f"its gzip stream is damaged or cut short: {error}") from error
    return np.asarray(values)


def _check_size(stored: int, needed: int) -> None:
    if stored != needed:
        raise ValueError(f"it holds {stored} bytes, and its header's size needs {needed}")


def _spatial(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:3], 1, 1)[:3]


def _placement(image: Any, mm: float) -> Iterator[str]:
    """Yield a note if lengths are converted, and if the place is not stated or stated twice.

    Args:
        image: The volume.
        mm: Millimetres per unit of its lengths.
    """
    import nibabel as nib

    header = image.header
    if mm != 1:
        yield "its lengths were converted to mm"
    if not header["sform_code"] and not header["qform_code"]:
        yield (
            "does not say where it lies (sform_code and qform_code are 0): its axes were taken as "
            "LAS, which may mirror it"
        )
    if not header["sform_code"] or not header["qform_code"]:
        return
    try:
        apart = header.get_sform() - header.get_qform()
    except (ValueError, nib.spatialimages.HeaderDataError):
        yield "its qform makes no sense: its sform was used"
        return
    corners = np.array([[*corner, 1] for corner in np.ndindex(2, 2, 2)])
    corners = corners * [*np.subtract(_spatial(image.shape), 1), 1]
    distance = float(np.linalg.norm((corners @ apart.T)[:, :3], axis=1).max())
    if distance > _APART * np.linalg.norm(image.affine[:3, :3], axis=0).min():
        yield f"its sform and qform lie up to {distance * mm:.3g} mm apart: its sform was used"
