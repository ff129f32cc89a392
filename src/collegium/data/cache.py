"""Prepared cases: decoded, resized and normalised once, then memory-mapped.

An entry is a folder named by what went into it: the bytes of the case's files, the preprocessing
and the version of the format. It is written under a temporary name and then renamed, so that
another process sees a complete entry or none. Its ``case.json`` is sealed and holds the SHA-256 of
every array, which a process compares when it first opens the entry. Nothing is ever written beside
the data.
"""

import errno
import hashlib
import json
import mmap
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from collegium.core.seals import read_json, seal_json
from collegium.data.decoded_image import Array
from collegium.data.digests import file_digest
from collegium.data.formats.dicom_files import files_below
from collegium.data.placeholders import missing_content
from collegium.data.preprocessing import CaseArrays, preprocess
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case
from collegium.errors import DataError, StorageError

FORMAT = 6
"""Version of the entries; a change of what is stored, or of how it is computed, raises it."""

_DETACHED = {".mhd": (".raw", ".zraw"), ".nhdr": (".raw", ".raw.gz")}
"""Suffixes of the files of voxels that belong to a header file."""


@dataclass(frozen=True)
class PreparedCase:
    """A case in the cache: paths and numbers only, so that it is cheap to send to another process.

    Attributes:
        site: The site's name.
        case: The site's own case id.
        patient: The site's own patient id.
        folder: The entry.
        shape: (channels, *spatial).
        spacing: Millimetres per spatial axis after resizing; None if unknown.
        notes: What was noticed and corrected while reading.
        target: The class, if the case is classified.
        slice_axis: For a volume, which of its RAS+ axes was moved to the end.
        vanished: The classes that its label map shows on disk only, see `vanished_classes`.
    """

    site: str
    case: str
    patient: str
    folder: Path
    shape: tuple[int, ...]
    spacing: tuple[float, ...] | None
    notes: tuple[str, ...] = ()
    target: int | None = None
    slice_axis: int = 2
    vanished: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"site {self.site}, case {self.case}"

    def arrays(self) -> CaseArrays:
        """Map the arrays into memory, read-only."""
        return _open(self.folder)


def prepare(case: Case, image: ImageConfig, task: TaskConfig, cache: Path) -> PreparedCase:
    """Return a case from the cache, which is prepared and stored first if it is not there.

    Preparing means decoding, resizing and normalising. Several processes may prepare the same case
    at once; the first to finish provides the entry. A damaged entry is written again.

    Args:
        case: The case's files.
        image: How the image becomes an array.
        task: The meaning of the labels.
        cache: The folder of the cache; created if absent.

    Raises:
        DataError: The case's files are unusable.
        StorageError: The cache cannot be written.
    """
    classified = case.target is not None and task.name == "classification"
    target = task.class_of(str(case.target), str(case)) if classified else None
    entry = cache / entry_name(case, image, task, cache)
    meta = _read_meta(entry)
    if meta is None:
        made = preprocess(case, image, task)
        described = {
            "spacing": made.spacing,
            "notes": made.notes,
            "across": made.slice_axis,
            "vanished": made.vanished,
        }
        meta = _publish(entry, made.arrays, described)
    spacing = meta["spacing"]
    return PreparedCase(
        site=case.site,
        case=case.case,
        patient=case.patient,
        folder=entry,
        shape=tuple(meta["shape"]),
        spacing=None if spacing is None else tuple(spacing),
        notes=tuple(meta["notes"]),
        target=target,
        slice_axis=meta["across"],
        vanished=tuple(meta["vanished"]),
    )


def entry_name(
    case: Case, image: ImageConfig, task: TaskConfig, record_in: Path | None = None
) -> str:
    """Return the name of a case's entry: a hash of its files' bytes, the settings and the format.

    Args:
        case: The case's files.
        image: How the image becomes an array.
        task: The meaning of the labels.
        record_in: The folder in which the files' digests are recorded, see `file_digest`.

    Raises:
        DataError: A file cannot be read.
    """
    labels: dict[str, object] = {"classes": task.classes, "label_map": task.label_map}
    if task.ignore is not None:
        labels["ignore"] = task.ignore
    if task.regions:
        labels["regions"] = list(task.regions.items())
    if case.labelled is not None:
        labels["labelled"] = case.labelled
    recipe = {
        "format": FORMAT,
        "image": {key: value for key, value in asdict(image).items() if key != "modalities"},
        "labels": labels if task.name == "segmentation" else None,
        "series": case.series,
        "channels": case.channels,
    }
    digest = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=20)
    for role, suffixes, found in digests_of_files(case, record_in):
        digest.update(f"{role}\0{suffixes}\0".encode())
        digest.update(found)
    return digest.hexdigest()


