"""DICOM segmentations: masks that lie on the grid of a series; install ``collegium[dicom]``.

They are read frame by frame, each put where its position says on the grid of the image, so that
slices without a segment may be absent. They are written by highdicom.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded import Decoded, listed
from collegium.data.formats.dicomfiles import files_below, is_dicom, quiet, sop_class
from collegium.data.formats.dicomheaders import Plane, functional_groups, look_up, planes_of
from collegium.data.formats.dicompixels import stored_frames
from collegium.data.formats.dicomsegwriting import write_segmentation
from collegium.data.formats.dicomstack import affine_of
from collegium.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

__all__ = ["Regions", "decode_regions", "decode_segmentation", "is_segmentation"]
__all__ += ["write_segmentation"]

Voxels = tuple[NDArray[np.intp], ...]

_SEGMENTATION, _LABEL_MAP = "1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7"
_OFF_GRID = 0.1  # of a voxel: how far a segmentation may lie off the grid of its image


@dataclass(frozen=True)
class Regions(Decoded):
    """Segments that may overlap: `array` is bool (segment, *spatial).

    Attributes:
        numbers: The number of each segment in the file.
        labels: What each is called there.
    """

    numbers: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()


def is_segmentation(path: Path) -> bool:
    """Whether a file is a DICOM segmentation, or a folder holds one."""
    return bool(_segmentations(path))


def decode_segmentation(path: Path, like: Decoded) -> Decoded:
    """Decode a segmentation to a label map (1, *spatial) of segment numbers on an image's grid.

    Args:
        path: The file, or a folder that holds one.
        like: The image that it belongs to.

    Raises:
        DataError: The file is damaged, or segments overlap or lie on another grid than the image.
    """
    with quiet():
        segments = _Segments.of(path)
        labels = np.zeros(like.array.shape[1:], np.min_scalar_type(max(segments.names)))
        for number, voxels in segments.on_grid(like):
            there = labels[voxels]
            others = there[(there != 0) & (there != number)]
            if others.size:
                names = [f"{n} ({segments.names.get(n, '')})" for n in (int(others[0]), number)]
                raise DataError(
                    f"{segments.path}: its segments {' and '.join(names)} overlap, so that they "
                    "are no label map: read them as regions, or export them without overlap"
                )
            labels[voxels] = number
    return Decoded(labels[None], like.spacing, like.affine, tuple(segments.notes))


def decode_regions(path: Path, like: Decoded) -> Regions:
    """Decode a segmentation to regions (segment, *spatial) that may overlap.

    Args:
        path: The file, or a folder that holds one.
        like: The image that it belongs to.

    Raises:
        DataError: The file is damaged, or segments lie on another grid than the image.
    """
    with quiet():
        segments = _Segments.of(path)
        numbers = tuple(sorted(segments.names))
        inside = np.zeros((len(numbers), *like.array.shape[1:]), bool)
        for number, voxels in segments.on_grid(like):
            inside[numbers.index(number)][voxels] = True
    return Regions(
        inside,
        like.spacing,
        like.affine,
        tuple(segments.notes),
        numbers=numbers,
        labels=tuple(segments.names[number] for number in numbers),
    )


def _segmentations(path: Path) -> list[Path]:
    files = files_below(path) if path.is_dir() else [path]
    kinds = (_SEGMENTATION, _LABEL_MAP)
    return [file for file in files if is_dicom(file) and sop_class(file) in kinds]


@dataclass(frozen=True)
class _Segments:
    """A segmentation as stored: frames (frame, row, column), and the segments' names."""

    path: Path
    dataset: "Dataset"
    frames: NDArray[Any]
    names: dict[int, str]
    notes: list[str]

    @classmethod
    def of(cls, path: Path) -> "_Segments":
        """Read the one segmentation of a path."""
        files = _segmentations(path)
        if len(files) != 1:
            raise DataError(
                f"{path}: holds {len(files)} DICOM segmentations "
                f"({listed(file.name for file in files)}): name the file of one"
            )
        dataset, frames = stored_frames(files[0])
        names = {
            int(item.SegmentNumber): str(item.get("SegmentLabel", ""))
            for item in dataset.get("SegmentSequence") or []
        }
        notes, values = [], frames[..., 0]
        if str(dataset.get("SegmentationType", "")) == "FRACTIONAL":
            values = 2 * values.astype(np.int64) >= int(dataset.MaximumFractionalValue)
            notes.append(f"{path.name}: its fractional segments were cut at one half")
        if not names:
            raise DataError(f"{files[0]}: it describes no segment: export it again")
        return cls(files[0], dataset, values, names, notes)

    def on_grid(self, like: Decoded) -> Iterator[tuple[int, Voxels]]:
        """Give for each frame the number of a segment and its voxels on the grid of an image."""
        elsewhere = 0
        for plane, values in zip(planes_of(self.dataset, self.path, ()), self.frames, strict=True):
            place = _place(plane, like, self.path)
            if place is None:
                elsewhere += 1
                continue
            for number, inside in self._parts(plane, values):
                yield number, _voxels(inside, place, like, self.path)
        if elsewhere:
            self.notes.append(f"{self.path.name}: {elsewhere} frames of other slices were left out")

    def _parts(self, plane: Plane, values: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Give the segments of a frame: one, or of a label map those that occur."""
        if self.dataset.SOPClassUID == _LABEL_MAP:
            background = self.dataset.get("PixelPaddingValue", 0)
            for number in np.unique(values):
                if number != background and int(number) in self.names:
                    yield int(number), values == number
            return
        groups = functional_groups(self.dataset, plane.frame)
        number = look_up(groups, "ReferencedSegmentNumber", "SegmentIdentificationSequence")
        number = next(iter(self.names)) if number is None else int(number)
        if number not in self.names:
            raise DataError(f"{self.path}: its segment {number} is not described: export it again")
        yield number, values != 0


def _place(plane: Plane, like: Decoded, path: Path) -> NDArray[np.float64] | None:
    """Return the way from (column, row) to the image's voxels; None where it is another slice.

    Returns:
        An array (voxel axis, 3): the steps from column to column and row to row, the first voxel.
    """
    shape = like.array.shape[1:]
    size = np.array([plane.shape[1], plane.shape[0]])
    if like.affine is None or (plane.position is None and len(shape) == 2):
        if shape != plane.shape[:2]:
            raise _other_grid(path, f"{plane.shape[:2]} against {shape} pixels")
        return np.array([[0.0, 1, 0], [1, 0, 0]])
    if plane.position is None:
        raise _other_grid(path, "it states no positions")
    exact = (np.linalg.inv(like.affine) @ affine_of(plane))[:3][:, [0, 1, 3]]
    whole = np.rint(exact)
    corners = np.array([[*corner, 1] for corner in np.ndindex(2, 2)]) * [*(size - 1), 1]
    off = np.abs((exact - whole) @ corners.T).max(1)
    if len(shape) == 2:
        if abs(exact[2, 2]) * np.linalg.norm(like.affine[:3, 2]) > _OFF_GRID * min(
            np.linalg.norm(like.affine[:3, :2], axis=0)
        ):
            return None
        off = off[:2]
    if np.abs(whole[: len(shape), :2]).sum(0).tolist() != [1, 1] or off.max() > _OFF_GRID:
        raise _other_grid(path, f"{off.max():.2g} voxels off, or turned")
    return whole[: len(shape)]


def _voxels(
    inside: NDArray[np.bool_], place: NDArray[np.float64], like: Decoded, path: Path
) -> Voxels:
    rows, columns = np.nonzero(inside)
    found = (place @ [columns, rows, np.ones(len(rows))]).astype(np.intp)
    limits = np.array(like.array.shape[1:])[:, None]
    outside = ((found < 0) | (found >= limits)).any(0)
    if outside.any():
        raise _other_grid(path, f"{np.count_nonzero(outside)} voxels of a frame lie outside")
    return tuple(found)


def _other_grid(path: Path, why: str) -> DataError:
    return DataError(
        f"{path}: the segmentation does not lie on the grid of its image ({why}): name the series "
        "that it was drawn on, or resample it"
    )
