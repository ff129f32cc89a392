"""From prepared cases to training samples: crops, flips and rotations, each from one generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from collegium.core.dataset import Batch, Example, join
from collegium.core.lazy import torch
from collegium.core.settings import NonNegative, NonNegativeInt, PositiveInt, UnitInterval, settings
from collegium.data.augmentation import cut_out, deform
from collegium.data.cache import PreparedCase
from collegium.data.decoded_image import Array
from collegium.data.preprocessing import CaseArrays
from collegium.errors import ConfigError


@settings
class SamplingConfig:
    """The sampling and augmentation of training samples.

    Attributes:
        crop: Size of the random crop per spatial axis; None takes whole cases, which must then have
            one shape. Two numbers on volumes draw from their slices (along the last axis).
        flips: Whether each spatial axis is flipped with probability 1/2.
        rotations: Whether the first two spatial axes are rotated by a random multiple of 90
            degrees, if the sample is square in them.
        patches: The number of samples from a case each time that it is drawn; batches are larger by
            this factor.
        foreground: Probability with which a crop is placed so that it holds a random pixel of the
            foreground.
        scale: Every channel is multiplied by a number drawn uniformly from 1 - scale to 1 + scale.
        shift: To every channel a number is added that is drawn uniformly from -shift to shift. A
            channel that is 0 everywhere, such as one that the site lacks, stays 0.
        channels_alike: Whether these two numbers are the same for all channels, as brightness and
            contrast of a picture are, or drawn for each channel.
        rotate: The case, or the slice, is rotated in its first two spatial axes before it is
            cropped, by an angle drawn uniformly from -rotate to rotate degrees, and continued by
            reflection beyond its border. The image is interpolated, label and mask by nearest
            neighbour.
        zoom: In the same step it is enlarged by a factor drawn uniformly from 1 - zoom to 1 + zoom.
        shear: In the same step each of these two axes leans on the other by an angle of its own,
            drawn uniformly from -shear to shear degrees.
        holes: As the last step, 1 to this many squares (in volumes, cubes) of the image are set to
            0; label and mask stay.
        hole_side: Their side in pixels.
        probability: The probability with which each of these changes is made in a sample,
            independently: rotate, zoom, shear, scale and shift together, and holes; flips and
            rotations then have it for one of those that change the sample, each alike. None: all
            are made in every sample, and flips and rotations as described.
        neighbours: If the crop has two numbers: this many slices on either side of a slice are
            further channels of the image, in the order of the volume; beyond its ends the last
            slice is repeated. 1 gives the three slices of IOP-FL's code. The network gets 2
            neighbours + 1 times as many channels.
    """

    crop: tuple[PositiveInt, ...] | None = None
    flips: bool = False
    rotations: bool = False
    patches: PositiveInt = 1
    foreground: UnitInterval = 0.0
    scale: UnitInterval = 0.0
    shift: NonNegative = 0.0
    channels_alike: bool = False
    rotate: Annotated[float, Ge(0), Le(180)] = 0.0
    zoom: Annotated[float, Ge(0), Le(0.5)] = 0.0
    shear: Annotated[float, Ge(0), Le(45)] = 0.0
    holes: NonNegativeInt = 0
    hole_side: PositiveInt = 16
    probability: UnitInterval | None = None
    neighbours: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.neighbours and (self.crop is None or len(self.crop) != 2):
            raise ConfigError(
                "sampling.neighbours is of slices: give sampling.crop two numbers, or leave it out"
            )
        if self.crop is not None and len(self.crop) not in (2, 3):
            raise ConfigError(
                f"sampling.crop is {list(self.crop)}: give two or three whole numbers above 0"
            )


def check_crop(config: SamplingConfig, shape: tuple[int, ...], name: str) -> None:
    """Check that samples can be cut from a case.

    Args:
        config: How samples are drawn.
        shape: The spatial shape of the prepared case.
        name: The case, for messages.

    Raises:
        ConfigError: The crop has more axes than the case.
    """
    if config.crop is not None and len(config.crop) > len(shape):
        raise ConfigError(
            f"sampling.crop has {len(config.crop)} numbers, but {name} has {len(shape)} spatial "
            f"axes {shape}: give {len(shape)} numbers"
        )


class ImageDataset:
    """The prepared cases of one split; a sample depends on its case and its generator only.

    A volume is cut into slices along its last axis if the crop has two numbers: a training sample
    is then a random slice, and `example` returns the slices of the volume as one batch.
    """

    def __init__(self, cases: Sequence[PreparedCase], config: SamplingConfig) -> None:
        self.cases = tuple(cases)
        self.config = config
        for case in self.cases:
            check_crop(config, case.shape[1:], str(case))

    def __len__(self) -> int:
        return len(self.cases)

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Draw `patches` samples from each case.

        Args:
            indices: The cases.
            rngs: One generator for each case, which its samples alone depend on.
        """
        pairs = zip(indices, rngs, strict=True)
        count = range(self.config.patches)
        return join([self._sample(self.cases[index], rng) for index, rng in pairs for _ in count])

    def example(self, index: int) -> Example:
        """Return one whole case, or all slices of one volume, without augmentation."""
        case, neighbours = self.cases[index], self.config.neighbours
        arrays, spacing = case.arrays(), case.spacing
        if self._in_slices(case):
            arrays = arrays.map(lambda values: np.moveaxis(values, -1, 0))
            spacing = None if spacing is None else (spacing[-1], *spacing[:-1])
        else:
            arrays = arrays.map(lambda values: values[None])
        if neighbours:
            arrays = replace(arrays, image=_with_neighbours(arrays.image, neighbours))
        batch = _batch(arrays, case.target)
        return Example(case.case, case.patient, batch, spacing, neighbours)

    def _in_slices(self, case: PreparedCase) -> bool:
        return self.config.crop is not None and len(case.shape) - 1 > len(self.config.crop)

    def _sample(self, case: PreparedCase, rng: torch.Generator) -> Batch:
        config, arrays = self.config, case.arrays()
        aim = _aim(arrays, rng) if config.foreground and _uniform(rng) < config.foreground else None
        if self._in_slices(case):
            place = _draw(case.shape[-1], rng) if aim is None else aim[-1]
            arrays = _slice(arrays, place, config.neighbours)
        elif config.neighbours:
            image = _with_neighbours(arrays.image[None], config.neighbours)[0]
            arrays = replace(arrays, image=image)
        if config.rotate or config.zoom or config.shear:
            arrays = self._deform(arrays, rng)
            aim = aim and _aim(arrays, rng)
        arrays = _crop(arrays, config.crop, rng, aim=aim)
        axes = len(arrays.shape)
        if config.flips:
            arrays = arrays.at([slice(None, None, step) for step in self._flips(axes, rng)])
        if config.rotations:
            turns = self._turns(rng)
            if arrays.shape[0] == arrays.shape[1]:
                plane = (-axes, 1 - axes)
                arrays = arrays.map(lambda values: np.rot90(values, turns, plane))
        batch = _batch(arrays.map(lambda values: values[None]), case.target)
        image = batch["image"]
        if self._chosen(rng):
            image = self._intensities(image, rng)
        if config.holes and self._chosen(rng):
            image = cut_out(image, config.holes, config.hole_side, rng)
        return batch | {"image": image}

    def _chosen(self, rng: torch.Generator) -> bool:
        """Return whether a change is made in a sample; nothing is drawn if all are."""
        chance = self.config.probability
        return chance is None or _uniform(rng) < chance

    def _deform(self, arrays: CaseArrays, rng: torch.Generator) -> CaseArrays:
        """Rotate, enlarge and shear a sample by random numbers."""
        config, shear = self.config, (0.0, 0.0)
        degrees, zoom = config.rotate * _around_0(rng), 1 + config.zoom * _around_0(rng)
        if config.shear:
            shear = (config.shear * _around_0(rng), config.shear * _around_0(rng))
        if config.probability is not None:
            degrees = degrees if self._chosen(rng) else 0.0
            zoom = zoom if self._chosen(rng) else 1.0
            shear = shear if self._chosen(rng) else (0.0, 0.0)
            if (degrees, zoom, shear) == (0.0, 1.0, (0.0, 0.0)):
                return arrays
        return deform(arrays, degrees, zoom=zoom, shear=shear)

    def _flips(self, axes: int, rng: torch.Generator) -> list[int]:
        """Return for every axis the step with which it is read: -1 or 1."""
        if self.config.probability is None:
            return [-1 if _draw(2, rng) else 1 for _ in range(axes)]
        number = 1 + _draw(2**axes - 1, rng) if self._chosen(rng) else 0
        return [-1 if number >> axis & 1 else 1 for axis in range(axes)]

    def _turns(self, rng: torch.Generator) -> int:
        """Return by how many quarter turns a sample is rotated."""
        if self.config.probability is None:
            return _draw(4, rng)
        return 1 + _draw(3, rng) if self._chosen(rng) else 0

    def _intensities(self, image: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Multiply and shift every channel of (1, channels, *spatial) by random numbers."""
        count = 1 if self.config.channels_alike else image.shape[1]
        shape = (1, count, *[1] * (image.ndim - 2))
        if self.config.scale:
            image = image * (1 + self.config.scale * (2 * torch.rand(shape, generator=rng) - 1))
        if self.config.shift:
            shift = self.config.shift * (2 * torch.rand(shape, generator=rng) - 1)
            image = image + shift * (image != 0).flatten(2).any(2).view(1, -1, *shape[2:])
        return image


def _slice(arrays: CaseArrays, place: int, neighbours: int) -> CaseArrays:
    """Return a slice of a volume, its image with the channels of its neighbours."""
    here = arrays.at([place])
    if not neighbours:
        return here
    around = _around(place, neighbours, arrays.shape[-1])
    return replace(here, image=np.concatenate([arrays.image[..., k] for k in around]))


def _with_neighbours(slices: Array, neighbours: int) -> Array:
    """Return slices (B, C, *spatial) with their neighbours' channels: (B, C (2n + 1), *spatial)."""
    count = len(slices)
    around = [_around(place, neighbours, count) for place in range(count)]
    joined: Array = slices[np.array(around)].reshape(count, -1, *slices.shape[2:])
    return joined


def _around(place: int, neighbours: int, count: int) -> list[int]:
    steps = range(-neighbours, neighbours + 1)
    return [min(max(place + step, 0), count - 1) for step in steps]


def _aim(arrays: CaseArrays, rng: torch.Generator) -> tuple[int, ...] | None:
    """Return a random pixel of the foreground; None if there is none."""
    found = np.flatnonzero(arrays.label) if arrays.label is not None else ()
    if not len(found):
        return None
    place = np.unravel_index(found[_draw(len(found), rng)], arrays.shape)
    return tuple(int(axis) for axis in place)


def _crop(
    arrays: CaseArrays,
    crop: tuple[int, ...] | None,
    rng: torch.Generator,
    *,
    aim: tuple[int, ...] | None = None,
) -> CaseArrays:
    """Crop at a random place; a smaller case is centred and padded with zeros.

    With an ``aim`` the crop is one of those that contain this pixel.
    """
    shape = arrays.shape
    size = shape if crop is None else crop
    starts = []
    for axis, (have, want) in enumerate(zip(shape, size, strict=True)):
        last = max(have - want, 0)
        least = 0 if aim is None else min(max(aim[axis] - want + 1, 0), last)
        most = last if aim is None else min(aim[axis], last)
        starts.append(least + _draw(most - least + 1, rng))
    windows = zip(starts, size, strict=True)
    arrays = arrays.at([slice(start, start + want) for start, want in windows])
    gaps = [max(want - have, 0) for have, want in zip(shape, size, strict=True)]
    if not any(gaps):
        return arrays
    if arrays.mask is None and arrays.label is not None:
        arrays = replace(arrays, mask=np.ones(arrays.shape, bool))
    margins = [(gap // 2, gap - gap // 2) for gap in gaps]
    return arrays.map(lambda v: np.pad(v, [(0, 0)] * (v.ndim - len(gaps)) + margins))


def _draw(count: int, rng: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=rng))


def _uniform(rng: torch.Generator) -> float:
    return float(torch.rand((), generator=rng))


def _around_0(rng: torch.Generator) -> float:
    """Return a number drawn uniformly from -1 to 1."""
    return 2 * _uniform(rng) - 1


def _batch(arrays: CaseArrays, target: int | None) -> Batch:
    """Copy views of mapped files into tensors."""
    batch = {"image": _tensor(arrays.image, np.float32)}
    if arrays.label is not None:
        batch["label"] = _tensor(arrays.label, np.int64)
    if target is not None:
        batch["label"] = torch.full((len(batch["image"]),), target)
    if arrays.mask is not None:
        batch["mask"] = _tensor(arrays.mask, np.bool_)
    return batch


def _tensor(values: Array, dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype, order="C"))