def digests_of_files(case: Case, record_in: Path | None = None) -> Iterator[tuple[str, str, bytes]]:
    """Yield the role ("image", "label" or "fov"), the suffixes and the digest of a case's files.

    Args:
        case: The case.
        record_in: See `entry_name`.

    Raises:
        DataError: A file cannot be read.
    """
    files = [*(("image", path) for path in case.images), ("label", case.label), ("fov", case.fov)]
    for role, path in files:
        for file in _contents(path) if path is not None else ():
            yield role, "".join(file.suffixes), _digest(case, file, record_in)


# --- entries on the disk


def _contents(path: Path) -> list[Path]:
    """Return the file and its detached voxels, or all files of a DICOM series' folder."""
    if path.is_dir():
        return [*files_below(path)]
    detached = [path.with_suffix(end) for end in _DETACHED.get(path.suffix.lower(), ())]
    return [path, *(file for file in detached if file.is_file())]


def _digest(case: Case, path: Path, record_in: Path | None) -> bytes:
    try:
        return file_digest(path, record_in)
    except OSError as error:
        if missing := missing_content(path):
            raise DataError(f"{case}: {path}: {missing}") from error
        raise DataError(
            f"{case}: {path} cannot be read ({error.strerror}): restore it or its permissions"
        ) from error


def _read_meta(entry: Path) -> dict[str, Any] | None:
    """Read the metadata of an entry; None if the entry is missing or damaged."""
    try:
        meta = read_json(entry / "case.json")
        sizes: Mapping[str, int] = meta["sizes"]
        good = all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if good else None


def _publish(entry: Path, arrays: CaseArrays, meta: Mapping[str, object]) -> dict[str, Any]:
    """Write an entry under a temporary name, rename it, and return its metadata."""
    temporary = entry.with_name(f".{entry.name}.{secrets.token_hex(8)}")
    try:
        temporary.mkdir(parents=True)
        sizes, digests = {}, {}
        for name, array in _stored(arrays):
            np.save(temporary / name, array)
            sizes[name] = (temporary / name).stat().st_size
            digests[name] = _array_digest(temporary / name)
        content = {**meta, "shape": arrays.image.shape, "sizes": sizes, "digests": digests}
        text = json.dumps(content, ensure_ascii=False)
        (temporary / "case.json").write_bytes(seal_json(text))
        return _move(temporary, entry)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"the cache {entry.parent} cannot be written ({reason}): "
            "free space there, make it writable, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _stored(arrays: CaseArrays) -> Iterator[tuple[str, Array]]:
    """Yield names and arrays as stored; in a volume the last axis varies slowest."""
    order = np.asfortranarray if len(arrays.shape) == 3 else np.ascontiguousarray
    yield "image.npy", order(arrays.image.astype(np.float32, copy=False))
    if arrays.label is not None:
        yield "label.npy", order(arrays.label.astype(np.uint8, copy=False))
    if arrays.mask is not None:
        yield "mask.npy", order(arrays.mask.astype(np.uint8))


def _move(temporary: Path, entry: Path) -> dict[str, Any]:
    """Rename into place; another process's complete entry is used, a damaged one is moved away."""
    for _ in range(5):
        try:
            temporary.rename(entry)
        except OSError as error:
            meta = _read_meta(entry)
            if meta is not None:
                return meta
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            aside = temporary.with_name(f"{temporary.name}.damaged")
            with suppress(FileNotFoundError):  # another process has put it aside
                entry.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            break
    meta = _read_meta(entry)
    if meta is None:
        raise OSError(f"the entry {entry.name} keeps being damaged")
    return meta


@lru_cache(maxsize=1 << 14)  # reading a header takes longer than mapping a file
def _layouts(folder: Path) -> dict[str, dict[str, Any]]:
    """Read where and how an entry's files hold their arrays: arguments of `np.ndarray`.

    Each file is compared with its digest first. The description of a damaged entry is removed, so
    that the entry is written again when its case is next prepared.
    """
    layouts = {}
    for name, digest in read_json(folder / "case.json")["digests"].items():
        if _array_digest(folder / name) != digest:
            (folder / "case.json").unlink(missing_ok=True)
            raise ValueError(f"{name} is damaged")
        values = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        layouts[name] = {
            "shape": values.shape,
            "dtype": values.dtype,
            "offset": values.offset,
            "order": "C" if values.flags.c_contiguous else "F",
        }
    return layouts


@lru_cache(maxsize=256)  # bounds the open files: each mapped array holds one
def _open(folder: Path) -> CaseArrays:
    try:
        mapped = {name: _map(folder / name, layout) for name, layout in _layouts(folder).items()}
        return CaseArrays(mapped["image.npy"], mapped.get("label.npy"), mapped.get("mask.npy"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the prepared case {folder} is damaged or cannot be read: start again, and it is "
            f"prepared again"
        ) from error


def _array_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _map(path: Path, layout: Mapping[str, Any]) -> Array:
    """Map a file as a plain array, which is faster to slice than a memmap."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.ndarray(buffer=content, **layout)
