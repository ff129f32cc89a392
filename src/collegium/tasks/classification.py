"""Classification: every case, an image, a volume or a row of a table, gets one class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from collegium.errors import ConfigError, DataError
from collegium.tasks.base import RAREST, Row, device_of
from collegium.tasks.losses import weighted_focal_loss
from collegium.tasks.metrics import auc_shares, balanced_shares

if TYPE_CHECKING:
    from collegium.core.dataset import Batch, Example

LOSSES = ("ce", "focal")
"""The losses of a classification by the names that a configuration uses."""

SHARED = ("balanced_accuracy", "auc")
"""The scores that are of all cases together and depend on how many each class has."""


class ClassificationTask:
    """Every case gets one of several classes.

    Its scores: "accuracy", 1 or 0 for a case; "log_loss", minus the logarithm of the probability of
    the true class, lower is better; and, shared out over the cases of a set by `complete`,
    "balanced_accuracy" and "auc", the area under the ROC curve (of more than two classes the mean
    of one against the rest), which is undefined where all cases are of one class. See
    `collegium.tasks.metrics.classification` for what a case's share is.

    Args:
        classes: Names of the classes, or how many there are.
        loss: "ce" (cross-entropy) or "focal" (gamma 2).
        weights: How much a case of each class counts in the loss, cross-entropy or focal; None: 1.
            The loss is the sum over the cases divided by their number. (With a weight,
            `torch.nn.CrossEntropyLoss` divides by the sum of the cases' weights, so that a batch of
            one class counts as without.)
        metric: The headline metric, which selects models on validation: "accuracy",
            "balanced_accuracy" or "auc".
    """

    units: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(("accuracy", "balanced_accuracy", "auc", "log_loss"), "")
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
        right = weights is None or all(0 < weight < math.inf for weight in weights)
        if not right or (weights is not None and len(weights) != self.classes):
            raise ConfigError(f"weights are {weights!r}: give {self.classes} numbers above 0")
        self._focal = loss == "focal"
        self._weights = torch.tensor([1.0] * self.classes if weights is None else [*weights])

    @property
    def channels(self) -> int:
        """How many numbers the network gives."""
        return self.classes

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Give the mean loss of the cases, each weighted by its class."""
        logits, label = self._checked(output), batch["label"]
        weights = self._weights.to(logits.device)
        if self._focal:
            return weighted_focal_loss(logits, label, weights)
        each = functional.cross_entropy(logits.float(), label, reduction="none")
        return (weights[label] * each).mean()

    def predict(self, module: nn.Module, example: Example) -> torch.Tensor:
        """Give the probability of every class, (B, classes), on the image's device."""
        image = example.batch["image"]
        logits = self._checked(module(image.to(device_of(module, image))))
        return logits.float().softmax(dim=1).to(image.device)

    def windows(self, module: nn.Module, image: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give the whole image."""
        yield image.to(device_of(module, image))

    def batched(self, size: int) -> ClassificationTask:
        """Give this task, which predicts whatever it gets in one forward pass."""
        return self

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Score a case by what `predict` gave for it; of slices the mean of their probabilities.

        Raises:
            DataError: The case has no class.
        """
        if "label" not in example.batch:
            raise DataError(f"case {example.case!r} has no class; name one, or leave the case out")
        label = int(example.batch["label"][0])
        chances = prediction.double().mean(dim=0).clamp(min=1e-15)
        wanted = [*self.units] if metrics is None else [*metrics]
        own = {
            "accuracy": float(chances.argmax() == label),
            "log_loss": -math.log(float(chances[label])),
        }
        kept = {f"_p{index}": float(chance) for index, chance in enumerate(chances)}
        found: dict[str, float | None] = {name: own.get(name) for name in wanted}
        return {**found, "_class": float(label), **kept}

    def complete(self, rows: Sequence[Row]) -> list[Row]:
        """Share balanced accuracy and AUC out over the cases; cases of a patient weigh as one.

        Beside them stands how many patients the rarest class has, of the classes that are there.
        """
        labels = [int(row["_class"]) for row in rows]
        chances = np.array([[row[f"_p{c}"] for c in range(self.classes)] for row in rows])
        patients = [str(row.get("patient", place)) for place, row in enumerate(rows)]
        whole: dict[str, list[float] | None] = {}
        if rows and "auc" in rows[0]:
            whole["auc"] = auc_shares(chances, labels, patients)
        if rows and "balanced_accuracy" in rows[0]:
            right = [
                float(row.argmax() == label) for row, label in zip(chances, labels, strict=True)
            ]
            whole["balanced_accuracy"] = balanced_shares(right, labels, patients)
        groups = [{p for p, of in zip(patients, labels, strict=True) if of == c} for c in {*labels}]
        rarest = {RAREST: min(map(len, groups))} if whole else {}
        return [
            {name: value for name, value in row.items() if not name.startswith("_")}
            | {name: shares[place] if shares else None for name, shares in whole.items()}
            | rarest
            for place, row in enumerate(rows)
        ]

    def _checked(self, output: object) -> torch.Tensor:
        """The logits, if they are one number for each class."""
        if not isinstance(output, torch.Tensor) or output.shape[1:] != (self.classes,):
            what = (
                tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
            )
            raise ConfigError(
                f"the model gives {what} for {self.classes} classes: let it give (cases, "
                f"{self.classes})"
            )
        return output
