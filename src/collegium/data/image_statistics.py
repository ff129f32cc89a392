"""Statistics of a site's images and labels, collected case by case."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np

from collegium.data.decoded_image import Array
from collegium.data.fingerprints import fingerprint
from collegium.data.preprocessing import RawCase, slice_axis, thick_axis, vanished_classes
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case


@dataclass(frozen=True)
class LabelSize:
    """The size of a structure over the cases that show it.

    Attributes:
        label: The class's value; for a region its name.
        unit: "mL" for volumes, "mm2" for pictures and single slices, "px" if no spacing is known.
        cases: Number of cases.
        least: The smallest.
        middle: The median.
        greatest: The largest.
    """

    label: int | str
    unit: str
    cases: int
    least: float
    middle: float
    greatest: float


@dataclass(frozen=True)
class IgnoredPixels:
    """The pixels or voxels of masks that nobody annotated, over the cases that have some.

    Attributes:
        cases: Number of cases.
        least: The fewest of a case.
        middle: The median.
        greatest: The most of a case.
        share: Their share of all pixels of these cases.
    """

    cases: int
    least: int
    middle: float
    greatest: int
    share: float


@dataclass(frozen=True)
class MissingChannel:
    """A channel of the network that cases of a site lack.

    Attributes:
        channel: The index among the network's channels, from 0.
        name: Its name, if a data set of the federation states it.
        cases: Number of cases that lack it.
    """

    channel: int
    name: str | None
    cases: int


class ImageStatistics:
    """Statistics of the cases of a site, updated by each case that is added.

    Args:
        task: The meaning of the labels there.
        image: How a file becomes an array.
        salt: The salt of the fingerprints.
    """

    def __init__(self, task: TaskConfig, image: ImageConfig, salt: str) -> None:
        self.task, self.image = task, image
        self._salt = salt
        self.count = 0
        self.shapes: Counter[str] = Counter()
        self.spacings: Counter[str] = Counter()
        self.orientations: Counter[str] = Counter()
        self.channels: Counter[str] = Counter()
        self.labels: Counter[int] = Counter()
        self.targets: Counter[str] = Counter()
        self.intensity: tuple[float, float] | None = None
        self.foreground = 0
        self.counted = 0
        self.thick: Counter[int] = Counter()
        self.notes: list[str] = []
        self.vanished: list[tuple[str, int]] = []
        self.fingerprints: dict[Case, str] = {}
        self.equal_channels: dict[Case, tuple[Path, ...]] = {}
        self._missing: Counter[int] = Counter()
        self._ignored: list[tuple[int, int]] = []
        self._sizes: dict[tuple[int | str, str], list[float]] = defaultdict(list)

    def add(self, case: Case, raw: RawCase) -> None:
        """Add one case.

        Args:
            case: The case.
            raw: Its decoded arrays.

        Raises:
            DataError: Its class is unknown, or it cannot be brought to the size of training.
            ConfigError: The size of training has another number of axes.
        """
        gone = vanished_classes(raw, self.image, str(case))
        self.vanished += [(case.case, value) for value in gone]
        image = raw.arrays.image
        self.count += 1
        self.shapes["x".join(map(str, raw.arrays.shape))] += 1
        self.channels[str(len(image))] += 1
        spacing = raw.spacing
        self.spacings["x".join(f"{mm:g}" for mm in spacing) if spacing else "unknown"] += 1
        self.orientations[raw.orientation or "none"] += 1
        thick = thick_axis(spacing)
        if thick not in (None, slice_axis(self.image.slices_along, spacing, raw.orientation)):
            self.thick[thick] += 1
        low, high = float(image.min()), float(image.max())
        before = self.intensity or (low, high)
        self.intensity = min(low, before[0]), max(high, before[1])
        self.fingerprints[case] = fingerprint(image, self._salt)
        self.notes += raw.notes
        self._add_channels(case, image)
        if self.task.name == "classification":
            self.targets[str(case.target)] += 1
            self.task.class_of(str(case.target), str(case))
        elif raw.arrays.label is not None:
            self._add_label(raw.arrays.label, raw)

    def sizes(self) -> tuple[LabelSize, ...]:
        """Return the size of each label, followed by each region."""
        order = [*range(len(self.task.classes)), *(self.task.regions or {})]
        return tuple(
            LabelSize(label, unit, len(sizes), min(sizes), median(sizes), max(sizes))
            for (label, unit), sizes in sorted(
                self._sizes.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1])
            )
        )

    def ignored(self) -> IgnoredPixels | None:
        """Return the pixels that nobody annotated; None if there are none."""
        if not self._ignored:
            return None
        counts, of = zip(*self._ignored, strict=True)
        share = sum(counts) / sum(of)
        return IgnoredPixels(len(counts), min(counts), median(counts), max(counts), share)

    def missing(self, names: Mapping[int, str]) -> tuple[MissingChannel, ...]:
        """Return the channels that cases lack, with their names as far as these are known."""
        return tuple(
            MissingChannel(channel, names.get(channel), cases)
            for channel, cases in sorted(self._missing.items())
        )

    def _add_channels(self, case: Case, image: Array) -> None:
        """Count the channels that a case lacks, and record files of it that are the same image."""
        if case.channels is not None:
            self._missing.update(set(range(self.image.inputs or 0)) - set(case.channels))
        for one, other in combinations(range(len(case.images)), 2):
            first, second = image[one : one + 1], image[other : other + 1]
            if len(image) == len(case.images) and np.ptp(first) and np.array_equal(first, second):
                self.equal_channels[case] = tuple(sorted({case.images[one], case.images[other]}))

    def _add_label(self, label: Array, raw: RawCase) -> None:
        known = label if raw.annotated is None else label[raw.annotated]
        if known.size < label.size:
            self._ignored.append((label.size - known.size, label.size))
        values, counts = np.unique(known, return_counts=True)
        self.labels.update(values.tolist())
        pixels: dict[int | str, int] = dict(zip(values.tolist(), counts.tolist(), strict=True))
        for region, classes in (self.task.regions or {}).items():
            pixels[region] = sum(pixels.get(value, 0) for value in classes)
        for structure, held in pixels.items():
            if structure and held:
                size, unit = _size(held, raw.spacing)
                self._sizes[structure, unit].append(size)
        inside = label if raw.inside is None else label[raw.inside]
        self.foreground += int(np.count_nonzero(inside))
        self.counted += inside.size


def _size(count: int, spacing: tuple[float, ...] | None) -> tuple[float, str]:
    """Return the size of a number of pixels or voxels, and its unit."""
    if spacing is None:
        return float(count), "px"
    size = count * math.prod(spacing)
    return (size / 1000, "mL") if len(spacing) == 3 else (size, "mm2")
