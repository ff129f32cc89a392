"""Inverters: for each kind of numbers that a site sends about images, how an attacker inverts them.

Each knows which numbers an image would have sent, by which an attacker finds the most alike among
images of his own, and yields attacks: a name, and a function that returns the rebuilt image. That
function is given the true image, which only two things take from it: the position in which a
rebuilt image is compared (see `collegium.diagnostics.attacks.phases.aligned`), and the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from collegium.diagnostics.attacks.features import invert_features
from collegium.diagnostics.attacks.inversion import Inversion
from collegium.diagnostics.attacks.phases import (
    PhaseRetrieval,
    Possible,
    aligned,
    retrieve,
    with_phases_of,
)
from collegium.heterogeneity.spectra import amplitude_window, transfer

Attack = tuple[str, Callable[[Tensor], Tensor]]
"""A name, and what returns the rebuilt image, (C, *spatial), for a true one of that shape."""

BOUND = "true phases"
"""The name of the attack that nobody can make: with the phases of the true image."""


@dataclass(frozen=True)
class Attacker:
    """The means of an attacker beside the part.

    Attributes:
        images: of his own, (N, C, *spatial), of the shape of the image that is rebuilt.
        settings: of the searches.
        seed: names the generators of what they start from.
    """

    images: Tensor
    settings: Inversion
    seed: int


@dataclass(frozen=True)
class Inverter:
    """An inverter of numbers about one image, or of the mean of several.

    Attributes:
        value: the numbers.
    """

    value: Tensor

    @property
    def numbers(self) -> int:
        """The number of independent numbers."""
        return self.value.numel()

    def of(self, image: Tensor) -> Tensor:
        """Return the numbers of an image, (C, *spatial), in the shape of those that were sent."""
        raise NotImplementedError

    def apart(self, image: Tensor) -> float:
        """Return how far the numbers of an image are from those sent, relative to their norm.

        Args:
            image: (C, *spatial).
        """
        with torch.no_grad():
            difference = self.of(image).double() - self.value.double()
        return float(difference.norm() / self.value.double().norm().clamp_min(1e-30))

    def attacks(self, shape: tuple[int, ...], attacker: Attacker) -> Iterator[Attack]:
        """Yield the attacks.

        Args:
            shape: of the image, (C, *spatial).
            attacker: what the attacker has beside.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Amplitudes(Inverter):
    """An inverter of a window of amplitudes, (C, 2b + 1, ...).

    Attributes:
        by_pixels: whether they were divided by the number of pixels.
    """

    by_pixels: bool = False

    @property
    def numbers(self) -> int:
        """Half of a window, which is point-symmetric, and its centre."""
        return len(self.value) * (self.value[0].numel() + 1) // 2

    def of(self, image: Tensor) -> Tensor:
        """See `Inverter.of`."""
        radius, shape = (self.value.shape[-1] - 1) // 2, image.shape[1:]
        window = amplitude_window(image[None], radius / min(shape))[0].double()
        return window / math.prod(shape) if self.by_pixels else window

    def attacks(self, shape: tuple[int, ...], attacker: Attacker) -> Iterator[Attack]:
        """Yield phase retrieval, the phases of an own image and of the mean of all, and the bound.

        See `Inverter.attacks`.
        """
        # a difference of two rounded means may be negative where it is nearly 0
        windows = (self.value * (math.prod(shape[1:]) if self.by_pixels else 1)).clamp_min(0)
        asked = attacker.settings
        found = retrieve(
            windows,
            shape[1:],
            Possible.like(attacker.images),
            PhaseRetrieval(steps=asked.steps, restarts=asked.restarts),
            seed=attacker.seed,
        )
        yield "phase retrieval", partial(aligned, found)
        swapped = transfer(min(attacker.images, key=self.apart)[None].double(), windows[None])[0]
        yield "phases of another image", lambda truth: swapped
        mean = attacker.images.double().mean(0, keepdim=True)
        blended = transfer(mean, windows[None])[0]
        yield "phases of the mean of own images", lambda truth: blended
        yield BOUND, partial(with_phases_of, windows)


