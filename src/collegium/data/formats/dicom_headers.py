"""The headers of DICOM files: series and image planes, without pixels.

A file holds one picture or, as an enhanced or multi-frame object, many. Each is an `ImagePlane`.
Only the necessary attributes are read: none that names a patient.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.data.decoded_image import listed
from collegium.data.formats.dicom_files import read
from collegium.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

_PROJECTIONS = {
    "CR", "DX", "ES", "GM", "IO", "MG", "OP", "PX", "RF", "RG", "SC", "SM", "US", "XC",
}  # fmt: skip
"""Modalities whose single pictures are not slices, even if they state a position."""

_CLASSES = "1.2.840.10008.5.1.4.1.1."
_NO_IMAGES = tuple(_CLASSES + number for number in ("11", "66", "88", "481.2"))
"""Presentation states, segmentations and registrations, reports, doses."""

_MEASURES, _VALUES = "PixelMeasuresSequence", "PixelValueTransformationSequence"
_POSITION, _ORIENTATION = "PlanePositionSequence", "PlaneOrientationSequence"

VOLUME_ATTRIBUTES = (
    ("TemporalPositionIdentifier", ""),
    ("TemporalPositionIndex", "FrameContentSequence"),
    ("TriggerTime", ""),
    ("FrameReferenceTime", ""),
    ("AcquisitionNumber", ""),
    ("FrameAcquisitionNumber", "FrameContentSequence"),
    ("EchoTime", ""),
    ("EffectiveEchoTime", "MREchoSequence"),
    ("EchoNumbers", ""),
    ("InversionTime", ""),
    ("DiffusionBValue", ""),
    ("DiffusionBValue", "MRDiffusionSequence"),
    ("AcquisitionTime", ""),
)
"""Attributes that distinguish several volumes of one series, and their functional groups."""

_AXES = ("sagittal", "coronal", "axial")
_NEAR_AXIS = 0.8  # cosine from which a plane is named by an axis, as in dicom3tools

_WANTED = [
    "SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "SeriesNumber", "Modality",
    "Rows", "Columns", "SamplesPerPixel", "NumberOfFrames", "ImagePositionPatient",
    "ImageOrientationPatient", "PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing",
    "RescaleSlope", "RescaleIntercept", "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence",
    *(keyword for keyword, sequence in VOLUME_ATTRIBUTES if not sequence),
]  # fmt: skip


@dataclass(frozen=True)
class ImagePlane:
    """One picture of a file.

    Attributes:
        file: The file.
        frame: The index of the picture in the file.
        shape: Rows, columns and samples per pixel.
        position: The centre of the first pixel in millimetres (LPS); None if it is not a slice.
        orientation: The direction of a row and of a column, as in ImageOrientationPatient.
        spacing: Millimetres between rows and between columns.
        rescale: Slope and intercept; None if the file states none.
        volume_attributes: Numbers that may distinguish the volumes of a series, by attribute.
    """

    file: Path
    frame: int
    shape: tuple[int, int, int]
    position: tuple[float, ...] | None
    orientation: tuple[float, ...] | None
    spacing: tuple[float, ...] | None
    rescale: tuple[float, float] | None
    volume_attributes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """The pictures of one series, or of the part of it with one orientation if it mixes several.

    Attributes:
        uid: The SeriesInstanceUID.
        number: The SeriesNumber, if there is one.
        planes: The pictures; the files of slices are sorted along the normal of their plane.
    """

    uid: str
    number: int | None
    planes: tuple[ImagePlane, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, which may be multi-frame."""
        return tuple(dict.fromkeys(plane.file for plane in self.planes))

    @property
    def orientation(self) -> str:
        """See `name_orientation`."""
        return name_orientation(self.planes[0].orientation)


def name_orientation(orientation: Sequence[float] | None) -> str:
    """Return the name of a plane: axial, sagittal, coronal, oblique; none if it is not a slice."""
    if orientation is None:
        return "none"
    components = np.abs(normal_of(orientation))
    axis = int(components.argmax())
    return _AXES[axis] if components[axis] >= _NEAR_AXIS else "oblique"


def normal_of(orientation: Sequence[float]) -> NDArray[np.float64]:
    """Return the unit normal of a plane, in LPS.

    Raises:
        DataError: Its rows and columns are parallel.
    """
    normal = np.cross(orientation[:3], orientation[3:])
    length = float(np.linalg.norm(normal))
    if length < 0.5:
        raise DataError(
            f"a DICOM slice states the orientation {listed(orientation)}, whose rows and columns "
            "are parallel: export it again"
        )
    return normal / length


