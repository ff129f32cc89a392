"""Recognises DICOM files, and is the one place that opens them."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from collegium.core.optional import import_optional
from collegium.data.placeholders import NO_IMAGE, missing_content
from collegium.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

_PREAMBLE, _MAGIC = 128, b"DICM"
_STARTS = (b"\x08\x00", b"\x02\x00", b"\x00\x08")
"""The first group of a file without preamble: identification or file meta, either byte order."""


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM by its content, or any file below a folder is.

    The content is recognised by its magic word or, without one, by its first elements. Of a file of
    another kind only the first bytes are read.
    """
    if path.is_dir():
        return any(is_dicom(file) for file in files_below(path))
    try:
        with path.open("rb") as file:
            start = file.read(_PREAMBLE + len(_MAGIC))
    except OSError:
        return False
    if start[_PREAMBLE:] == _MAGIC:
        return True
    return start[:2] in _STARTS and bool(sop_class(path))


def sop_class(path: Path) -> str:
    """Return the UID of the kind of object that a DICOM file holds; empty if it states none."""
    try:
        found = str(read(path, only=["SOPClassUID"]).get("SOPClassUID", ""))
    except DataError:
        return ""
    return found if found.replace(".", "").isdigit() else ""


def files_below(folder: Path) -> Iterator[Path]:
    """Return all files below a folder, in the order of their paths."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def check_content(folder: Path) -> None:
    """Refuse a folder that holds a file whose content is elsewhere, as it may be a slice.

    Args:
        folder: The folder of a series.

    Raises:
        DataError: There is one, and its name is not that of text or a table.
    """
    for path in sorted(folder.rglob("*")):
        missing = missing_content(path)
        if missing and path.suffix.lower() not in NO_IMAGE:
            raise DataError(f"{path}: {missing}")


def read(path: Path, only: Sequence[str] | None = None, *, pixels: bool = False) -> "Dataset":
    """Read a DICOM file.

    Args:
        path: The file.
        only: The attributes to read; None: all.
        pixels: Whether to read its pixels too.

    Raises:
        DataError: It is damaged.
    """
    library = import_optional("pydicom", "dicom", path.name)
    with ignore_value_warnings():
        try:
            dataset: Dataset = library.dcmread(
                path,
                stop_before_pixels=not pixels,
                force=True,  # files without preamble
                specific_tags=None if only is None else list(only),
            )
        except OSError:
            raise
        except Exception as error:  # pydicom and struct raise a dozen classes
            raise DataError(
                f"{path}: its DICOM header cannot be read ({type(error).__name__}): it is damaged; "
                "copy it again from its source"
            ) from error
    _state_syntax(dataset)
    return dataset


def _state_syntax(dataset: "Dataset") -> None:
    """Set the encoding that pydicom guessed for a file without file meta information."""
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    if not hasattr(dataset, "file_meta"):
        dataset.file_meta = FileMetaDataset()
    if "TransferSyntaxUID" not in dataset.file_meta:
        implicit, little = dataset.original_encoding
        explicit = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else explicit


@contextmanager
def ignore_value_warnings() -> Iterator[None]:
    """Ignore warnings about values that violate the standard; unreadable ones raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
