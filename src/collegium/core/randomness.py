"""Random generators named by their purpose, so that no generator state is ever shared.

A generator is created where it is used, from the run's seed and a path of words and numbers, and
dropped afterwards. Nothing random has to be stored to resume a run, and neither the order of the
clients nor the number of processes can matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from collegium.core.lazy import torch
from collegium.errors import ProtocolError


def seed_of(seed: int, *path: str | int) -> int:
    """Return a 63-bit seed from the first 8 bytes of BLAKE2b of seed and path as text.

    Args:
        seed: of the run.
        *path: words and numbers that name the purpose.
    """
    key = "/".join([str(seed), *map(str, path)]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, *path: str | int) -> torch.Generator:
    """Return a new generator for a purpose.

    Args:
        seed: of the run.
        *path: words and numbers that name the purpose, e.g. ``"client", "A", 3, "train"``.
    """
    return torch.Generator().manual_seed(seed_of(seed, *path))


def claim(used: set[str], purpose: str, scope: str) -> None:
    """Add a purpose to those that have been used, each of which has one generator.

    Args:
        used: the purposes used before; it is changed.
        purpose: the new one.
        scope: where a purpose may be used once, for the message.

    Raises:
        ProtocolError: it was used before.
    """
    if purpose in used:
        raise ProtocolError(
            f"the random generator {purpose!r} was used twice in one {scope}; give each use its "
            f"own name"
        )
    used.add(purpose)


def permutation(count: int, seed: int, *path: str | int) -> list[int]:
    """Return the numbers from 0 up to, not including, a count in the order of `torch.randperm`.

    Both draw from MT19937, which numpy has too, so that splits can be drawn without loading torch.

    Args:
        count: how many numbers.
        seed: of the run.
        *path: words and numbers that name the purpose, as of `generator`.
    """
    random = np.random.RandomState(seed_of(seed, *path) % 2**32)
    order = list(range(count))
    for place, draw in enumerate(random.randint(2**32, size=count, dtype=np.uint32).tolist()):
        other = place + draw % (count - place)
        order[place], order[other] = order[other], order[place]
    return order


@contextmanager
def ambient(seed: int, *path: str | int) -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them after it.

    Dropout and the initialisation of layers draw from torch's global generators; this is the only
    place that touches them.

    Args:
        seed: of the run.
        *path: words and numbers that name the purpose.
    """
    with restoring():
        torch.manual_seed(seed_of(seed, *path))
        yield


@contextmanager
def restoring() -> Iterator[None]:
    """Restore torch's global generators after the block: what follows draws what it has drawn."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=list(devices)):
        yield
