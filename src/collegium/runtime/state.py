"""Stored states of a run: one file per committed point, written whole or not at all, and sealed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import safetensors

from collegium.core.files import remove_leftovers, write_atomically
from collegium.core.lazy import torch
from collegium.core.message import pack, unpack
from collegium.core.seals import START_AGAIN, check_seal, seal_tensors
from collegium.errors import CheckpointError, ProtocolError, StorageError

logger = logging.getLogger(__name__)

SUFFIX = ".state"


class Store:
    """A folder of named states; names sort by time.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def clean(self) -> None:
        """Remove the rest of interrupted writes.

        Only the one process that writes here may call it, as it cannot know another's writes.
        """
        remove_leftovers(self.root)

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
        """Store a value.

        Args:
            name: the name of the state.
            value: see `collegium.core.message.pack`.
        """
        self.write(name, *seal_tensors(pack(value)))

    def write(self, name: str, *data: bytes | memoryview) -> None:
        """Store a value that is packed already.

        Args:
            name: the name of the state.
            *data: what `collegium.core.message.pack` returned, sealed by
                `collegium.core.seals.seal_tensors`.
        """
        write_atomically(self.path(name), *data)

    def load_newest(self) -> tuple[str, Any] | None:
        """Return name and value of the newest undamaged state whose name is a number, or None.

        A damaged state is logged and removed, and the one before it used.

        Raises:
            CheckpointError: every stored state is damaged.
        """
        names = [name for name in self.names() if name.isdigit()]
        for name in reversed(names):
            try:
                return name, self.load(name)
            except CheckpointError:
                file = self.path(name)
                logger.warning("%s is damaged; continuing from the state before it", file)
                self.remove(name)
        if names:
            raise CheckpointError(
                f"no undamaged state is left in {self.root}; start the run again in a new output "
                f"folder"
            )
        return None

    def load(self, name: str) -> Any:
        """Return the value stored under ``name``."""
        return self.decode(name, self.read(name))

    def read(self, name: str) -> bytes:
        """Return the stored bytes.

        Raises:
            CheckpointError: the file is damaged: a bit of it has changed.
            StorageError: the file cannot be read.
        """
        try:
            data = self.path(name).read_bytes()
            check_seal(data)
        except OSError as error:
            raise StorageError(f"{self.path(name)}: {error.strerror or error}") from error
        except ValueError as error:
            raise self._damaged(name) from error
        return data

    def outline(self, name: str) -> Any:
        """Return the plain values stored under ``name`` without making a tensor.

        In place of `Tensors` is a dictionary with the one key `collegium.core.message.MARK`.

        Raises:
            CheckpointError: the file is damaged, for example cut short.
            StorageError: the file cannot be read.
        """
        self.read(name)
        try:
            with safetensors.safe_open(self.path(name), "numpy") as file:
                return json.loads(file.metadata()["nesting"])
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(name) from error

    def decode(self, name: str, data: bytes, device: str | torch.device = "cpu") -> Any:
        """Return the value of stored bytes.

        Args:
            name: the name of the state, for errors.
            data: the stored bytes.
            device: where the tensors go.

        Raises:
            CheckpointError: the file is damaged, for example cut short.
        """
        try:
            return unpack(data, device)
        except ProtocolError as error:
            raise self._damaged(name) from error

    def _damaged(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path(name)} is damaged (cut short or changed); {START_AGAIN}"
        )

    def remove(self, name: str) -> None:
        """Remove the state ``name`` if it exists."""
        self.path(name).unlink(missing_ok=True)

    def prune(self, before: str) -> None:
        """Remove all states older than the newest one that sorts before ``before``."""
        keep = self.newest(before)
        for name in self.names():
            if keep is not None and name < keep:
                self.remove(name)
