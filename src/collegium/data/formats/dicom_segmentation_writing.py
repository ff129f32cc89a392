"""Writes label maps as DICOM segmentations that refer to the series they were predicted on."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.optional import import_optional
from collegium.data.decoded_image import from_ras, resize_nearest
from collegium.data.formats.dicom import read_grid
from collegium.data.formats.dicom_files import ignore_value_warnings, read
from collegium.data.formats.dicom_geometry import VolumeGrid
from collegium.data.formats.dicom_headers import ImagePlane
from collegium.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

_MAY_BE_EMPTY = (
    "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID",
    "StudyDate", "StudyTime", "ReferringPhysicianName",
)  # fmt: skip
_LONGEST_NAME = 64


def write_segmentation(
    labels: NDArray[Any],
    image: Path,
    path: Path,
    classes: Sequence[str],
    series: str | None = None,
) -> None:
    """Write a label map as a binary DICOM segmentation, without loss, on the grid of its image.

    It carries the patient and study of the image, as every object of a study does. A class is the
    segment of its number; if no voxel is foreground all frames are kept, empty.

    Args:
        labels: Classes (x, y, z) in RAS+, or (row, column) of a picture, as images are read; those
            of another size are resized.
        image: The predicted file or folder.
        path: The file to write.
        classes: Names of the classes by value, the background first.
        series: Which series of the folder.

    Raises:
        DataError: As `decode` of the image, or its headers lack what a segmentation refers to.
        OSError: The file cannot be written.
    """
    library: Any = import_optional("highdicom", "dicom", path.name)
    with ignore_value_warnings():
        grid = read_grid(image, series)
        stored = _stored(labels, grid)
        count = max(len(classes) - 1, int(stored.max(initial=0)), 1)
        names = [*classes, *(f"class {number}" for number in range(len(classes), count + 1))]
        stored = np.ascontiguousarray(stored, np.min_scalar_type(count))
        try:
            written = _make(stored, grid.volumes[0], names[1 : count + 1], library)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            lacking = f" ({error})" if isinstance(error, AttributeError) else ""
            raise DataError(
                f"{image}: its headers break the standard so that no segmentation can refer to "
                f"them{lacking}: write the mask of an image that is converted to NIfTI"
            ) from error
        written.save_as(path)


def _stored(labels: NDArray[Any], grid: VolumeGrid) -> NDArray[Any]:
    """Bring labels to the axes and size of the slices: (slice, row, column)."""
    slices = grid.volumes[0]
    rows, columns, _ = slices[0].shape
    if len(slices) == len(grid.volumes) == 1:
        return resize_nearest(labels, (rows, columns))[None]
    return from_ras(labels, grid.affine, (columns, rows, len(slices))).transpose(2, 1, 0)


def _make(
    pixels: NDArray[Any], planes: Sequence[ImagePlane], names: Sequence[str], library: Any
) -> Any:
    """Build the segmentation of some slices; pixels are (slice, row, column)."""
    sources, system = _sources(planes), library.CoordinateSystemNames.PATIENT
    positions = orientation = None
    if planes[0].position is not None:
        positions = [library.PlanePositionSequence(system, plane.position) for plane in planes]
        orientation = library.PlaneOrientationSequence(system, planes[0].orientation)
    return library.seg.Segmentation(
        source_images=sources,
        pixel_array=pixels,
        segmentation_type="BINARY",
        segment_descriptions=_describe(names, library),
        series_instance_uid=library.UID(),
        series_number=1000 + int(sources[0].get("SeriesNumber") or 0),
        sop_instance_uid=library.UID(),
        instance_number=1,
        manufacturer="Collegium",
        manufacturer_model_name="Collegium",
        software_versions=version("collegium"),
        device_serial_number="0",
        content_label="SEGMENTATION",
        omit_empty_frames=bool(pixels.any()),
        plane_positions=positions,
        plane_orientation=orientation,
    )


def _describe(names: Sequence[str], library: Any) -> list[Any]:
    from pydicom.sr.codedict import codes

    algorithm = library.AlgorithmIdentificationSequence(
        name="Collegium", family=codes.DCM.ArtificialIntelligence, version=version("collegium")
    )
    return [
        library.seg.SegmentDescription(
            segment_number=number,
            segment_label=name[:_LONGEST_NAME],
            segmented_property_category=codes.SCT.AnatomicalStructure,
            segmented_property_type=codes.SCT.Tissue,
            algorithm_type="AUTOMATIC",
            algorithm_identification=algorithm,
        )
        for number, name in enumerate(names, start=1)
    ]


def _sources(planes: Sequence[ImagePlane]) -> list["Dataset"]:
    """Read the headers of the slices, or of the one file that holds them, as highdicom needs them.

    Required attributes that may be empty are added; of several directions that agree up to rounding
    the first is kept. A picture that is not a slice has no thickness, without which highdicom reads
    no pixel size: it stays with the picture.
    """
    from pydicom.uid import generate_uid

    sources = [read(file) for file in dict.fromkeys(plane.file for plane in planes)]
    if "NumberOfFrames" in sources[0]:
        sources = sources[:1]
    new_frame = generate_uid()
    for source in sources:
        for keyword in _MAY_BE_EMPTY:
            if keyword not in source:
                setattr(source, keyword, "")
        if planes[0].position is None:
            for keyword in ("FrameOfReferenceUID", "ImagePositionPatient", "PixelSpacing"):
                source.pop(keyword, None)
        elif "FrameOfReferenceUID" not in source:
            source.FrameOfReferenceUID = new_frame
        if "ImageOrientationPatient" in source:
            source.ImageOrientationPatient = sources[0].ImageOrientationPatient
        if "SharedFunctionalGroupsSequence" in source:
            _share(source)
    return sources


def _share(source: "Dataset") -> None:
    """Move attributes common to all frames to the place where highdicom expects them."""
    shared = source.SharedFunctionalGroupsSequence[0]
    own = source.get("PerFrameFunctionalGroupsSequence") or []
    for keyword in ("PlaneOrientationSequence", "PixelMeasuresSequence"):
        if keyword not in shared and own and keyword in own[0]:
            setattr(shared, keyword, getattr(own[0], keyword))
