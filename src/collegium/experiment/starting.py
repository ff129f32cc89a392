"""Starting values of an experiment, chosen from a federation's data by fixed rules.

The rules are those of `docs/recipes.md`. What the federation's own description states stays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, median_low
from typing import Any, Literal

from collegium.data.federation_config import FederationConfig, sites_of
from collegium.data.inspection import FederationInspection, SiteInspection, inspect_federation
from collegium.data.preprocessing import slice_axis, target_shape
from collegium.data.sampling import SamplingConfig
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.table_inspection import inspect_tables
from collegium.errors import ConfigError, DataError

SEEDS = 5
"""Trainings of each method."""

MOST_SIDE = {2: 128, 3: 64}
"""The longest side of a crop of a segmentation, by the number of its axes."""

MOST_IMAGE = {2: 224, 3: 64}
"""The longest side of an image that is classified."""

SMALL_IMAGE = {2: 64, 3: 32}
"""Up to this longest side a DenseNet keeps the resolution in its first layer."""

MOST_WINDOW = {2: 512, 3: 96}
"""Images with a longer side are predicted in windows of this side."""

FACTOR, LEAST_SIDE = 8, 16
"""Sides of crops are multiples of what three halvings of the U-Net divide by, and no shorter."""

THICK_SLICES, FEW_SLICES = 3.0, 16
"""Volumes are cut into slices from this ratio of voxel lengths on, or with fewer slices."""

LARGE_CROP = 2**17
"""Voxels of a crop beyond which a batch holds half as many."""

RARE_FOREGROUND, RARE_CLASS = 0.05, 0.1
"""Shares of an image and of the cases below which a structure and a class are rare."""

UNEQUAL_SPACING = 1.1
"""Volumes are resampled where voxels of one axis differ by more than this ratio."""

MANY_ROWS = 1000
"""From so many rows to train on a perceptron has its larger layers."""

LEAST_STEPS, LEAST_TABLE_STEPS, MOST_STEPS = 20, 5, 30
"""Steps of a round: at least, for images and for tables, and at most."""

AXES: tuple[Literal["x", "y", "z"], ...] = ("x", "y", "z")


@dataclass(frozen=True)
class Choice:
    """A setting that was chosen.

    Attributes:
        key: Its key in an experiment file.
        value: Its value, as YAML holds it.
        why: The reason, in a few words.
    """

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class StartingValues:
    """An experiment to start with.

    Attributes:
        federation: The federation, completed.
        choices: What was chosen, in the order of an experiment file; the keys of the federation's
            own settings begin with `federation.`.
        notes: What the data let expect of the experiment, a sentence each.
    """

    federation: FederationConfig
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]


def starting_values(config: FederationConfig, *, guessed: bool = False) -> StartingValues:
    """Inspect the data of a federation, and choose network, loss, sampling and training for them.

    Args:
        config: The federation.
        guessed: Whether the classes of a segmentation may be learnt from the masks, as nobody
            stated them.

    Raises:
        DataError: The data have problems that prevent training.
        ConfigError: A site cannot be opened on this machine, or all sites are outside.
    """
    if not sites_of(config):
        raise ConfigError("federation.outside names all sites: leave one in to train on")
    if config.table is not None:
        tables = inspect_tables(config)
        _refuse_problems(tables)
        return _for_tables(config, tables)
    chosen, found = _inspect_images(config, guessed=guessed)
    facts = ImageFacts.of(found, chosen.image)
    classified = chosen.task.name == "classification"
    return (_for_classification if classified else _for_segmentation)(config, chosen, found, facts)


# --- what the rules look at


@dataclass(frozen=True)
class ImageFacts:
    """Sizes, voxels and channels of the images of the sites that train.

    Attributes:
        shape: The median of each axis, as stored; of pictures alone where there are also volumes.
        largest: The longest of each axis.
        shapes: The number of different shapes.
        spacing: The median pixel or voxel in mm; None where a file states none.
        spread: The ratio of the longest to the shortest voxel, of the axis where it is greatest.
        channels: The number of channels.
    """

    shape: tuple[int, ...]
    largest: tuple[int, ...]
    shapes: int
    spacing: tuple[float, ...] | None
    spread: float
    channels: int

    @classmethod
    def of(cls, inspection: FederationInspection, image: ImageConfig) -> ImageFacts:
        """Return the facts of inspected images.

        Args:
            inspection: The inspection of a federation of images.
            image: How files become arrays.
        """
        sites = _inside(inspection)
        shapes = [tuple(map(int, shape)) for shape in _each(site.shapes for site in sites)]
        axes = min(map(len, shapes))
        kept = [shape for shape in shapes if len(shape) == axes]
        spacings = _each(site.spacings for site in sites)
        known = len(kept) == len(shapes) and ("unknown",) not in spacings
        voxels = [tuple(map(float, spacing)) for spacing in spacings] if known else []
        channels = max(int(count) for site in sites for count in site.channels)
        return cls(
            tuple(map(median_low, zip(*kept, strict=True))),
            tuple(map(max, zip(*kept, strict=True))),
            len(set(shapes)),
            tuple(float(f"{median(axis):.3g}") for axis in zip(*voxels, strict=True)) or None,
            max((max(axis) / min(axis) for axis in zip(*voxels, strict=True)), default=1.0),
            channels if image.inputs is None else image.inputs,
        )


def _each(counts: Iterable[Mapping[str, int]]) -> list[tuple[str, ...]]:
    """Return the sizes of every case, from the counts of words such as 96x96."""
    total = sum((Counter(counted) for counted in counts), Counter[str]())
    return [tuple(word.split("x")) for word in total.elements() if word]


def _inside(inspection: FederationInspection) -> list[Any]:
    return [site for site in inspection.sites if site.inside]


def _inspect_images(
    config: FederationConfig, *, guessed: bool
) -> tuple[FederationConfig, FederationInspection]:
    """Inspect images, with the channels and the classes that they turn out to have."""
    found = inspect_federation(_of_any_shape(config))
    counts = {count for site in found.sites for count in site.channels}
    if counts == {"1", "3"} and config.image.channels == "keep" and config.image.inputs is None:
        config = replace(config, image=replace(config.image, channels="rgb"))
        found = inspect_federation(_of_any_shape(config))
    if guessed and not found.good and config.task == TaskConfig():
        names = ("background", *(f"class_{value}" for value in range(1, 256)))
        wide = replace(config, task=TaskConfig(classes=names))
        again = inspect_federation(_of_any_shape(wide))
        values = {value for site in again.sites for value in site.labels} - {"0"}
        if again.good and ("255" not in values or len(values) == 1):  # 255 may mean ignore
            found, config = again, replace(config, task=_task_of_masks(again.sites))
    _refuse_problems(found)
    return config, found


def _of_any_shape(config: FederationConfig) -> FederationConfig:
    """Return a federation with a crop, without which images of several shapes are a problem."""
    if config.sampling.crop is not None:
        return config
    return replace(config, sampling=replace(config.sampling, crop=(1, 1)))


def _task_of_masks(sites: Sequence[SiteInspection]) -> TaskConfig:
    """Return the classes of masks whose values nobody has named."""
    values = sorted({int(value) for site in sites for value in site.labels} - {0})
    classes = ("background", *(f"class_{value}" for value in values))
    numbered = dict(zip(values, range(1, len(classes)), strict=True))
    same = all(value == number for value, number in numbered.items())
    return TaskConfig(classes=classes, label_map=None if same else numbered)


def _refuse_problems(inspection: FederationInspection) -> None:
    problems = [problem for site in inspection.sites for problem in site.problems]
    problems += inspection.problems
    if problems:
        more = len(problems) - 1
        raise DataError(problems[0] + (f" (and {more} more problems)" if more else ""))


# --- segmentation


def _for_segmentation(
    stated: FederationConfig,
    config: FederationConfig,
    found: FederationInspection,
    facts: ImageFacts,
) -> StartingValues:
    """Choose a U-Net, and how it is trained, from what was stated, and what was found."""
    image, dims, choices = _plane(config, facts)
    sides = _prepared(facts.shape, facts, image)
    largest = _prepared(facts.largest, facts, image)
    crop = config.sampling.crop or tuple(_side(side, MOST_SIDE[dims]) for side in sides[:dims])
    shares = [site.foreground for site in _inside(found) if site.foreground is not None]
    sampling, augmented = _sampling(config.sampling, crop, sides, mean(shares or [1.0]))
    inputs = facts.channels * (2 * sampling.neighbours + 1)
    widths = [16, 32, 64, 128] if dims == 2 else [8, 16, 32, 64]
    network = {"name": "unet", "spatial_dims": dims, "in_channels": inputs, "channels": widths}
    batch = 8 if dims == 2 else 2 if math.prod(crop) > LARGE_CROP else 4
    in_slices = dims < len(sides)
    samples = sides[-1] if in_slices else sampling.patches
    choices += [
        *augmented,
        Choice("model", network | {"num_res_units": 1}, _of_images(facts, in_slices=in_slices)),
        Choice("loss", "dice_ce", "Dice with cross-entropy"),
        *_home(),
        _training(found, max(1, batch // sampling.patches), {"lr": 2e-3}, samples=samples),
    ]
    if max(largest[:dims]) > MOST_WINDOW[dims]:
        window = [MOST_WINDOW[dims]] * dims
        why = f"images of up to {_by(largest[:dims])} are predicted in pieces"
        choices.append(Choice("inference", {"window": window}, why))
    return _values(stated, replace(config, image=image, sampling=sampling), choices, found)


def _plane(config: FederationConfig, facts: ImageFacts) -> tuple[ImageConfig, int, list[Choice]]:
    """Choose between two and three axes, and how volumes are cut and resampled."""
    image, crop, choices = config.image, config.sampling.crop, list[Choice]()
    if len(facts.shape) == 2:
        return image, 2, choices
    dims = len(crop) if crop is not None else 3
    _, second, longest = sorted(facts.spacing or (1.0, 1.0, 1.0))
    thick = crop is None and longest >= THICK_SLICES * second
    few = crop is None and not thick and min(facts.shape) < FEW_SLICES
    if thick or few:
        dims = 2
        short = facts.shape.index(min(facts.shape))
        why = (
            f"slices are {longest:g} mm apart and pixels {second:g} mm: a network of slices"
            if thick
            else f"{min(facts.shape)} slices are too few for a network of volumes"
        )
        if image.slices_along == "z":
            image = replace(image, slices_along="acquisition" if thick else AXES[short])
        choices.append(Choice("federation.image.slices_along", image.slices_along, why))
    if image.spacing is None and image.size is None and facts.spread > UNEQUAL_SPACING:
        spacing = _last(facts, image)[1]
        assert spacing is not None
        image = replace(image, spacing=spacing[:dims])
        why = f"voxels differ by up to {facts.spread:.2g} times: all are brought to the median"
        choices.append(Choice("federation.image.spacing", list(spacing[:dims]), why))
    return image, dims, choices


def _last(
    facts: ImageFacts, image: ImageConfig
) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """Return the order of a volume's axes with the slices' last, and the voxel in this order."""
    axes = tuple(range(len(facts.shape)))
    if len(axes) == 3:
        across = slice_axis(image.slices_along, facts.spacing, None)
        axes = (*(axis for axis in axes if axis != across), across)
    spacing = facts.spacing
    return axes, None if spacing is None else tuple(spacing[axis] for axis in axes)


def _prepared(shape: tuple[int, ...], facts: ImageFacts, image: ImageConfig) -> tuple[int, ...]:
    """Return the sides of an image as the network sees it, the slices of a volume last."""
    axes, spacing = _last(facts, image)
    moved = tuple(shape[axis] for axis in axes)
    return target_shape(moved, spacing, image, "the image of median size")


def _sampling(
    sampling: SamplingConfig, crop: tuple[int, ...], sides: tuple[int, ...], foreground: float
) -> tuple[SamplingConfig, list[Choice]]:
    """Choose crop, place and augmentation of samples, as far as they are not stated."""
    plain, choices = sampling == SamplingConfig(crop=sampling.crop), list[Choice]()
    if sampling.crop is None:
        most = MOST_SIDE[len(crop)]
        why = f"multiples of {FACTOR} within the median image, {_by(sides)}; at most {most}"
        choices.append(Choice("federation.sampling.crop", list(crop), why))
    smaller = any(want < have for want, have in zip(crop, sides, strict=False))
    chosen = replace(sampling, crop=crop)
    if plain and smaller and foreground < RARE_FOREGROUND:
        chosen = replace(chosen, foreground=0.5)
        why = f"half of the crops hold a structure, which fills {foreground:.1%} of an image"
        choices.append(Choice("federation.sampling.foreground", 0.5, why))
    if plain:
        chosen = replace(chosen, scale=0.1, shift=0.1)
        why = "intensities vary by a tenth; add flips: true where left may be right"
        choices.append(Choice("federation.sampling.scale", 0.1, why))
    return chosen, choices


# --- classification of images


def _for_classification(
    stated: FederationConfig,
    config: FederationConfig,
    found: FederationInspection,
    facts: ImageFacts,
) -> StartingValues:
    """Choose a DenseNet, and how it is trained, from what was stated, and what was found."""
    image, sampling, choices = _of_one_size(config, facts)
    sides = sampling.crop or _prepared(facts.shape, facts, image)
    dims = len(sides)
    counts: Counter[str] = Counter()
    for site in _inside(found):
        for word, count in site.targets.items():
            counts[config.task.classes[config.task.class_of(word, site.name)]] += count
    task, loss = _loss(config.task, counts)
    stem = "small" if max(sides) <= SMALL_IMAGE[dims] else "large"
    inputs = facts.channels * (2 * sampling.neighbours + 1)
    network = {"name": "densenet", "spatial_dims": dims, "in_channels": inputs}
    choices += [
        Choice("model", network | {"stem": stem}, _of_images(facts, in_slices=False)),
        *loss,
        *_home(),
        _training(found, 16 if dims == 2 else 4, {"lr": 1e-3}, samples=sampling.patches),
    ]
    chosen = replace(config, image=image, sampling=sampling, task=task)
    return _values(stated, chosen, choices, found)


def _of_one_size(
    config: FederationConfig, facts: ImageFacts
) -> tuple[ImageConfig, SamplingConfig, list[Choice]]:
    """Choose the one size that images in a batch need: whole images, unless a scale is stated."""
    image, sampling, most = config.image, config.sampling, MOST_IMAGE[len(facts.shape)]
    fit = facts.shapes == 1 and max(facts.shape) <= most
    if sampling.crop is not None or isinstance(image.size, tuple) or fit:
        return image, sampling, []
    if image.size is None and image.spacing is None:
        factor = min(1.0, most / max(facts.shape))
        size = tuple(_nearest(side * factor) for side in facts.shape)
        why = f"one size for all, from the median {_by(facts.shape)}; at most {most}"
        choice = Choice("federation.image.size", list(size), why)
        return replace(image, size=size), sampling, [choice]
    sides = _prepared(facts.shape, facts, image)
    crop = tuple(_side(side, most) for side in sides)
    why = f"one size for all, from the median {_by(sides)}; at most {most}"
    choice = Choice("federation.sampling.crop", list(crop), why)
    return image, replace(sampling, crop=crop), [choice]


def _loss(task: TaskConfig, counts: Mapping[str, int]) -> tuple[TaskConfig, list[Choice]]:
    """Choose the loss of a classification and the metric that selects models."""
    rarest = min(task.classes, key=lambda name: counts.get(name, 0))
    share = counts.get(rarest, 0) / max(1, sum(counts.values()))
    if share >= RARE_CLASS:
        why = f"cross-entropy; the rarest class, {rarest}, has {share:.0%} of the cases"
        return task, [Choice("loss", "ce", why)]
    why = f"the rarest class, {rarest}, has {share:.1%} of the cases"
    choices = [Choice("loss", "focal", why)]
    if task.metric is None:
        task = replace(task, metric="balanced_accuracy")
        choices.insert(0, Choice("federation.task.metric", "balanced_accuracy", why))
    return task, choices


# --- tables


def _for_tables(config: FederationConfig, found: FederationInspection) -> StartingValues:
    """Choose a perceptron, and how it is trained, from what was found in tables."""
    rows = sum(site.splits["train"] for site in _inside(found))
    counts: Counter[str] = sum((Counter(site.targets) for site in _inside(found)), Counter())
    task, loss = _loss(config.task, counts)
    hidden = [32, 16] if rows < MANY_ROWS else [64, 32]
    table = config.table
    assert table is not None, "the federation has no tables"
    why = f"{len(table.columns)} columns as {table.features} features, {rows} rows to train on"
    choices = [
        Choice("model", {"name": "mlp", "hidden": hidden}, why),
        *loss,
        Choice("rounds", 30, "none of them at home, which did not pay on tables"),
        _training(found, 32, {"lr": 1e-2, "weight_decay": 1e-4}, least=LEAST_TABLE_STEPS),
    ]
    return _values(config, replace(config, task=task), choices, found)


# --- all of them


def _values(
    stated: FederationConfig,
    config: FederationConfig,
    choices: Sequence[Choice],
    found: FederationInspection,
) -> StartingValues:
    """Return the values with what is the same for all kinds of data."""
    first = []
    if config.task.classes != stated.task.classes:
        first = [Choice("federation.task.classes", [*config.task.classes], "found in the masks")]
    if config.image.channels != stated.image.channels:
        why = "some images are grey and others in colour: grey ones become colour"
        first.append(Choice("federation.image.channels", config.image.channels, why))
    seeds = Choice(
        "seeds",
        [*range(SEEDS)],
        "five trainings of each; with fewer than three nothing is said of joining",
    )
    why = "alone, one model for all, and one with each site's own normalisation"
    last = [seeds, Choice("algorithms", ["local", "fedavg", "fedbn"], why)]
    return StartingValues(config, (*first, *choices, *last), _notes(found))


def _home() -> list[Choice]:
    why = "25 rounds, the last five at home, the optimiser's moments kept"
    return [
        Choice("recipe", "home", why),
        Choice("evaluation", {"every": 5}, "rounds between scores on validation cases"),
    ]


def _training(
    found: FederationInspection,
    batch: int,
    settings: Mapping[str, Any],
    *,
    samples: int = 1,
    least: int = LEAST_STEPS,
) -> Choice:
    """Choose batch size and steps by the site of median size; every site takes the same steps."""
    cases = median_low(site.splits["train"] for site in _inside(found))
    while batch > 2 and batch > cases * samples:
        batch //= 2
    steps = min(MOST_STEPS, max(least, math.ceil(cases * samples / batch)))
    why = (
        f"equal steps for every site and method: about an epoch of the median site, of {cases} "
        f"cases, from {least} to {MOST_STEPS}"
    )
    values = {"optimizer": "adam", **settings, "batch_size": batch, "local_steps": steps}
    return Choice("training", values, why)


def _notes(found: FederationInspection) -> tuple[str, ...]:
    """Return what will limit the answers, a sentence each."""
    from collegium.evaluation.intervals import PATIENTS

    notes = [
        f"site {site.name} has {count} test patients, and a verdict needs {PATIENTS}: raise "
        f"splits.test, or name the splits"
        for site in _inside(found)
        if (count := site.patients_per_split["test"]) < PATIENTS
    ]
    if found.findings:
        count = len(found.findings)
        notes.append(f"copies or patients in two places to check, {count}: see collegium inspect")
    return tuple(notes)


def _of_images(facts: ImageFacts, *, in_slices: bool) -> str:
    """Return in words what a network of images is made for."""
    kind = "slices of volumes" if in_slices else "volumes" if len(facts.shape) == 3 else "pictures"
    channels = f"{facts.channels} channel{'s' if facts.channels > 1 else ''}"
    return f"{kind} of {_by(facts.shape)} (median) with {channels}"


def _side(side: int, most: int) -> int:
    """Return the largest multiple of `FACTOR` within a side of an image and a limit."""
    return max(LEAST_SIDE, min(most, side) // FACTOR * FACTOR)


def _nearest(side: float) -> int:
    return max(LEAST_SIDE, round(side / FACTOR) * FACTOR)


def _by(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))
