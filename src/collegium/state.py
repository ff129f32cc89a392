"""Where a run keeps its state: one file per committed point, written whole or not at all."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors
import torch

from collegium.errors import CheckpointError, ProtocolError, StorageError
from collegium.message import pack, unpack

logger = logging.getLogger(__name__)

SUFFIX = ".state"


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


class Store:
    """A folder of named states; names sort by time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def clean(self) -> None:
        """Remove what interrupted writes left.

        Only the one process that writes here now may call it: another's write may be under way.
        """
        for leftover in self.root.glob("*.tmp"):
            leftover.unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        """Return the file of ``name``."""
        return self.root / f"{name}{SUFFIX}"

    def names(self) -> list[str]:
        """Return the names of all stored states, oldest first."""
        return sorted(file.name.removesuffix(SUFFIX) for file in self.root.glob(f"*{SUFFIX}"))

    def newest(self, before: str) -> str | None:
        """Return the newest name that sorts before ``before``."""
        return max((name for name in self.names() if name < before), default=None)

    def save(self, name: str, value: Any) -> None:
        """Store ``value`` (see `collegium.message.pack`) under ``name``."""
        self.write(name, pack(value))

    def write(self, name: str, data: bytes) -> None:
        """Store bytes made by `collegium.message.pack`."""
        write_atomically(self.path(name), data)

    def load_newest(self) -> tuple[str, Any] | None:
        """Return the newest whole state under a number, and its name; None where there is none.

        A damaged state is named, removed, and the one before it used.

        Raises:
            CheckpointError: every stored state is damaged.
        """
        names = [name for name in self.names() if name.isdigit()]
        for name in reversed(names):
            try:
                return name, self.load(name)
            except CheckpointError as error:
                logger.warning("%s; going on from the state before it", error)
                self.remove(name)
        if names:
            raise CheckpointError(
                f"no whole state is left in {self.root}; start the run again in a new output folder"
            )
        return None

    def load(self, name: str) -> Any:
        """Return what was stored under ``name``."""
        return self.decode(name, self.read(name))

    def read(self, name: str) -> bytes:
        """Return the stored bytes.

        Raises:
            StorageError: the file cannot be read.
        """
        try:
            return self.path(name).read_bytes()
        except OSError as error:
            raise StorageError(f"{self.path(name)}: {error.strerror or error}") from error

    def outline(self, name: str) -> Any:
        """Return the plain values stored under ``name``; not one tensor is read.

        Where `Tensors` are, there is a dictionary with the one key `collegium.message.MARK`.

        Raises:
            CheckpointError: the file is damaged, for example cut short.
            StorageError: the file cannot be read.
        """
        try:
            with safetensors.safe_open(self.path(name), "pt") as file:
                return json.loads(file.metadata()["nesting"])
        except OSError as error:
            raise StorageError(f"{self.path(name)}: {error.strerror or error}") from error
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(name) from error

    def decode(self, name: str, data: bytes, device: str | torch.device = "cpu") -> Any:
        """Return the value that ``data`` holds, its tensors on ``device``.

        Raises:
            CheckpointError: the file is damaged, for example cut short.
        """
        try:
            return unpack(data, device)
        except ProtocolError as error:
            raise self._damaged(name) from error

    def _damaged(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path(name)} is damaged (cut short or overwritten); restore it or remove it"
        )

    def remove(self, name: str) -> None:
        """Forget ``name``."""
        self.path(name).unlink(missing_ok=True)

    def prune(self, before: str) -> None:
        """Forget all states older than the newest one that sorts before ``before``."""
        keep = self.newest(before)
        for name in self.names():
            if keep is not None and name < keep:
                self.remove(name)
