"""Phase retrieval: an image rebuilt from amplitudes of its Fourier transform, without its phases.

An attacker who reads the amplitudes of low frequencies that FedDG, ResFIM and HarmoFL send knows
two things of an image exactly: its mean intensity up to the sign, which is the amplitude of
frequency 0 by the number of pixels, and, if the amplitudes are those of all frequencies, its
periodic autocorrelation, whose transform is the squared amplitudes (of a window: that of the image
without its higher frequencies). For the phases there is no formula. They are searched for by
alternating projections after Fienup, "Phase retrieval algorithms: a comparison" (Applied Optics 21,
1982, https://doi.org/10.1364/AO.21.002758), onto the images with the known amplitudes and onto the
images that are possible:

    g' = image with the phases of g and the known amplitudes
    g <- g' where g' is possible, otherwise g - beta (g' - nearest possible)  (hybrid input-output)
    g <- nearest possible to g'                                               (error reduction)

Possible are real images whose intensities lie in a range, and which are as dark as the background
outside a support. Amplitudes of unknown frequencies are taken as 0, the best guess without phases.

An image that is moved around the frame, or turned by 180 degrees, has the same amplitudes, so that
a rebuilt image is compared in its best such position, see `aligned`.

Deviation: the paper's range has only its lower end, 0; here an upper end counts alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from collegium.core.randomness import generator
from collegium.core.settings import Positive, PositiveInt, settings

STARTS = 10
"""So many images are searched for at once, for each restart."""

CYCLE, REDUCED = 50, 10
"""Of each such number of steps, how many, the last ones, are error reduction."""

DARK = 0.1
"""Up to this share of the range a pixel of the mean of one's own images is background."""


@settings
class PhaseRetrieval:
    """The settings of phase retrieval.

    Attributes:
        steps: steps of alternating projections; the last `CYCLE` are error reduction.
        restarts: how often `STARTS` random images are started from; the one whose amplitudes are
            nearest to the known ones wins.
        beta: of hybrid input-output; the paper's 0.9 is usual.
    """

    steps: PositiveInt = 1500
    restarts: PositiveInt = 1
    beta: Positive = 0.9


@dataclass(frozen=True)
class Possible:
    """The images that an attacker thinks possible.

    Attributes:
        low: (C,), the intensity of the background; nothing is darker.
        high: (C,), the highest.
        mean: (C,), about the mean, for the sign of the true one.
        support: (*spatial), where an image may be brighter than the background.
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    support: Tensor

    @classmethod
    def like(cls, images: Tensor) -> Possible:
        """Return what an attacker's own images have in common.

        The support is where their mean is brighter than the darkest tenth of its range, and the
        background the mean of the rest.

        Args:
            images: (N, C, *spatial).
        """
        mean = images.double().mean(0)
        flat = mean.flatten(1)
        low, high = (
            end.reshape(-1, *[1] * (mean.ndim - 1)) for end in (flat.amin(1), flat.amax(1))
        )
        inside = (mean > low + DARK * (high - low)).any(0)
        outside = mean[:, ~inside]
        background = outside.mean(1) if outside.numel() else flat.amin(1)
        brightest = images.double().flatten(2).amax((0, 2))
        return cls(background, brightest, flat.mean(1), inside)


def spread(windows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return amplitudes at the places of `torch.fft.fftn`, 0 where they are unknown.

    Args:
        windows: (C, 2b + 1, ...), centred, see `collegium.heterogeneity.spectra`.
        shape: of the images, one side for each axis of a window.

    Returns:
        (C, *shape) in float64.
    """
    radius = (windows.shape[-1] - 1) // 2
    amplitudes = torch.zeros(len(windows), *shape, dtype=torch.float64)
    inner = tuple(slice(0, 2 * radius + 1) for _ in shape)
    amplitudes[(slice(None), *inner)] = windows.double()
    return amplitudes.roll([-radius] * len(shape), _axes(amplitudes))


def with_phases_of(windows: Tensor, image: Tensor) -> Tensor:
    """Return the image with known amplitudes, the phases of an image and nothing else.

    With the image's own amplitudes this is the image without its higher frequencies: the most that
    amplitudes and phases of a window tell.

    Args:
        windows: see `spread`.
        image: (C, *spatial).
    """
    amplitudes = spread(windows, tuple(image.shape[1:]))
    axes = _axes(image)
    phases = torch.sgn(torch.fft.fftn(image.double(), dim=axes))
    rebuilt: Tensor = torch.fft.ifftn(amplitudes * phases, dim=axes).real
    return rebuilt


