"""What a network is trained for: its loss, how it predicts a whole case, how that is scored."""

from collegium.tasks.base import Row, SupervisedTask, Task
from collegium.tasks.classification import ClassificationTask
from collegium.tasks.segmentation import METRICS, SegmentationTask

__all__ = ["METRICS", "ClassificationTask", "Row", "SegmentationTask", "SupervisedTask", "Task"]
