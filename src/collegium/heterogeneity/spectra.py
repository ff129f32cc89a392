"""Low-frequency amplitudes of images, and images with those of another site (FDA, FedDG, ResFIM).

An image is split by the Fourier transform into amplitudes, which hold much of how it was acquired,
and phases, which hold most of what it shows. Only a small window of low frequencies is exchanged,
so only its bins are computed: a few products with thin cosine matrices in place of whole
transforms, equal to those up to rounding.

A window is centred: entry ``[radius + u, radius + v]`` belongs to frequency (u, v), as after
``fftshift``. It is point-symmetric for a real image, so that a transferred image is real. FedDG and
ResFIM replace the amplitudes in full; FedDG also clips to [0, 255], which would be wrong for
normalised intensities and is not done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collegium.core.lazy import torch
from collegium.errors import ConfigError, DataError, ProtocolError

if TYPE_CHECKING:
    from torch import Tensor


def window_radius(shape: Sequence[int], ratio: float) -> int:
    """Return the radius b of the window: the smallest side times the ratio, rounded down.

    Args:
        shape: spatial shape of the images, two or three sides.
        ratio: L, from 0 (the mean intensity alone) to below one half; 0.01 is usual.

    Raises:
        ConfigError: the shape has other than two or three sides, or the ratio is out of range: the
            window must stay below the highest frequency of every even side, whose bin has no mirror
            image.
    """
    if len(shape) not in (2, 3):
        raise ConfigError(f"spectra are taken of images or volumes, not of shape {tuple(shape)}")
    if not 0 <= ratio < math.inf:
        raise ConfigError(f"the window's ratio is {ratio}; choose a number from 0, such as 0.01")
    radius = math.floor(round(min(shape) * ratio, 9))  # 100 * 0.29 is a little less than 29
    if radius > _largest_radius(shape):
        raise ConfigError(
            f"a window of ratio {ratio} has {2 * radius + 1} frequencies a side, more than images "
            f"of {' x '.join(map(str, shape))} pixels have; choose a smaller ratio"
        )
    return radius


def as_images(inputs: Tensor) -> Tensor:
    """Return rows of a table (B, features) and signals (B, C, length) as images of one row.

    Images and volumes are returned as they are.
    """
    inputs = inputs.unsqueeze(1) if inputs.ndim == 2 else inputs
    return inputs.unsqueeze(2) if inputs.ndim == 3 else inputs


def amplitude_window(images: Tensor, ratio: float) -> Tensor:
    """Return the centred low-frequency window of |fftshift(fft)| of each image and channel.

    Args:
        images: (B, C, *spatial), with two or three spatial axes.
        ratio: L; the radius is b = `window_radius`.

    Returns:
        (B, C, 2b + 1, 2b + 1), or with a third such side for volumes; float64 for float64 images,
        otherwise float32.

    Raises:
        ConfigError: the ratio is out of range, or the images have other than two or three axes.
        DataError: a spectrum holds NaN or infinite values, as any such intensity makes it.
    """
    radius = window_radius(images.shape[2:], ratio)
    half = _low_frequencies(_as_real(images), radius).abs()
    _require_finite(half, "image")
    mirrored = half[..., 1:].flip(_spatial(images))
    return torch.cat([mirrored, half], dim=-1)


def transfer(images: Tensor, windows: Tensor) -> Tensor:
    """Return the images with the amplitudes of other images at low frequencies, their phase kept.

    This is the real part of the inverse transform of the changed spectrum. A bin without amplitude
    has phase 0. Of a window that is not point-symmetric the symmetric part counts, since the rest
    would be imaginary.

    Args:
        images: (B, C, *spatial).
        windows: (B, C, 2b + 1, ...) as `amplitude_window` returns them. One image goes with many
            windows, and one window with many images: either B may be 1.

    Returns:
        (B, C, *spatial) in the type of the images.

    Raises:
        DataError: a spectrum of the images holds NaN or infinite values.
        ProtocolError: the windows do not fit the images, or hold NaN, infinite or negative values.
    """
    radius = _radius_of(windows, images)
    pixels = _as_real(images)
    spectrum = _low_frequencies(pixels, radius)
    amplitudes = spectrum.abs()
    _require_finite(amplitudes, "image")
    wanted = windows.to(pixels)
    symmetric = (wanted + wanted.flip(_spatial(images))) / 2
    phases = torch.where(amplitudes == 0, torch.ones_like(spectrum), torch.sgn(spectrum))
    change = (symmetric[..., radius:] - amplitudes) * phases
    return (pixels + _image_of(change, pixels.shape[2:])).to(images.dtype)


def _low_frequencies(images: Tensor, radius: int) -> Tensor:
    """Return the discrete Fourier transform at frequencies -b..b, on the last axis 0..b alone."""
    *others, width = images.shape[2:]
    waves = _waves(range(radius + 1), width, images)
    parts = images @ torch.cat([waves.real, waves.imag]).T
    spectrum = torch.complex(parts[..., : radius + 1], parts[..., radius + 1 :])
    for axis, size in enumerate(others, start=2):
        waves = _waves(range(-radius, radius + 1), size, images)
        spectrum = (spectrum.movedim(axis, -1) @ waves.T).movedim(-1, axis)
    return spectrum


def _image_of(spectrum: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the inverse of `_low_frequencies`, all other frequencies being 0."""
    *others, width = shape
    radius = spectrum.shape[-1] - 1
    real = spectrum.real
    for axis, size in enumerate(others, start=2):
        waves = _waves(range(-radius, radius + 1), size, real).conj()
        spectrum = (spectrum.movedim(axis, -1) @ waves).movedim(-1, axis)
    waves = _waves(range(radius + 1), width, real)
    twice = torch.full((radius + 1, 1), 2.0).to(real)  # the left out half mirrors this one
    twice[0] = 1.0
    rows = torch.cat([waves.real * twice, waves.imag * twice]) / math.prod(shape)
    return torch.cat([spectrum.real, spectrum.imag], dim=-1) @ rows


