import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collegium.tasks.losses import (
    LOSSES,
    REGION_LOSSES,
    Loss,
    cross_entropy_loss,
    dice_ce_loss,
    exclusion_loss,
    merge_unlabelled,
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


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_dice_and_cross_entropy_agree_with_monai_where_nothing_is_masked(order: Any) -> None:
    monai = pytest.importorskip("monai.losses")
    logits, label, _ = sample()
    theirs = monai.DiceCELoss(
        softmax=True, to_onehot_y=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5
    )
    found = []
    for loss in (dice_ce_loss, lambda x, y: theirs(x, y[:, None])):
        own = logits.contiguous(memory_format=order).requires_grad_()
        value = loss(own, label)
        value.backward()
        found.append((value, own.grad))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_dice_and_cross_entropy_are_the_sum_of_both(soft: bool, masked: bool) -> None:
    logits, label, mask = sample()
    target = torch.softmax(2 * logits.flip(1), dim=1) if soft else label
    inside = mask if masked else None
    expected = soft_dice_loss(logits, target, inside) + cross_entropy_loss(logits, target, inside)
    torch.testing.assert_close(dice_ce_loss(logits, target, inside), expected)
    nothing = torch.zeros_like(mask)
    own = logits.clone().requires_grad_()
    value = dice_ce_loss(own, target, nothing)
    value.backward()
    assert float(value.detach()) == 0
    assert own.grad is not None
    assert not own.grad.any()


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


def test_labels_of_probabilities_may_be_undefined_outside_the_mask(loss: Loss) -> None:
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, 4, 6, generator=draw)
    label = torch.randn(2, 3, 4, 6, generator=draw).softmax(dim=1)
    mask = torch.zeros(2, 4, 6, dtype=torch.bool)
    mask[..., :4] = True
    undefined = label.masked_fill(~mask.unsqueeze(1), torch.nan)
    assert float(loss(logits, undefined, mask)) == float(loss(logits, label, mask))


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


# --- masks that annotate some of the classes only


