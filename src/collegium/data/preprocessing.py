"""How a case's files become arrays: read, checked, resampled, normalised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from collegium.core.lazy import torch
from collegium.data.decoded_image import Array, DecodedImage, listed, resize_nearest
from collegium.data.reading import normalise, read_image, read_label, read_mask, shades_of_grey
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case
from collegium.errors import ConfigError, DataError

THICK = 1.5
"""The ratio to the other two voxel lengths from which an axis runs across thick slices."""


@dataclass(frozen=True)
class CaseArrays:
    """The arrays of one case.

    Attributes:
        image: (channels, *spatial).
        label: (*spatial); None if the case has a class instead.
        mask: Where pixels count, (*spatial): the field of view, if there is one; in a prepared
            case without what nobody annotated. None: everywhere.
    """

    image: Array
    label: Array | None
    mask: Array | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The spatial sizes."""
        return self.image.shape[1:]

    def map(self, function: Callable[[Array], Array]) -> CaseArrays:
        """Apply one function to every array."""
        label = None if self.label is None else function(self.label)
        mask = None if self.mask is None else function(self.mask)
        return CaseArrays(function(self.image), label, mask)

    def at(self, window: Sequence[slice | int]) -> CaseArrays:
        """Index the last axes of every array."""
        index: tuple[Any, ...] = (..., *window)
        return self.map(lambda values: values[index])


@dataclass(frozen=True)
class RawCase:
    """A case as decoded: aligned and checked, but neither resampled nor normalised.

    Attributes:
        arrays: The content of the files.
        spacing: Millimetres per spatial axis; None if unknown.
        notes: What was noticed and corrected while reading.
        full_scale: See `DecodedImage`.
        measured: Where the image holds measurements, in its shape.
        orientation: See `DecodedImage`.
        annotated: Where the label was annotated, (*spatial); None: everywhere.
    """

    arrays: CaseArrays
    spacing: tuple[float, ...] | None
    notes: tuple[str, ...]
    full_scale: float | None
    measured: Array
    orientation: str | None = None
    annotated: Array | None = None

    @property
    def inside(self) -> Array | None:
        """The pixels that count: those annotated in the field of view; None: all."""
        if self.arrays.mask is None or self.annotated is None:
            return self.arrays.mask if self.annotated is None else self.annotated
        both: Array = self.arrays.mask & self.annotated
        return both


@dataclass(frozen=True)
class PreprocessedCase:
    """A case as it is trained and scored on.

    Attributes:
        arrays: Resampled and normalised.
        spacing: Millimetres per spatial axis; None if unknown.
        notes: What was noticed and corrected while reading.
        slice_axis: For a volume, which of its RAS+ axes was moved to the end.
        vanished: See `vanished_classes`.
    """

    arrays: CaseArrays
    spacing: tuple[float, ...] | None
    notes: tuple[str, ...]
    slice_axis: int
    vanished: tuple[int, ...] = ()


def preprocess(case: Case, config: ImageConfig, task: TaskConfig) -> PreprocessedCase:
    """Return the arrays that a case is trained and scored on.

    Intensities are normalised inside the whole field of view, whatever part of it is annotated, as
    they are when a model is applied.

    Args:
        case: The case's files.
        config: How the image becomes an array.
        task: The meaning of the labels.

    Raises:
        DataError: The case's files are unusable.
        ConfigError: The settings do not fit the case.
    """
    return preprocess_decoded(case, decode_case(case, config, task), config)