@dataclass(frozen=True)
class Moments(Inverter):
    """An inverter of mean and standard deviation of each channel, (2, C)."""

    def of(self, image: Tensor) -> Tensor:
        """See `Inverter.of`."""
        rows = image.flatten(1).double()
        return torch.stack([rows.mean(1), rows.std(1)])

    def attacks(self, shape: tuple[int, ...], attacker: Attacker) -> Iterator[Attack]:
        """Yield an image of the attacker's own with this mean and deviation.

        See `Inverter.attacks`.
        """
        best = min(attacker.images, key=self.apart)
        rows = best.flatten(1).double()
        standard = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True).clamp_min(1e-12)
        mean, deviation = self.value.double().unsqueeze(2)
        restyled = (standard * deviation + mean).reshape(shape)
        yield "another image with this mean and deviation", lambda truth: restyled


@dataclass(frozen=True)
class GridImage(Inverter):
    """An inverter of an image on a grid, (C, *grid)."""

    def of(self, image: Tensor) -> Tensor:
        """See `Inverter.of`."""
        return _averaged(image, self.value.shape[1:])

    def attacks(self, shape: tuple[int, ...], attacker: Attacker) -> Iterator[Attack]:
        """Yield the image, enlarged. See `Inverter.attacks`."""
        enlarged = resized(self.value.double(), shape[1:])
        yield "enlarged", lambda truth: enlarged


@dataclass(frozen=True)
class SecondMoments(Inverter):
    """An inverter of second moments of the pixels on a grid, (P, P).

    Of one image of one channel they are the product of its pixels, less their mean, with
    themselves, whose only component is the image up to sign and mean.
    """

    @property
    def numbers(self) -> int:
        """Half of the matrix, which is symmetric, and its diagonal."""
        return len(self.value) * (len(self.value) + 1) // 2

    def of(self, image: Tensor) -> Tensor:
        """See `Inverter.of`."""
        axes = image.ndim - 1
        rows = _averaged(image, (self._side(axes),) * axes).flatten(1)
        rows = rows - rows.mean()
        return rows.T @ rows / len(rows)

    def _side(self, axes: int) -> int:
        return round(math.pow(len(self.value), 1 / axes))

    def attacks(self, shape: tuple[int, ...], attacker: Attacker) -> Iterator[Attack]:
        """Yield the largest component, signed and shifted as the attacker's own images.

        See `Inverter.attacks`.
        """
        values, vectors = torch.linalg.eigh(self.value.double())
        axes, own = len(shape) - 1, attacker.images.double().mean(0)
        grid = (self._side(axes),) * axes
        component = vectors[:, -1] * values[-1].clamp_min(0).sqrt()
        usual = _averaged(own, grid).mean(0).flatten()
        component = component * torch.sign(component @ (usual - usual.mean()))
        plane = component.reshape(1, *grid) + own.mean()
        enlarged = resized(plane, shape[1:]).expand(shape)
        yield "largest component", lambda truth: enlarged


@dataclass(frozen=True)
class NetworkFeatures(Inverter):
    """An inverter of what a known network makes of an image.

    Attributes:
        features: returns it, differentiably, of an image (1, C, *spatial).
    """

    features: Callable[[Tensor], Tensor]

    def of(self, image: Tensor) -> Tensor:
        """See `Inverter.of`."""
        return self.features(image[None].double())

    def attacks(self, shape: tuple[int, ...], attacker: Attacker) -> Iterator[Attack]:
        """Yield feature inversion, from the mean of the attacker's own images.

        See `Inverter.attacks`.
        """
        found = invert_features(
            self.features,
            self.value,
            (1, *shape),
            attacker.settings,
            start=attacker.images.mean(0, keepdim=True),
            seed=attacker.seed,
        )[0]
        yield "feature inversion", lambda truth: found


def resized(image: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an image on another grid, interpolated linearly.

    Args:
        image: (C, *spatial).
        shape: the sides of the grid.
    """
    if tuple(image.shape[1:]) == tuple(shape):
        return image
    mode = "bilinear" if len(shape) == 2 else "trilinear"
    return functional.interpolate(image[None], tuple(shape), mode=mode)[0]


def _averaged(image: Tensor, grid: Sequence[int]) -> Tensor:
    """Return an image on a grid as sites sketch it, by averages over areas."""
    return functional.interpolate(image[None].float(), tuple(grid), mode="area")[0].double()
