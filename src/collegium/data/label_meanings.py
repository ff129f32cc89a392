"""What a site does not annotate, by its own description: pixels to ignore, classes it lacks."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from collegium.data.decoded_image import listed
from collegium.data.formats import segment_names
from collegium.data.importers.common import DatasetDescription
from collegium.data.settings import TaskConfig
from collegium.data.site import Case
from collegium.errors import ConfigError


def with_ignored(task: TaskConfig, description: DatasetDescription, site: str) -> TaskConfig:
    """Return a site's task with what its data set calls ignore, beside `TaskConfig.ignore`.

    Args:
        task: The task with the site's label map.
        description: The description of its data set.
        site: Its name, for errors.

    Raises:
        ConfigError: The label map makes a class of what the data set calls ignore.
    """
    if task.name != "segmentation":
        return task
    ignore, maps = task.ignore, dict(task.label_map or {})
    for value in description.ignore:
        if ignore is None:
            free = max(255, len(task.classes))
            ignore = value if value >= len(task.classes) else free
        if maps.get(value, ignore) != ignore:
            raise ConfigError(
                f"site {site}: label_map makes class {maps[value]} of the value {value}, which "
                f"{description.source} there calls ignore, not annotated: take {value} out of "
                f"label_map, or correct {description.source}"
            )
        maps |= {} if value == ignore else {value: ignore}
    return replace(task, label_map=maps or task.label_map, ignore=ignore)


def ignore_notes(task: TaskConfig, description: DatasetDescription) -> list[str]:
    """Return a note on the values of a site's masks that its data set calls ignore.

    Args:
        task: The task.
        description: The description of its data set.
    """
    if not description.ignore or task.name != "segmentation":
        return []
    return [
        f"{description.source} calls the value {listed(description.ignore)} ignore: these pixels "
        f"are not annotated, and nothing is trained or scored on them"
    ]


def class_notes(task: TaskConfig, cases: Iterable[Case]) -> list[str]:
    """Return a note on the classes for which a site of class folders has none.

    Args:
        task: The task.
        cases: The cases of the site.
    """
    coding = task.coding or {}
    there = {coding.get(str(case.target), str(case.target)) for case in cases}
    missing = [word for word in task.classes if word not in there]
    if task.name != "classification" or not there or not missing:
        return []
    return [
        f"it has no folder of the class {listed(missing)}: if its images of it are in the folder "
        f"of another class, they are learnt and scored as that one; take the site out, or sort "
        f"them; if it has none, nothing is to be done"
    ]


def segment_classes(cases: Sequence[Case], task: TaskConfig) -> frozenset[frozenset[int]]:
    """Return the classes that each segment of a site's DICOM segmentations becomes.

    Segments without the name of a region or class may be regions by their order, so that where
    regions are learnt they tell nothing, and the result is empty.

    Args:
        cases: The cases of the site; labels of other formats have no segments.
        task: The task with the site's label map.
    """
    called = {word.casefold(): {number} for number, word in enumerate(task.classes)}
    called |= {word.casefold(): {*made_of} for word, made_of in (task.regions or {}).items()}
    found: set[frozenset[int]] = set()
    for case in cases:
        for number, word in segment_names(case.label).items() if case.label else ():
            plain = {(task.label_map or {}).get(number, number)}
            own = plain if task.label_map else called.get(word.strip().casefold(), plain)
            if task.regions and word.strip().casefold() not in called:
                return frozenset()
            found.add(frozenset(own))
    return frozenset(found)
