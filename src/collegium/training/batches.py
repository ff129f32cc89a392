"""The order in which a client's examples form batches, and the generator of each sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from collegium.core.dataset import Batch, Dataset
from collegium.core.randomness import generator

Path = tuple[str | int, ...]
"""The name of a random generator."""


class _SampleGenerators(Sequence[torch.Generator]):
    """One generator per sample, created when it is used.

    Augmentation depends on the sample alone, not on the process or the order of draws.
    """

    def __init__(self, seed: int, path: Path, samples: Sequence[tuple[int, int]]) -> None:
        self._seed, self._path, self._samples = seed, path, samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, position: Any) -> Any:
        return generator(self._seed, *self._path, "sample", *self._samples[position])


def plan_batches(
    count: int, batch_size: int, *, epochs: int, steps: int | None, seed: int, path: Path
) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of (epoch, index), each epoch in an order of its own.

    With ``epochs`` every epoch is cut into batches, and a last batch of one example is merged into
    the batch before it, since batch normalisation cannot learn from one value (unless
    ``batch_size`` is 1). With ``steps`` the epochs follow each other without a cut, so that all
    batches are full.

    Args:
        count: number of examples.
        batch_size: examples per batch.
        epochs: passes over the examples, if ``steps`` is None.
        steps: number of batches.
        seed: of the run.
        path: name of the generator; the orders follow from it.
    """

    def order(epoch: int) -> list[tuple[int, int]]:
        shuffled = torch.randperm(count, generator=generator(seed, *path, "order", epoch))
        return [(epoch, int(index)) for index in shuffled]

    if steps is not None:
        endless = itertools.chain.from_iterable(map(order, itertools.count()))
        for _ in range(steps):
            yield list(itertools.islice(endless, batch_size))
        return
    for epoch in range(epochs):
        samples = order(epoch)
        cuts = list(range(0, count, batch_size))
        if batch_size > 1 and len(cuts) > 1 and count - cuts[-1] == 1:
            cuts.pop()
        for start, end in zip(cuts, [*cuts[1:], count], strict=True):
            yield samples[start:end]


def draw_batch(data: Dataset, samples: Sequence[tuple[int, int]], seed: int, path: Path) -> Batch:
    """Return a batch of samples, each cropped and augmented by a generator of its own.

    Args:
        data: the examples.
        samples: pairs of epoch and index.
        seed: of the run.
        path: name from which the generators follow.
    """
    return data.batch([index for _, index in samples], _SampleGenerators(seed, path, samples))
