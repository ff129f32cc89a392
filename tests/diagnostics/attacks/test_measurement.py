"""How rebuilt batches are matched with the true ones and scored."""

import pytest
import torch

from collegium import SegmentationTask
from collegium.diagnostics.attacks.inversion import Rebuilt
from collegium.diagnostics.attacks.likeness import compare
from collegium.diagnostics.attacks.measurement import mask_dice, matched, mean_likeness


def test_a_rebuilt_batch_is_put_into_the_order_of_the_true_one() -> None:
    torch.manual_seed(0)
    truth = torch.randn(4, 1, 12, 12)
    order = [2, 0, 3, 1]
    images = (truth + 0.3 * torch.randn_like(truth))[order]
    found = matched(Rebuilt(images, torch.tensor(order), 0.0), truth)
    assert found.label.tolist() == [0, 1, 2, 3]
    each = [compare(images[order.index(n)][None], truth[n][None]) for n in range(4)]
    mean = mean_likeness(found.image, truth)
    assert mean.psnr == pytest.approx(sum(one.psnr for one in each) / 4)
    assert mean.ssim == pytest.approx(sum(one.ssim for one in each) / 4)


def test_masks_are_scored_by_dice() -> None:
    label = torch.zeros(2, 4, 4, dtype=torch.int64)
    label[:, :2] = 1
    found = label.clone()
    found[1, 0] = 0  # 4 of 8 pixels: 2 * 4 / (4 + 8)
    truth = {"image": torch.zeros(2, 1, 4, 4), "label": label}
    rebuilt = Rebuilt(truth["image"], found, 0.0)
    assert mask_dice(SegmentationTask(), rebuilt, truth) == pytest.approx((1 + 2 / 3) / 2)
    empty = {"image": truth["image"], "label": torch.zeros_like(label)}
    nothing = Rebuilt(truth["image"], torch.zeros_like(label), 0.0)
    assert mask_dice(SegmentationTask(), nothing, empty) is None
