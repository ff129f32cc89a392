import numpy as np
import pytest
import torch

from collegium.errors import ConfigError, DataError, ProtocolError
from collegium.heterogeneity.spectra import amplitude_window, as_images, transfer, window_radius

SHAPES = [(8, 8), (9, 12), (7, 5), (6, 31), (8, 6, 10), (5, 7, 9)]


def cut(spectrum, radius, axes):
    """The centred window of a spectrum as numpy's fft gives it."""
    for axis in axes:
        size = spectrum.shape[axis]
        rows = np.arange(size // 2 - radius, size // 2 + radius + 1)
        spectrum = np.fft.fftshift(spectrum, axis).take(rows, axis)
    return spectrum


def transferred(image, window):
    """One channel with the window's amplitudes, by whole transforms."""
    axes = tuple(range(image.ndim))
    spectrum = np.fft.fftshift(np.fft.fftn(image))
    radius = window.shape[-1] // 2
    middle = tuple(slice(n // 2 - radius, n // 2 + radius + 1) for n in image.shape)
    amplitude, phase = np.abs(spectrum), np.angle(spectrum)
    amplitude[middle] = window
    return np.fft.ifftn(np.fft.ifftshift(amplitude * np.exp(1j * phase), axes)).real


def images(shape, batch=2, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(0.3, 1, (batch, channels, *shape))


@pytest.mark.parametrize("name", ["spectral_transfer_6x6_L0.17", "spectral_transfer_6x6_L0.0"])
def test_transfer_of_a_known_spectrum(golden, name):
    case = golden(name)
    image = torch.tensor(case["inputs"]["x"], dtype=torch.float64)
    ratio, expected = case["params"]["L"], case["expected"]
    assert window_radius(image.shape, ratio) == expected["b"]
    window = cut(np.array(case["inputs"]["target_amplitude"]), expected["b"], (0, 1))
    found = transfer(image[None, None], torch.tensor(window)[None, None])[0, 0]
    np.testing.assert_allclose(found, expected["y"], atol=case["atol"])
    # the image now has the window's amplitudes
    after = amplitude_window(found[None, None], ratio)[0, 0]
    np.testing.assert_allclose(after, window, atol=case["atol"])


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_are_the_middle_of_the_whole_spectrum(shape):
    values = images(shape)
    axes = tuple(range(2, values.ndim))
    for ratio in (0.0, 0.21, 0.34):
        radius = int(min(shape) * ratio)
        expected = np.abs(cut(np.fft.fftn(values, axes=axes), radius, axes))
        found = amplitude_window(torch.tensor(values), ratio)
        np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.34])
def test_transfer_equals_whole_transforms(shape, ratio):
    values, others = images(shape), images(shape, seed=1)
    windows = amplitude_window(torch.tensor(others), ratio)
    found = transfer(torch.tensor(values), windows)
    expected = [[transferred(c, w) for c, w in zip(i, v, strict=True)] for i, v in
                zip(values, windows.numpy(), strict=True)]  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=1e-11)


def test_of_a_window_without_symmetry_the_real_part_counts():
    values = images((9, 8))
    windows = np.random.default_rng(5).uniform(0, 30, (2, 3, 5, 5))
    found = transfer(torch.tensor(values), torch.tensor(windows))
    expected = transferred(values[1, 2], windows[1, 2])
    np.testing.assert_allclose(found[1, 2], expected, atol=1e-11)


def test_an_images_own_window_changes_nothing():
    values = torch.tensor(images((12, 10)))
    np.testing.assert_allclose(transfer(values, amplitude_window(values, 0.3)), values, atol=1e-12)


def test_the_smallest_window_moves_the_mean_and_keeps_its_sign():
    values, others = torch.tensor(images((8, 8))) - 2, torch.tensor(images((8, 8), seed=3))
    found = transfer(values, amplitude_window(others, 0.0))
    means = values.mean((2, 3))
    np.testing.assert_allclose(found.mean((2, 3)), others.mean((2, 3)).abs() * means.sign())
    np.testing.assert_allclose(found - found.mean((2, 3), keepdim=True),
                               values - values.mean((2, 3), keepdim=True), atol=1e-12)  # fmt: skip


def test_a_bin_without_amplitude_has_phase_zero():
    values = np.zeros((1, 1, 6, 6))
    window = np.full((1, 1, 3, 3), 36.0)
    expected = transferred(values[0, 0], window[0, 0])
    found = transfer(torch.tensor(values), torch.tensor(window))[0, 0]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert found[0, 0] == pytest.approx(9.0)  # nine cosines in phase


def test_one_image_goes_with_many_windows_and_one_window_with_many_images():
    values = torch.tensor(images((8, 9), batch=3))
    windows = amplitude_window(torch.tensor(images((8, 9), batch=3, seed=2)), 0.25)
    each = transfer(values, windows)
    one_image, one_window = transfer(values[:1], windows), transfer(values, windows[:1])
    for i in range(3):
        image, window = values[i : i + 1], windows[i : i + 1]
        np.testing.assert_allclose(each[i], transfer(image, window)[0], atol=1e-13)
        np.testing.assert_allclose(one_image[i], transfer(values[:1], window)[0], atol=1e-13)
        np.testing.assert_allclose(one_window[i], transfer(image, windows[:1])[0], atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "kept", "atol"),
    [(torch.float32, torch.float32, 1e-5), (torch.float16, torch.float32, 4e-3)],
)
def test_single_and_half_precision(kind, kept, atol):
    values, others = torch.tensor(images((32, 32))).to(kind), torch.tensor(images((32, 32), seed=4))
    windows = amplitude_window(others.to(kind), 0.1)
    assert windows.dtype == kept
    found = transfer(values, windows)
    assert found.dtype == kind
    exact = transfer(values.double(), amplitude_window(others.to(kind).double(), 0.1))
    np.testing.assert_allclose(found.double(), exact, atol=atol)
    assert amplitude_window(values.double(), 0.1).dtype == torch.float64


