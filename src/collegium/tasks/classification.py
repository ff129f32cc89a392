"""Classification: every case (an image, a volume or a row of a table) has one class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
from collegium.tasks.metrics.calibration import BINS, calibration_error_pseudovalues
from collegium.tasks.metrics.classification import (
    Array,
    auc_pseudovalues,
    balanced_accuracy_pseudovalues,
    patient_weights,
)
from collegium.tasks.metrics.decisions import choose_threshold, predictive_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from collegium.core.dataset import Batch, Example

LOSSES = ("ce", "focal")
"""The losses of a classification, by their names in a configuration."""

SET_METRICS = ("balanced_accuracy", "auc")
"""The metrics of a set of cases, which depend on how many cases each class has."""

DEFAULT_METRICS = ("accuracy", *SET_METRICS, "log_loss", "brier")
"""The metrics that every classification has."""

DECISION_METRICS = ("sensitivity", "specificity", "ppv", "npv")
"""The metrics of decisions by a threshold, which is chosen on validation cases."""

FURTHER_METRICS = (*DECISION_METRICS, "ece")
"""The metrics that a classification has if it is asked for them, by their names."""


class _Cases(NamedTuple):
    """The classes and probabilities of a set of cases."""

    probabilities: Array
    labels: NDArray[np.intp]
    patients: list[str]


class ClassificationTask(WholeCaseTask):
    """The task of giving every case one of several classes.

    Its scores: "accuracy", 1 or 0 for a case; "log_loss", minus the logarithm of the probability of
    the true class, lower is better; "brier", the squared error of the probabilities summed over the
    classes (half of it with two), lower is better; and, as one pseudo-value for each case of a set,
    "balanced_accuracy" and "auc", the area under the ROC curve (with more than two classes the mean
    of one against the rest), which is undefined if all cases are of one class. See
    `collegium.tasks.metrics.classification` for the pseudo-values.

    Further ones, if `metrics` names them: "sensitivity" and "specificity" at a threshold that is
    chosen on validation cases, 1 or 0 for each case of its class and no score for the others;
    "ppv" and "npv", the predictive values at a prevalence, of all cases together; with any of
    these, "threshold". With two classes the second is what is looked for; with more, each is, and
    the names end with that of the class, such as "sensitivity_melanoma". And "ece", the expected
    calibration error, as one pseudo-value for each case. See
    `collegium.tasks.metrics.decisions` and `.calibration`.

    Args:
        classes: Names of the classes, or their number.
        loss: "ce" (cross-entropy) or "focal" (gamma 2).
        weights: The weight of each class in the loss, cross-entropy or focal; None: 1. The loss is
            the sum over the cases divided by their number. (With weights,
            `torch.nn.CrossEntropyLoss` divides by the sum of the cases' weights, so that they have
            no effect on a batch of one class.)
        metric: The headline metric, which selects models on validation: "accuracy",
            "balanced_accuracy" or "auc".
        metrics: Any of `FURTHER_METRICS`, beside those that every classification has.
        least_sensitivity: The sensitivity that a threshold has to reach on validation cases, in
            (0, 1]; None: the one with the largest Youden index is chosen.
        prevalence: The prevalence of the second class where decisions are made, in (0, 1); with
            more than two classes that of some of them, by name.
        calibration_bins: How many bins of equal width "ece" has.
    """

    def __init__(
        self,
        classes: Sequence[str] | int = 2,
        loss: str = "ce",
        *,
        weights: Sequence[float] | None = None,
        metric: str = "accuracy",
        metrics: Sequence[str] = (),
        least_sensitivity: float | None = None,
        prevalence: float | Mapping[str, float] | None = None,
        calibration_bins: int = BINS,
    ) -> None:
        names = [str(c) for c in range(classes)] if isinstance(classes, int) else [*classes]
        self.classes = len(names)
        self.metric = metric
        self.metrics = tuple(metrics)
        self.least_sensitivity = least_sensitivity
        self.calibration_bins = calibration_bins
        binary = self.classes == 2
        self._looked_for = {1: ""} if binary else {c: f"_{name}" for c, name in enumerate(names)}
        self._prevalence = _by_class(names, prevalence)
        self._check_metrics(prevalence)
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

    def _check_metrics(self, prevalence: float | Mapping[str, float] | None) -> None:
        """Refuse further metrics that cannot work, and settings that are of none of them."""
        if unknown := set(self.metrics).difference(FURTHER_METRICS):
            raise ConfigError(
                f"there is no metric {min(unknown)!r} to add: choose task.metrics from "
                f"{', '.join(FURTHER_METRICS)}; {', '.join(DEFAULT_METRICS)} are always there"
            )
        predictive = not {"ppv", "npv"}.isdisjoint(self.metrics)
        if predictive and prevalence is None:
            raise ConfigError("ppv and npv need a prevalence: set task.prevalence, such as 0.05")
        if not predictive and prevalence is not None:
            raise ConfigError(
                "task.prevalence is of ppv and npv: list them in task.metrics, or leave it out"
            )
        if not all(0 < value < 1 for value in self._prevalence.values()):
            raise ConfigError(f"task.prevalence is {prevalence!r}: give numbers between 0 and 1")
        least = self.least_sensitivity
        if least is not None and not self.needs_validation:
            raise ConfigError(
                "task.least_sensitivity chooses a threshold, and no metric needs one: list "
                "sensitivity and specificity in task.metrics, or leave it out"
            )
        if least is not None and not 0 < least <= 1:
            raise ConfigError(f"task.least_sensitivity is {least}: give a number above 0, up to 1")
        if self.calibration_bins < 1:
            raise ConfigError(f"task.calibration_bins is {self.calibration_bins}: give 1 or more")

    @property
    def needs_validation(self) -> bool:
        """Whether thresholds are chosen on validation cases."""
        return not set(DECISION_METRICS).isdisjoint(self.metrics)

    @property
    def units(self) -> Mapping[str, str]:
        """The unit of each metric that `scores` can return, which is none."""
        names = [*DEFAULT_METRICS, *(["ece"] if "ece" in self.metrics else [])]
        for c, suffix in self._looked_for.items():
            names += [f"{name}{suffix}" for name in self._decision_metrics(c)]
        return dict.fromkeys(names, "")

    def _decision_metrics(self, looked_for: int) -> list[str]:
        """Return the metrics of decisions on a class, with the threshold, without its name."""
        found = [name for name in DECISION_METRICS if name in self.metrics]
        if looked_for not in self._prevalence:
            found = [name for name in found if name not in ("ppv", "npv")]
        return [*found, "threshold"] if self.needs_validation else []

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

    def add_set_scores(
        self, rows: Sequence[CaseScores], validation: Sequence[CaseScores] = ()
    ) -> list[CaseScores]:
        """Return the rows with what depends on all of them; patients weigh the same.

        Classes stay in the rows; probabilities stay beside metrics of the set, whose statistics
        need them. A row without a sensitivity or specificity is of a case that these are not about.

        Args:
            rows: What `scores` returned for each case.
            validation: The same of validation cases, see `Task.add_set_scores`.
        """
        if not rows:
            return []
        cases, chosen_on = self._cases(rows), self._cases(validation)
        added: list[CaseScores] = [{} for _ in rows]
        for name in rows[0].keys() & {*SET_METRICS, "ece"}:
            values = self._pseudovalues(name, cases)
            for place, more in enumerate(added):
                more[name] = values[place] if values else None
        for c, suffix in self._looked_for.items():
            if f"threshold{suffix}" in rows[0]:
                self._add_decisions(added, cases, chosen_on, c)
        replaced = self.units.keys() - {"accuracy", "log_loss", "brier"}
        return [
            {
                name: more.get(name, value)
                for name, value in row.items()
                if name in more
                or (name not in replaced and (more or name == TRUE_CLASS or not is_hidden(name)))
            }
            for row, more in zip(rows, added, strict=True)
        ]

    def _pseudovalues(self, name: str, cases: _Cases) -> list[float] | None:
        """Return the values of a metric of the set; None if it is undefined."""
        chances, labels, patients = cases.probabilities, cases.labels.tolist(), cases.patients
        if name == "auc":
            return auc_pseudovalues(chances, labels, patients)
        if name == "ece":
            bins = self.calibration_bins
            return calibration_error_pseudovalues(chances, labels, patients, bins=bins)
        correct = (chances.argmax(axis=1) == cases.labels).astype(float)
        return balanced_accuracy_pseudovalues(correct, labels, patients)

    def _add_decisions(
        self, added: Sequence[CaseScores], cases: _Cases, validation: _Cases, looked_for: int
    ) -> None:
        """Add the scores of decisions on a class, by a threshold from validation cases."""
        wanted, suffix = self._decision_metrics(looked_for), self._looked_for[looked_for]
        threshold = choose_threshold(
            validation.probabilities[:, looked_for],
            validation.labels == looked_for,
            validation.patients,
            least_sensitivity=self.least_sensitivity,
        )
        positive = cases.labels == looked_for
        above = cases.probabilities[:, looked_for] >= (math.inf if threshold is None else threshold)
        common: dict[str, float | None] = {"threshold": threshold}
        for name, right, members in (
            ("sensitivity", above, positive), ("specificity", ~above, ~positive),
        ):  # fmt: skip
            known = threshold is not None and bool(members.any())
            common[name] = _mean_of(right, members, cases.patients) if known else None
            if name in wanted and known:
                for row, value, member in zip(added, right, members, strict=True):
                    row |= {f"{name}{suffix}": float(value)} if member else {}
                wanted.remove(name)
        if looked_for in self._prevalence:
            common["ppv"], common["npv"] = predictive_values(
                common["sensitivity"], common["specificity"], self._prevalence[looked_for]
            )
        for row in added:
            row |= {f"{name}{suffix}": common[name] for name in wanted}

    def _cases(self, rows: Sequence[CaseScores]) -> _Cases:
        """Return what metrics of a set are made of."""
        chances = [[row[f"{PROBABILITY}{c}"] for c in range(self.classes)] for row in rows]
        return _Cases(
            np.array(chances, float).reshape(len(rows), self.classes),
            np.array([int(row[TRUE_CLASS]) for row in rows], np.intp),
            [str(row.get("patient", index)) for index, row in enumerate(rows)],
        )

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


def _by_class(
    names: Sequence[str], prevalence: float | Mapping[str, float] | None
) -> dict[int, float]:
    """Return the prevalence of the classes that have one, by their numbers."""
    if prevalence is None:
        return {}
    if isinstance(prevalence, Mapping) != (len(names) > 2):
        raise ConfigError(
            f"task.prevalence is {prevalence!r}: give "
            + ("one for each class by name" if len(names) > 2 else "the number of the second class")
        )
    if not isinstance(prevalence, Mapping):
        return {1: prevalence}
    if unknown := sorted(prevalence.keys() - set(names)):
        raise ConfigError(f"task.prevalence names {unknown[0]!r}: choose from {', '.join(names)}")
    return {names.index(name): value for name, value in prevalence.items()}


def _mean_of(
    values: NDArray[np.bool_], members: NDArray[np.bool_], patients: Sequence[str]
) -> float:
    """Return the mean of some cases, whose patients weigh the same."""
    weights = patient_weights([p for p, own in zip(patients, members, strict=True) if own], 0)
    return float(weights @ values[members])
