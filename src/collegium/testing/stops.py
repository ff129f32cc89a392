"""Stops of a run: what its folder holds before a request or after a write to disk."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from collegium.core import files as files_module
from collegium.runtime import client as client_module
from collegium.runtime import records as records_module
from collegium.runtime import run as run_module
from collegium.runtime import state as state_module


@contextmanager
def after_writes(then: Callable[[int], None]) -> Iterator[None]:
    """Call a function right after every write to disk inside the block, with its number from 1.

    What is appended to a file is written in two halves, which are two writes.

    Args:
        then: the function; a KeyboardInterrupt from it stops the run there.
    """
    original, original_append = files_module.write_atomically, files_module.append_durably
    users: list[Any] = [state_module, client_module, run_module]
    appending: Any = records_module
    count = [0]

    def write(path: Path, *data: bytes | memoryview, private: bool = False) -> None:
        original(path, *data, private=private)
        count[0] += 1
        then(count[0])

    def append(path: Path, data: bytes, *, at: int) -> None:
        for end in (len(data) // 2, len(data)):
            original_append(path, data[:end], at=at)
            count[0] += 1
            then(count[0])

    for module in users:
        module.write_atomically = write
    appending.append_durably = append
    try:
        yield
    finally:
        for module in users:
            module.write_atomically = original
        appending.append_durably = original_append


class Stops:
    """Copies of a run as it would be found if it were stopped, one for each state of its files.

    Files decide how a run resumes, except for the ledger, which nothing reads.

    Args:
        folder: for the copies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen = folder, set[str]()
        self.found: dict[str, Path] = {}
        """The folder of every stop that is not like an earlier one, by what it was."""

    def keep(self, root: Path, kind: str, number: int) -> None:
        """Copy the run as it is now.

        Args:
            root: its folder.
            kind: before what, or after what, it is stopped.
            number: of the request or write.
        """
        files = [f for f in sorted(root.rglob("*")) if f.is_file() and f.name != "ledger.jsonl"]
        digest = hashlib.blake2b()
        for file in files:
            data = file.read_bytes()
            digest.update(f"{file.relative_to(root)}\0{len(data)}\0".encode() + data)
        if digest.hexdigest() not in self._seen:
            self._seen.add(digest.hexdigest())
            self.found[f"{kind} {number}"] = copy = self._folder / f"{len(self.found):06d}"
            shutil.copytree(root, copy) if root.exists() else copy.mkdir(parents=True)
