import numpy as np
import pytest
import torch
from scipy import ndimage

from collegium.adaptation._losses import (
    consistency_loss,
    entropy_loss,
    shape_loss,
    shape_map,
)
from collegium.errors import ConfigError


def two_classes(foreground: torch.Tensor) -> torch.Tensor:
    return torch.stack([1 - foreground, foreground], dim=1)


@pytest.mark.parametrize("name", ["shape_loss_d1", "shape_loss_d10"])
def test_the_shape_loss_is_the_mean_variation_in_clipped_windows(golden, name) -> None:
    case = golden(name)
    expected, atol = case["expected"], case["atol"]
    p = two_classes(torch.tensor([case["inputs"]["prob_fg"]], dtype=torch.float64))
    found = shape_map(p, case["params"]["d"])
    np.testing.assert_allclose(found[0], expected["d_map"], atol=atol)
    value = float(shape_loss(p, case["params"]["d"]))
    assert value == pytest.approx(expected["mean"], abs=atol)
    assert value != pytest.approx(expected["sum_paper"], abs=1e-3)
    assert value != pytest.approx(expected["code"], abs=1e-3)


def test_consistency_and_entropy_average_over_batch_and_pixels(golden) -> None:
    case = golden("consistency_and_entropy")
    expected, atol = case["expected"], case["atol"]
    p, q = (
        torch.tensor(case["inputs"][key], dtype=torch.float64).softmax(dim=1)
        for key in ("logits", "logits_perturbed")
    )
    consistency, entropy = float(consistency_loss(p, q)), float(entropy_loss(p))
    assert consistency == pytest.approx(expected["consistency"], abs=atol)
    assert entropy == pytest.approx(expected["entropy"], abs=atol)
    assert consistency != pytest.approx(expected["consistency_code"], abs=1e-6)
    assert entropy != pytest.approx(expected["entropy_code"], abs=1e-6)
    total = expected["total_beta_0_01_with_shape_0"]
    assert consistency + 0.01 * entropy == pytest.approx(total, abs=atol)


def test_the_variation_of_volumes_with_several_classes_is_that_of_scipy() -> None:
    rng = torch.Generator().manual_seed(0)
    p = torch.rand(2, 3, 6, 5, 7, generator=rng, dtype=torch.float64).softmax(dim=1)
    found = shape_map(p, radius=2)
    for sample, variation in zip(p, found, strict=True):
        expected = sum(
            ndimage.maximum_filter(c, 5, mode="nearest")
            - ndimage.minimum_filter(c, 5, mode="nearest")
            for c in sample[1:].numpy()
        )
        np.testing.assert_allclose(variation, expected, atol=1e-12)


def test_entropy_is_zero_where_a_class_is_certain_and_has_a_finite_gradient() -> None:
    logits = torch.tensor([[[200.0]], [[-200.0]]]).unsqueeze(0).requires_grad_()
    loss = entropy_loss(logits.softmax(dim=1))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_what_the_shape_loss_cannot_take_is_said() -> None:
    with pytest.raises(ConfigError, match="radius of the shape loss is -1"):
        shape_map(torch.rand(1, 2, 4, 4), radius=-1)
    with pytest.raises(ConfigError, match=r"needs images or volumes.*\(4, 2\)"):
        shape_map(torch.rand(4, 2))
