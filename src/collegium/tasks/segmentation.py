"""Segmentation: every pixel has one class, or belongs to overlapping regions."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from collegium.core.lazy import functional, nn, torch
from collegium.errors import ConfigError, DataError
from collegium.tasks.base import CaseScores, device_of
from collegium.tasks.losses import (
    LOSSES,
    REGION_LOSSES,
    exclusion_loss,
    merge_unlabelled,
    region_labels,
)
from collegium.tasks.metrics import overlap as measures
from collegium.tasks.metrics.overlap import structures_of
from collegium.tasks.metrics.published import label_iou, micro_iou

if TYPE_CHECKING:
    from collegium.core.dataset import Batch, Example

DEFAULT_METRICS = ("dice", "iou", "hd95")
"""The metrics that every segmentation has."""

STRUCTURE_METRICS = {
    "dice": measures.dice,
    "iou": measures.iou,
    "hd95": measures.hd95,
    "surface_dice": measures.surface_dice,
    "assd": measures.assd,
    "volume_difference": measures.volume_difference,
    "relative_volume_difference": measures.relative_volume_difference,
    "lesion_sensitivity": measures.lesion_sensitivity,
    "lesion_false_positives": measures.lesion_false_positives,
}
"""The metrics of structures, by their names in a configuration."""

IMAGE_METRICS = {"micro_iou": micro_iou, "label_iou": label_iou}
"""The metrics of all classes together, by their names in a configuration."""

METRICS = (*STRUCTURE_METRICS, *IMAGE_METRICS)
"""The metrics of a segmentation, by their names in a configuration."""

HEADLINES = ("dice", "iou", "micro_iou", "label_iou", "surface_dice")
"""The metrics that may select models: the higher the better, and no wrong mask has the best one."""

DISTANCES = ("hd95", "assd")
"""The metrics in millimetres, or in pixels under another name."""

SPACED_AXES = {"surface_dice": 2, "volume_difference": 3}
"""The metrics without such another name, and how many axes need a spacing."""

TOGETHER = {2: 1 << 18, 3: 1 << 21}
"""Pixels, or voxels, of the cases that enter a network together, at most.