def _waves(frequencies: range, size: int, like: Tensor) -> Tensor:
    """Return the rows exp(-2 pi i f n / size), on the device and of the type of ``like``."""
    turns = torch.outer(torch.tensor(list(frequencies)), torch.arange(size)) % size
    angle = turns.double() * (-2 * math.pi / size)
    return torch.complex(angle.cos().to(like), angle.sin().to(like))


def _as_real(images: Tensor) -> Tensor:
    return images if images.dtype == torch.float64 else images.float()


def _spatial(images: Tensor) -> list[int]:
    return list(range(2, images.ndim))


def _largest_radius(shape: Sequence[int]) -> int:
    return min((side - 1) // 2 for side in shape)


def _radius_of(windows: Tensor, images: Tensor) -> int:
    """Return the radius of windows that fit the images and hold amplitudes."""
    sides = set(windows.shape[2:])
    radius = (windows.shape[-1] - 1) // 2
    fits = windows.ndim == images.ndim and windows.shape[1] == images.shape[1]
    fits = fits and (1 in (len(windows), len(images)) or len(windows) == len(images))
    if not fits or sides != {2 * radius + 1} or radius > _largest_radius(images.shape[2:]):
        raise ProtocolError(
            f"amplitude windows of shape {tuple(windows.shape)} do not fit images of shape "
            f"{tuple(images.shape)}; bring the images of all sites to one size"
        )
    _require_finite(windows, "amplitude window")
    if (windows < 0).any():
        raise ProtocolError("an amplitude window holds negative values, which amplitudes never are")
    return radius


def _require_finite(values: Tensor, whose: str) -> None:
    """Raise an error about the first of a batch that holds NaN or infinite values."""
    finite = torch.isfinite(values).flatten(1).all(1)
    if bool(finite.all()):
        return
    first = int((~finite).nonzero()[0]) + 1
    if whose == "image":
        raise DataError(
            f"the spectrum of image {first} of a batch of {len(values)} holds NaN or infinite "
            f"values; look for them in its intensities"
        )
    raise ProtocolError(
        f"{whose} {first} of {len(values)} holds NaN or infinite values; look at the images of the "
        f"site that sent it"
    )
