import numpy as np
import pytest
import torch
from scipy import ndimage

from collegium.adaptation._losses import (
    consistency_loss,
    counted_pixels,
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


def masked() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    p, q = (torch.randn(2, 3, 6, 7, generator=rng).double().softmax(dim=1) for _ in range(2))
    inside = torch.rand(2, 6, 7, generator=rng) < 0.6
    return p, q, inside


def test_losses_in_a_field_of_view_are_means_over_its_pixels() -> None:
    p, q, inside = masked()
    a, b, m = p.numpy(), q.numpy(), inside.numpy()
    distance, entropy = ((a - b) ** 2).sum(1)[m].mean(), -(a * np.log(a)).sum(1)[m].mean()
    assert float(consistency_loss(p, q, inside)) == pytest.approx(distance, rel=1e-12)
    assert float(entropy_loss(p, inside)) == pytest.approx(entropy, rel=1e-12)
    ranges = []
    for n, i, j in np.argwhere(m):
        rows, columns = slice(max(i - 1, 0), i + 2), slice(max(j - 1, 0), j + 2)
        near = a[n, 1:, rows, columns][:, m[n, rows, columns]]
        ranges.append((near.max(1) - near.min(1)).sum())
    assert float(shape_loss(p, 1, inside)) == pytest.approx(np.mean(ranges), rel=1e-12)


def test_pixels_outside_the_field_of_view_change_neither_losses_nor_gradients() -> None:
    p, q, inside = masked()
    found = []
    for change in (0.0, 0.7):
        moved = torch.where(inside.unsqueeze(1), p, p + change).requires_grad_()
        losses = [
            consistency_loss(moved, q, inside), shape_loss(moved, 2, inside),
            entropy_loss(moved, inside),
        ]  # fmt: skip
        (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), moved)
        assert not gradient.movedim(1, -1)[~inside].any()
        found.append((losses, gradient))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_an_empty_field_of_view_has_a_loss_of_zero() -> None:
    p, q, inside = masked()
    none = torch.zeros_like(inside)
    assert float(consistency_loss(p, q, none)) == float(shape_loss(p, 1, none)) == 0
    assert float(entropy_loss(p, none)) == 0


def test_a_field_of_view_needs_an_output_of_pixels() -> None:
    with pytest.raises(ConfigError, match=r"tent.field_of_view selects pixels.*\(2, 3\)"):
        counted_pixels(torch.ones(2, 4, 4, dtype=torch.bool), torch.zeros(2, 3), "tent")