def probabilities(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits (1, 4, 3) of three pixels, and their labels."""
    p = torch.tensor(case["P"], dtype=torch.float64)
    return p.T[None].log(), torch.tensor([case["y"]])


def several(seed: int = 0, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, classes, 5, 4, generator=rng, dtype=torch.float64)
    label = torch.tensor([0, 2, 4])[torch.randint(3, (2, 5, 4), generator=rng)]
    return logits, label, torch.rand(2, 5, 4, generator=rng) < 0.6


def test_the_merged_background_and_the_marginal_losses_are_the_reference_values(
    newer_golden: dict[str, Any],
) -> None:
    case = newer_golden["marginal_exclusion"]
    logits, label = probabilities(case)
    merged, numbers = merge_unlabelled(logits, label, case["labelled"])
    background = merged.softmax(dim=1)[0, 0].tolist()
    assert background == pytest.approx(case["merged_background"], rel=1e-9)
    ce = float(cross_entropy_loss(merged, numbers))
    assert ce == pytest.approx(case["marginal_ce"], rel=1e-6)
    dice = float(soft_dice_loss(merged, numbers, smooth=0.0))
    assert dice == pytest.approx(sum(case["marginal_dice_per_channel"]) / 2, rel=1e-6)
    plain = float(cross_entropy_loss(logits, label))
    assert plain == pytest.approx(case["plain_ce_for_comparison"], rel=1e-6)


@pytest.mark.parametrize(
    ("form", "key"), [("dice", "exclusion_dice_overlap_mean"), ("ce", "exclusion_ce")]
)
def test_exclusion_losses_are_the_reference_values(
    newer_golden: dict[str, Any], form: Any, key: str
) -> None:
    case = newer_golden["marginal_exclusion"]
    logits, label = probabilities(case)
    value = float(exclusion_loss(logits, label, case["labelled"], form=form))
    assert value == pytest.approx(case[key], rel=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_marginal_and_exclusion_losses_are_those_of_summed_probabilities(masked: bool) -> None:
    """In numpy, with two labelled and two unlabelled classes, which are in the labels too."""
    logits, _, mask = several()
    label = torch.randint(5, (2, 5, 4), generator=torch.Generator().manual_seed(3))
    merged, numbers = merge_unlabelled(logits, label, [4, 2])
    assert torch.equal(merged[:, 1:], logits[:, [2, 4]])
    inside = mask if masked else torch.ones_like(mask)
    p = logits.softmax(1).movedim(1, -1)[inside].numpy()
    y = label[inside].numpy()
    background = p[:, 0] + p[:, 1] + p[:, 3]
    own = np.select([y == 2, y == 4], [p[:, 2], p[:, 4]], background)
    mask_or_none = mask if masked else None
    ce = float(cross_entropy_loss(merged, numbers, mask_or_none))
    assert ce == pytest.approx(-np.log(own).mean(), rel=1e-12)
    channels = ((background, (y != 2) & (y != 4)), (p[:, 2], y == 2), (p[:, 4], y == 4))
    overlaps = [2 * (q * g).sum() / (q.sum() + g.sum()) for q, g in channels]
    dice = float(soft_dice_loss(merged, numbers, mask_or_none, smooth=0.0))
    assert dice == pytest.approx(1 - np.mean(overlaps), rel=1e-12)
    e = (y == 2) | (y == 4)
    apart = [2 * (p[:, c] * e).sum() / (p[:, c].sum() + e.sum()) for c in (1, 3)]
    found = exclusion_loss(logits, label, [4, 2], mask_or_none)
    assert float(found) == pytest.approx(np.mean(apart), rel=1e-12)
    logs = (e[:, None] * np.log(1 + p[:, [1, 3]])).sum() / len(y)
    found = exclusion_loss(logits, label, [4, 2], mask_or_none, form="ce")
    assert float(found) == pytest.approx(logs, rel=1e-12)


def test_moving_probability_between_background_and_unlabelled_classes_changes_nothing(
    loss: Loss,
) -> None:
    logits, label, _ = several()
    p, moved = logits.softmax(1), logits.softmax(1).clone()
    moved[:, 0] += 0.9 * p[:, 1]
    moved[:, 1] *= 0.1
    moved[:, 3] += 0.5 * p[:, 0]
    moved[:, 0] -= 0.5 * p[:, 0]
    values = [loss(*merge_unlabelled(q.log(), label, [2, 4]), None) for q in (p, moved)]
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=0.0)
    plain = [loss(q.log(), label, None) for q in (p, moved)]
    assert abs(float(plain[0] - plain[1])) > 0.01


def test_a_label_of_a_class_that_is_not_labelled_is_background(loss: Loss) -> None:
    logits, label, _ = several()
    other = torch.where(label == 0, 3, label)
    values = [loss(*merge_unlabelled(logits, y, [2, 4]), None) for y in (label, other)]
    assert torch.equal(values[0], values[1])


@pytest.mark.parametrize("masked", [False, True])
def test_with_all_classes_labelled_the_marginal_loss_is_the_plain_one_bit_by_bit(
    loss: Loss, masked: bool
) -> None:
    found = []
    for merge in (False, True):
        logits, label, mask = several()
        logits.requires_grad_()
        both = merge_unlabelled(logits, label, [1, 2, 3, 4]) if merge else (logits, label)
        value = loss(*both, mask if masked else None)
        value.backward()
        assert logits.grad is not None
        found.append((value.detach(), logits.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert float(exclusion_loss(logits, label, [1, 2, 3, 4]).detach()) == 0.0


@pytest.mark.parametrize("form", ["dice", "ce"])
def test_the_exclusion_loss_is_0_where_nothing_counts_or_is_labelled(form: Any) -> None:
    logits, label, mask = several()
    logits.requires_grad_()
    nothing = exclusion_loss(logits, label, [2], torch.zeros_like(mask), form=form)
    absent = exclusion_loss(logits, torch.zeros_like(label), [2], form=form)
    (nothing + absent).backward()
    assert float(nothing.detach()) == float(absent.detach()) == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_merged_logits_far_apart_stay_finite_and_half_precision_is_widened() -> None:
    logits = torch.tensor([[[300.0], [-300.0], [200.0], [299.0]]]).to(torch.bfloat16)
    merged, numbers = merge_unlabelled(logits, torch.tensor([[2]]), [2])
    assert merged.dtype == torch.float32
    assert numbers.tolist() == [[1]]
    expected = math.log(math.exp(0) + math.exp(float(logits[0, 3, 0]) - 300)) + 300 - 200
    assert float(cross_entropy_loss(merged, numbers)) == pytest.approx(expected, rel=1e-6)


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


# --- labels of probabilities


def test_a_one_hot_label_of_floats_gives_the_value_of_its_numbers(loss: Loss) -> None:
    logits, label, mask = sample()
    soft = torch.nn.functional.one_hot(label, 3).movedim(-1, 1).float()
    torch.testing.assert_close(loss(logits, soft, None), loss(logits, label, None))
    torch.testing.assert_close(loss(logits, soft, mask), loss(logits, label, mask))


def test_regions_of_floats_give_the_value_of_the_boolean_ones(region_loss: Loss) -> None:
    logits, regions, mask = regions_sample()
    for inside in (None, mask):
        mine = region_loss(logits, regions.float(), inside)
        torch.testing.assert_close(mine, region_loss(logits, regions, inside))


def test_losses_of_a_label_of_probabilities_are_those_by_hand() -> None:
    # p = (.5, .25) for g = (1, .5): foreground 2 (.5 + .125) / (.75 + 1.5), background
    # 2 (0 + .375) / (1.25 + .5)
    logits = logits_of([0.5, 0.25])
    label = torch.tensor([[[0.0, 0.5]], [[1.0, 0.5]]], dtype=torch.float64).movedim(0, 1)
    dice = float(soft_dice_loss(logits, label, smooth=0.0))
    assert dice == pytest.approx(1 - (1.25 / 2.25 + 0.75 / 1.75) / 2, abs=1e-12)
    ce = (TWO - 0.5 * math.log(0.75) - 0.5 * math.log(0.25)) / 2
    assert float(cross_entropy_loss(logits, label)) == pytest.approx(ce, abs=1e-12)
    first = torch.tensor([[True, False]])
    assert float(cross_entropy_loss(logits, label, first)) == pytest.approx(TWO, abs=1e-12)