def autocorrelation(windows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the periodic autocorrelation of an image without its higher frequencies.

    Entry d is the sum over pixels n of x(n) x(n + d); entry 0 of amplitudes alone.

    Args:
        windows: see `spread`.
        shape: of the image.

    Returns:
        (C, *shape) in float64.
    """
    amplitudes = spread(windows, shape)
    found: Tensor = torch.fft.ifftn(amplitudes.square(), dim=_axes(amplitudes)).real
    return found


def mean_intensity(windows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the magnitude of the mean intensity of each channel, (C,).

    Args:
        windows: see `spread`.
        shape: of the image.
    """
    amplitudes = spread(windows, shape)
    return amplitudes.flatten(1)[:, 0] / math.prod(shape)


def withdrawn(mean: Tensor, count: int, rest: Tensor) -> Tensor:
    """Return what one patient has added to a mean, from the means with and without that patient.

    With n patients this is n mean_n - (n - 1) mean_(n - 1), exactly, whatever was averaged.

    Args:
        mean: of all.
        count: how many, n.
        rest: of all but one.
    """
    return count * mean.double() - (count - 1) * rest.double()


def retrieve(
    windows: Tensor,
    shape: tuple[int, ...],
    possible: Possible,
    settings: PhaseRetrieval,
    *,
    seed: int = 0,
) -> Tensor:
    """Return a possible image with known amplitudes, (C, *shape), each channel by itself.

    Args:
        windows: see `spread`.
        shape: of the image.
        possible: what the attacker knows beside.
        settings: the settings.
        seed: names the generators of the images that are started from.
    """
    amplitudes = spread(windows, shape)
    channels = [
        _retrieve_channel(amplitude, possible, channel, settings, seed)
        for channel, amplitude in enumerate(amplitudes)
    ]
    return torch.stack(channels)


def _retrieve_channel(
    amplitude: Tensor,
    possible: Possible,
    channel: int,
    settings: PhaseRetrieval,
    seed: int,
) -> Tensor:
    """Return one channel, (*shape); intensities count from the background on the way."""
    low, span = possible.low[channel], possible.high[channel] - possible.low[channel]
    axes = tuple(range(1, amplitude.ndim + 1))
    amplitude = amplitude.clone()
    zero = amplitude.flatten()[:1]  # of frequency 0: the sum, up to the sign
    signs = torch.sign(possible.mean[channel]), -torch.sign(possible.mean[channel])
    sums = [float(sign * zero - low * amplitude.numel()) for sign in signs]
    zero[:] = next((total for total in sums if total >= 0), 0.0)

    def consistent(image: Tensor) -> Tensor:
        spectrum = torch.fft.fftn(image, dim=axes)
        phases = torch.where(spectrum == 0, torch.ones_like(spectrum), torch.sgn(spectrum))
        found: Tensor = torch.fft.ifftn(amplitude * phases, dim=axes).real
        return found

    def nearest(image: Tensor) -> Tensor:
        return image.clamp(min=0.0).minimum(span) * possible.support

    best, least = torch.zeros(amplitude.shape, dtype=torch.float64), math.inf
    for number in range(settings.restarts):
        rng = generator(seed, "attack", "phases", channel, number)
        start = torch.randn(STARTS, *amplitude.shape, generator=rng, dtype=torch.float64)
        spectrum = torch.fft.fftn(start, dim=axes)
        image = torch.fft.ifftn(amplitude * torch.sgn(spectrum), dim=axes).real
        for step in range(settings.steps):
            found = consistent(image)
            allowed = nearest(found)
            left = settings.steps - step
            if left <= CYCLE or step % CYCLE >= CYCLE - REDUCED:
                image = allowed
            else:
                moved = image - settings.beta * (found - allowed)
                image = torch.where(found == allowed, found, moved)
        misfit = torch.fft.fftn(image, dim=axes).abs() - amplitude
        misfits = misfit.flatten(1).square().sum(1)
        if float(misfits.min()) < least:
            least, best = float(misfits.min()), image[int(misfits.argmin())]
    return best + low


def aligned(image: Tensor, truth: Tensor) -> Tensor:
    """Return an image in that place and turned so that its correlation with another is largest.

    It is moved around the frame, all channels alike, and turned by 180 degrees (reflected at its
    centre) or not: all of these have the same amplitudes.

    Args:
        image: (C, *spatial).
        truth: the other, of the same shape.
    """
    axes = _axes(image)
    wanted = torch.fft.fftn(truth.double(), dim=axes)
    found, largest = image, -math.inf
    for turned in (image, image.flip(axes)):
        own = torch.fft.fftn(turned.double(), dim=axes)
        products = torch.fft.ifftn(own.conj() * wanted, dim=axes).real.sum(0)
        place = int(products.argmax())
        if float(products.flatten()[place]) > largest:
            largest = float(products.flatten()[place])
            shifts = [
                int(step) for step in torch.unravel_index(torch.tensor(place), products.shape)
            ]
            found = turned.roll(shifts, axes)
    return found


def _axes(image: Tensor) -> tuple[int, ...]:
    """Return the spatial axes of (C, *spatial), or of a batch of one channel."""
    return tuple(range(1, image.ndim))
