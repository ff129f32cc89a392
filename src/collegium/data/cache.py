"""Prepared cases: decoded, resized and normalised once, then memory-mapped.

An entry is a folder named by what went into it: the bytes of the case's files, the recipe and the
format's version. It is written beside its place and then renamed, so that another process sees a
whole entry or none. Nothing is ever written beside the data.
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
from typing import Any, Literal

import numpy as np

from collegium.data.decoded import Array
from collegium.data.recipe import Arrays, make
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case
from collegium.errors import DataError, StorageError

FORMAT = 4
"""Version of the entries; a change of what is stored, or of how it is computed, raises it."""

_DETACHED = {".mhd": (".raw", ".zraw"), ".nhdr": (".raw", ".raw.gz")}
"""Where the voxels are of which a header file speaks."""


@dataclass(frozen=True)
class PreparedCase:
    """A case in the cache; it holds paths and numbers only, so it is cheap to send to a process.

    Attributes:
        site: The site's name.
        case: The site's own case id.
        patient: The site's own patient id.
        folder: The entry.
        shape: Channels, then the spatial axes.
        spacing: Millimetres per spatial axis after resizing; None where unknown.
        notes: What was noticed and mended while reading.
        target: The class of a case that is classified.
        across: Of a volume, which axis of its RAS+ axes is the last one here.
    """

    site: str
    case: str
    patient: str
    folder: Path
    shape: tuple[int, ...]
    spacing: tuple[float, ...] | None
    notes: tuple[str, ...] = ()
    target: int | None = None
    across: int = 2

    def __str__(self) -> str:
        return f"site {self.site}, case {self.case}"

    def arrays(self) -> Arrays:
        """Map the arrays into memory, read-only."""
        return _open(self.folder)


def prepare(case: Case, image: ImageConfig, task: TaskConfig, cache: Path) -> PreparedCase:
    """Give a case out of the cache; decode, resize, normalise and store it first where needed.

    Several processes may prepare the same case at once: whoever is first wins. A damaged entry is
    made anew.

    Raises:
        DataError: If the case's files are unusable.
        StorageError: If the cache cannot be written.
    """
    classified = case.target is not None and task.name == "classification"
    target = task.class_of(str(case.target), str(case)) if classified else None
    entry = cache / entry_name(case, image, task)
    meta = _read_meta(entry)
    if meta is None:
        made = make(case, image, task)
        about = {"spacing": made.spacing, "notes": made.notes, "across": made.across}
        meta = _publish(entry, made.arrays, about)
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
        across=meta["across"],
    )


def entry_name(case: Case, image: ImageConfig, task: TaskConfig) -> str:
    """Give the name of a case's entry: a hash of its files' bytes, the recipe and the format."""
    labels: dict[str, object] = {"classes": task.classes, "label_map": task.label_map}
    if task.regions:
        labels["regions"] = list(task.regions.items())
    recipe = {
        "format": FORMAT,
        "image": asdict(image),
        "labels": labels if task.name == "segmentation" else None,
        "series": case.series,
        "channels": case.channels,
    }
    digest = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=20)
    files = {
        "image": case.images,
        "label": (case.label,) if case.label else (),
        "fov": (case.fov,) if case.fov else (),
    }
    for role, paths in files.items():
        for path in paths:
            for file in _contents(path):
                digest.update(f"{role}\0{''.join(file.suffixes)}\0".encode())
                digest.update(_digest(case, file))
    return digest.hexdigest()


# --- entries on the disk


def _contents(path: Path) -> list[Path]:
    """The file, or all files of the folder of a DICOM series, and what a header file points to."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    detached = [path.with_suffix(end) for end in _DETACHED.get(path.suffix.lower(), ())]
    return [path, *(file for file in detached if file.is_file())]


def _digest(case: Case, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).digest()
    except OSError as error:
        raise DataError(
            f"{case}: {path} cannot be read ({error.strerror}): restore it or its permissions"
        ) from error


def _read_meta(entry: Path) -> dict[str, Any] | None:
    """Read what an entry says of itself; None where it is missing or damaged."""
    try:
        meta: dict[str, Any] = json.loads((entry / "case.json").read_text("utf-8"))
        sizes: Mapping[str, int] = meta["sizes"]
        good = all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if good else None


def _publish(entry: Path, arrays: Arrays, meta: Mapping[str, object]) -> dict[str, Any]:
    """Write an entry beside its place and rename it; give what the entry says of itself."""
    temporary = entry.with_name(f".{entry.name}.{secrets.token_hex(8)}")
    try:
        temporary.mkdir(parents=True)
        sizes = {}
        for name, array in _stored(arrays):
            np.save(temporary / name, array)
            sizes[name] = (temporary / name).stat().st_size
        content = {**meta, "shape": arrays.image.shape, "sizes": sizes}
        (temporary / "case.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
        return _move(temporary, entry)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"the cache {entry.parent} cannot be written ({reason}): "
            "free space there, make it writable, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _stored(arrays: Arrays) -> Iterator[tuple[str, Array]]:
    """Give names and arrays as stored; a volume's last axis is slowest, so a slice is one piece."""
    order = np.asfortranarray if len(arrays.shape) == 3 else np.ascontiguousarray
    yield "image.npy", order(arrays.image.astype(np.float32, copy=False))
    if arrays.label is not None:
        yield "label.npy", order(arrays.label.astype(np.uint8, copy=False))
    if arrays.mask is not None:
        yield "mask.npy", order(arrays.mask.astype(np.uint8))


def _move(temporary: Path, entry: Path) -> dict[str, Any]:
    """Rename into place; another process's whole entry is used, a damaged one is put aside."""
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


@dataclass(frozen=True)
class _Layout:
    """Where the values of an array are in its file."""

    offset: int
    shape: tuple[int, ...]
    kind: np.dtype[Any]
    order: Literal["C", "F"]

    @classmethod
    def of(cls, path: Path) -> "_Layout":
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        order: Literal["C", "F"] = "C" if values.flags.c_contiguous else "F"
        return cls(values.offset, values.shape, values.dtype, order)


@lru_cache(maxsize=1 << 14)  # reading a header takes longer than mapping a file
def _layouts(folder: Path) -> dict[str, _Layout]:
    """Read where the values of an entry's arrays are, by the names of their files."""
    stored = json.loads((folder / "case.json").read_text("utf-8"))["sizes"]
    return {name: _Layout.of(folder / name) for name in stored}


@lru_cache(maxsize=256)  # bounds the open files: each mapped array holds one
def _open(folder: Path) -> Arrays:
    try:
        mapped = {name: _map(folder / name, layout) for name, layout in _layouts(folder).items()}
        return Arrays(mapped["image.npy"], mapped.get("label.npy"), mapped.get("mask.npy"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the prepared case {folder} cannot be read: start again, and it is prepared anew"
        ) from error


def _map(path: Path, layout: _Layout) -> Array:
    """Map a file as a plain array: slicing one is faster than slicing a memmap."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.ndarray(layout.shape, layout.kind, content, layout.offset, order=layout.order)
