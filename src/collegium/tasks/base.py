"""The protocol of a task: its loss, its prediction of a whole case, its scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

from collegium.core.lazy import nn, torch
from collegium.core.payloads import CASES, EVENTS, Metric

if TYPE_CHECKING:
    from collegium.core.dataset import Batch, Example

CaseScores = dict[str, Any]
"""The scores of a case by metric, beside the keys that identify the case."""

NON_SCORE_KEYS = ("case", "patient", CASES, EVENTS)
"""The keys of `CaseScores` that are not metrics."""

HIDDEN = "_"
"""The start of keys of `CaseScores` that are no metrics of their own but what some are made of."""

TRUE_CLASS = f"{HIDDEN}class"
"""The number of a case's true class, beside metrics that depend on how many cases each has."""

PROBABILITY = f"{HIDDEN}p"
"""Before the number of a class: the probability that was predicted for it."""


LIMITS: Mapping[str, Metric] = MappingProxyType(
    {
        **dict.fromkeys(
            ("dice", "iou", "micro_iou", "label_iou", "surface_dice", "lesion_sensitivity"),
            Metric(0.0, 1.0),
        ),
        **dict.fromkeys(
            ("accuracy", "threshold", "sensitivity", "specificity", "ppv", "npv"), Metric(0.0, 1.0)
        ),
        "ece": Metric(-1.0, 1.0),
        **dict.fromkeys(("hd95", "assd", "lesion_false_positives", "log_loss"), Metric(0.0)),
        "volume_difference": Metric(),
        "relative_volume_difference": Metric(-1.0),
        "brier": Metric(0.0, 2.0),
        **dict.fromkeys(("balanced_accuracy", "auc"), Metric(-2.0, 2.0, of_set=True)),
    }
)
"""The values that metrics can have, of all classes and of one; any other can have all."""


def family(metric: str) -> str:
    """Return the metric that a name is of: "surface_dice" for "surface_dice_liver".

    Args:
        metric: The name, also "hd95_px" or "hd95_px_liver"; of one that no task here has, the
            first word.
    """
    words = metric.split("_")
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((name for name in names if name in LIMITS), words[0])


def metrics_of(task: Task) -> dict[str, Metric]:
    """Return the values that each score of a case can have, by name, the hidden ones included.

    Args:
        task: the task; its classes, where it has some, are those of hidden scores.
    """
    found = {name: LIMITS.get(family(name), Metric()) for name in task.units}
    classes = getattr(task, "classes", 0)
    if isinstance(classes, int) and classes:
        found[TRUE_CLASS] = Metric(0.0, classes - 1.0)
        found |= {f"{PROBABILITY}{number}": Metric(0.0, 1.0) for number in range(classes)}
    return found


def is_hidden(name: str) -> bool:
    """Return whether a key of `CaseScores` is hidden: it leaves a site with its cases' scores only.

    No table shows it.
    """
    return name.startswith(HIDDEN)


def count_events(rows: Sequence[Mapping[str, Any]], metric: str) -> int:
    """Return on how many patients a mean score depends.

    Of a classification these are the patients with a case of the rarest class that occurs, and none
    if only one class does; otherwise all patients with a defined score.

    Args:
        rows: Scores by case, or one row that stands for all.
        metric: The metric.
    """
    if rows and EVENTS in rows[0]:
        return int(rows[0][EVENTS])
    patients: dict[Any, set[str]] = {}
    for place, row in enumerate(rows):
        if row[metric] is not None or TRUE_CLASS in row:
            found = patients.setdefault(row.get(TRUE_CLASS), set())
            found.add(str(row.get("patient", place)))
    counts = [len(found) for found in patients.values()]
    return 0 if len(counts) < 2 and None not in patients else min(counts)


