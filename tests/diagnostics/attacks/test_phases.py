import numpy as np
import pytest
import torch

from collegium.algorithms._amplitude_norm import amplitudes_of
from collegium.diagnostics.attacks.likeness import compare
from collegium.diagnostics.attacks.phases import (
    PhaseRetrieval,
    Possible,
    aligned,
    autocorrelation,
    mean_intensity,
    retrieve,
    spread,
    with_phases_of,
    withdrawn,
)
from collegium.heterogeneity.spectra import amplitude_window

WHOLE = 0.499
"""The ratio of a window that holds all frequencies of an image with odd sides."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=rng, dtype=torch.float64)


def window_of(image: torch.Tensor, ratio: float = WHOLE) -> torch.Tensor:
    return amplitude_window(image[None], ratio)[0]


def possible(low: float, high: float, mean: float, support: torch.Tensor) -> Possible:
    first, last, middle = torch.tensor([[low], [high], [mean]], dtype=torch.float64)
    return Possible(first, last, middle, support)


def rebuilt(image: torch.Tensor, known: Possible) -> torch.Tensor:
    found = retrieve(window_of(image), tuple(image.shape[1:]), known, PhaseRetrieval(steps=800))
    return aligned(found, image)


@pytest.mark.parametrize("shape", [(2, 7, 9), (1, 5, 7, 5)])
def test_a_window_lies_where_the_transform_has_its_frequencies(shape: tuple[int, ...]) -> None:
    image = drawn(*shape)
    radius = (min(shape[1:]) - 1) // 2
    found = spread(window_of(image), shape[1:]).numpy()
    axes = tuple(range(1, len(shape)))
    expected = np.abs(np.fft.fftn(image.numpy(), axes=axes))
    for axis, side in zip(axes, shape[1:], strict=True):
        far = np.abs(np.fft.fftfreq(side, 1 / side)) > radius + 0.5
        expected[(slice(None),) * axis + (far,)] = 0
    assert found == pytest.approx(expected)


def test_amplitudes_tell_the_mean_intensity_up_to_its_sign() -> None:
    image = drawn(2, 8, 8) - torch.tensor([0.0, 2.0]).reshape(2, 1, 1)
    means = mean_intensity(window_of(image, 0.0), (8, 8))
    assert means.tolist() == pytest.approx(image.mean((1, 2)).abs().tolist())


def test_a_whole_spectrum_tells_the_autocorrelation() -> None:
    image = drawn(1, 5, 5)
    expected = [
        [float((image * image.roll((-i, -j), (1, 2))).sum()) for j in range(5)] for i in range(5)
    ]
    found = autocorrelation(window_of(image), (5, 5))[0]
    assert found.numpy() == pytest.approx(np.array(expected))


def test_true_phases_give_the_image_without_its_higher_frequencies() -> None:
    image = drawn(1, 9, 9)
    assert torch.allclose(with_phases_of(window_of(image), image), image)
    spectrum = np.fft.fft2(image[0].numpy())
    far = np.abs(np.fft.fftfreq(9, 1 / 9)) > 2.5
    spectrum[far], spectrum[:, far] = 0, 0
    found = with_phases_of(window_of(image, 0.25), image)
    assert found[0].numpy() == pytest.approx(np.fft.ifft2(spectrum).real)


def test_an_image_of_points_is_determined_by_its_autocorrelation_and_found() -> None:
    """Three points in general position: their differences tell them up to place and turn."""
    image = torch.zeros(1, 9, 9, dtype=torch.float64)
    image[0, 2, 3], image[0, 4, 4], image[0, 3, 6] = 1.0, 0.5, 0.8
    anywhere = torch.ones(9, 9, dtype=torch.bool)
    assert compare(rebuilt(image, possible(0, 1, 0.1, anywhere))[None], image[None]).psnr > 60
    dark = image - 1  # the same points, all of negative intensity, whose mean is -0.97
    found = rebuilt(dark, possible(-1, 0, -0.9, anywhere))
    assert compare(found[None], dark[None]).psnr > 60


def test_an_image_is_found_within_a_tight_support() -> None:
    image = torch.zeros(1, 17, 17, dtype=torch.float64)
    image[0, 5:11, 4:10] = drawn(6, 6)
    found = rebuilt(image, possible(0, 1, 0.1, image[0] > 0))
    assert compare(found[None], image[None]).psnr > 60


def test_a_rebuilt_image_is_compared_in_its_best_place_and_turn() -> None:
    image = drawn(2, 6, 7)
    for moved in (image.roll((2, 5), (1, 2)), image.flip((1, 2)).roll((1, 3), (1, 2))):
        assert torch.equal(aligned(moved, image), image)
        assert torch.allclose(window_of(moved, 0.4), window_of(image, 0.4))


def test_two_means_give_the_amplitudes_of_who_is_in_one_of_them() -> None:
    assert withdrawn(torch.tensor([3.0]), 3, torch.tensor([1.5])).tolist() == [6.0]  # 1, 2 and 6
    images = [drawn(1, 1, 8, 8, seed=seed) for seed in range(4)]
    amplitudes = torch.stack([amplitudes_of(image, 2) for image in images])
    found = withdrawn(amplitudes.mean(0), 4, amplitudes[:3].mean(0))
    spectrum = np.fft.fftshift(np.abs(np.fft.fft2(images[3][0, 0].numpy()))) / 64
    assert found[0].numpy() == pytest.approx(spectrum[2:7, 2:7])


def test_an_attacker_takes_range_and_support_from_images_of_his_own() -> None:
    one = torch.zeros(1, 8, 8)
    one[0, 2:6, 3:5] = 4.0
    known = Possible.like(torch.stack([one, one / 2]))
    assert (float(known.low), float(known.high)) == (0.0, 4.0)
    assert float(known.mean) == pytest.approx(3.0 * 8 / 64)
    assert torch.equal(known.support, one[0] > 0)
