"""NRRD, MetaImage (MHA, MHD) through SimpleITK; install ``collegium[itk]``."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.optional import need
from collegium.data.decoded import Decoded, as_stored, nearest, upright
from collegium.errors import DataError

SUFFIXES = (".nrrd", ".nhdr", ".mha", ".mhd")

_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def decode(path: Path) -> Decoded:
    """Decode a volume brought to RAS+, or a two-dimensional image as (channels, row, column).

    The components of a voxel are channels; axes of length one are dropped behind the third.

    Raises:
        DataError: The image has other than two or three axes, or SimpleITK is missing.
        ValueError: The file is damaged.
    """
    image = _load(path)
    axes = image.GetDimension()
    values: NDArray[Any] = need("SimpleITK", "itk", path.name).GetArrayFromImage(image)
    several = image.GetNumberOfComponentsPerPixel() > 1
    channels = np.moveaxis(values, -1, 0) if several else values[None]
    if axes == 2:
        column, row = image.GetSpacing()
        return Decoded(channels, (row, column))
    if axes != 3:
        raise DataError(
            f"{path}: an image of {axes} axes is not read: save every volume as a file of its own"
        )
    return upright(channels.transpose(0, 3, 2, 1), _affine(image), path.name)


def write_mask(labels: NDArray[Any], image: Path, path: Path) -> None:
    """Write a label map with the size, axes and geometry of an image, in the format of ``path``."""
    library, source = need("SimpleITK", "itk", path.name), _load(image)
    if source.GetDimension() == 2:
        columns, rows = source.GetSize()
        stored = nearest(labels, (rows, columns))
    else:
        stored = as_stored(labels, _affine(source), source.GetSize()).transpose(2, 1, 0)
    mask = library.GetImageFromArray(np.ascontiguousarray(stored))
    mask.CopyInformation(source)
    try:
        library.WriteImage(mask, str(path), useCompression=True)
    except RuntimeError as error:
        raise OSError(_reason(error)) from error


def _load(path: Path) -> Any:
    library = need("SimpleITK", "itk", path.name)
    if not path.exists():
        raise FileNotFoundError(path)
    meta = path.suffix.lower() in (".mha", ".mhd")  # by itself ITK knows them in lower case only
    try:
        image = library.ReadImage(str(path), imageIO="MetaImageIO" if meta else "")
    except RuntimeError as error:
        raise ValueError(_reason(error).replace(str(path), path.name)) from error
    while image.GetDimension() > 3 and image.GetSize()[-1] == 1:
        image = image[(*[slice(None)] * (image.GetDimension() - 1), 0)]
    return image


def _reason(error: RuntimeError) -> str:
    """Return the last line that says something; a reason that ITK gives is often another's."""
    lines = [line.strip(" )") for line in str(error).splitlines() if line.strip(" )")]
    said = lines[-1].partition("ERROR: ")[2] or lines[-1]
    return "its header or its voxels do not make sense" if said.startswith("Reason:") else said


def _affine(image: Any) -> NDArray[np.float64]:
    """From stored indices (x, y, z) to millimetres in RAS+; ITK's own are in LPS+."""
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return np.asarray(_LPS_TO_RAS @ affine)
