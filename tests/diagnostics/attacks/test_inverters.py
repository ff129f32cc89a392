import numpy as np
import pytest
import torch

from collegium.algorithms._site_norm import statistics_of
from collegium.diagnostics.attacks.inversion import Inversion
from collegium.diagnostics.attacks.inverters import (
    BOUND,
    Amplitudes,
    Attacker,
    GridImage,
    Inverter,
    Moments,
    SecondMoments,
)
from collegium.heterogeneity.spectra import amplitude_window


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=rng, dtype=torch.float64)


def attacked(inverter: Inverter, truth: torch.Tensor, own: torch.Tensor) -> dict[str, torch.Tensor]:
    attacker = Attacker(own, Inversion(steps=10), 0)
    shape = tuple(truth.shape)
    return {name: make(truth) for name, make in inverter.attacks(shape, attacker)}


def test_amplitudes_are_put_under_the_phases_of_the_most_alike_image() -> None:
    truth, own = drawn(1, 9, 9), torch.stack([drawn(1, 9, 9, seed=1), drawn(1, 9, 9) + 0.01])
    inverter = Amplitudes(amplitude_window(truth[None], 0.499)[0])
    assert inverter.numbers == 41  # of 81, of which 80 are twice the same
    assert inverter.apart(truth) == pytest.approx(0, abs=1e-12)
    found = attacked(inverter, truth, own)
    assert torch.allclose(found[BOUND], truth)
    # the second one differs in its mean alone, whose amplitude is replaced
    assert torch.allclose(found["phases of another image"], truth, atol=1e-6)
    spectrum = np.fft.fft2(own.mean(0)[0].numpy())
    expected = np.abs(np.fft.fft2(truth[0].numpy())) * spectrum / np.abs(spectrum)
    mixed = found["phases of the mean of own images"]
    assert mixed[0].numpy() == pytest.approx(np.fft.ifft2(expected).real, abs=1e-6)


def test_amplitudes_by_pixels_are_those_of_harmofl() -> None:
    truth = drawn(1, 9, 9)
    inverter = Amplitudes(amplitude_window(truth[None], 0.499)[0] / 81, by_pixels=True)
    assert inverter.apart(truth) == pytest.approx(0, abs=1e-12)
    assert torch.allclose(attacked(inverter, truth, truth[None])[BOUND], truth)


def test_moments_are_those_of_fedrdn_and_given_to_another_image() -> None:
    truth, own = drawn(2, 6, 6), drawn(3, 2, 6, 6, seed=1) * 5
    inverter = Moments(statistics_of([truth[None]], pooled=False))
    assert inverter.apart(truth) == pytest.approx(0, abs=1e-12)
    (found,) = attacked(inverter, truth, own).values()
    assert found.mean((1, 2)).tolist() == pytest.approx(truth.mean((1, 2)).tolist())
    assert found.std((1, 2)).tolist() == pytest.approx(truth.std((1, 2)).tolist())
    assert max(float(np.corrcoef(found.flatten(), o.flatten())[0, 1]) for o in own) > 0.9


def test_an_image_on_a_grid_is_enlarged() -> None:
    truth = torch.tensor([[[0.0, 4.0], [0.0, 4.0]]], dtype=torch.float64)
    inverter = GridImage(truth)
    assert inverter.apart(truth.repeat_interleave(2, 1).repeat_interleave(2, 2)) == 0
    (found,) = attacked(inverter, torch.zeros(1, 2, 4), torch.zeros(1, 1, 2, 4)).values()
    assert found.tolist() == [[[0, 1, 3, 4], [0, 1, 3, 4]]]


def test_second_moments_of_one_image_are_the_image() -> None:
    truth = drawn(1, 4, 4).float()
    pixels = truth.flatten().numpy() - truth.mean().item()
    inverter = SecondMoments(torch.from_numpy(np.outer(pixels, pixels)))
    assert inverter.numbers == 16 * 17 // 2
    assert inverter.apart(truth) == pytest.approx(0, abs=1e-6)
    (found,) = attacked(inverter, truth, truth[None] + 3).values()
    assert (found - 3).numpy() == pytest.approx(truth.numpy(), abs=1e-5)
    (turned,) = attacked(inverter, truth, -truth[None]).values()  # the sign is the attacker's guess
    assert float(np.corrcoef(turned.flatten(), truth.flatten())[0, 1]) == pytest.approx(-1)
