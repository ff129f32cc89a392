"""How good predictions are, case by case."""

from collegium.tasks.metrics.classification import auc_shares, balanced_shares
from collegium.tasks.metrics.overlap import (
    Regions,
    Score,
    box,
    dice,
    hd95,
    inside,
    iou,
    label_iou,
    micro_iou,
    sdwd,
    slice_dice_legacy,
)

__all__ = ["Regions", "Score", "auc_shares", "balanced_shares", "box", "dice", "hd95", "inside"]
__all__ += ["iou", "label_iou", "micro_iou", "sdwd", "slice_dice_legacy"]
