"""Random generators named by what they are for, so that no generator state is ever shared.

A generator is made where it is used, from the run's seed and a path of words and numbers, and
forgotten afterwards. Nothing random has to be stored to resume a run, and neither the order of the
clients nor the number of processes can matter.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, *path: str | int) -> int:
    """Return the 63-bit seed of ``path`` (the first 8 bytes of BLAKE2b of the path's text)."""
    key = "/".join([str(seed), *map(str, path)]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, *path: str | int) -> torch.Generator:
    """Return the generator of ``path`` (e.g. ``"client", "A", "round", 3, "batches"``)."""
    return torch.Generator().manual_seed(seed_of(seed, *path))


@contextmanager
def ambient(seed: int, *path: str | int) -> Iterator[None]:
    """Seed torch's global generators by ``path`` inside the block and restore them after it.

    Dropout and the initialisation of layers draw from torch's global generators; this is the only
    place that touches them.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed_of(seed, *path))
        yield
