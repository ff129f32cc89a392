"""The likeness of a rebuilt image and the true one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from monai.metrics.regression import PSNRMetric, SSIMMetric

from collegium.errors import DataError

WINDOW = 11
"""Side of SSIM's Gaussian window in pixels, or the largest odd number that fits the image."""


@dataclass(frozen=True)
class Likeness:
    """Measures of a rebuilt image against the true one, whose range is its maximum minus minimum.

    Attributes:
        psnr: peak signal-to-noise ratio in dB, with that range as the peak.
        ssim: structural similarity (Wang et al., 2004), at most 1, with a Gaussian window.
        correlation: Pearson's correlation of the pixels; 0 where one image is constant.
        fitted_psnr: as ``psnr`` after the best scale and offset, which an attacker can set by eye
            and which normalisation removes from a gradient.
        fitted_ssim: as ``ssim`` after the same.
        blank_psnr: of an image that has the true mean everywhere: what knowing nothing else gives.
    """

    psnr: float
    ssim: float
    correlation: float
    fitted_psnr: float
    fitted_ssim: float
    blank_psnr: float


def compare(image: torch.Tensor, truth: torch.Tensor) -> Likeness:
    """Return how alike two images are.

    Args:
        image: the rebuilt image, (1, C, *spatial).
        truth: the true one.

    Raises:
        DataError: the true image is constant.
    """
    x, y = image.detach().double(), truth.detach().double()
    spread = float(y.max() - y.min())
    if spread == 0:
        raise DataError("the true image is constant, so that nothing compares to it; take another")
    dx, dy = x - x.mean(), y - y.mean()
    xx, xy, yy = (float((a * b).sum()) for a, b in ((dx, dx), (dx, dy), (dy, dy)))
    slope = xy / xx if xx > 0 else 0.0
    fitted = y.mean() + slope * dx
    return Likeness(
        _psnr(x, y, spread),
        _ssim(x, y, spread),
        xy / (xx * yy) ** 0.5 if xx > 0 else 0.0,
        _psnr(fitted, y, spread),
        _ssim(fitted, y, spread),
        _psnr(torch.full_like(y, float(y.mean())), y, spread),
    )


def _psnr(x: torch.Tensor, y: torch.Tensor, spread: float) -> float:
    return float(PSNRMetric(max_val=spread)(x, y))  # type: ignore[arg-type]


def _ssim(x: torch.Tensor, y: torch.Tensor, spread: float) -> float:
    least = min(y.shape[2:])
    window = min(WINDOW, least - 1 + least % 2)
    metric = SSIMMetric(y.ndim - 2, data_range=spread, win_size=window)
    return float(metric(x.float(), y.float()))  # type: ignore[arg-type]
