"""Tasks: the loss a network is trained with, how it predicts a whole case, how that is scored."""

from collegium.tasks.base import (
    ALL_CASES,
    CASES,
    NON_SCORE_KEYS,
    RAREST_CLASS,
    CaseScores,
    SupervisedTask,
    Task,
)
from collegium.tasks.classification import SET_METRICS, ClassificationTask
from collegium.tasks.segmentation import SegmentationTask

__all__ = [
    "ALL_CASES",
    "CASES",
    "NON_SCORE_KEYS",
    "RAREST_CLASS",
    "SET_METRICS",
    "CaseScores",
    "ClassificationTask",
    "SegmentationTask",
    "SupervisedTask",
    "Task",
]