def read_header(path: Path) -> Series | None:
    """Return the pictures of a DICOM file and their series; None if it is not an image.

    Raises:
        DataError: It is damaged: it should be an image, but states no size.
    """
    dataset = read(path, only=_WANTED)
    meta = dataset.file_meta.get("MediaStorageSOPClassUID", "")
    kind = str(dataset.get("SOPClassUID", "") or meta)
    if any(kind == uid or kind.startswith(f"{uid}.") for uid in _NO_IMAGES):
        return None
    if not dataset.get("Rows") or not dataset.get("Columns"):
        _check_whole(kind, path)
        return None
    number = _number(dataset.get("SeriesNumber"))
    return Series(
        uid=str(dataset.get("SeriesInstanceUID", "")),
        number=None if number is None else int(number),
        planes=tuple(planes_of(dataset, path)),
    )


def _check_whole(kind: str, path: Path) -> None:
    """Refuse a file without a size whose class is an image, or that has no class."""
    from pydicom.uid import UID

    if not kind or "Image Storage" in UID(kind).name:
        raise DataError(
            f"{path}: its DICOM header states no size: it is cut short or was stripped of its "
            "picture; copy it again from its source"
        )


def planes_of(
    dataset: "Dataset", file: Path, volume_attributes: Sequence[tuple[str, str]] = VOLUME_ATTRIBUTES
) -> Iterator[ImagePlane]:
    """Yield the pictures of a file in its order.

    Args:
        dataset: The content of the file.
        file: Its path.
        volume_attributes: The attributes to read, see `VOLUME_ATTRIBUTES`.
    """
    shape = (int(dataset.Rows), int(dataset.Columns), int(dataset.get("SamplesPerPixel", 1) or 1))
    frames = int(dataset.get("NumberOfFrames", 1) or 1)
    flat = frames == 1 and dataset.get("Modality") in _PROJECTIONS
    for frame in range(frames):
        groups = functional_groups(dataset, frame)
        position = _numbers(look_up(groups, "ImagePositionPatient", _POSITION), 3)
        orientation = _numbers(look_up(groups, "ImageOrientationPatient", _ORIENTATION), 6)
        spacing = _numbers(look_up(groups, "PixelSpacing", _MEASURES), 2)
        placed = not flat and None not in (position, orientation, spacing)
        slope = _number(look_up(groups, "RescaleSlope", _VALUES))
        intercept = _number(look_up(groups, "RescaleIntercept", _VALUES))
        stated = slope is not None or intercept is not None
        found = {
            key: _number(look_up(groups, key, sequence)) for key, sequence in volume_attributes
        }
        yield ImagePlane(
            file=file,
            frame=frame,
            shape=shape,
            position=position if placed else None,
            orientation=orientation if placed else None,
            spacing=spacing or _projected_spacing(dataset),
            rescale=(1.0 if slope is None else slope, intercept or 0.0) if stated else None,
            volume_attributes={key: value for key, value in found.items() if value is not None},
        )


def functional_groups(dataset: "Dataset", frame: int) -> tuple["Dataset", ...]:
    """Return the places of a frame's attributes, the most specific first.

    Args:
        dataset: The content of the file.
        frame: The index of the frame.
    """
    own = dataset.get("PerFrameFunctionalGroupsSequence") or []
    shared = dataset.get("SharedFunctionalGroupsSequence") or []
    return (*own[frame : frame + 1], *shared[:1], dataset)


def look_up(groups: tuple["Dataset", ...], keyword: str, sequence: str) -> Any:
    """Return an attribute of a frame from its functional group, or from the header itself.

    Args:
        groups: The result of `functional_groups`.
        keyword: The attribute.
        sequence: The keyword of its functional group; "" if it has none.
    """
    for group in groups[:-1]:
        items = group.get(sequence) if sequence else None
        if items and keyword in items[0]:
            return items[0].get(keyword)
    return groups[-1].get(keyword)


def _projected_spacing(dataset: "Dataset") -> tuple[float, ...] | None:
    imager, scanned = (
        _numbers(dataset.get(f"{kind}PixelSpacing"), 2) for kind in ("Imager", "NominalScanned")
    )
    return imager or scanned


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    """Return so many finite numbers, or None."""
    try:
        found = tuple(float(number) for number in value)
    except (TypeError, ValueError):
        return None
    finite = all(abs(number) < float("inf") for number in found)
    return found if len(found) == count and finite else None


def _number(value: Any) -> float | None:
    numbers = _numbers([value], 1)
    return None if numbers is None else numbers[0]
