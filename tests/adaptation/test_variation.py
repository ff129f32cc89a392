"""The weight variation, against weights that are made for every case in numpy."""

import numpy as np
import pytest
import torch

from collegium.adaptation import _variation
from collegium.adaptation._variation import products, weight_variation


@pytest.mark.parametrize("at_once", [1, 7, 2**20])
def test_products_are_those_of_the_whole_weights_however_they_are_cut(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_variation, "AT_ONCE", at_once)
    weights = np.random.default_rng(0).normal(size=(3, 4, 2, 5))
    flat = weights.reshape(3, 40)
    found = products(torch.from_numpy(weights).float())
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, flat @ flat.T, rtol=1e-5, atol=1e-5)


def test_two_orthogonal_sources_have_a_closed_form() -> None:
    """W(e) is (1/2, 1/2); taking one source alone is as far from it as it is from zero."""
    weights = torch.eye(2, dtype=torch.float64)
    coefficients = torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 1.0], [0.5, 0.8]])
    expected = [0.0, 1.0, 1.0, 0.3 * np.sqrt(2)]
    np.testing.assert_allclose(weight_variation(weights, coefficients), expected, atol=1e-7)


def test_equal_sources_vary_by_what_the_coefficients_sum_to() -> None:
    weights = torch.full((4, 3, 3), 0.7)
    coefficients = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.5, 0.5]])
    np.testing.assert_allclose(weight_variation(weights, coefficients), [0.0, 1.0], atol=1e-6)


def test_the_variation_is_that_of_the_weights_of_each_case() -> None:
    rng = np.random.default_rng(1)
    weights, coefficients = rng.normal(size=(3, 5, 4, 3, 3)), rng.uniform(size=(6, 3))
    equal = weights.mean(0)
    expected = [
        np.linalg.norm(np.tensordot(r, weights, 1) - equal) / np.linalg.norm(equal)
        for r in coefficients
    ]
    found = weight_variation(torch.from_numpy(weights), torch.from_numpy(coefficients))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_small_differences_of_models_that_are_nearly_equal_are_not_lost() -> None:
    """The sources differ by 1e-4 and the coefficients sum to one."""
    rng = np.random.default_rng(2)
    weights = rng.normal(size=(1, 50, 40)) + 1e-4 * rng.normal(size=(3, 50, 40))
    coefficients = np.array([[0.3, 0.3, 0.4]])
    apart = np.tensordot(coefficients[0] - 1 / 3, weights, 1)
    expected = np.linalg.norm(apart) / np.linalg.norm(weights.mean(0))
    found = weight_variation(torch.from_numpy(weights), torch.from_numpy(coefficients))
    np.testing.assert_allclose(found, [expected], rtol=1e-4)


def test_a_layer_of_zeros_does_not_vary() -> None:
    assert weight_variation(torch.zeros(2, 3), torch.rand(4, 2)).tolist() == [0.0] * 4
