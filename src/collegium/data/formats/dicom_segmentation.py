"""DICOM segmentations: masks on the grid of a series; install ``collegium[dicom]``.

They are read frame by frame, each placed by its position on the grid of the image, so that slices
without a segment may be absent. Overlapping segments are regions, which are identified by their
labels. They are written by highdicom.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded_image import DecodedImage, DecodedRegions, listed
from collegium.data.formats.dicom_files import (
    files_below,
    ignore_value_warnings,
    is_dicom,
    read,
    sop_class,
)
from collegium.data.formats.dicom_geometry import affine_of
from collegium.data.formats.dicom_headers import ImagePlane, functional_groups, look_up, planes_of
from collegium.data.formats.dicom_pixels import stored_frames
from collegium.data.formats.dicom_segmentation_writing import write_segmentation
from collegium.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

__all__ = ["decode_segmentation", "is_segmentation", "segment_names", "write_segmentation"]

Voxels = tuple[NDArray[np.intp], ...]

_SEGMENTATION, _LABEL_MAP = "1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7"
_OFF_GRID = 0.1  # of a voxel: how far a segmentation may lie off the grid of its image


def is_segmentation(path: Path) -> bool:
    """Return whether a file is a DICOM segmentation, or a folder holds one."""
    return bool(_segmentations(path))


def segment_names(path: Path) -> dict[int, str]:
    """Return the names of the segments of a segmentation by their numbers; no pixel is read.

    Args:
        path: The file, or a folder that holds one; anything else has no segments.
    """
    names: dict[int, str] = {}
    for file in _segmentations(path):
        with ignore_value_warnings():
            names |= _segment_labels(read(file, only=["SegmentSequence"]))
    return names


def _segment_labels(dataset: "Dataset") -> dict[int, str]:
    return {
        int(item.SegmentNumber): str(item.get("SegmentLabel", ""))
        for item in dataset.get("SegmentSequence") or []
    }


def decode_segmentation(
    path: Path,
    like: DecodedImage,
    regions: Sequence[str] = (),
    classes: Sequence[str] = (),
    *,
    by_name: bool = True,
) -> DecodedImage:
    """Decode a segmentation to a label map (1, *spatial) on an image's grid.

    It holds the segments' numbers; but if all segments have names of classes, in upper or lower
    case, they are these classes whatever their numbers.

    Segments that overlap, or that have names of regions and not of classes, become
    `DecodedRegions`: identified by their labels in upper or lower case, a region without a segment
    being empty; if no label is the name of a region or class, by the order of as many segments.

    Args:
        path: The file, or a folder that holds one.
        like: The image that it belongs to.
        regions: Names of the regions that segments may be.
        classes: Names of the classes.
        by_name: Whether names of classes are used; otherwise numbers are.

    Raises:
        DataError: The file is damaged, or segments lie on another grid than the image, or overlap
            and are not the regions, or only some have names of classes.
    """
    with ignore_value_warnings():
        segments = _Segments.of(path)
        numbers = segments.numbers_by_name(regions)
        if numbers is None or segments.numbers_by_name(classes) is not None:
            labels, overlap = _label_map(segments, like)
            if not overlap:
                segments.note_order(regions, classes)
                if by_name:
                    labels = segments.as_classes(labels, classes)
                return DecodedImage(labels[None], like.spacing, like.affine, tuple(segments.notes))
            numbers = numbers or segments.in_order(regions, classes, overlap)
        masks = _masks(segments, like, [numbers.get(name) for name in regions])
        lacking = [name for name in regions if name not in numbers]
        if lacking:
            segments.notes.append(
                f"{segments.path.name}: has no segment {listed(lacking)}, taken as empty"
            )
    return DecodedRegions(masks, like.spacing, like.affine, tuple(segments.notes))


def _label_map(segments: "_Segments", like: DecodedImage) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Return the numbers of segments (*spatial), and the first two that overlap."""
    labels = np.zeros(like.array.shape[1:], np.min_scalar_type(max(segments.names)))
    for number, voxels in segments.on_grid(like):
        there = labels[voxels]
        others = there[(there != 0) & (there != number)]
        if others.size:
            return labels, (int(others[0]), number)
        labels[voxels] = number
    return labels, ()


