"""What a network is trained for: its loss, how it predicts a whole case, and how that is scored."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.nn import functional

from collegium import metrics as measures
from collegium.errors import ConfigError, DataError
from collegium.losses import LOSSES

if TYPE_CHECKING:
    from collegium.data.dataset import Batch, Example

METRICS = ("dice", "iou", "hd95")
"""The metrics of a segmentation by the names that a configuration uses."""


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
        """Score a whole case, by all `metrics` or some; None is undefined, and never averaged."""
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
        output: torch.Tensor = module(image.to(_device(module, image)))
        return output.to(image.device)

    def windows(self, module: nn.Module, image: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give the whole image."""
        yield image.to(_device(module, image))

    def batched(self, size: int) -> SupervisedTask:
        """Give this task, which predicts whatever it gets in one forward pass."""
        return self

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Give minus the loss, the only metric."""
        value = -float(self._loss(prediction, example.batch["label"]).detach())
        return {"negative_loss": value if math.isfinite(value) else None}


class SegmentationTask:
    """Every pixel gets one of several classes, of which the first is the background.

    Loss and scores count only what is inside `batch["mask"]`, where there is one. A batch of one is
    scored as it is; the slices of a volume, stacked along the batch axis, are predicted a few at a
    time and scored as one volume.

    HD95 is given as "hd95", in millimetres, where `Example.spacing` has a number for every axis of
    what is scored (for stacked slices the distance between slices comes first), and otherwise as
    "hd95_px", in pixels: two units never share a name.

    Args:
        classes: Names of the classes, or how many there are.
        loss: "dice_ce", "dice" or "ce".
        metrics: Any of "dice", "iou" and "hd95".
        window: Size of the window for images that are larger; smaller ones are padded to it and
            take one forward pass. None: every image takes one forward pass, padded to a multiple
            of what a network with an attribute `strides`, such as MONAI's `UNet`, needs.
        overlap: Of neighbouring windows, as a fraction of the window, in [0, 1).
        metric: The headline metric, "dice" or "iou".
        batch_size: Windows or slices in one forward pass.
    """

    def __init__(
        self,
        classes: Sequence[str] | int = 2,
        loss: str = "dice_ce",
        *,
        metrics: Sequence[str] = METRICS,
        window: Sequence[int] | None = None,
        overlap: float = 0.25,
        metric: str = "dice",
        batch_size: int = 4,
    ) -> None:
        self.classes = classes if isinstance(classes, int) else len(classes)
        self.metrics = tuple(metrics)
        self.metric = metric
        self.window = None if window is None else tuple(window)
        self.overlap = overlap
        self.batch_size = batch_size
        if loss not in LOSSES:
            raise ConfigError(f"loss is {loss!r}: set it to one of {', '.join(LOSSES)}.")
        self._loss = LOSSES[loss]
        self._check()

    def _check(self) -> None:
        """Refuse settings that cannot work."""
        if self.classes < 2:
            raise ConfigError(
                f"task.classes holds {self.classes} class: name the background and a structure."
            )
        if unknown := set(self.metrics).difference(METRICS):
            raise ConfigError(
                f"there is no metric {min(unknown)!r}: choose metrics from {', '.join(METRICS)}."
            )
        if self.metric not in self.metrics or self.metric == "hd95":
            raise ConfigError(
                f"the headline metric is {self.metric!r}: set it to dice or iou and list it in "
                f"metrics."
            )
        if self.window is not None and (not self.window or min(self.window) < 1):
            raise ConfigError(
                f"inference.window is {self.window}: give a positive size for each axis."
            )
        if not 0 <= self.overlap < 1:
            raise ConfigError(
                f"inference.overlap is {self.overlap}: set it to 0 or more and below 1."
            )

    @property
    def units(self) -> Mapping[str, str]:
        """The unit of each metric that `scores` can give."""
        units = {name: "" for name in self.metrics if name != "hd95"}
        return units | ({"hd95": "mm", "hd95_px": "px"} if "hd95" in self.metrics else {})

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Give the loss between logits and label, inside the mask where there is one."""
        return self._loss(self._checked(output), batch["label"], batch.get("mask"))

    def predict(self, module: nn.Module, example: Example) -> torch.Tensor:
        """Give the most probable class of every pixel.

        The image goes to the network's device piece by piece; the result is on the image's device.

        Args:
            module: The network, in evaluation mode.
            example: The case; its image is (B, C, *spatial).

        Returns:
            Classes, int64, (B, *spatial).

        Raises:
            ConfigError: The window does not suit the image or the network, or the network gives
                another number of classes than the task has.
        """
        image = example.batch["image"]
        size = tuple(image.shape[2:])
        window = self._window(module, size)
        if _fits(size, window):
            return torch.cat(list(self._whole(module, image, window)))
        from monai.inferers.utils import sliding_window_inference

        logits = sliding_window_inference(
            image,
            roi_size=window,
            sw_batch_size=self.batch_size,
            predictor=module,
            overlap=self.overlap,
            sw_device=_device(module, image),
            device=image.device,
        )
        return self._checked(logits).argmax(dim=1)

    def windows(self, module: nn.Module, image: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give what of an image enters the network at once, cut and padded as in `predict`.

        Args:
            module: The network.
            image: (B, C, *spatial).

        Yields:
            At most `batch_size` windows, (b, C, *window), on the network's device. A larger image
            than the window gives all windows of its grid, image by image.

        Raises:
            ConfigError: The window does not suit the image or the network.
        """
        window, device = self._window(module, tuple(image.shape[2:])), _device(module, image)
        if _fits(tuple(image.shape[2:]), window):
            pieces = functional.pad(image, _padding(tuple(image.shape[2:]), window)[0])
        else:
            pieces = torch.cat([cut for single in image for cut in self._grid(single, window)])
        for piece in torch.split(pieces, self.batch_size):
            yield piece.to(device)

    def batched(self, size: int) -> SegmentationTask:
        """Give the same task with so many windows or slices in one forward pass."""
        other = copy.copy(self)
        other.batch_size = size
        return other

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Score a case, or a volume of slices, inside its mask where there is one.

        Args:
            prediction: What `predict` gave.
            example: The case, with its label.
            metrics: Some of the task's metrics; all of them by default.

        Returns:
            A value for each metric; None where it is undefined.

        Raises:
            DataError: The spacing has another number of axes than the image.
        """
        label, mask = example.batch["label"], example.batch.get("mask")
        spacing = example.spacing
        if spacing is not None and len(spacing) not in (label.ndim, label.ndim - 1):
            raise DataError(
                f"case {example.case!r} has a spacing of {len(spacing)} axes and an image of "
                f"{label.ndim - 1}: correct the spacing or leave it out."
            )
        if len(label) == 1:
            prediction, label, mask = prediction[0], label[0], None if mask is None else mask[0]
            spacing = spacing if spacing is None else spacing[-label.ndim :]
        known = spacing is not None and len(spacing) == label.ndim
        result: dict[str, float | None] = {}
        for name in self.metrics if metrics is None else metrics:
            if name == "hd95":
                result["hd95" if known else "hd95_px"] = measures.hd95(
                    prediction,
                    label,
                    classes=self.classes,
                    mask=mask,
                    spacing=spacing if known else None,
                )
            else:
                overlap = measures.iou if name == "iou" else measures.dice
                result[name] = overlap(prediction, label, classes=self.classes, mask=mask)
        return result

    def _window(self, module: nn.Module, size: tuple[int, ...]) -> tuple[int, ...]:
        """The configured window, or the image's size rounded up to what the network needs."""
        divisor = _divisor(module)
        if self.window is None:
            return tuple(math.ceil(axis / divisor) * divisor for axis in size)
        if len(self.window) != len(size) or any(axis % divisor for axis in self.window):
            raise ConfigError(
                f"inference.window is {self.window} for images of {len(size)} axes: give one size "
                f"per axis, each a multiple of {divisor}."
            )
        return self.window

    def _whole(
        self, module: nn.Module, image: torch.Tensor, window: tuple[int, ...]
    ) -> Iterator[torch.Tensor]:
        """Predict images that fit the window, padded with zeros on all sides, a few at a time."""
        padding, inside = _padding(tuple(image.shape[2:]), window)
        device = _device(module, image)
        for piece in torch.split(image, self.batch_size):
            logits = self._checked(module(functional.pad(piece.to(device), padding)))
            yield logits[:, :, *inside].argmax(dim=1).to(image.device)

    def _grid(self, image: torch.Tensor, window: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Cut (C, *spatial) into (1, C, *window) on the grid of `sliding_window_inference`."""
        from monai.data.utils import dense_patch_slices

        size = tuple(map(max, image.shape[1:], window))
        padded = functional.pad(image, _padding(tuple(image.shape[1:]), size)[0])
        steps = tuple(
            window[axis] if window[axis] == size[axis] else max(1, int(side * (1 - self.overlap)))
            for axis, side in enumerate(window)
        )
        for place in dense_patch_slices(size, window, steps):
            yield padded[:, *place][None]

    def _checked(self, logits: object) -> torch.Tensor:
        """The logits, if they are one tensor with a channel for each class."""
        if not isinstance(logits, torch.Tensor):
            raise ConfigError(
                f"the model gives a {type(logits).__name__}: let it give one tensor, the logits."
            )
        if logits.shape[1] != self.classes:
            raise ConfigError(
                f"the model gives {logits.shape[1]} channels for {self.classes} classes: "
                f"set its out_channels to {self.classes}."
            )
        return logits


def _fits(size: tuple[int, ...], window: tuple[int, ...]) -> bool:
    return all(have <= fits for have, fits in zip(size, window, strict=True))


def _padding(size: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[list[int], list[slice]]:
    """How torch pads a size on all sides to the one wanted, and where the image then lies."""
    padding: list[int] = []
    inside: list[slice] = []
    for have, fits in zip(size, wanted, strict=True):
        before = (fits - have) // 2
        padding = [before, fits - have - before, *padding]  # torch wants the last axis first
        inside.append(slice(before, before + have))
    return padding, inside


def _divisor(module: nn.Module) -> int:
    """What the sizes of images must be multiples of, as far as the network says so."""
    strides = getattr(module, "strides", None)
    if isinstance(strides, Sequence) and all(isinstance(stride, int) for stride in strides):
        return math.prod(strides)
    return 1


def _device(module: nn.Module, image: torch.Tensor) -> torch.device:
    """Where the network is; where the image is if the network has no parameters."""
    return next((parameter.device for parameter in module.parameters()), image.device)
