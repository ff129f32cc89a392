"""Which files are DICOM, and the one place that opens them."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from collegium.core.optional import need
from collegium.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

_PREAMBLE, _MAGIC = 128, b"DICM"
_STARTS = (b"\x08\x00", b"\x02\x00", b"\x00\x08")
"""The first group of a file without preamble: identification or file meta, either byte order."""


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM by its content: its magic word or, without one, its first elements.

    A folder is where a file in it is, or in a folder in it. Of a file that is something else only
    the first bytes are read.
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
    """Return what kind of object a DICOM file holds, as a UID; empty where it does not say."""
    try:
        found = str(read(path, only=["SOPClassUID"]).get("SOPClassUID", ""))
    except DataError:
        return ""
    return found if found.replace(".", "").isdigit() else ""


def files_below(folder: Path) -> Iterator[Path]:
    """Give all files of a folder and of those in it, in the order of their names."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path


def read(path: Path, only: Sequence[str] | None = None, *, pixels: bool = False) -> "Dataset":
    """Read a DICOM file.

    Args:
        path: The file.
        only: The attributes that are wanted; None: all.
        pixels: Whether its pixels are wanted too.

    Raises:
        DataError: It is damaged.
    """
    library = need("pydicom", "dicom", path.name)
    with quiet():
        try:
            dataset: Dataset = library.dcmread(
                path,
                stop_before_pixels=not pixels,
                force=True,  # files without preamble
                specific_tags=None if only is None else list(only),
            )
        except OSError:
            raise
        except Exception as error:  # pydicom and struct raise a dozen kinds
            raise DataError(
                f"{path}: its DICOM header cannot be read ({type(error).__name__}): it is damaged; "
                "copy it again from its source"
            ) from error
    _state_syntax(dataset)
    return dataset


def _state_syntax(dataset: "Dataset") -> None:
    """Write down the encoding that pydicom guessed for a file without file meta information."""
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    if not hasattr(dataset, "file_meta"):
        dataset.file_meta = FileMetaDataset()
    if "TransferSyntaxUID" not in dataset.file_meta:
        implicit, little = dataset.original_encoding
        explicit = ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else explicit


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings of values that break the standard; what cannot be read raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
