"""NRRD and MetaImage (MHA, MHD) through SimpleITK; install ``collegium[itk]``."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.optional import import_optional
from collegium.data.decoded_image import DecodedImage, from_ras, resize_nearest, to_ras
from collegium.data.formats.itk_headers import check_voxels, stated_unit
from collegium.errors import DataError

SUFFIXES = (".nrrd", ".nhdr", ".mha", ".mhd")

_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def decode(path: Path) -> DecodedImage:
    """Decode a volume brought to RAS+, or a two-dimensional image as (channels, row, column).

    The file is read to its end and compared with its header, see `check_voxels`.
    The components of a voxel are channels; axes of length one after the third are dropped.

    Raises:
        DataError: The image has neither two nor three axes or an unknown unit of length, or
            SimpleITK is missing.
        ValueError: The file is damaged.
    """
    image = _load(path)
    check_voxels(path)
    axes = image.GetDimension()
    values: NDArray[Any] = import_optional("SimpleITK", "itk", path.name).GetArrayFromImage(image)
    several = image.GetNumberOfComponentsPerPixel() > 1
    channels = np.moveaxis(values, -1, 0) if several else values[None]
    mm, unit = stated_unit(path)
    notes = () if mm == 1 else (f"{path.name}: its lengths in {unit} were converted to mm",)
    if axes == 2:
        column, row = image.GetSpacing()
        return DecodedImage(channels, (row * mm, column * mm), notes=notes)
    if axes != 3:
        raise DataError(
            f"{path}: an image of {axes} axes is not read: save every volume as a file of its own"
        )
    affine = np.diag([mm, mm, mm, 1.0]) @ _affine(image)
    return to_ras(channels.transpose(0, 3, 2, 1), affine, path.name, notes=notes)


def write_mask(labels: NDArray[Any], image: Path, path: Path) -> None:
    """Write a label map with the size, axes and geometry of an image, in the format of ``path``.

    Its lengths are in millimetres, whatever the unit of the image's.

    Args:
        labels: (x, y, z) in RAS+, or (row, column).
        image: The file of the image.
        path: The file to write.

    Raises:
        OSError: The file cannot be written.
    """
    library, source = import_optional("SimpleITK", "itk", path.name), _load(image)
    if source.GetDimension() == 2:
        columns, rows = source.GetSize()
        stored = resize_nearest(labels, (rows, columns))
    else:
        stored = from_ras(labels, _affine(source), source.GetSize()).transpose(2, 1, 0)
    mask = library.GetImageFromArray(np.ascontiguousarray(stored))
    mask.CopyInformation(source)
    mm, _ = stated_unit(image)
    mask.SetSpacing([step * mm for step in source.GetSpacing()])
    mask.SetOrigin([place * mm for place in source.GetOrigin()])
    try:
        library.WriteImage(mask, str(path), useCompression=True)
    except RuntimeError as error:
        raise OSError(_reason(error)) from error


def _load(path: Path) -> Any:
    library = import_optional("SimpleITK", "itk", path.name)
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
    """Return the last informative line; a reason that ITK appends is often another error's."""
    lines = [line.strip(" )") for line in str(error).splitlines() if line.strip(" )")]
    last = lines[-1].partition("ERROR: ")[2] or lines[-1]
    return "its header or its voxels do not make sense" if last.startswith("Reason:") else last


def _affine(image: Any) -> NDArray[np.float64]:
    """Return the affine from stored indices (x, y, z) to mm in RAS+; ITK's own is in LPS+."""
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return np.asarray(_LPS_TO_RAS @ affine)
