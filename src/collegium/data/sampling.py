"""From prepared cases to training samples: crops, flips and turns, each from one generator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from collegium.data.cache import PreparedCase
from collegium.data.dataset import Batch, Example, join
from collegium.data.recipe import Array, Arrays
from collegium.errors import ConfigError


@dataclass(frozen=True)
class SamplingConfig:
    """How a training sample is drawn from a case.

    Attributes:
        crop: Size of the random crop per spatial axis; None takes whole cases, which must then have
            one shape. Two numbers on volumes draw from their slices (the last axis).
        flips: Whether each spatial axis is flipped with probability 1/2.
        rotations: Whether the first two spatial axes are turned by a random multiple of 90 degrees,
            where the sample is square in them.
    """

    crop: tuple[int, ...] | None = None
    flips: bool = False
    rotations: bool = False

    def __post_init__(self) -> None:
        if self.crop is not None and (len(self.crop) not in (2, 3) or min(self.crop) < 1):
            raise ConfigError(
                f"sampling.crop is {list(self.crop)}: give two or three whole numbers above 0"
            )


class ImageDataset:
    """The prepared cases of one split; a sample depends on its case and its generator only.

    A volume is cut into slices along its last axis where the crop has two numbers: a training
    sample is then a random slice, and `example` gives the slices of the volume as one batch.
    """

    def __init__(self, cases: Sequence[PreparedCase], config: SamplingConfig) -> None:
        self.cases = tuple(cases)
        self.config = config
        for case in self.cases:
            axes = len(case.shape) - 1
            if config.crop is not None and len(config.crop) > axes:
                raise ConfigError(
                    f"sampling.crop has {len(config.crop)} numbers, but {case} has {axes} "
                    f"spatial axes {case.shape[1:]}: give {axes} numbers"
                )

    def __len__(self) -> int:
        return len(self.cases)

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Draw one sample from each case; sample i draws from `rngs[i]` only."""
        pairs = zip(indices, rngs, strict=True)
        return join([self._sample(self.cases[index], rng) for index, rng in pairs])

    def example(self, index: int) -> Example:
        """Give one whole case, or all slices of one volume, without augmentation."""
        case = self.cases[index]
        arrays, spacing = case.arrays(), case.spacing
        if self._in_slices(case):
            batch = _batch(arrays.map(lambda values: np.moveaxis(values, -1, 0)))
            spacing = None if spacing is None else (spacing[-1], *spacing[:-1])
        else:
            batch = _batch(arrays.map(lambda values: values[None]))
        return Example(case.case, case.patient, batch, spacing)

    def _in_slices(self, case: PreparedCase) -> bool:
        return self.config.crop is not None and len(case.shape) - 1 > len(self.config.crop)

    def _sample(self, case: PreparedCase, rng: torch.Generator) -> Batch:
        arrays = case.arrays()
        if self._in_slices(case):
            arrays = arrays.at([_draw(case.shape[-1], rng)])
        arrays = _crop(arrays, self.config.crop, rng)
        axes = arrays.label.ndim
        if self.config.flips:
            steps = [-1 if _draw(2, rng) else 1 for _ in range(axes)]
            arrays = arrays.at([slice(None, None, step) for step in steps])
        if self.config.rotations:
            turns = _draw(4, rng)
            if arrays.label.shape[0] == arrays.label.shape[1]:
                plane = (-axes, 1 - axes)
                arrays = arrays.map(lambda values: np.rot90(values, turns, plane))
        return _batch(arrays.map(lambda values: values[None]))


def _crop(arrays: Arrays, crop: tuple[int, ...] | None, rng: torch.Generator) -> Arrays:
    """Cut a crop at a random place; where the case is smaller, it stands in the middle of zeros."""
    shape = arrays.label.shape
    size = shape if crop is None else crop
    starts = [_draw(max(have - want, 0) + 1, rng) for have, want in zip(shape, size, strict=True)]
    windows = zip(starts, size, strict=True)
    arrays = arrays.at([slice(start, start + want) for start, want in windows])
    gaps = [max(want - have, 0) for have, want in zip(shape, size, strict=True)]
    if not any(gaps):
        return arrays
    if arrays.mask is None:
        arrays = replace(arrays, mask=np.ones(arrays.label.shape, bool))
    margins = [(gap // 2, gap - gap // 2) for gap in gaps]
    return arrays.map(lambda v: np.pad(v, [(0, 0)] * (v.ndim - len(gaps)) + margins))


def _draw(count: int, rng: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=rng))


def _batch(arrays: Arrays) -> Batch:
    """Copy views of mapped files into tensors."""
    batch = {"image": _tensor(arrays.image, np.float32), "label": _tensor(arrays.label, np.int64)}
    if arrays.mask is not None:
        batch["mask"] = _tensor(arrays.mask, np.bool_)
    return batch


def _tensor(values: Array, kind: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=kind, order="C"))
