"""Atomic writes, and locks that keep a second process out of a folder."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from collegium.errors import DataError, StorageError

_TEMPORARY = re.compile(r"\.\d+\.tmp$")

TOO_LARGE = (
    "the file is larger than the file system or 'ulimit -f' allows; raise the limit or choose "
    "another output folder, and continue with 'collegium resume'"
)
"""The sentence on a file that the operating system refuses for its size."""


def write_atomically(path: Path, *data: bytes | memoryview, private: bool = False) -> None:
    """Write a file so that it always holds all of the old content or all of the new one.

    Args:
        path: the file; its folder is created.
        *data: the new content, in parts that follow one another.
        private: whether the file's owner alone may read and write it (mode 0600), from its first
            byte on and whatever the umask or the mode of the old file is: for secrets.

    Raises:
        StorageError: the disk is full or not writable.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # see `_TEMPORARY`
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if private:
            temporary.unlink(missing_ok=True)
            temporary.touch(mode=0o600, exist_ok=False)
        with temporary.open("wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error


def append_durably(path: Path, data: bytes, *, at: int) -> None:
    """Append to a file, after removing what an interrupted write has left behind its last end.

    Args:
        path: the file; it and its folder are created.
        data: what is appended.
        at: where the file ended after the last write that was completed, in bytes.

    Raises:
        StorageError: the disk is full or not writable.
    """
    try:
        new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if file.tell() > at:
                file.truncate(at)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            _sync_folder(path.parent)
    except OSError as error:
        raise storage_error(error, path) from error


def remove_leftovers(folder: Path) -> None:
    """Remove the rest of interrupted writes below a folder.

    Only the one process that writes there may call it, as it cannot know another's writes.

    Args:
        folder: the folder.
    """
    for leftover in folder.rglob("*.tmp"):
        if _TEMPORARY.search(leftover.name):
            leftover.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; Windows can neither open folders nor needs it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(error: OSError, path: Path) -> StorageError:
    """Return the error that explains a failure of the operating system in one sentence.

    Args:
        error: the failure.
        path: the file that was to be written.
    """
    resume = "continue with 'collegium resume'"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            text = f"the disk that holds {path.parent} is full; free some space and {resume}"
        case errno.EFBIG:
            text = f"{path}: {TOO_LARGE}"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            text = (
                f"no permission to write in {path.parent}; choose another output folder or "
                f"change its permissions"
            )
        case errno.ENOTDIR | errno.EEXIST:
            text = f"{path}: a file stands in the place of a folder; choose another output folder"
        case _:
            text = f"{path}: {error.strerror or error}; check the disk and {resume}"
    return StorageError(text)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``output`` at the end of the block; after an error it is removed.

    Raises:
        DataError: ``output`` holds something already.
    """
    if output.exists() and any(output.iterdir()):
        raise DataError(f"{output} holds something already; choose another output folder")
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes out of a folder inside the block; the lock ends with its process.

    Args:
        folder: the folder, which is created.
        wait: whether to wait for another process that holds the lock; a thread may then take the
            same lock again inside the block.

    Raises:
        StorageError: another process holds the lock and ``wait`` is false, or the folder cannot be
            written.
    """
    from filelock import FileLock, Timeout  # takes longer to import than the rest of this module

    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(path, timeout=-1 if wait else 0, is_singleton=wait)
        held.acquire()
    except Timeout as error:
        raise StorageError(
            f"another process is running in {folder}; wait for it or choose another output folder"
        ) from error
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        yield
    finally:
        held.release()