def _masks(
    segments: "_Segments", like: DecodedImage, numbers: Sequence[int | None]
) -> NDArray[np.bool_]:
    """Return the masks of the segments with some numbers: (number, *spatial)."""
    inside = np.zeros((len(numbers), *like.array.shape[1:]), bool)
    for number, voxels in segments.on_grid(like):
        inside[numbers.index(number)][voxels] = True
    return inside


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
        names, notes, values = _segment_labels(dataset), [], frames[..., 0]
        if str(dataset.get("SegmentationType", "")) == "FRACTIONAL":
            values = 2 * values.astype(np.int64) >= int(dataset.MaximumFractionalValue)
            notes.append(f"{path.name}: its fractional segments were cut at one half")
        if not names:
            raise DataError(f"{files[0]}: it describes no segment: export it again")
        return cls(files[0], dataset, values, names, notes)

    def numbers_by_name(self, names: Sequence[str]) -> dict[str, int] | None:
        """Return the segments' numbers by these names; None if a segment has another name."""
        own = {label.strip().casefold(): number for number, label in self.names.items()}
        found = {name: own.pop(key) for name in names if (key := name.casefold()) in own}
        return None if own or len(found) < len(self.names) else found

    def in_order(
        self, regions: Sequence[str], classes: Sequence[str], overlap: tuple[int, ...]
    ) -> dict[str, int]:
        """Return the segments' numbers by the names of as many regions."""
        if self._nameless(regions, classes):
            pairs = dict(zip(regions, sorted(self.names), strict=True))
            words = listed(f"{self.names[number]} as {name}" for name, number in pairs.items())
            self.notes.append(f"{self.path.name}: its segments were taken in their order: {words}")
            return pairs
        if not regions:
            words = " and ".join(f"{number} ({self.names[number]})" for number in overlap)
            raise DataError(
                f"{self.path}: its segments {words} overlap, so that they are no label map: list "
                "in task.regions the classes of each, or export them without overlap"
            )
        raise DataError(
            f"{self.path}: its segments ({listed(self.names.values())}) overlap and are not the "
            f"regions ({listed(regions)}): name them in task.regions as in the file, or export "
            "them without overlap"
        )

    def as_classes(self, labels: NDArray[Any], classes: Sequence[str]) -> NDArray[Any]:
        """Map the numbers of segments to the classes of the same names."""
        places = {name.casefold(): place for place, name in enumerate(classes)}
        keys = {n: label.strip().casefold() for n, label in self.names.items() if n}
        named = {number: places[key] for number, key in keys.items() if key in places}
        if not named:
            return labels
        words = listed(f"{number} ({self.names[number]})" for number in keys)
        if len(named) < len(keys):
            raise DataError(
                f"{self.path}: some of its segments {words} have names of classes and some have "
                f"not (task.classes: {listed(classes)}): name all of them so, or map the number of "
                "each to its class in label_map"
            )
        if all(number == place for number, place in named.items()):
            return labels
        self.notes.append(f"{self.path.name}: its segments {words} were read by their names")
        moved = np.zeros(max(self.names) + 1, np.min_scalar_type(len(classes)))
        moved[list(named)] = list(named.values())
        brought: NDArray[Any] = moved[labels]
        return brought

    def note_order(self, regions: Sequence[str], classes: Sequence[str]) -> None:
        """Note that segments without overlap were not taken as regions, if they may be."""
        if self._nameless(regions, classes):
            self.notes.append(
                f"{self.path.name}: its segments ({listed(self.names.values())}) do not overlap "
                "and were read as the classes of their numbers; regions should be called as such"
            )

    def _nameless(self, regions: Sequence[str], classes: Sequence[str]) -> bool:
        """Return whether as many segments as regions all lack the name of a region or class."""
        known = {name.casefold() for name in (*regions, *classes)}
        own = {label.strip().casefold() for label in self.names.values()}
        return len(regions) == len(self.names) and not own & known

    def on_grid(self, like: DecodedImage) -> Iterator[tuple[int, Voxels]]:
        """Yield for each frame the number of a segment and its voxels on the grid of an image."""
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

    def _parts(
        self, plane: ImagePlane, values: NDArray[Any]
    ) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield the segments of a frame: one, or for a label map those that occur."""
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


def _place(plane: ImagePlane, like: DecodedImage, path: Path) -> NDArray[np.float64] | None:
    """Return the map from (column, row) to the image's voxels; None if it is another slice.

    It is (voxel axis, 3): the steps from column to column and row to row, the first voxel.
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
    inside: NDArray[np.bool_], place: NDArray[np.float64], like: DecodedImage, path: Path
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
