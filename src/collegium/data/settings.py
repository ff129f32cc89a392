"""What a federation says of its images and its task: how files become arrays, what labels mean."""

import math
from dataclasses import dataclass

from collegium.data.decoded import listed
from collegium.data.reading import CHANNELS, NORMALISE
from collegium.data.tables import MISSING, plain_code
from collegium.errors import ConfigError, DataError

TASKS = ("segmentation", "classification")

SLICES_ALONG = ("x", "y", "z", "acquisition")


@dataclass(frozen=True)
class ImageConfig:
    """The recipe by which a file becomes an array; part of an entry's name.

    Attributes:
        channels: "keep", "grey", "rgb" or "green".
        inputs: How many channels the network gets; an image with others is refused. None: as many
            as the files hold.
        spacing: Millimetres per axis to resample volumes to, the image linearly and labels by the
            nearest voxel; None: as stored. Two numbers leave the third axis as it is.
        size: One number: the longest side after resizing; several: the exact size; None: as stored.
            Two numbers on volumes resize the slices and keep their number.
        slices_along: The axis of a volume that comes last, so that slices are taken along it: "x",
            "y" or "z" towards right, front and head, or "acquisition", see
            `collegium.data.recipe.slice_axis`. Sizes, spacings, crops and windows count the two
            axes of the slices first.
        clip: The least and the greatest intensity, to which others are cut off first; for CT.
        normalise: "zscore" (per case and channel, inside the field of view), "zscore_nonzero" (by
            and of the voxels that are not 0), "minmax" (0 to 1), "symmetric" (-1 to 1), "scale" (by
            the range of the file's integer type) or "none".
    """

    channels: str = "keep"
    inputs: int | None = None
    spacing: tuple[float, ...] | None = None
    size: tuple[int, ...] | int | None = None
    slices_along: str = "z"
    clip: tuple[float, float] | None = None
    normalise: str = "zscore"

    def __post_init__(self) -> None:
        for key, choices in (
            ("channels", CHANNELS),
            ("normalise", NORMALISE),
            ("slices_along", SLICES_ALONG),
        ):
            if getattr(self, key) not in choices:
                raise ConfigError(
                    f"image.{key} is {getattr(self, key)!r}: choose one of {', '.join(choices)}"
                )
        if min([self.size] if isinstance(self.size, int) else self.size or [1]) < 1:
            raise ConfigError(f"image.size is {self.size!r}: give whole numbers above 0")
        if self.spacing is not None and (len(self.spacing) not in (2, 3) or min(self.spacing) <= 0):
            raise ConfigError(f"image.spacing is {self.spacing!r}: give two or three lengths in mm")
        if self.spacing is not None and self.size is not None:
            raise ConfigError("image.spacing and image.size both say how large: give one of them")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ConfigError(f"image.clip is {self.clip!r}: give the least and the greatest value")
        if self.inputs is not None and self.inputs < 1:
            raise ConfigError(f"image.inputs is {self.inputs}: give a whole number above 0")


@dataclass(frozen=True)
class TaskConfig:
    """What the labels mean.

    Attributes:
        name: The kind of task: "segmentation" or "classification".
        classes: Names of the classes by value; of a segmentation the background first.
        label_map: Stored value to class, where the label maps hold other values.
        regions: Of a segmentation, what is learnt where structures overlap: by name the classes
            that a region is made of, such as {WT: [1, 2, 3], TC: [1, 3], ET: [3]}. The network then
            gives one channel for each region. None: each pixel has one class.
        coding: Of a classification, what is written to the name of its class, where tables or
            manifests hold other words: {"0": healthy, "1": ill, "2": ill}.
        metric: What selects models on validation cases; None: Dice, or accuracy.
        weights: Of a classification, how much a case of each class counts in the loss, in the order
            of `classes`; the loss is still divided by the number of cases. None: 1 each.
    """

    name: str = "segmentation"
    classes: tuple[str, ...] = ("background", "foreground")
    label_map: dict[int, int] | None = None
    regions: dict[str, tuple[int, ...]] | None = None
    coding: dict[str, str] | None = None
    metric: str | None = None
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise ConfigError(f"task.name is {self.name!r}: choose one of {', '.join(TASKS)}")
        if not 2 <= len(self.classes) <= 256:
            raise ConfigError(
                f"task.classes names {len(self.classes)} classes: name 2 to 256, of a "
                f"segmentation the background first"
            )
        if self.name != "segmentation" and (self.regions or self.label_map):
            raise ConfigError("task.regions and task.label_map are for segmentations: leave both")
        wrong = [
            name
            for name, values in (self.regions or {}).items()
            if not values or not set(values) <= set(range(1, len(self.classes)))
        ]
        if wrong:
            raise ConfigError(
                f"task.regions.{wrong[0]} should list classes from 1 to {len(self.classes) - 1}"
            )
        unknown = sorted(set((self.coding or {}).values()) - set(self.classes))
        if unknown:
            raise ConfigError(f"task.coding names {unknown[0]!r}, which is not in task.classes")
        self._check_weights()

    def _check_weights(self) -> None:
        if self.weights is None:
            return
        if self.name != "classification":
            raise ConfigError("task.weights is for classifications: leave it out")
        right = all(0 < weight < math.inf for weight in self.weights)
        if not right or len(self.weights) != len(self.classes):
            raise ConfigError(
                f"task.weights is {list(self.weights)}: give {len(self.classes)} numbers above 0, "
                f"one for each of task.classes, or null"
            )

    @property
    def channels(self) -> int:
        """How many channels the network gives."""
        return len(self.regions or self.classes)

    def class_of(self, written: str, where: str, *, row: bool = False) -> int:
        """Return the class that a word stands for; where 3.0 stands for none, that of 3.

        Args:
            written: The word.
            where: Where it stands, for messages.
            row: Whether it stands in a row of a table, whose cells no message repeats.

        Raises:
            DataError: There is no such class.
        """
        names = [(self.coding or {}).get(word, word) for word in (written, plain_code(written))]
        name = next((name for name in names if name in self.classes), None)
        if name is not None:
            return self.classes.index(name)
        if written.lower() in (MISSING if row else ("",)):
            raise DataError(
                f"{where} has no class: fill it in or leave the {'row' if row else 'case'} out"
            )
        raise DataError(
            f"{where}: the class {'' if row else f'{written!r} '}is unknown: write one of "
            f"{listed(self.classes)}, or say in task.coding what it stands for"
        )