def test_the_arguments_are_left_as_they_are():
    values = torch.tensor(images((8, 8)))
    windows = amplitude_window(values.flip(0), 0.2)
    before = values.clone(), windows.clone()
    transfer(values, windows)
    assert torch.equal(values, before[0])
    assert torch.equal(windows, before[1])


def test_the_radius_is_rounded_down_but_not_by_rounding_errors():
    assert window_radius((384, 400), 0.01) == 3
    assert window_radius((384, 384), 0.003) == 1
    assert window_radius((100, 100), 0.29) == 29  # 100 * 0.29 < 29 in floating point
    assert window_radius((64, 64, 16), 0.1) == 1
    assert window_radius((64, 64), 0) == 0


@pytest.mark.parametrize(
    ("shape", "largest"), [((6, 6), 2), ((7, 7), 3), ((6, 20), 2), ((1, 1), 0)]
)
def test_a_window_stays_below_the_highest_frequency_of_even_sides(shape, largest):
    assert window_radius(shape, largest / min(shape)) == largest
    with pytest.raises(ConfigError, match="choose a smaller ratio"):
        window_radius(shape, (largest + 1) / min(shape))


@pytest.mark.parametrize("ratio", [-0.01, float("nan"), float("inf")])
def test_a_ratio_that_means_nothing_is_refused(ratio):
    with pytest.raises(ConfigError, match="choose a number from 0"):
        window_radius((8, 8), ratio)


def test_only_images_and_volumes_have_spectra():
    with pytest.raises(ConfigError, match="of images or volumes"):
        amplitude_window(torch.zeros(4, 3), 0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_in_a_spectrum_is_an_error(bad):
    values = torch.tensor(images((8, 8)))
    windows = amplitude_window(values, 0.2)
    spoilt = values.clone()
    spoilt[1, 2, 3, 4] = bad
    with pytest.raises(DataError, match="image 2 of a batch of 2 holds NaN or infinite"):
        amplitude_window(spoilt, 0.2)
    with pytest.raises(DataError, match="image 2 of a batch of 2 holds NaN or infinite"):
        transfer(spoilt, windows)
    windows[0, 0, 0, 0] = bad
    with pytest.raises(ProtocolError, match="amplitude window 1 of 2 holds NaN or infinite"):
        transfer(values, windows)


def test_windows_that_do_not_fit_are_refused():
    values = torch.tensor(images((8, 8)))
    windows = amplitude_window(values, 0.2)
    wrong = [
        windows[:, :2],  # channels
        windows[..., :2, :2],  # no middle
        windows[..., :1, :],  # not square
        windows[0],  # no batch
        torch.ones(2, 3, 9, 9),  # more than there is
        windows.repeat(2, 1, 1, 1)[:3],  # three for two
        torch.ones(2, 3, 3, 3, 3),  # of volumes
    ]
    for window in wrong:
        with pytest.raises(ProtocolError, match="do not fit images of shape"):
            transfer(values, window)
    with pytest.raises(ProtocolError, match="negative values"):
        transfer(values, -windows)


def test_rows_and_signals_count_as_images_of_one_row() -> None:
    assert as_images(torch.zeros(2, 5)).shape == (2, 1, 1, 5)
    assert as_images(torch.zeros(2, 3, 5)).shape == (2, 3, 1, 5)
    volumes = torch.zeros(2, 3, 5, 6, 7)
    assert as_images(volumes) is volumes
