"""Writes predicted masks on the grid of the image that they belong to."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.pairing import case_id
from collegium.data.reading import VOLUMES
from collegium.data.recipe import nearest
from collegium.errors import DataError, StorageError


def write_mask(labels: NDArray[Any], image: Path, folder: Path, case: str) -> Path:
    """Write a label map beside its kind: a picture as PNG, a volume as NIfTI.

    It is brought back to the size of the image by nearest neighbour where the recipe resized it. A
    NIfTI mask has the image's shape, axes and affine, so that it lies on the same voxels; its
    values are integers. A PNG has the size of the picture as it is displayed.

    Args:
        labels: Classes (rows, columns), or of a volume (x, y, z) in RAS+ order, as images are read.
        image: The file that was predicted.
        folder: Where to write; it is there.
        case: Names the file.

    Returns:
        The path.

    Raises:
        StorageError: The file cannot be written.
    """
    volume = image.name.lower().endswith(VOLUMES)
    path = folder / f"{case}{'.nii.gz' if volume else '.png'}"
    kind = np.uint8 if labels.max(initial=0) < 256 else np.uint16
    try:
        if volume:
            _write_volume(labels.astype(kind), image, path)
        else:
            _write_picture(labels.astype(kind), image, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror or error})") from error
    return path


def _write_picture(labels: NDArray[Any], image: Path, path: Path) -> None:
    from PIL import Image, ImageOps

    with Image.open(image) as opened:
        shown = ImageOps.exif_transpose(opened) if opened.format in ("JPEG", "MPO") else opened
        columns, rows = shown.size
    Image.fromarray(nearest(labels, (rows, columns))).save(path)


def _write_volume(labels: NDArray[Any], image: Path, path: Path) -> None:
    import nibabel

    library: Any = nibabel  # it is not typed throughout
    turn, source = library.orientations, library.load(image)
    spatial = (*source.shape[:3], 1, 1)[:3]
    axes = turn.io_orientation(source.affine)
    ras = tuple(int(spatial[int(axis)]) for axis in np.argsort(axes[:, 0]))
    flat = labels[..., None] if labels.ndim == 2 else labels
    whole = nearest(flat, ras)
    back = turn.ornt_transform(turn.axcodes2ornt("RAS"), axes)
    stored = turn.apply_orientation(whole, back)
    if stored.shape != spatial:
        raise DataError(f"{case_id(image)}: the mask does not fit the grid of its image")
    mask = library.Nifti1Image(np.ascontiguousarray(stored), source.affine)
    sform, qform = (int(source.header[key]) for key in ("sform_code", "qform_code"))
    mask.set_sform(source.affine, sform or int(not qform))
    mask.set_qform(source.get_qform() if qform else source.affine, qform)
    mask.header.set_xyzt_units(*source.header.get_xyzt_units())
    library.save(mask, path)
