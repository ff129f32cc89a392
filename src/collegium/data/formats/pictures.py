"""Pictures through Pillow: PNG, JPEG, TIFF, GIF, BMP."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded_image import DecodedImage, resize_nearest
from collegium.data.formats.picture_files import check_picture
from collegium.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".gif", ".bmp")

_BLACK_AND_WHITE = {(0, 0, 0), (255, 255, 255)}
_FORMATS = ("PNG", "JPEG", "TIFF", "GIF", "BMP")


def decode(path: Path, palette: str = "colours") -> DecodedImage:
    """Decode a picture as stored, channels first.

    Args:
        path: The file.
        palette: "colours": a palette is decoded to its colours; "indices": they are kept;
            "bilevel": the picture if the palette is black and white, otherwise the indices.

    Raises:
        DataError: Reading it would lose something.
        ValueError: The file is damaged.
    """
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
            bits = _check_kind(image, path, notes)
            check_picture(image, path)
            if image.format in ("JPEG", "MPO") and image.getexif().get(0x0112, 1) != 1:
                image = ImageOps.exif_transpose(image)
                notes.append(f"{path.name}: was turned upright as its EXIF orientation says")
            array = _pixels(image, palette, path, notes)
            if image.mode == "L" and bits in (2, 4) and palette == "indices":
                array = array // (255 // (2**bits - 1))  # Pillow spreads 0..3 and 0..15 to 0..255
            if image.mode == "I" and getattr(image, "tag_v2", {}).get(339, (2,))[0] == 1:
                array = array.view(np.uint32)  # Pillow reads unsigned as signed
    whole = array.dtype.kind in "ub" and array.dtype.itemsize < 4
    return DecodedImage(
        array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0),
        notes=tuple(notes),
        full_scale=2.0 ** max(bits, 8) - 1 if whole else None,
    )


def _check_kind(image: "Image", path: Path, notes: list[str]) -> int:
    """Refuse pictures that Pillow would read with a loss; return the bits per channel."""
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
    """Return the picture (0, 255) if the palette's used colours are black and white."""
    used = np.unique(indices)
    if used[-1] <= 1:
        used = np.arange(min(2, len(colours)))
    if used[-1] < len(colours) and {tuple(colours[i].tolist()) for i in used} == _BLACK_AND_WHITE:
        indices = colours[indices, 0]
    return indices


def write_mask(labels: NDArray[Any], image: Path, path: Path) -> None:
    """Write a label map as a PNG of the size of the picture as it is displayed.

    Args:
        labels: (row, column).
        image: The file of the picture.
        path: The file to write.
    """
    from PIL import Image, ImageOps

    with Image.open(image) as opened:
        shown = ImageOps.exif_transpose(opened) if opened.format in ("JPEG", "MPO") else opened
        columns, rows = shown.size
    Image.fromarray(resize_nearest(labels, (rows, columns))).save(path)
