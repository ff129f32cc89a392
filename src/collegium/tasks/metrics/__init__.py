"""Metrics of predictions, case by case."""

from collegium.tasks.metrics.classification import auc_pseudovalues, balanced_accuracy_pseudovalues
from collegium.tasks.metrics.overlap import (
    Regions,
    box_plot_summary,
    dice,
    hd95,
    iou,
    label_iou,
    micro_iou,
    region_mask,
    sdwd,
    slice_dice_legacy,
)

__all__ = [
    "Regions",
    "auc_pseudovalues",
    "balanced_accuracy_pseudovalues",
    "box_plot_summary",
    "dice",
    "hd95",
    "iou",
    "label_iou",
    "micro_iou",
    "region_mask",
    "sdwd",
    "slice_dice_legacy",
]
