"""Finds the cases of a site in the common layouts of published data sets.

There is one module per layout; each has a pure function from a site's name and folder to its usable
cases and one sentence for each problem, like `discovery.from_folder`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from collegium.data.discovery import subfolders
from collegium.data.importers import bids, cases, classes, datalist, folders, isic, lists, nnunet
from collegium.data.importers.bids import from_bids
from collegium.data.importers.cases import from_cases
from collegium.data.importers.classes import from_classes
from collegium.data.importers.common import DatasetDescription, FoundCases
from collegium.data.importers.datalist import from_datalist
from collegium.data.importers.folder_with_manifest import from_folder_and_manifest
from collegium.data.importers.folders import from_folders
from collegium.data.importers.isic import from_isic
from collegium.data.importers.lists import from_lists
from collegium.data.importers.nnunet import from_nnunet
from collegium.data.settings import TaskConfig
from collegium.data.site import Case
from collegium.errors import ConfigError

__all__ = [
    "LAYOUTS",
    "OPTIONS",
    "DatasetDescription",
    "describe_dataset",
    "detect_layout",
    "find_in_folder",
    "from_bids",
    "from_cases",
    "from_classes",
    "from_datalist",
    "from_folders",
    "from_isic",
    "from_lists",
    "from_nnunet",
]

LAYOUTS = (
    "auto", "images-labels", "nnunet", "datalist", "bids", "lists", "cases", "classes", "isic",
)  # fmt: skip
"""The names of layouts in a configuration; auto is the result of `detect_layout`."""

OPTIONS = ("modality", "derivative", "center")
"""Options of the layouts bids and isic, see `from_bids` and `from_isic`."""

_PLAIN: dict[str, Callable[[str, Path], FoundCases]] = {
    "images-labels": from_folders,
    "nnunet": from_nnunet,
    "datalist": from_datalist,
    "lists": from_lists,
    "cases": from_cases,
    "classes": from_classes,
}

_FEATURES = {
    "nnunet": "dataset.json and imagesTr",
    "images-labels": "subfolders images and labels, optionally below train, val and test",
    "datalist": "a JSON file with a list training",
    "lists": "arrays beside their *_segmentation",
    "bids": "subfolders sub-*",
    "cases": "a subfolder for each case with its images and one mask",
    "classes": "a subfolder for each class; a single one has a name of task.classes or task.coding",
}
"""The features by which layouts are recognised, in the order in which they are tried."""

_OF_OTHER_TASKS = {"segmentation": "classes", "classification": "cases"}
"""The layout that is not considered for a task."""


def find_in_folder(
    site: str,
    folder: Path,
    *,
    layout: str = "auto",
    options: Mapping[str, str] | None = None,
    task: TaskConfig | None = None,
) -> tuple[list[Case], list[str]]:
    """Return the usable cases of a folder and one sentence for each problem.

    Args:
        site: The site's name.
        folder: The folder; for a datalist, optionally the JSON file itself.
        layout: One of `LAYOUTS`.
        options: Values of `OPTIONS`.
        task: The task, see `detect_layout`.

    Raises:
        ConfigError: The layout or an option is unknown, or does not fit the folder.
        DataError: The folder as a whole is unusable.
    """
    options = options or {}
    _check(site, layout, options)
    if not folder.exists():
        return [], [
            f"site {site}: there is no folder {folder}: correct the path or federation.root"
        ]
    kind = detect_layout(folder, site=site, task=task) if layout == "auto" else layout
    if kind is None and folder.is_dir() and any(subfolders(folder)[:2]):
        kind = "images-labels"  # which reports the missing folder
    if kind is None:
        return [], [_unknown(site, folder, task)]
    if kind == "isic":
        raise ConfigError(
            f"site {site}: the layout isic is a folder of pictures and a table of them: name the "
            "table as the site's manifest"
        )
    if kind == "bids" and "center" not in options:
        found, problems = from_bids(
            site, folder, modality=options.get("modality"), derivative=options.get("derivative")
        )
    elif options:
        raise ConfigError(
            f"site {site}: the options {', '.join(options)} are of another layout, and {folder} "
            f"has the layout {kind}: leave them out"
        )
    else:
        found, problems = _PLAIN[kind](site, folder)
    return found, [*problems, *_duplicates(site, folder, found)]


def find_with_manifest(
    site: str,
    folder: Path,
    manifest: Path,
    *,
    layout: str = "auto",
    options: Mapping[str, str] | None = None,
) -> tuple[list[Case], list[str]]:
    """Return the usable cases of a folder and a manifest that belong together, and the problems.

    Args:
        site: The site's name.
        folder: The folder.
        manifest: Patients, splits or classes by the images' names: see `from_folder_and_manifest`
            and, for Fed-ISIC2019's table, `from_isic`.
        layout: One of `LAYOUTS`; "isic", or "auto" with its table, is Fed-ISIC2019.
        options: Values of `OPTIONS`.

    Raises:
        ConfigError: The layout or an option is unknown.
        DataError: The folder or the manifest is unusable as a whole.
    """
    options = options or {}
    _check(site, layout, options)
    if layout == "isic" or (layout == "auto" and isic.matches(manifest)):
        return from_isic(site, folder, manifest, center=options.get("center"))
    return from_folder_and_manifest(site, folder, manifest)


def _check(site: str, layout: str, options: Mapping[str, str]) -> None:
    if layout not in LAYOUTS:
        raise ConfigError(
            f"site {site}: the layout {layout!r} is unknown: choose one of {', '.join(LAYOUTS)}"
        )
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            f"site {site}: the option {unknown[0]!r} is unknown: choose among {', '.join(OPTIONS)}"
        )


def describe_dataset(
    site: str,
    folder: Path,
    *,
    layout: str = "auto",
    options: Mapping[str, str] | None = None,
    task: TaskConfig | None = None,
) -> DatasetDescription:
    """Return a data set's own description: names of labels and channels, and files not used.

    Args:
        site: The site's name.
        folder: The folder; for a datalist, optionally the JSON file itself.
        layout: One of `LAYOUTS`.
        options: Values of `OPTIONS`.
        task: The task, see `detect_layout`.

    Raises:
        DataError: The description is unusable, which `find_in_folder` reports too.
    """
    kind = detect_layout(folder, site=site, task=task) if layout == "auto" else layout
    if kind == "bids":
        return bids.describe((options or {}).get("modality"))
    describe = {
        "nnunet": nnunet.describe,
        "datalist": datalist.describe,
        "lists": lists.describe,
        "cases": cases.describe,
    }
    return describe[kind](site, folder) if kind in describe else DatasetDescription()


def detect_layout(folder: Path, *, site: str = "", task: TaskConfig | None = None) -> str | None:
    """Return the layout of a folder; None if it is none of the known ones.

    Args:
        folder: The folder, or a file.
        site: The site's name: the site's own folder may have this name and be inside the folder.
        task: The task. The layout "cases" is only considered for a segmentation, "classes" only for
            a classification, whose classes have names. None: both are considered.
    """
    if not folder.is_dir():
        return "datalist" if datalist.matches(folder) else None
    recognises: dict[str, Callable[[Path], bool]] = {
        "nnunet": nnunet.matches,
        "images-labels": folders.matches,
        "datalist": datalist.matches,
        "lists": partial(lists.matches, site=site),
        "bids": bids.matches,
        "cases": cases.matches,
        "classes": partial(classes.matches, names=_class_names(task)),
    }
    return next((layout for layout in _considered(task) if recognises[layout](folder)), None)


def _considered(task: TaskConfig | None) -> list[str]:
    other = None if task is None else _OF_OTHER_TASKS[task.name]
    return [layout for layout in _FEATURES if layout != other]


def _class_names(task: TaskConfig | None) -> set[str]:
    return set() if task is None else {*task.classes, *(task.coding or {})}


def _unknown(site: str, folder: Path, task: TaskConfig | None) -> str:
    features = "; ".join(_FEATURES[layout] for layout in _considered(task))
    return (
        f"site {site}: the layout of {folder} is not recognised (looked for: {features}): name it "
        "by layout, or list the images in a manifest"
    )


def _duplicates(site: str, folder: Path, found: list[Case]) -> list[str]:
    counts = Counter(case.case for case in found)
    return [
        f"site {site}: {count} images of {folder} are called case {name}: rename them, or list "
        "them in a manifest"
        for name, count in counts.items()
        if count > 1
    ]
