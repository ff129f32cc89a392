"""The recipe by which a case's files become arrays: read, checked, resized, normalised."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collegium.data.reading import (
    CHANNELS,
    NORMALISE,
    Decoded,
    normalise,
    read_image,
    read_label,
    read_mask,
)
from collegium.data.site import Case
from collegium.errors import ConfigError, DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class ImageConfig:
    """The recipe by which a file becomes an array; part of an entry's name.

    Attributes:
        channels: "keep", "grey", "rgb" or "green".
        size: One number: the longest side after resizing; several: the exact size; None: as stored.
            Two numbers on volumes resize the slices and keep their number.
        normalise: "zscore" (per case and channel, inside the field of view), "minmax", "scale" (by
            the range of the file's integer type) or "none".
    """

    channels: str = "keep"
    size: tuple[int, ...] | int | None = None
    normalise: str = "zscore"

    def __post_init__(self) -> None:
        for key, choices in (("channels", CHANNELS), ("normalise", NORMALISE)):
            if getattr(self, key) not in choices:
                raise ConfigError(
                    f"image.{key} is {getattr(self, key)!r}: choose one of {', '.join(choices)}"
                )
        if min([self.size] if isinstance(self.size, int) else self.size or [1]) < 1:
            raise ConfigError(f"image.size is {self.size!r}: give whole numbers above 0")


@dataclass(frozen=True)
class TaskConfig:
    """What the labels mean.

    Attributes:
        name: The kind of task: "segmentation".
        classes: Names of the classes by value, the background first.
        label_map: Stored value to class, where the files hold other values.
    """

    name: str = "segmentation"
    classes: tuple[str, ...] = ("background", "foreground")
    label_map: dict[int, int] | None = None

    def __post_init__(self) -> None:
        if self.name != "segmentation":
            raise ConfigError(f"task.name is {self.name!r}: choose segmentation")
        if not 2 <= len(self.classes) <= 256:
            raise ConfigError(
                f"task.classes names {len(self.classes)} classes: name 2 to 256, background first"
            )


@dataclass(frozen=True)
class Arrays:
    """The arrays of one case: image (C, *spatial), label and, where there is one, field of view."""

    image: Array
    label: Array
    mask: Array | None

    def map(self, function: Callable[[Array], Array]) -> "Arrays":
        """Apply one function to every array."""
        mask = None if self.mask is None else function(self.mask)
        return Arrays(function(self.image), function(self.label), mask)

    def at(self, window: Sequence[slice | int]) -> "Arrays":
        """Index the last axes of every array."""
        index: tuple[Any, ...] = (..., *window)
        return self.map(lambda values: values[index])


@dataclass(frozen=True)
class RawCase:
    """A case as decoded: aligned, checked, neither resized nor normalised."""

    arrays: Arrays
    spacing: tuple[float, ...] | None
    notes: tuple[str, ...]
    full_scale: float | None
    finite: Array


def make(
    case: Case, config: ImageConfig, task: TaskConfig
) -> tuple[Arrays, tuple[float, ...] | None, tuple[str, ...]]:
    """Make the arrays that a case is trained and scored on, their spacing and what was noticed.

    Raises:
        DataError: If the case's files are unusable.
        ConfigError: If the recipe does not fit the case.
    """
    raw = decode(case, config, task)
    before = raw.arrays.label.shape
    after = _target_shape(before, config.size, str(case))
    arrays = resize(raw.arrays, after)
    finite = np.stack([nearest(channel, after) for channel in raw.finite])
    image = normalise(
        arrays.image,
        config.normalise,
        arrays.mask,
        finite,
        full_scale=raw.full_scale,
        name=str(case.images[0]),
    )
    spacing = raw.spacing
    if spacing is not None:
        spacing = tuple(s * b / a for s, b, a in zip(spacing, before, after, strict=True))
    return replace(arrays, image=image), spacing, raw.notes


def decode(case: Case, image: ImageConfig, task: TaskConfig) -> RawCase:
    """Read a case's files and check that image, label and field of view fit each other.

    A case without a label gets one of zeros.

    Raises:
        DataError: If a file is unusable or the shapes differ.
    """
    try:
        parts = {path: read_image(path, image.channels) for path in case.images}
        label = _read_label(case, task)
        fov = None if case.fov is None else read_mask(case.fov)
    except DataError as error:
        raise DataError(f"{case}: {error}") from error
    first = next(iter(parts.values()))
    for path, part in parts.items():
        _check_fit(case, first, part, path, "image")
    if label is not None and case.label is not None:
        _check_fit(case, first, label, case.label, "mask")
    if fov is not None and case.fov is not None:
        _check_fit(case, first, fov, case.fov, "field of view")
    read = [*parts.values(), *filter(None, (label, fov))]
    finite = [
        np.ones(part.array.shape, bool) if part.finite is None else part.finite
        for part in parts.values()
    ]
    return RawCase(
        Arrays(
            np.concatenate([part.array for part in parts.values()]),
            np.zeros(first.array.shape[1:], np.uint8) if label is None else label.array,
            None if fov is None else fov.array,
        ),
        spacing=first.spacing,
        notes=tuple(note for part in read for note in part.notes),
        full_scale=first.full_scale,
        finite=np.concatenate(finite),
    )


def _read_label(case: Case, task: TaskConfig) -> Decoded | None:
    if case.label is None:
        return None
    return read_label(case.label, classes=len(task.classes), label_map=task.label_map)


def resize(arrays: Arrays, shape: tuple[int, ...]) -> Arrays:
    """Resize to `shape`: the image (bi- or trilinear, antialiased in 2-D), labels by the nearest.

    Slices of a volume are resized one by one, as in 2-D, where only the plane changes.
    """
    if arrays.label.shape == shape:
        return arrays
    image = torch.from_numpy(np.ascontiguousarray(arrays.image))
    if len(shape) == 3 and arrays.label.shape[2] == shape[2]:
        image = _interpolate(image.permute(3, 0, 1, 2), shape[:2]).permute(1, 2, 3, 0)
    else:
        image = _interpolate(image[None], shape)[0]
    mask = None if arrays.mask is None else nearest(arrays.mask, shape)
    return Arrays(image.numpy(), nearest(arrays.label, shape), mask)


# --- details


def _check_fit(case: Case, image: Decoded, other: Decoded, path: Path, what: str) -> None:
    """Refuse another shape, or a place in the world that is more than a tenth of a voxel away."""
    shape = image.array.shape[1:]
    spatial = other.array.shape[-len(shape) :] if what == "image" else other.array.shape
    if spatial != shape:
        raise DataError(
            f"{case}: {what} shape {spatial} differs from image {shape}: {path} against "
            f"{case.images[0]}: export both from the same series"
        )
    if image.affine is None or other.affine is None:
        return
    last = np.subtract([*shape, 1][:3], 1)
    corners = np.array([[*corner, 1] for corner in np.ndindex(2, 2, 2)]) * [*last, 1]
    offset = float(np.linalg.norm(corners @ (other.affine - image.affine).T, axis=1).max())
    if offset > 0.1 * np.linalg.norm(image.affine[:3, :3], axis=0).min():
        origins = [
            tuple(round(float(x), 3) for x in a[:3, 3]) for a in (image.affine, other.affine)
        ]
        raise DataError(
            f"{case}: {what} lies up to {offset:.1f} mm away from the image (origins {origins[0]} "
            f"and {origins[1]}): {path} against {case.images[0]}: resample it onto the image"
        )


def _target_shape(
    shape: tuple[int, ...], size: tuple[int, ...] | int | None, where: str
) -> tuple[int, ...]:
    if size is None:
        return shape
    if isinstance(size, int):
        return tuple(max(1, round(length * size / max(shape))) for length in shape)
    if len(size) not in (len(shape), max(2, len(shape) - 1)):
        raise ConfigError(
            f"image.size has {len(size)} numbers, but {where} has the shape {shape}: "
            f"give {len(shape)} numbers or one for the longest side"
        )
    return (*size, *shape[len(size) :])


def _interpolate(image: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    plane = len(shape) == 2
    mode = "bilinear" if plane else "trilinear"
    return torch.nn.functional.interpolate(image, shape, mode=mode, antialias=plane)


def nearest(labels: Array, shape: tuple[int, ...]) -> Array:
    """Resize a label map: each new entry is the one whose centre is nearest."""
    rows = [
        np.minimum((np.arange(new) * 2 + 1) * old // (2 * new), old - 1)
        for old, new in zip(labels.shape, shape, strict=True)
    ]
    return labels[np.ix_(*rows)]
