"""Arrays of NumPy and HDF5, as research code stores them: slices, or stacks of slices.

An array has no geometry. Its axes are inferred from their number and lengths:

* two: (row, column);
* three: (row, column, channel) if the last is at most 8 and shorter than the first two, or
  (channel, row, column) if the first is; otherwise a stack (slice, row, column);
* four: (slice, row, column, channel), as IOP-FL and GRACE store prostates.

An array that would be (channel, row, column) is a stack as well if its file holds a label of the
same three lengths, and a note reports it; a picture whose file holds as many regions as it has
channels has its channels last. A stack of 8 slices or fewer without a label in its file needs a
fourth axis of length 1 to be distinguished from channels.

Stacks become volumes (row, column, slice). An ``.npz`` or HDF5 file names its arrays: ``image``,
``img``, ``data``, ``raw`` or ``x``, and ``label``, ``mask``, ``seg``, ``segmentation``, ``gt`` or
``y``; a ``spacing`` in it is used, in the order of the axes. If an ``.npy`` file is image and label
at once, as in FedDG, the first three channels are the image and the others nested structures, each
inside the one before: the label is the number of them that hold a pixel.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from collegium.core.optional import import_optional
from collegium.data.decoded_image import DecodedImage, listed, resize_nearest
from collegium.errors import DataError

SUFFIXES = (".npy", ".npz", ".h5", ".hdf5")

Array = NDArray[Any]
Role = Literal["image", "label", "both: image", "both: label"]
"""The array to read from a file; "both" if one file holds image and label."""

IMAGES = ("image", "img", "data", "raw", "x")
LABELS = ("label", "mask", "seg", "segmentation", "gt", "y")

_MOST_CHANNELS = 8
_COLOURS = 3  # channels of the image in a file that is both


def decode(path: Path, role: Role = "image", axes: int | None = None) -> DecodedImage:
    """Decode an array, channels first.

    Args:
        path: The file.
        role: The array to read.
        axes: The number of spatial axes of its image, if it is a label; None: inferred.

    Raises:
        DataError: The file holds pickled objects, no array of that role or other axes.
        ValueError: The file is damaged.
    """
    wanted = IMAGES if role.endswith("image") else LABELS
    if path.suffix.lower() == ".npy":
        parts = {wanted[0]: _whole(path)}
        both = role.startswith("both")
    else:
        parts, both = _named(path), False
    stored = _first(parts, wanted)
    if stored is None:
        raise DataError(
            f"{path}: it holds {listed(sorted(parts)) or 'nothing'} and no {wanted[0]}; name the "
            f"array one of {listed(wanted)}"
        )
    few = _is_stack_of_few(parts)
    array = _channels_first(stored, path, 3 if few and axes is None else axes)
    if both:
        array = array[:_COLOURS] if role == "both: image" else _nested(array[_COLOURS:], path)
    spacing = _spacing(parts.get("spacing"), stored.ndim, array.ndim - 1, path)
    whole = array.dtype.kind == "u" and array.dtype.itemsize < 4
    full_scale = float(np.iinfo(array.dtype).max) if whole else None
    notes: tuple[str, ...] = ()
    if few and wanted is IMAGES:
        notes = (f"{path.name}: has the shape {stored.shape} of its label and was read as slices",)
    return DecodedImage(array, spacing, notes=notes, full_scale=full_scale)


def write_mask(labels: Array, image: Path, path: Path) -> None:
    """Write a label map as ``.npy``, in the order and size of the image's axes.

    Args:
        labels: (row, column) or (row, column, slice).
        image: The file of the image.
        path: The file to write.
    """
    plain = image.suffix.lower() == ".npy"
    stored = _whole(image) if plain else _first(_named(image), IMAGES)
    assert stored is not None
    shape = _channels_first(stored, image, labels.ndim).shape[1:]
    whole = resize_nearest(labels, shape)
    np.save(path, np.moveaxis(whole, -1, 0) if whole.ndim == 3 else whole)


def _whole(path: Path) -> Array:
    return _numpy(path).get("", np.empty(0))


def _named(path: Path) -> dict[str, Array]:
    """Read all arrays of a file by their names in lower case."""
    if path.suffix.lower() == ".npz":
        return _numpy(path)
    library = import_optional("h5py", "hdf5", path.name)
    with library.File(path, "r") as file:
        return {
            name.lower(): np.asarray(value[()])
            for name, value in file.items()
            if isinstance(value, library.Dataset)
        }


def _numpy(path: Path) -> dict[str, Array]:
    """Read a file of NumPy, a single array by the name ""; pickled content is never opened."""
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                _check_end(stream)
                return {"": np.asarray(file)}
            return dict(_members(file))
    except ValueError as error:
        raise _explained(error, path) from error


def _members(file: Any) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of an .npz by their names in lower case, each read to its end."""
    for name in file.zip.namelist():
        if name.endswith(".npy"):
            with file.zip.open(name) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
                _check_end(member)  # where the checksum is compared
            yield name.removesuffix(".npy").lower(), array


