import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collegium.tasks.losses import (
    LOSSES,
    REGION_LOSSES,
    Loss,
    cross_entropy_loss,
    dice_ce_loss,
    region_cross_entropy_loss,
    region_dice_ce_loss,
    region_dice_loss,
    soft_dice_loss,
    weighted_focal_loss,
)

TWO = math.log(2)


def logits_of(probabilities: list[float]) -> torch.Tensor:
    """Logits (1, 2, N) of pixels whose probability of class 1 is given."""
    p = torch.tensor([probabilities], dtype=torch.float64)
    return torch.stack([(1 - p).log(), p.log()], dim=1)


@pytest.fixture(params=sorted(LOSSES))
def loss(request: pytest.FixtureRequest) -> Loss:
    return LOSSES[request.param]


def sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 5, 4, generator=rng)
    label = torch.randint(3, (2, 5, 4), generator=rng)
    return logits, label, torch.rand(2, 5, 4, generator=rng) < 0.6


def test_soft_dice_is_that_of_iop_fl(golden: Callable[[str], dict[str, Any]]) -> None:
    case = golden("soft_dice_loss")
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64)
    label = torch.tensor(case["inputs"]["label"])
    value = float(soft_dice_loss(logits, label, smooth=case["params"]["smooth"]))
    assert abs(value - case["expected"]["loss"]) <= case["atol"]


def test_soft_dice_agrees_with_monai_where_nothing_is_masked() -> None:
    monai = pytest.importorskip("monai.losses")
    logits, label, _ = sample()
    theirs = monai.DiceLoss(softmax=True, to_onehot_y=True, batch=True)(logits, label[:, None])
    torch.testing.assert_close(soft_dice_loss(logits, label), theirs)


def test_soft_dice_counts_only_what_is_inside_the_mask() -> None:
    # inside: p = (.5, .25) for g = (1, 0); foreground 2*.5 / (.75+1), background 2*.75 / (1.25+1)
    logits, label = logits_of([0.5, 0.25, 0.99, 0.01]), torch.tensor([[1, 0, 0, 1]])
    mask = torch.tensor([[True, True, False, False]])
    value = float(soft_dice_loss(logits, label, mask, smooth=0.0))
    assert value == pytest.approx(1 - (1 / 1.75 + 1.5 / 2.25) / 2, abs=1e-12)


def test_cross_entropy_is_the_mean_over_the_pixels_inside_the_mask() -> None:
    logits, label = logits_of([0.5, 0.25, 0.99, 0.01]), torch.tensor([[1, 0, 0, 1]])
    mask = torch.tensor([[True, True, False, False]])
    expected = (math.log(2) - math.log(0.75)) / 2
    assert float(cross_entropy_loss(logits, label, mask)) == pytest.approx(expected, abs=1e-12)


def test_cross_entropy_weighs_pixels_and_not_images() -> None:
    logits = torch.cat([logits_of([0.5, 0.5, 0.5]), logits_of([0.25, 0.25, 0.25])])
    label = torch.zeros(2, 3, dtype=torch.int64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    expected = (3 * TWO - math.log(0.75)) / 4
    assert float(cross_entropy_loss(logits, label, mask)) == pytest.approx(expected, abs=1e-12)


def test_dice_ce_is_the_sum_of_both() -> None:
    logits, label = torch.zeros(1, 2, 4, dtype=torch.float64), torch.tensor([[1, 1, 0, 0]])
    assert float(dice_ce_loss(logits, label)) == pytest.approx(0.5 + TWO, abs=1e-5)


def test_a_loss_inside_a_mask_is_the_loss_of_the_pixels_cut_out(loss: Loss) -> None:
    logits, label, mask = sample()
    cut = loss(logits.movedim(1, -1)[mask].T[None], label[mask][None], None)
    torch.testing.assert_close(loss(logits, label, mask), cut)


def test_a_mask_that_is_true_everywhere_changes_nothing(loss: Loss) -> None:
    logits, label, mask = sample()
    everywhere = torch.ones_like(mask)
    torch.testing.assert_close(loss(logits, label, everywhere), loss(logits, label, None))


def test_pixels_outside_the_mask_get_no_gradient(loss: Loss) -> None:
    logits, label, mask = sample()
    logits.requires_grad_()
    loss(logits, label, mask).backward()
    assert logits.grad is not None
    moved = logits.grad.abs().sum(dim=1) > 0
    assert torch.equal(moved, mask)


def test_an_empty_mask_gives_zero_and_a_gradient_of_zeros(loss: Loss) -> None:
    logits, label, mask = sample()
    logits.requires_grad_()
    value = loss(logits, label, torch.zeros_like(mask))
    value.backward()
    assert value.detach() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_half_precision_logits_are_computed_in_single_precision(loss: Loss) -> None:
    logits, label, mask = sample()
    half = logits.to(torch.bfloat16)
    value = loss(half, label, mask)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(half.float(), label, mask))


def test_losses_work_on_volumes(loss: Loss) -> None:
    logits, label = torch.zeros(1, 2, 2, 3, 4), torch.zeros(1, 2, 3, 4, dtype=torch.int64)
    flat = loss(logits.reshape(1, 2, -1), label.reshape(1, -1), None)
    torch.testing.assert_close(loss(logits, label, torch.ones(1, 2, 3, 4).bool()), flat)


def test_a_class_absent_from_the_truth_costs_its_probability() -> None:
    logits, label = torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.int64)
    # background 2*1.5 / 4.5, foreground 0 / 1.5
    assert float(soft_dice_loss(logits, label)) == pytest.approx(1 - (2 / 3 + 0) / 2, abs=1e-5)


