"""What a DICOM file holds if it is neither an image nor a segmentation, in words.

The contours of a radiotherapy structure set (RTSTRUCT) are not rasterised here: which pixels a
contour holds depends on a rule of its border that the file does not state, and programs differ.
"""

from collections.abc import Iterable
from pathlib import Path

from collegium.data.decoded_image import listed
from collegium.data.formats.dicom_files import is_dicom, read, sop_class

_CLASSES = "1.2.840.10008.5.1.4.1.1."
_STRUCTURE_SET = _CLASSES + "481.3"
_KINDS = {
    _CLASSES + "66.": "a DICOM segmentation, which is a mask",
    _CLASSES + "88.": "a structured report",
    _CLASSES + "11.": "a presentation state",
    _CLASSES + "481.": "an object of radiotherapy",
}
"""Kinds of objects by the beginning of their class."""


def other_object(files: Iterable[Path]) -> str | None:
    """Return a sentence on the first DICOM object among files that hold no image; None if none is.

    Args:
        files: The files.
    """
    for path in files:
        if is_dicom(path) and (kind := sop_class(path)):
            return f"{path}: {_in_words(path, kind)}"
    return None


def _in_words(path: Path, kind: str) -> str:
    if kind == _STRUCTURE_SET:
        names = _regions_of_interest(path)
        return (
            f"is a radiotherapy structure set (RTSTRUCT) with the ROIs {listed(names) or 'none'}, "
            "whose contours are not read: convert it on its series to a DICOM segmentation or a "
            "label map, as 3D Slicer and plastimatch do, and name that"
        )
    words = next((words for start, words in _KINDS.items() if kind.startswith(start)), None)
    return (
        f"is {words or f'a DICOM object of the class {kind}'} and holds no image: as an image name "
        "the file or folder of one, as a label a DICOM segmentation or a label map"
    )


def _regions_of_interest(path: Path) -> list[str]:
    """Return the names of the regions of a structure set, each in one line."""
    items = read(path, only=["StructureSetROISequence"]).get("StructureSetROISequence") or []
    return [" ".join(str(item.get("ROIName", "")).split()) or "without a name" for item in items]