def preprocess_decoded(case: Case, raw: RawCase, config: ImageConfig) -> PreprocessedCase:
    """Return the arrays that a decoded case is trained and scored on.

    Args:
        case: The case's files.
        raw: What `decode_case` returned for it.
        config: How the image becomes an array.

    Raises:
        DataError: The case's files are unusable.
        ConfigError: The settings do not fit the case.
    """
    raw, across = _sliced(raw, config)
    before = raw.arrays.shape
    after = target_shape(before, raw.spacing, config, str(case))
    arrays, gone = raw.arrays, _vanished(raw.arrays.label, after)
    if config.clip is not None:
        arrays = replace(arrays, image=np.clip(arrays.image, *config.clip).astype(np.float32))
    arrays = resize(arrays, after)
    name, image = str(case.images[0]), arrays.image
    if config.colour_constancy is not None:
        image = shades_of_grey(image, config.colour_constancy, full_scale=raw.full_scale, name=name)
    image = normalise(
        image,
        config.normalise,
        arrays.mask,
        np.stack([resize_nearest(channel, after) for channel in raw.measured]),
        full_scale=raw.full_scale,
        name=name,
    )
    mask = None if raw.inside is None else resize_nearest(raw.inside, after)
    spacing = raw.spacing
    if spacing is not None:
        spacing = tuple(s * b / a for s, b, a in zip(spacing, before, after, strict=True))
    return PreprocessedCase(
        CaseArrays(_placed(image, case, config), arrays.label, mask),
        spacing,
        raw.notes,
        across,
        gone,
    )


def vanished_classes(raw: RawCase, config: ImageConfig, where: str) -> tuple[int, ...]:
    """Return the classes that a label map shows on disk and not at the trained size or spacing.

    Args:
        raw: The decoded case.
        config: How the image becomes an array.
        where: The case, for errors.

    Raises:
        DataError: As `target_shape`; or ConfigError.
    """
    raw, _ = _sliced(raw, config)
    return _vanished(raw.arrays.label, target_shape(raw.arrays.shape, raw.spacing, config, where))


def vanishing_notes(classes: Sequence[str], gone: Iterable[tuple[str, int]]) -> list[str]:
    """Return a sentence for each class that cases show on disk only.

    Args:
        classes: The names of the classes.
        gone: Case and class, for each class that vanished from a case.
    """
    cases: dict[int, list[str]] = {}
    for case, value in gone:
        cases.setdefault(value, []).append(case)
    return [
        f"case{'s' if len(names) > 1 else ''} {listed(names)}: {classes[value]} is in the mask on "
        "disk and gone at the trained size or spacing: set a larger image.size or a finer "
        "image.spacing, or nothing is learnt from it there"
        for value, names in sorted(cases.items())
    ]


def slice_axis(along: str, spacing: tuple[float, ...] | None, orientation: str | None) -> int:
    """Return the axis perpendicular to the slices of a volume, counted in RAS+.

    Args:
        along: "x", "y" or "z"; or "acquisition": the file's third axis, as scanners and converters
            write it, unless the voxels are `THICK` times as long along another axis as along both
            others, as in a volume that was reoriented after its acquisition.
        spacing: Millimetres per axis of the volume in RAS+; None if unknown.
        orientation: The directions of the file's axes, such as "LPS"; None if unknown.
    """
    if along != "acquisition":
        return "xyz".index(along)
    thick = thick_axis(spacing)
    if thick is not None:
        return thick
    if orientation is None:
        return 2
    return next(k for k in range(3) if orientation[2] in ("RL", "AP", "SI")[k])


def thick_axis(spacing: tuple[float, ...] | None) -> int | None:
    """Return the axis of a volume along which voxels are much longer than along both others."""
    if spacing is None or len(spacing) != 3:
        return None
    *_, second, longest = sorted(spacing)
    return spacing.index(longest) if longest >= THICK * second else None


def _sliced(raw: RawCase, config: ImageConfig) -> tuple[RawCase, int]:
    """Move the axis across the slices of a volume to the end; return that axis too."""
    across = slice_axis(config.slices_along, raw.spacing, raw.orientation)
    return (_with_last(raw, across) if len(raw.arrays.shape) == 3 else raw), across


