"""Writes files whole or not at all, and keeps a second process out of a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from collegium.errors import StorageError


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` holds its old content or all of the new one, come what may.

    Raises:
        StorageError: the disk is full or not writable.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error


def storage_error(error: OSError, path: Path) -> StorageError:
    """Return the sentence for what the operating system said about ``path``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk that holds {path.parent} is full; free some space and go on with "
            f"'collegium resume'"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(
            f"no permission to write in {path.parent}; choose another output folder or "
            f"change its permissions"
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return StorageError(
            f"{path}: a file stands in the place of a folder; choose another output folder"
        )
    return StorageError(
        f"{path}: {error.strerror or error}; check the disk and go on with 'collegium resume'"
    )


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keep a second process out of an output folder.

    Raises:
        StorageError: another one is there, or the folder cannot be written.
    """
    import fcntl  # not on every system

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise storage_error(error, folder / ".lock") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                f"another process is running in {folder}; wait for it or choose another "
                f"output folder"
            ) from error
        yield