A processor is as quick with larger pictures one by one. Volumes are not: torch takes a slow kernel
for a convolution of a single small one.
"""

MAX_STRUCTURES = 8
"""With more structures than these only their mean is scored."""


class SegmentationTask:
    """The task of giving every pixel one of several classes, the first being the background.

    With `regions` the network has a channel for each region, a set of classes, and regions may
    overlap, as whole tumour, tumour core and enhancing tumour do. A pixel then gets the class
    whose regions are closest to those with a logit above 0, the lower class of equally close ones;
    if the channels contradict each other this is a convention, and otherwise it is exact.

    Loss and scores count only pixels inside `batch["mask"]`, if there is one. A batch of one is
    scored as one image; the slices of a volume, stacked along the batch axis, are predicted a few
    at a time and scored as one volume.

    HD95 is called "hd95", in millimetres, if `Example.spacing` has a number for every axis of the
    scored case (for stacked slices the distance between slices comes first), and otherwise
    "hd95_px", in pixels: two units never share a name. So are "assd" and "assd_px". What is in
    other units of length ("surface_dice", "volume_difference") is undefined without a spacing. With
    two to eight structures every metric of structures is also computed for each of them, as
    "dice_<structure>".

    Where masks annotate some of the classes only, see `with_labelled`, the loss is the marginal
    loss, and other classes have no scores.

    Args:
        classes: Names of the classes, or their number.
        loss: "dice_ce", "dice" or "ce".
        metrics: Any of `METRICS`, see `collegium.tasks.metrics.overlap` and `.published`.
        window: Size of the window for images that are larger; smaller ones are padded to it and
            take one forward pass. None: every image takes one forward pass, padded to a multiple
            of the product of the `strides` of a network that has them, such as MONAI's `UNet`.
        overlap: Overlap of neighbouring windows, as a fraction of the window, in [0, 1).
        metric: The headline metric, one of `HEADLINES`.
        batch_size: Windows or slices in one forward pass.
        regions: The classes of each region, by its name; None: every pixel has one class.
        exclusion: Weight of the exclusion loss, which is added where masks annotate some of the
            classes only.
        exclusion_form: "dice" or "ce", see `collegium.tasks.losses.exclusion_loss`.
        surface_tolerance: The tolerance of "surface_dice" in mm, or that of each structure by name.
        lesion_overlap: The least IoU of a lesion and a predicted component that finds it; 0: any
            common pixel. See `collegium.tasks.metrics.lesions.count_lesions`.
    """

    needs_validation = False

    def __init__(
        self,
        classes: Sequence[str] | int = 2,
        loss: str = "dice_ce",
        *,
        metrics: Sequence[str] = DEFAULT_METRICS,
        window: Sequence[int] | None = None,
        overlap: float = 0.25,
        metric: str = "dice",
        batch_size: int = 4,
        regions: Mapping[str, Sequence[int]] | None = None,
        exclusion: float = 0.0,
        exclusion_form: Literal["dice", "ce"] = "dice",
        surface_tolerance: float | Mapping[str, float] | None = None,
        lesion_overlap: float = 0.0,
    ) -> None:
        self.classes = classes if isinstance(classes, int) else len(classes)
        self.regions = regions
        self.structures = _structures(classes, regions)
        self.metrics = tuple(metrics)
        self.metric = metric
        self.window = None if window is None else tuple(window)
        self.overlap = overlap
        self.batch_size = batch_size
        self.exclusion = exclusion
        self.exclusion_form = exclusion_form
        self.surface_tolerance = surface_tolerance
        self.lesion_overlap = lesion_overlap
        self.labelled: tuple[int, ...] | None = None
        losses = LOSSES if regions is None else REGION_LOSSES
        if loss not in losses:
            raise ConfigError(f"loss is {loss!r}: set it to one of {', '.join(losses)}.")
        self._loss = losses[loss]
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
        if self.metric not in self.metrics or self.metric not in HEADLINES:
            raise ConfigError(
                f"the headline metric is {self.metric!r}: set it to one of {', '.join(HEADLINES)} "
                f"and list it in metrics."
            )
        self._check_tolerance()
        if not 0 <= self.lesion_overlap <= 1:
            raise ConfigError(
                f"task.lesion_overlap is {self.lesion_overlap}: set it to an IoU from 0 to 1."
            )
        if self.window is not None and (not self.window or min(self.window) < 1):
            raise ConfigError(
                f"inference.window is {self.window}: give a positive size for each axis."
            )
        if not 0 <= self.overlap < 1:
            raise ConfigError(
                f"inference.overlap is {self.overlap}: set it to 0 or more and below 1."
            )

    def _check_tolerance(self) -> None:
        """Refuse surface Dice without a tolerance for every structure, and the reverse."""
        given = self.surface_tolerance
        if given is None:
            if "surface_dice" in self.metrics:
                raise ConfigError(
                    "surface_dice has no tolerance: set task.surface_tolerance, in mm, such as 2.0."
                )
            return
        if "surface_dice" not in self.metrics:
            raise ConfigError(
                "task.surface_tolerance is of surface_dice: list that in task.metrics, or leave it "
                "out."
            )
        if isinstance(given, Mapping) and given.keys() != self.structures.keys():
            raise ConfigError(
                f"task.surface_tolerance names {', '.join(given) or 'nothing'}: name each of "
                f"{', '.join(self.structures)}, or give one number for all."
            )
        values = list(given.values()) if isinstance(given, Mapping) else [given]
        if not all(0 < value < math.inf for value in values):
            raise ConfigError(f"task.surface_tolerance is {given}: give millimetres above 0.")

    @property
    def channels(self) -> int:
        """The number of the network's output channels."""
        return len(self.regions or ()) or self.classes

    @property
    def units(self) -> Mapping[str, str]:
        """The unit of each metric that `scores` can return."""
        units = {name: "" for name in self.metrics if name not in DISTANCES}
        if "volume_difference" in units:
            units["volume_difference"] = "ml"
        for name in DISTANCES:
            units |= {name: "mm", f"{name}_px": "px"} if name in self.metrics else {}
        separate = self._separate_structures()
        return units | {
            f"{metric}_{name}": unit
            for metric, unit in units.items()
            if metric not in IMAGE_METRICS
            for name in separate
        }

    def loss(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss between logits and label, inside the mask if any. See `Task.loss`.

        A label of floats holds the probability of every class, (B, classes, *spatial); where masks
        annotate some of the classes only it is refused.

        Raises:
            ConfigError: The model's output does not suit the task, or the label is of
                probabilities and cannot be.
        """
        label, mask, output = batch["label"], batch.get("mask"), self._checked(output)
        if self.labelled is not None:
            loss = self._loss(*merge_unlabelled(output, label, self.labelled), mask)
            if not self.exclusion:
                return loss
            apart = exclusion_loss(output, label, self.labelled, mask, form=self.exclusion_form)
            return loss + self.exclusion * apart
        if self.regions is not None:
            label = region_labels(label, self.regions.values())
        return self._loss(output, label, mask)

    def predict(self, module: nn.Module, example: Example) -> torch.Tensor:
        """Return the most probable class of every pixel.

        The image is moved to the network's device window by window; the result is on the image's.

        Args:
            module: The network, in evaluation mode.
            example: The case; its image is (B, C, *spatial).

        Returns:
            Classes, int64, (B, *spatial).

        Raises:
            ConfigError: The window does not suit the image or the network, or the network returns
                another number of channels than the task has.
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
            sw_device=device_of(module, image),
            device=image.device,
        )
        return self._classes(self._checked(logits))

    def predict_all(
        self, module: nn.Module, examples: Iterable[Example]
    ) -> Iterator[tuple[Example, torch.Tensor]]:
        """Yield cases with their predictions. See `Task.predict_all`.

        Cases that fit the window and are padded to one shape enter the network together, up to
        `batch_size` and `TOGETHER`. One that is left alone enters twice, since the last bits of a
        network's outputs are others for a batch of one; with one thread they are the same for any
        larger batch. No cases enter together if the network normalises by the batch.
        """
        if _normalises_by_batch(module):
            yield from ((example, self.predict(module, example)) for example in examples)
            return
        group: list[Example] = []
        shape: tuple[int, ...] = ()
        for example in examples:
            own = self._shape_in_batch(module, example.batch["image"])
            if group and (own != shape or len(group) == self._most_together(shape)):
                yield from zip(group, self._predict_group(module, group, shape), strict=True)
                group = []
            if self._most_together(own) < 2:
                yield example, self.predict(module, example)
            else:
                group.append(example)
            shape = own
        if group:
            yield from zip(group, self._predict_group(module, group, shape), strict=True)

    def windows(self, module: nn.Module, image: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the windows of an image, cut and padded as in `predict`.

        Args:
            module: The network.
            image: (B, C, *spatial).

        Yields:
            At most `batch_size` windows, (b, C, *window), on the network's device: for images that
            are larger than the window all windows of the grid, image by image.

        Raises:
            ConfigError: The window does not suit the image or the network.
        """
        window, device = self._window(module, tuple(image.shape[2:])), device_of(module, image)
        if _fits(tuple(image.shape[2:]), window):
            cuts = functional.pad(image, _padding(tuple(image.shape[2:]), window)[0])
        else:
            cuts = torch.cat([cut for single in image for cut in self._grid(single, window)])
        for batch in torch.split(cuts, self.batch_size):
            yield batch.to(device)

    def with_batch_size(self, size: int) -> SegmentationTask:
        """Return the same task with ``size`` windows or slices in one forward pass."""
        other = copy.copy(self)
        other.batch_size = size
        return other

    def with_labelled(self, names: Collection[str]) -> SegmentationTask:
        """Return the task at a site whose masks annotate some of the classes only.

        What belongs to another class is background in these masks. The loss merges these classes
        with the background (`collegium.tasks.losses.merge_unlabelled`), and has the exclusion loss
        added to it if that has a weight. Their scores are undefined, and means over structures are
        over the annotated ones. Predictions have all classes.

        Args:
            names: Names of the annotated classes, without the background, which always is.

        Returns:
            This task, if these are all classes.

        Raises:
            ConfigError: There is no such class or none is named, or regions overlap.
        """
        unknown = sorted(set(names) - self.structures.keys())
        if unknown or not names:
            named = f"names {unknown[0]!r}, which is no structure" if unknown else "is empty"
            raise ConfigError(
                f"labelled {named}: choose from {', '.join(self.structures)}, without the "
                f"background."
            )
        if len(set(names)) == len(self.structures):
            return self
        if self.regions is not None:
            raise ConfigError(
                "labelled is of classes, and regions overlap: the loss of regions has no form that "
                "leaves some of them out; give the classes without task.regions."
            )
        other = copy.copy(self)
        other.labelled = tuple(sorted(self.structures[name][0] for name in set(names)))
        return other

    def scores(
        self, prediction: torch.Tensor, example: Example, metrics: Sequence[str] | None = None
    ) -> dict[str, float | None]:
        """Score a case, or a volume of slices, inside its mask if it has one.

        Args:
            prediction: What `predict` returned, (B, *spatial).
            example: The case, with its label, (B, *spatial).
            metrics: Some of the task's metrics; None: all of them, also for each structure.

        Returns:
            A value for each metric; None if it is undefined, as for a class that the masks do not
            annotate.

        Raises:
            DataError: The spacing has another number of axes than the image.
        """
        label, mask, spacing = example.batch["label"], example.batch.get("mask"), _spacing(example)
        if len(label) == 1:
            prediction, label, mask = prediction[0], label[0], None if mask is None else mask[0]

        by_name = self._structures_of_case(prediction, label, mask, spacing)
        found = [structure for (structure,) in by_name.values()]
        result: dict[str, float | None] = {}
        for name in self.metrics if metrics is None else metrics:
            if name in IMAGE_METRICS:
                result[name] = self._score_image(name, prediction, label, mask)
                continue
            measure = STRUCTURE_METRICS[name]
            key = f"{name}_px" if name in DISTANCES and spacing is None else name
            result[key] = measure(found)
            for structure in self._separate_structures() if metrics is None else ():
                result[f"{key}_{structure}"] = measure(by_name.get(structure, []))
        return result

    def undefined_at(self, example: Example) -> list[str]:
        """Return the metrics that no case like this one has, whatever its masks.

        These are in millimetres or millilitres, and the case has no spacing of as many axes.

        Args:
            example: The case.

        Raises:
            DataError: The spacing has another number of axes than the image.
        """
        axes = len(_spacing(example) or ())
        return [name for name in self.metrics if axes < SPACED_AXES.get(name, 0)]

    def _structures_of_case(
        self,
        prediction: torch.Tensor,
        label: torch.Tensor,
        mask: torch.Tensor | None,
        spacing: Sequence[float] | None,
    ) -> dict[str, list[measures.Structure]]:
        """Return the annotated structures of a case by name, each in a list of its own."""
        known, given = self._annotated_structures(), self.surface_tolerance
        tolerances = None
        if given is not None:
            tolerances = [given[name] if isinstance(given, Mapping) else given for name in known]
        found = structures_of(
            prediction,
            label,
            mask=mask,
            spacing=spacing,
            regions=list(known.values()),
            tolerances=tolerances,
            lesion_overlap=self.lesion_overlap,
        )
        return {name: [structure] for name, structure in zip(known, found, strict=True)}

    def _score_image(
        self,
        name: str,
        prediction: torch.Tensor,
        label: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> float | None:
        """Return a metric of all classes together; None where the masks annotate some only."""
        if self.labelled is not None:
            return None
        if mask is not None:
            prediction, label = prediction[mask], label[mask]
        return IMAGE_METRICS[name](prediction, label)

    def add_set_scores(
        self, rows: Sequence[CaseScores], validation: Sequence[CaseScores] = ()
    ) -> list[CaseScores]:
        """Return the rows unchanged. See `Task.add_set_scores`."""
        return [*rows]

    def _annotated_structures(self) -> Mapping[str, Sequence[int]]:
        """Return the structures that the masks annotate."""
        if self.labelled is None:
            return self.structures
        return {name: (k,) for name, (k, *_) in self.structures.items() if k in self.labelled}

    def _separate_structures(self) -> Mapping[str, Sequence[int]]:
        """Return the structures that are also scored one by one."""
        return self.structures if 1 < len(self.structures) <= MAX_STRUCTURES else {}

    def _classes(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the class of every pixel of (B, channels, *spatial)."""
        if self.regions is None:
            return logits.max(dim=1).indices  # as argmax, in a tenth of its time
        predicted = (logits > 0).movedim(1, -1)
        belongs = [[c in region for region in self.regions.values()] for c in range(self.classes)]
        distances = [(predicted != row).sum(dim=-1) for row in torch.tensor(belongs).to(predicted)]
        return torch.stack(distances, dim=1).min(dim=1).indices

    def _window(self, module: nn.Module, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the configured window, or the image's size rounded up to a valid one."""
        divisors = _divisors(module, len(size))
        if self.window is None:
            pairs = zip(size, divisors, strict=True)
            return tuple(math.ceil(axis / divisor) * divisor for axis, divisor in pairs)
        fits = len(self.window) == len(size)
        if not fits or any(a % d for a, d in zip(self.window, divisors, strict=True)):
            needs = divisors[0] if len(set(divisors)) == 1 else divisors
            raise ConfigError(
                f"inference.window is {self.window} for images of {len(size)} axes: give one size "
                f"per axis, each a multiple of {needs}."
            )
        return self.window

    def _whole(
        self, module: nn.Module, image: torch.Tensor, window: tuple[int, ...]
    ) -> Iterator[torch.Tensor]:
        """Predict images that fit the window, a few at a time."""
        for batch in torch.split(image, self.batch_size):
            yield from self._at_once(module, [batch], window)

    def _at_once(
        self, module: nn.Module, images: Sequence[torch.Tensor], window: tuple[int, ...]
    ) -> Iterator[torch.Tensor]:
        """Predict images that fit the window in one forward pass, padded with zeros on all sides.

        Each is (b, C, *spatial), and so is what is yielded.
        """
        device = device_of(module, images[0])
        paddings = [_padding(tuple(image.shape[2:]), window) for image in images]
        padded = [
            functional.pad(image.to(device), padding)
            for image, (padding, _) in zip(images, paddings, strict=True)
        ]
        logits = self._checked(module(torch.cat(padded)))
        parts = torch.split(logits, [len(image) for image in images])
        for image, part, (_, unpadded) in zip(images, parts, paddings, strict=True):
            yield self._classes(part[:, :, *unpadded]).to(image.device)

    def _shape_in_batch(self, module: nn.Module, image: torch.Tensor) -> tuple[int, ...]:
        """Return the shape (C, *spatial) in which an image enters with others; () if it cannot."""
        window = self._window(module, tuple(image.shape[2:]))
        if len(image) > 1 or not _fits(tuple(image.shape[2:]), window):
            return ()
        return (image.shape[1], *window)

    def _most_together(self, shape: tuple[int, ...]) -> int:
        """Return how many images of a shape (C, *spatial) may share a forward pass; () gives 0."""
        limit = TOGETHER.get(len(shape) - 1, 0)
        return min(self.batch_size, limit // math.prod(shape[1:]))

    def _predict_group(
        self, module: nn.Module, group: Sequence[Example], shape: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Predict cases that enter the network together, with a shape (C, *spatial)."""
        images = [example.batch["image"] for example in group]
        images += images if len(group) == 1 else []
        return list(self._at_once(module, images, shape[1:]))[: len(group)]

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
        """Return the logits if they are one tensor with a channel for each class."""
        if not isinstance(logits, torch.Tensor):
            kind = type(logits).__name__
            raise ConfigError(f"the model returns a {kind}: let it return one tensor, the logits.")
        if logits.shape[1] != self.channels:
            kind = "classes" if self.regions is None else "regions"
            raise ConfigError(
                f"the model returns {logits.shape[1]} channels for {self.channels} {kind}: "
                f"set its out_channels to {self.channels}."
            )
        return logits


def _structures(
    classes: Sequence[str] | int, regions: Mapping[str, Sequence[int]] | None
) -> Mapping[str, Sequence[int]]:
    """Return the structures to score by name: the regions, or each class but the background."""
    if regions is not None:
        return regions
    names = [str(k) for k in range(classes)] if isinstance(classes, int) else classes
    return {name: (index,) for index, name in enumerate(names) if index}


def _spacing(example: Example) -> tuple[float, ...] | None:
    """Return the spacing of the scored case, of one image or of a stack; None unless all have one.

    Raises:
        DataError: It has another number of axes than the image.
    """
    spacing, stack = example.spacing, example.batch["label"]
    if spacing is None:
        return None
    if len(spacing) not in (stack.ndim, stack.ndim - 1):
        raise DataError(
            f"case {example.case!r} has a spacing of {len(spacing)} axes and an image of "
            f"{stack.ndim - 1}: correct the spacing or leave it out."
        )
    if len(stack) == 1:
        return tuple(spacing[-(stack.ndim - 1) :])
    return spacing if len(spacing) == stack.ndim else None


def _fits(size: tuple[int, ...], window: tuple[int, ...]) -> bool:
    return all(side <= limit for side, limit in zip(size, window, strict=True))


def _normalises_by_batch(module: nn.Module) -> bool:
    """Return whether the output for an image depends on the other images of its batch."""
    return any(
        isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and (layer.training or layer.running_mean is None)
        for layer in module.modules()
    )


def _padding(size: tuple[int, ...], target: tuple[int, ...]) -> tuple[list[int], list[slice]]:
    """Return torch's padding from one size to another on all sides, and the slices that undo it."""
    padding: list[int] = []
    unpadded: list[slice] = []
    for old, new in zip(size, target, strict=True):
        before = (new - old) // 2
        padding = [before, new - old - before, *padding]  # torch wants the last axis first
        unpadded.append(slice(before, before + old))
    return padding, unpadded


def _divisors(module: nn.Module, axes: int) -> tuple[int, ...]:
    """Return the number by which each side of an image must be divisible; 1 if it is unknown."""
    strides = getattr(module, "strides", None)
    levels = strides if isinstance(strides, Sequence) else ()
    by_axis = [(level,) * axes if isinstance(level, int) else tuple(level) for level in levels]
    if any(len(level) != axes for level in by_axis):
        return (1,) * axes
    return tuple(math.prod(level[axis] for level in by_axis) for axis in range(axes))
