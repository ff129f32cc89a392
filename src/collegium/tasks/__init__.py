"""Tasks: the loss a network is trained with, how it predicts a whole case, how that is scored."""

from collegium.core.payloads import ALL_CASES, CASES, EVENTS
from collegium.tasks.base import (
    HIDDEN,
    NON_SCORE_KEYS,
    PROBABILITY,
    TRUE_CLASS,
    CaseScores,
    SupervisedTask,
    Task,
    count_events,
    family,
    is_hidden,
    metrics_of,
)
from collegium.tasks.classification import SET_METRICS, ClassificationTask
from collegium.tasks.segmentation import SegmentationTask

__all__ = [
    "ALL_CASES",
    "CASES",
    "EVENTS",
    "HIDDEN",
    "NON_SCORE_KEYS",
    "PROBABILITY",
    "SET_METRICS",
    "TRUE_CLASS",
    "CaseScores",
    "ClassificationTask",
    "SegmentationTask",
    "SupervisedTask",
    "Task",
    "count_events",
    "family",
    "is_hidden",
    "metrics_of",
]
