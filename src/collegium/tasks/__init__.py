"""What a network is trained for: its loss, how it predicts a whole case, how that is scored."""

from collegium.tasks.base import ABOUT, RAREST, Row, SupervisedTask, Task
from collegium.tasks.classification import SHARED, ClassificationTask
from collegium.tasks.segmentation import METRICS, SegmentationTask

__all__ = [
    "ABOUT",
    "METRICS",
    "RAREST",
    "SHARED",
    "ClassificationTask",
    "Row",
    "SegmentationTask",
    "SupervisedTask",
    "Task",
]
