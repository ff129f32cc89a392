"""What a network is trained for, whatever the task: its loss, its prediction, its scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from collegium.core.dataset import Batch, Example

Row = dict[str, Any]
"""The scores of a case, beside whatever names the case."""

RAREST = "rarest_class"
"""Where scores depend on how many cases each class has: how many patients the rarest one has."""

ABOUT = ("case", "patient", RAREST)
"""What a row holds beside scores."""


class Task(Protocol):
    """What is learnt.

    Attributes:
        metric: The headline metric, for which higher is better; it selects models on validation.
        units: The unit of each metric that `scores` can give: "" for none, "mm" or "px".
    """

    @property
    def metric(self) -> str: ...  # noqa: D102

    @property
    def units(self) -> Mapping[str, str]: ...  # noqa: D102

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Give the scalar to descend on."""
        ...

    def predict(self, module: nn.Module, example: Example) -> torch.Tensor:
        """Predict a whole case at full size; called under `torch.no_grad()` in evaluation mode."""
        ...

    def windows(self, module: nn.Module, image: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give what of a case's image enters the network at once, on the network's device."""
        ...

    def batched(self, size: int) -> Task:
        """Give the same task with so many windows, slices or cases in one forward pass."""
        ...

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Score a whole case, by all `metrics` or some; None is undefined, and never averaged.

        Names that begin with "_" hold what `complete` needs; they never leave a site.
        """
        ...

    def complete(self, rows: Sequence[Row]) -> list[Row]:
        """Add to the scores of all cases of a set those that depend on all of them together."""
        ...


class SupervisedTask:
    """Any task with a loss between the network's output and `batch["label"]`.

    Its one metric, "negative_loss", is minus that loss; it is undefined where that is not finite.

    Args:
        loss: Takes output and label, gives a scalar.
    """

    metric = "negative_loss"
    units: Mapping[str, str] = MappingProxyType({"negative_loss": ""})

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._loss = loss

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Give the loss between output and label."""
        return self._loss(output, batch["label"])

    def predict(self, module: nn.Module, example: Example) -> torch.Tensor:
        """Give the network's output, on the image's device."""
        image = example.batch["image"]
        output: torch.Tensor = module(image.to(device_of(module, image)))
        return output.to(image.device)

    def windows(self, module: nn.Module, image: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give the whole image."""
        yield image.to(device_of(module, image))

    def batched(self, size: int) -> SupervisedTask:
        """Give this task, which predicts whatever it gets in one forward pass."""
        return self

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Give minus the loss, the only metric."""
        value = -float(self._loss(prediction, example.batch["label"]).detach())
        return {"negative_loss": value if math.isfinite(value) else None}

    def complete(self, rows: Sequence[Row]) -> list[Row]:
        """Give the rows as they are."""
        return [*rows]


def device_of(module: nn.Module, image: torch.Tensor) -> torch.device:
    """Return where the network is; where the image is if the network has no parameters."""
    return next((parameter.device for parameter in module.parameters()), image.device)