def _check_end(stream: IO[bytes]) -> None:
    if stream.read(1):
        raise ValueError("it holds more than its header says")


def _explained(error: ValueError, path: Path) -> Exception:
    """Distinguish pickled objects from damage: NumPy takes any unknown content for the former."""
    text = str(error)
    if "Object arrays" in text or ("allow_pickle" in text and path.read_bytes()[:1] == b"\x80"):
        return DataError(
            f"{path}: it holds pickled Python objects, which can run code and are not read; save a "
            f"plain array of numbers"
        )
    return ValueError("no array of NumPy") if "allow_pickle" in text else error


def _first(parts: Mapping[str, Array], names: Sequence[str]) -> Array | None:
    return next((parts[name] for name in names if name in parts), None)


def _channels_first(array: Array, path: Path, axes: int | None = None) -> Array:
    """Return (channels, row, column) or (channels, row, column, slice)."""
    if array.dtype.kind not in "biuf" or not array.size or not 2 <= array.ndim <= 4:
        raise DataError(
            f"{path}: an array of shape {array.shape} and type {array.dtype} is not read: save "
            f"numbers with two to four axes"
        )
    if array.ndim == 4:
        return array.transpose(3, 1, 2, 0)
    if array.ndim == 2:
        return array[None]
    axis = None if axes == 3 else _channel_axis(array.shape)
    return np.moveaxis(array, 0, -1)[None] if axis is None else np.moveaxis(array, axis, 0)


def _channel_axis(shape: tuple[int, ...]) -> int | None:
    """Return which of three axes is channels by its length; None: it is a stack of slices."""
    first, middle, last = shape
    if last <= _MOST_CHANNELS and last < min(first, middle):
        return 2
    return 0 if first <= _MOST_CHANNELS and first < min(middle, last) else None


def _is_stack_of_few(parts: Mapping[str, Array]) -> bool:
    """Return whether a label beside the image shows that its first axis is slices, not channels."""
    image, label = _first(parts, IMAGES), _first(parts, LABELS)
    if image is None or label is None or image.ndim != 3 or image.shape != label.shape:
        return False
    return _channel_axis(image.shape) == 0


def _nested(channels: Array, path: Path) -> Array:
    """Return the number of nested structures that hold each pixel."""
    if not len(channels):
        raise DataError(
            f"{path}: it has {_COLOURS} channels or fewer and so no label; name another file"
        )
    if len(channels) == 1:
        return channels
    inside = channels > 0
    for outer, inner in pairwise(inside):
        if (inner & ~outer).any():
            raise DataError(
                f"{path}: its structures do not lie one in the other; save one label map"
            )
    nested: Array = inside.sum(0, keepdims=True).astype(np.uint8)
    return nested


def _spacing(stored: Array | None, had: int, axes: int, path: Path) -> tuple[float, ...] | None:
    """Return the spacing in the order of the axes as they are read."""
    if stored is None:
        return None
    values = tuple(float(step) for step in np.ravel(stored))
    if len(values) != axes or min(values) <= 0:
        raise DataError(
            f"{path}: its spacing {values} does not give {axes} lengths above 0 (the array has "
            f"{had} axes); correct it or leave it out"
        )
    return values if axes == 2 else (*values[1:], values[0])
