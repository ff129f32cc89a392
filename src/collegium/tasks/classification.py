"""Classification: every case (an image, a volume or a row of a table) has one class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from collegium.core.lazy import functional, nn, torch
from collegium.errors import ConfigError, DataError
from collegium.tasks.base import (
    PROBABILITY,
    TRUE_CLASS,
    CaseScores,
    WholeCaseTask,
    device_of,
    is_hidden,
)
from collegium.tasks.losses import weighted_focal_loss
from collegium.tasks.metrics.classification import (
    auc_pseudovalues,
    balanced_accuracy_pseudovalues,
)

if TYPE_CHECKING:
    from collegium.core.dataset import Batch, Example

LOSSES = ("ce", "focal")
"""The losses of a classification, by their names in a configuration."""

SET_METRICS = ("balanced_accuracy", "auc")
"""The metrics of a set of cases, which depend on how many cases each class has."""


class ClassificationTask(WholeCaseTask):
    """The task of giving every case one of several classes.

    Its scores: "accuracy", 1 or 0 for a case; "log_loss", minus the logarithm of the probability of
    the true class, lower is better; "brier", the squared error of the probabilities summed over the
    classes (half of it with two), lower is better; and, as one pseudo-value for each case of a set,
    "balanced_accuracy" and "auc", the area under the ROC curve (with more than two classes the mean
    of one against the rest), which is undefined if all cases are of one class. See
    `collegium.tasks.metrics.classification` for the pseudo-values.

    Args:
        classes: Names of the classes, or their number.
        loss: "ce" (cross-entropy) or "focal" (gamma 2).
        weights: The weight of each class in the loss, cross-entropy or focal; None: 1. The loss is
            the sum over the cases divided by their number. (With weights,
            `torch.nn.CrossEntropyLoss` divides by the sum of the cases' weights, so that they have
            no effect on a batch of one class.)
        metric: The headline metric, which selects models on validation: "accuracy",
            "balanced_accuracy" or "auc".
    """

    units: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(("accuracy", "balanced_accuracy", "auc", "log_loss", "brier"), "")
    )

    def __init__(
        self,
        classes: Sequence[str] | int = 2,
        loss: str = "ce",
        *,
        weights: Sequence[float] | None = None,
        metric: str = "accuracy",
    ) -> None:
        self.classes = classes if isinstance(classes, int) else len(classes)
        self.metric = metric
        if loss not in LOSSES:
            raise ConfigError(f"loss is {loss!r}: set it to one of {', '.join(LOSSES)}.")
        if metric not in ("accuracy", "balanced_accuracy", "auc"):
            raise ConfigError(
                f"the headline metric is {metric!r}: choose accuracy, balanced_accuracy or auc"
            )
        given = [1.0] * self.classes if weights is None else [*weights]
        if len(given) != self.classes or not all(0 < weight < math.inf for weight in given):
            raise ConfigError(f"weights are {weights!r}: give {self.classes} numbers above 0")
        self._focal = loss == "focal"
        self._weights = torch.tensor(given)

    @property
    def channels(self) -> int:
        """The number of the network's outputs."""
        return self.classes

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the mean loss of the cases, each weighted by its class. See `Task.loss`."""
        logits, label = self._checked(output), batch["label"]
        weights = self._weights.to(logits.device)
        if self._focal:
            return weighted_focal_loss(logits, label, weights)
        each = functional.cross_entropy(logits.float(), label, reduction="none")
        return (weights[label] * each).mean()

    def predict(self, module: nn.Module, example: Example) -> torch.Tensor:
        """Return the probability of every class, (B, classes). See `Task.predict`."""
        image = example.batch["image"]
        logits = self._checked(module(image.to(device_of(module, image))))
        return logits.float().softmax(dim=1).to(image.device)

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Score a case; the probabilities of slices are averaged. See `Task.scores`.

        Raises:
            DataError: The case has no class.
        """
        if "label" not in example.batch:
            raise DataError(f"case {example.case!r} has no class; name one, or leave the case out")
        label = int(example.batch["label"][0])
        probabilities = prediction.double().mean(dim=0).clamp(min=1e-15)
        errors = probabilities - functional.one_hot(torch.tensor(label), self.classes)
        wanted = [*self.units] if metrics is None else [*metrics]
        own = {
            "accuracy": float(probabilities.argmax() == label),
            "log_loss": -math.log(float(probabilities[label])),
            "brier": float(errors.square().sum()) / (2 if self.classes == 2 else 1),
        }
        scores: dict[str, float | None] = {name: own.get(name) for name in wanted}
        inputs = {f"{PROBABILITY}{c}": float(value) for c, value in enumerate(probabilities)}
        return {**scores, TRUE_CLASS: float(label), **inputs}

    def add_set_scores(self, rows: Sequence[CaseScores]) -> list[CaseScores]:
        """Return the rows with pseudo-values of balanced accuracy and AUC; patients weigh the same.

        Classes stay in the rows; probabilities stay beside these two, whose statistics need them.
        """
        labels = [int(row[TRUE_CLASS]) for row in rows]
        probabilities = np.array(
            [[row[f"{PROBABILITY}{c}"] for c in range(self.classes)] for row in rows]
        )
        patients = [str(row.get("patient", index)) for index, row in enumerate(rows)]
        added: dict[str, list[float] | None] = {}
        if rows and "auc" in rows[0]:
            added["auc"] = auc_pseudovalues(probabilities, labels, patients)
        if rows and "balanced_accuracy" in rows[0]:
            correct = (probabilities.argmax(axis=1) == labels).astype(float)
            added["balanced_accuracy"] = balanced_accuracy_pseudovalues(correct, labels, patients)
        return [
            {
                name: value
                for name, value in row.items()
                if added or name == TRUE_CLASS or not is_hidden(name)
            }
            | {name: values[index] if values else None for name, values in added.items()}
            for index, row in enumerate(rows)
        ]

    def _checked(self, output: object) -> torch.Tensor:
        """Return the logits if they are one number for each class."""
        if not isinstance(output, torch.Tensor) or output.shape[1:] != (self.classes,):
            found = (
                tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            )
            raise ConfigError(
                f"the model returns {found} for {self.classes} classes: let it return (cases, "
                f"{self.classes})"
            )
        return output