def _vanished(label: Array | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    if label is None or label.shape == shape:
        return ()
    kept = np.unique(resize_nearest(label, shape))
    return tuple(int(value) for value in np.setdiff1d(np.unique(label), kept) if value)


def _with_last(raw: RawCase, across: int) -> RawCase:
    """Move an axis of a volume to the end."""

    def moved(values: Array) -> Array:
        return np.moveaxis(values, across - 3, -1)

    spacing = raw.spacing
    if spacing is not None:
        spacing = (*spacing[:across], *spacing[across + 1 :], spacing[across])
    annotated = None if raw.annotated is None else moved(raw.annotated)
    return replace(
        raw,
        arrays=raw.arrays.map(moved),
        spacing=spacing,
        measured=moved(raw.measured),
        annotated=annotated,
    )


def decode_case(case: Case, image: ImageConfig, task: TaskConfig) -> RawCase:
    """Read a case's files and check that image, label and field of view fit each other.

    A case of a segmentation without a label gets one of zeros. One of whose label nothing is
    annotated is refused.

    Args:
        case: The case's files.
        image: How the image becomes an array.
        task: The meaning of the labels.

    Raises:
        DataError: A file is unusable or the shapes differ.
        ConfigError: The case's channels are not among the network's.
    """
    both = case.label is not None and case.label in case.images
    try:
        parts = {
            path: read_image(path, image.channels, series=case.series, both=both)
            for path in case.images
        }
        first = next(iter(parts.values()))
        label = None
        if case.label is not None and task.name == "segmentation":
            label = read_label(
                case.label,
                classes=task.classes,
                label_map=task.label_map,
                ignore=task.ignore,
                regions=task.regions,
                like=first,
                both=both,
            )
            _check_labelled(case, label.array, task)
        fov = None if case.fov is None else read_mask(case.fov, first)
    except DataError as error:
        raise DataError(f"{case}: {error}") from error
    read = [("image", path, part) for path, part in parts.items()]
    others = (("mask", case.label, label), ("field of view", case.fov, fov))
    read += [(role, path, other) for role, path, other in others if path and other]
    for role, path, part in read:
        _check_fit(case, first, part, path, role)
    array = np.concatenate([part.array for part in parts.values()])
    measured = np.concatenate([_measured(part) for part in parts.values()])
    if case.channels is not None and len(case.channels) < len(array) == image.inputs:
        # the file holds all channels, also those that the case is to lack
        array, measured = (values[_listed(case, image)] for values in (array, measured))
    _check_channels(case, image, array)
    zeros = np.zeros(array.shape[1:], np.uint8) if task.name == "segmentation" else None
    raw = RawCase(
        CaseArrays(
            array, zeros if label is None else label.array, None if fov is None else fov.array
        ),
        spacing=first.spacing,
        notes=tuple(note for _, _, part in read for note in part.notes),
        full_scale=first.full_scale,
        measured=measured,
        orientation=first.orientation,
        annotated=None if label is None else label.measured,
    )
    if raw.annotated is not None and raw.inside is not None and not raw.inside.any():
        raise DataError(
            f"{case}: {case.label} holds no annotated pixel{' in its field of view' * bool(fov)}, "
            f"but the value to ignore ({task.ignore}) alone: take the case out"
        )
    return raw


def _check_labelled(case: Case, label: Array, task: TaskConfig) -> None:
    """Refuse a mask that holds a class which the site has not labelled."""
    if case.labelled is None:
        return
    held = sorted({*np.unique(label).tolist()} - {0, *case.labelled})
    if held:
        names = listed([task.classes[value] for value in held])
        raise DataError(
            f"{case.label}: the mask holds {names}, which the site's labelled leaves out: add it "
            f"there, or map it to 0 by the site's label_map"
        )


def _measured(part: DecodedImage) -> Array:
    return np.ones(part.array.shape, bool) if part.measured is None else part.measured


def _check_channels(case: Case, config: ImageConfig, image: Array) -> None:
    """Refuse an image whose number of channels is not the configured or the site's own."""
    wanted = config.inputs if case.channels is None else len(case.channels)
    if wanted is not None and len(image) != wanted:
        setting = "image.inputs" if case.channels is None else "channels of the site"
        raise DataError(
            f"{case}: the image has {len(image)} channels (shape {image.shape}, channels first) "
            f"and {setting} says {wanted}: pick one volume of {case.images[0].name}, or correct "
            f"{setting}"
        )


def _placed(image: Array, case: Case, config: ImageConfig) -> Array:
    """Move the channels of a site to their places among the network's channels; others are 0."""
    if case.channels is None:
        return image
    places = _listed(case, config)
    whole = np.zeros((config.inputs or 0, *image.shape[1:]), image.dtype)
    whole[places] = image
    return whole


def _listed(case: Case, config: ImageConfig) -> list[int]:
    """Return the channels that a case has; refuse those that the network does not have."""
    channels = list(case.channels or ())
    if config.inputs is None or max(channels) >= config.inputs:
        raise ConfigError(
            f"site {case.site} has the channels {listed(channels)}, and image.inputs is "
            f"{config.inputs}: set it to the number of channels, which are counted from 0"
        )
    return channels


def resize(arrays: CaseArrays, shape: tuple[int, ...]) -> CaseArrays:
    """Resize the image (bi- or trilinear, antialiased in 2-D) and labels (by nearest neighbour).

    Slices of a volume are resized one by one, as in 2-D, if only the plane changes.

    Args:
        arrays: The case.
        shape: The new spatial sizes.
    """
    if arrays.shape == shape:
        return arrays
    image = torch.from_numpy(np.ascontiguousarray(arrays.image))
    if len(shape) == 3 and arrays.shape[2] == shape[2]:
        image = _interpolate(image.permute(3, 0, 1, 2), shape[:2]).permute(1, 2, 3, 0)
    else:
        image = _interpolate(image[None], shape)[0]
    label = None if arrays.label is None else resize_nearest(arrays.label, shape)
    mask = None if arrays.mask is None else resize_nearest(arrays.mask, shape)
    return CaseArrays(image.numpy(), label, mask)


def target_shape(
    shape: tuple[int, ...],
    spacing: tuple[float, ...] | None,
    config: ImageConfig,
    where: str,
) -> tuple[int, ...]:
    """Return the spatial sizes of a case after resampling or resizing.

    Args:
        shape: Before, the axis across the slices of a volume last.
        spacing: Millimetres per axis before; None if unknown.
        config: The spacing or the size that is wanted.
        where: The case, for errors.

    Raises:
        DataError: The spacing is unknown and one is wanted.
        ConfigError: The settings have more axes than the case.
    """
    size = config.size
    if config.spacing is not None:
        if spacing is None:
            raise DataError(
                f"{where}: its file does not state its spacing, and image.spacing resamples to "
                f"{config.spacing} mm: use image.size, or a format with a spacing"
            )
        if len(config.spacing) > len(shape):
            raise ConfigError(
                f"image.spacing has {len(config.spacing)} numbers, but {where} has the shape "
                f"{shape}: give {len(shape)}"
            )
        wanted = (*config.spacing, *spacing[len(config.spacing) :])
        scaled = (n * s / w for n, s, w in zip(shape, spacing, wanted, strict=True))
        return tuple(max(1, round(length)) for length in scaled)
    if size is None:
        return shape
    if isinstance(size, int):
        side = max(shape) if config.side == "longest" else min(shape)
        return tuple(max(1, round(length * size / side)) for length in shape)
    if len(size) not in (len(shape), max(2, len(shape) - 1)):
        raise ConfigError(
            f"image.size has {len(size)} numbers, but {where} has the shape {shape}: "
            f"give {len(shape)} numbers or one for the {config.side} side"
        )
    return (*size, *shape[len(size) :])


# --- details


def _check_fit(case: Case, image: DecodedImage, other: DecodedImage, path: Path, role: str) -> None:
    """Refuse another shape, or a position in space that is more than a tenth of a voxel away."""
    shape = image.array.shape[1:]
    spatial = other.array.shape[-len(shape) :] if role == "image" else other.array.shape
    if spatial != shape:
        raise DataError(
            f"{case}: {role} shape {spatial} differs from image {shape}: {path} against "
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
            f"{case}: {role} lies up to {offset:.1f} mm away from the image (origins {origins[0]} "
            f"and {origins[1]}): {path} against {case.images[0]}: resample it onto the image"
        )


def _interpolate(image: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    plane = len(shape) == 2
    mode = "bilinear" if plane else "trilinear"
    return torch.nn.functional.interpolate(image, shape, mode=mode, antialias=plane)