def test_weighted_focal_loss_is_that_of_flamby(golden: Callable[[str], dict[str, Any]]) -> None:
    case = golden("weighted_focal")
    logits = torch.tensor(case["inputs"]["logits"], dtype=torch.float64)
    label, alpha = torch.tensor(case["inputs"]["y"]), torch.tensor(case["inputs"]["alpha"])
    value = weighted_focal_loss(logits, label, alpha.double(), gamma=case["params"]["gamma"])
    assert float(value) == pytest.approx(case["expected"]["loss"], abs=case["atol"])


def test_weighted_focal_loss_without_focus_is_weighted_cross_entropy() -> None:
    rng = torch.Generator().manual_seed(0)
    logits, label = torch.randn(7, 3, generator=rng), torch.randint(3, (7,), generator=rng)
    alpha = torch.tensor([1.0, 0.5, 3.0])
    expected = torch.nn.functional.cross_entropy(logits, label, alpha, reduction="sum") / 7
    assert torch.isclose(weighted_focal_loss(logits, label, alpha, gamma=0.0), expected)


# --- regions that may overlap


@pytest.fixture(params=sorted(REGION_LOSSES))
def region_loss(request: pytest.FixtureRequest) -> Loss:
    return REGION_LOSSES[request.param]


def regions_sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 5, 4, generator=rng)
    regions = torch.rand(2, 3, 5, 4, generator=rng) < 0.4
    return logits, regions, torch.rand(2, 5, 4, generator=rng) < 0.6


def test_region_losses_have_the_names_of_the_others() -> None:
    assert REGION_LOSSES.keys() == LOSSES.keys()


def test_region_dice_agrees_with_monai_where_nothing_is_masked() -> None:
    monai = pytest.importorskip("monai.losses")
    logits, regions, _ = regions_sample()
    for smooth in (1e-5, 0.5):
        theirs = monai.DiceLoss(sigmoid=True, batch=True, smooth_nr=smooth, smooth_dr=smooth)
        mine = region_dice_loss(logits, regions, smooth=smooth)
        torch.testing.assert_close(mine, theirs(logits, regions.float()))


def test_region_dice_inside_a_mask_agrees_with_monai_on_the_pixels_cut_out() -> None:
    monai = pytest.importorskip("monai.losses")
    logits, regions, mask = regions_sample(1)
    cut = [values.movedim(1, -1)[mask].T[None] for values in (logits, regions.float())]
    theirs = monai.DiceLoss(sigmoid=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5)(*cut)
    torch.testing.assert_close(region_dice_loss(logits, regions, mask), theirs)


def test_region_cross_entropy_is_torch_s_binary_one() -> None:
    logits, regions, mask = regions_sample()
    bce = torch.nn.functional.binary_cross_entropy
    everywhere = bce(torch.sigmoid(logits), regions.float())
    torch.testing.assert_close(region_cross_entropy_loss(logits, regions), everywhere)
    inside = [values.movedim(1, -1)[mask] for values in (torch.sigmoid(logits), regions.float())]
    torch.testing.assert_close(
        region_cross_entropy_loss(logits, regions, mask), bce(inside[0], inside[1])
    )


def test_region_cross_entropy_of_extreme_logits_is_finite() -> None:
    logits = torch.tensor([[[200.0, -300.0]]])
    regions = torch.tensor([[[False, True]]])
    assert float(region_cross_entropy_loss(logits, regions)) == pytest.approx(250)


def test_region_dice_ce_is_the_sum_of_both() -> None:
    logits = torch.zeros(1, 2, 4, dtype=torch.float64)
    regions = torch.tensor([[[True, True, False, False], [True, True, True, True]]])
    # p = .5: dice 2*1 / (2 + 2) and 2*2 / (2 + 4)
    expected = 1 - (1 / 2 + 2 / 3) / 2 + TWO
    assert float(region_dice_ce_loss(logits, regions)) == pytest.approx(expected, abs=1e-5)


def test_pixels_outside_the_mask_get_no_gradient_from_regions(region_loss: Loss) -> None:
    logits, regions, mask = regions_sample()
    logits.requires_grad_()
    region_loss(logits, regions, mask).backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().sum(dim=1) > 0, mask)


def test_an_empty_mask_gives_zero_and_a_gradient_of_zeros_for_regions(region_loss: Loss) -> None:
    logits, regions, mask = regions_sample()
    logits.requires_grad_()
    value = region_loss(logits, regions, torch.zeros_like(mask))
    value.backward()
    assert value.detach() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_half_precision_regions_are_computed_in_single_precision(region_loss: Loss) -> None:
    logits, regions, mask = regions_sample()
    half = logits.to(torch.bfloat16)
    value = region_loss(half, regions, mask)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, region_loss(half.float(), regions, mask))


def test_region_losses_work_on_volumes(region_loss: Loss) -> None:
    logits, regions, mask = regions_sample()
    cubes = [values.reshape(*values.shape[:-2], 5, 2, 2) for values in (logits, regions, mask)]
    torch.testing.assert_close(region_loss(*cubes), region_loss(logits, regions, mask))


def test_cross_entropy_elsewhere_than_on_the_processor_is_a_scalar_too():
    """It takes another road there, since CUDA has no deterministic kernel that adds up pixels."""
    logits, label, mask = (tensor.to("meta") for tensor in sample())
    assert cross_entropy_loss(logits, label).shape == ()
    assert cross_entropy_loss(logits, label, mask).shape == ()


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_and_gradients_on_a_gpu_are_those_of_the_processor(cuda, name, masked):
    found = []
    for device in ("cpu", cuda):
        logits, label, mask = (tensor.to(device) for tensor in sample())
        logits.requires_grad_()
        value = LOSSES[name](logits, label, mask if masked else None)
        value.backward()
        assert logits.grad is not None
        found.append((value.detach().cpu(), logits.grad.cpu()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
