"""The settings of images and of the task: how files become arrays, and what labels mean."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from collegium.core.settings import (
    NonNegative,
    OpenUnitInterval,
    Positive,
    PositiveInt,
    Share,
    UnitInterval,
    settings,
)
from collegium.data.columns import nfc, plain_code
from collegium.data.decoded_image import listed
from collegium.data.reading import Channels, Normalisation
from collegium.data.tables import MISSING
from collegium.errors import ConfigError, DataError


@settings
class ImageConfig:
    """The preprocessing of images; part of the name of an entry in the cache.

    Attributes:
        channels: "keep", "grey", "rgb" or "green".
        inputs: The number of the network's channels; an image with another number is refused. None:
            as many as the files hold, or as there are modalities.
        modalities: The names of the network's channels, in order, by which a site may say which
            ones it has.
        spacing: Millimetres per axis to resample volumes to, the image linearly and labels by
            nearest neighbour; None: as stored. Two numbers leave the third axis as it is.
        size: One number: the longest side after resizing; several: the exact size; None: as stored.
            Two numbers on volumes resize the slices and keep their number.
        side: Which side one number as `size` sets: the "longest" or the "shortest".
        slices_along: The axis of a volume that comes last, so that slices are taken along it: "x",
            "y" or "z" towards right, front and head, or "acquisition", see
            `collegium.data.preprocessing.slice_axis`. Sizes, spacings, crops and windows count the
            two axes of the slices first.
        clip: The lowest and the highest intensity, to which others are clipped first; for CT.
        colour_constancy: For pictures in colour, the norm p of shades of grey, by which the colour
            of the light is estimated and taken out before `normalise`, see
            `collegium.data.reading.shades_of_grey`: 6 is what the paper found best, 1 is grey
            world. None: colours stay as they are.
        normalise: "zscore" (per case and channel, inside the field of view), "zscore_nonzero" (from
            and for the voxels that are not 0), "minmax" (0 to 1), "symmetric" (-1 to 1), "scale"
            (by the range of the file's integer type) or "none".
    """

    channels: Channels = "keep"
    inputs: PositiveInt | None = None
    modalities: tuple[str, ...] | None = None
    spacing: tuple[Positive, ...] | None = None
    size: tuple[PositiveInt, ...] | PositiveInt | None = None
    side: Literal["longest", "shortest"] = "longest"
    slices_along: Literal["x", "y", "z", "acquisition"] = "z"
    clip: tuple[float, float] | None = None
    colour_constancy: Annotated[float, Ge(1), Le(64)] | None = None
    normalise: Normalisation = "zscore"

    def __post_init__(self) -> None:
        if self.spacing is not None and len(self.spacing) not in (2, 3):
            raise ConfigError(f"image.spacing is {self.spacing!r}: give two or three lengths in mm")
        if self.spacing is not None and self.size is not None:
            raise ConfigError("image.spacing and image.size both say how large: give one of them")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ConfigError(f"image.clip is {self.clip!r}: give the least and the greatest value")
        if self.colour_constancy is not None and self.channels in ("grey", "green"):
            raise ConfigError(
                f"image.colour_constancy needs colours, and image.channels is {self.channels}: set "
                f"image.channels to rgb or leave image.colour_constancy out"
            )
        if self.modalities is not None:
            self._check_modalities(self.modalities)

    def _check_modalities(self, names: tuple[str, ...]) -> None:
        """Set `inputs` to the number of modalities, or refuse another number."""
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"image.modalities is {list(names)}: name every channel of the network once"
            )
        if self.inputs not in (None, len(names)):
            raise ConfigError(
                f"image.modalities names {len(names)} channels and image.inputs is {self.inputs}: "
                f"leave image.inputs out"
            )
        object.__setattr__(self, "inputs", len(names))


@settings
class TaskConfig:
    """The task: what is learnt, and the meaning of the labels.

    Attributes:
        name: The kind of task: "segmentation" or "classification".
        classes: Names of the classes by value; for a segmentation the background first.
        label_map: Stored value to class, if the label maps hold other values.
        ignore: For a segmentation, the value of pixels that nobody annotated, such as 255, after
            `label_map`: they are outside every loss, score and size, as what is outside the field
            of view is. A data set that names a label ignore needs it not, see `task_of_site`. None:
            everything is annotated.
        regions: For a segmentation of overlapping structures: the classes that make up each region,
            by its name, such as {WT: [1, 2, 3], TC: [1, 3], ET: [3]}. The network then has one
            output channel per region. None: each pixel has one class.
        coding: For a classification, from the written label to the name of its class, if tables or
            manifests hold other words: {"0": healthy, "1": ill, "2": ill}.
        metric: The metric that selects models on validation cases; None: Dice, or accuracy.
        metrics: Further metrics of the test cases, beside those that every run has, such as
            surface_dice or assd.
        surface_tolerance: The tolerance of surface_dice in mm, or that of each structure by name.
        lesion_overlap: For lesion_sensitivity and lesion_false_positives, the least IoU of a lesion
            and a predicted component that finds it; 0: any common voxel.
        least_sensitivity: For sensitivity and specificity, the sensitivity that each site's
            threshold has to reach on its validation cases; None: the one with the largest Youden
            index is chosen.
        prevalence: For ppv and npv, the prevalence of the second class where decisions are made;
            with more than two classes that of some of them, by name.
        calibration_bins: For ece, how many bins of equal width divide the probabilities.
        weights: For a classification, the weight of a case of each class in the loss, in the order
            of `classes`; the loss is still divided by the number of cases. None: 1 each.
        exclusion: For a segmentation, the weight of the exclusion loss at sites whose masks
            annotate some of the classes only.
        exclusion_form: "dice" or "ce", see `collegium.tasks.losses.exclusion_loss`.
    """

    name: Literal["segmentation", "classification"] = "segmentation"
    classes: tuple[str, ...] = ("background", "foreground")
    label_map: dict[int, int] | None = None
    ignore: int | None = None
    regions: dict[str, tuple[int, ...]] | None = None
    coding: dict[str, str] | None = None
    metric: str | None = None
    metrics: tuple[str, ...] = ()
    surface_tolerance: Positive | dict[str, Positive] | None = None
    lesion_overlap: UnitInterval = 0.0
    least_sensitivity: Share | None = None
    prevalence: OpenUnitInterval | dict[str, OpenUnitInterval] | None = None
    calibration_bins: PositiveInt = 10
    weights: tuple[Positive, ...] | None = None
    exclusion: NonNegative = 0.0
    exclusion_form: Literal["dice", "ce"] = "dice"

    def __post_init__(self) -> None:
        if not 2 <= len(self.classes) <= 256:
            raise ConfigError(
                f"task.classes names {len(self.classes)} classes: name 2 to 256, of a "
                f"segmentation the background first"
            )
        if self.name == "segmentation" and "ignore" in map(str.casefold, self.classes):
            raise ConfigError(
                "task.classes names ignore, by which nnU-Net means pixels that nobody annotated; "
                "they are no class: leave it out there, and give their value in the masks as "
                "task.ignore, unless a dataset.json names it; nothing is trained or scored on them"
            )
        if self.name != "segmentation" and (self.regions or self.label_map):
            raise ConfigError("task.regions and task.label_map are for segmentations: leave both")
        self._check_ignore()
        if self.exclusion and (self.name != "segmentation" or self.regions):
            raise ConfigError(
                "task.exclusion is for segmentations into classes of which some sites annotate "
                "some only: leave it out"
            )
        if self.name != "segmentation" and (self.surface_tolerance or self.lesion_overlap):
            raise ConfigError(
                "task.surface_tolerance and task.lesion_overlap are for segmentations: leave both"
            )
        if self.name != "classification" and (self.least_sensitivity or self.prevalence):
            raise ConfigError(
                "task.least_sensitivity and task.prevalence are for classifications: leave both"
            )
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

    def _check_ignore(self) -> None:
        if self.ignore is None:
            return
        if self.name != "segmentation":
            raise ConfigError("task.ignore is a value of masks, for segmentations: leave it out")
        if 0 <= self.ignore < len(self.classes):
            raise ConfigError(
                f"task.ignore is {self.ignore}, which is the class {self.classes[self.ignore]}: "
                f"map the value of what nobody annotated to another one by task.label_map, as in "
                f"{{{self.ignore}: 255}}, and set task.ignore: 255"
            )

    def _check_weights(self) -> None:
        if self.weights is None:
            return
        if self.name != "classification":
            raise ConfigError("task.weights is for classifications: leave it out")
        if len(self.weights) != len(self.classes):
            raise ConfigError(
                f"task.weights is {list(self.weights)}: give {len(self.classes)} numbers above 0, "
                f"one for each of task.classes, or null"
            )

    @property
    def channels(self) -> int:
        """The number of the network's output channels."""
        return len(self.regions or self.classes)

    def class_of(self, written: str, where: str, *, row: bool = False) -> int:
        """Return the class of a written label; a label 3.0 that is not known itself counts as 3.

        Args:
            written: The label as written.
            where: Its location, for messages.
            row: Whether it is a cell of a table, whose content no message repeats.

        Raises:
            DataError: There is no such class.
        """
        if (found := self.find_class(written)) is not None:
            return found
        if written.lower() in (MISSING if row else ("",)):
            raise DataError(
                f"{where} has no class: fill it in or leave the {'row' if row else 'case'} out"
            )
        raise DataError(
            f"{where}: the class {'' if row else f'{written!r} '}is unknown: write one of "
            f"{listed(self.classes)}, or add it to task.coding"
        )

    def find_class(self, written: str) -> int | None:
        """Return the class of a written label, see `class_of`; None if it is none.

        Args:
            written: The label as written.
        """
        classes = [nfc(name) for name in self.classes]
        coding = {nfc(word): nfc(name) for word, name in (self.coding or {}).items()}
        words = (nfc(written), plain_code(written))
        names = [coding.get(word, word) for word in words]
        return next((classes.index(name) for name in names if name in classes), None)