class Task(Protocol):
    """A learning task: its loss, how a whole case is predicted, and how it is scored.

    Attributes:
        metric: The headline metric, for which higher is better; it selects models on validation.
        units: The unit of each metric that `scores` can return: "" for none, "mm", "px" or "ml".
        needs_validation: Whether some of them depend on what is chosen on validation cases, such as
            a threshold; `add_set_scores` gets those of the same model then.
    """

    @property
    def metric(self) -> str: ...  # noqa: D102

    @property
    def units(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def needs_validation(self) -> bool: ...  # noqa: D102

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss to minimise.

        Args:
            output: The network's output for the batch, (B, channels, *spatial) or (B, classes).
            batch: The batch, with its "label" and, optionally, its "mask".

        Returns:
            A scalar.
        """

    def predict(self, module: nn.Module, example: Example) -> torch.Tensor:
        """Predict a whole case at full size; called under `torch.no_grad()` in evaluation mode.

        Args:
            module: The network, in evaluation mode.
            example: The case; its image is (B, C, *spatial), or (B, features) for a table.

        Returns:
            The prediction, on the image's device.
        """

    def predict_all(
        self, module: nn.Module, examples: Iterable[Example]
    ) -> Iterator[tuple[Example, torch.Tensor]]:
        """Yield cases in their order with their predictions; several may share a forward pass.

        Called under `torch.no_grad()`. What a network returns for a case does not depend on the
        others but for its last bits.

        Args:
            module: The network, in evaluation mode.
            examples: The cases.
        """

    def windows(self, module: nn.Module, image: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of a case's image that each enter the network in one forward pass.

        What has the image's batch and pixels, such as a mask (B, 1, *spatial), is cut as the image
        is, and padded with zeros.

        Args:
            module: The network.
            image: (B, C, *spatial), or (B, features) for a table.

        Yields:
            Parts, (b, C, *window), on the network's device.
        """

    def with_batch_size(self, size: int) -> Task:
        """Return the same task with ``size`` windows, slices or cases in one forward pass."""

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Score a whole case.

        Args:
            prediction: What `predict` returned for the case.
            example: The case, with its label.
            metrics: The metrics to compute; None: all of them.

        Returns:
            The score by metric; None is undefined, and never averaged. Hidden keys, see
            `is_hidden`, hold what `add_set_scores` and the statistics of its metrics need.
        """

    def add_set_scores(
        self, rows: Sequence[CaseScores], validation: Sequence[CaseScores] = ()
    ) -> list[CaseScores]:
        """Return the scores of a set of cases, with the metrics of the set added.

        Args:
            rows: What `scores` returned for each case.
            validation: The same of validation cases, by which thresholds are chosen; without them
                what needs a threshold is undefined.
        """


class WholeCaseTask:
    """The base of tasks whose network predicts a whole case in one forward pass."""

    @property
    def needs_validation(self) -> bool:
        """Whether something is chosen on validation cases. See `Task.needs_validation`."""
        return False

    def predict_all(
        self: Task, module: nn.Module, examples: Iterable[Example]
    ) -> Iterator[tuple[Example, torch.Tensor]]:
        """Predict case by case. See `Task.predict_all`."""
        for example in examples:
            yield example, self.predict(module, example)

    def windows(self, module: nn.Module, image: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the whole image. See `Task.windows`."""
        yield image.to(device_of(module, image))

    def with_batch_size(self, size: int) -> Self:
        """Return this task, since the size of a forward pass is that of the case."""
        return self


class SupervisedTask(WholeCaseTask):
    """Any task with a loss between the network's output and `batch["label"]`.

    Its one metric, "negative_loss", is minus that loss; it is undefined if that is not finite.

    Args:
        loss: Takes output and label, returns a scalar.
    """

    metric = "negative_loss"
    units: Mapping[str, str] = MappingProxyType({"negative_loss": ""})

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._loss = loss

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss between output and label. See `Task.loss`."""
        return self._loss(output, batch["label"])

    def predict(self, module: nn.Module, example: Example) -> torch.Tensor:
        """Return the network's output, on the image's device. See `Task.predict`."""
        image = example.batch["image"]
        output: torch.Tensor = module(image.to(device_of(module, image)))
        return output.to(image.device)

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Return minus the loss, the only metric. See `Task.scores`."""
        value = -float(self._loss(prediction, example.batch["label"]).detach())
        return {"negative_loss": value if math.isfinite(value) else None}

    def add_set_scores(
        self, rows: Sequence[CaseScores], validation: Sequence[CaseScores] = ()
    ) -> list[CaseScores]:
        """Return the rows unchanged. See `Task.add_set_scores`."""
        return [*rows]


def device_of(module: nn.Module, image: torch.Tensor) -> torch.device:
    """Return the device of a network, or that of the image if the network has no parameters.

    Args:
        module: The network.
        image: A tensor on the device to fall back on.
    """
    return next((parameter.device for parameter in module.parameters()), image.device)
