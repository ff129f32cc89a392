import math

import pytest
import torch

from collegium.diagnostics.attacks.likeness import compare
from collegium.errors import DataError


def drawn(size: int = 16) -> torch.Tensor:
    return torch.rand(1, 1, size, size, generator=torch.Generator().manual_seed(0))


def test_psnr_has_the_range_of_the_true_image_as_its_peak() -> None:
    truth = torch.tensor([[[[0.0, 4.0], [2.0, 2.0]]]]).repeat(1, 1, 8, 8)
    found = compare(truth + 0.5, truth)
    assert found.psnr == pytest.approx(10 * math.log10(4**2 / 0.5**2))
    assert found.blank_psnr == pytest.approx(10 * math.log10(4**2 / 2))  # the variance is 2
    assert found.correlation == pytest.approx(1)


def test_scale_and_offset_are_fitted() -> None:
    truth = drawn()
    found = compare(-3 * truth + 7, truth)
    assert found.correlation == pytest.approx(-1)
    assert found.psnr < 0
    assert found.fitted_psnr > 100
    assert found.fitted_ssim == pytest.approx(1, abs=1e-4)


def test_a_constant_guess_tells_nothing() -> None:
    truth = drawn()
    found = compare(torch.zeros_like(truth), truth)
    assert found.correlation == 0
    assert found.fitted_psnr == pytest.approx(found.blank_psnr)


def test_ssim_is_one_for_the_same_image_also_of_small_and_deep_ones() -> None:
    for truth in (drawn(), drawn(6), torch.rand(1, 1, 8, 8, 8)):
        assert compare(truth, truth).ssim == pytest.approx(1, abs=1e-5)


def test_a_constant_image_is_refused() -> None:
    with pytest.raises(DataError, match="the true image is constant"):
        compare(drawn(), torch.ones(1, 1, 16, 16))
