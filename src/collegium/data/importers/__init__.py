"""Finds the cases of a site in the common layouts of published data sets.

There is one module per layout; each has a function like `discovery.from_folder`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from collegium.data.discovery import no_folder, subfolders
from collegium.data.importers import bids, cases, classes, datalist, folders, isic, lists, nnunet
from collegium.data.importers.common import IGNORE, DatasetDescription, FoundCases
from collegium.data.importers.folder_with_manifest import from_folder_and_manifest
from collegium.data.settings import TaskConfig
from collegium.data.site import Case
from collegium.errors import ConfigError


class _Layout(NamedTuple):
    """A layout: the features by which it is recognised, and its functions."""

    features: str
    matches: Callable[..., bool]
    find: Callable[..., FoundCases]
    describe: Callable[[str, Path], DatasetDescription] | None = None


_LAYOUTS = {
    "nnunet": _Layout(
        "dataset.json and imagesTr", nnunet.matches, nnunet.from_nnunet, nnunet.describe
    ),
    "images-labels": _Layout(
        "subfolders images and labels, optionally below train, val and test",
        folders.matches,
        folders.from_folders,
    ),
    "datalist": _Layout(
        "a JSON file with a list training",
        datalist.matches,
        datalist.from_datalist,
        datalist.describe,
    ),
    "lists": _Layout(
        "arrays beside their *_segmentation", lists.matches, lists.from_lists, lists.describe
    ),
    "bids": _Layout("subfolders sub-*", bids.matches, bids.from_bids),
    "cases": _Layout(
        "a subfolder for each case with its images and one mask",
        cases.matches,
        cases.from_cases,
        cases.describe,
    ),
    "classes": _Layout(
        "a subfolder for each class; a single one has a name of task.classes or task.coding",
        classes.matches,
        classes.from_classes,
    ),
}
"""The layouts in the order in which they are tried."""

LAYOUTS = ("auto", *_LAYOUTS, "isic")
"""The names of layouts in a configuration; auto is the result of `detect_layout`."""

OPTIONS = ("modality", "derivative", "center")
"""Options of the layouts bids and isic, see `from_bids` and `from_isic`."""


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
        return [], [no_folder(site, folder)]
    kind = detect_layout(folder, site=site, task=task) if layout == "auto" else layout
    if kind is None and folder.is_dir() and any(subfolders(folder)[:2]):
        kind = "images-labels"  # which reports the missing folder
    if kind is None:
        features = "; ".join(_LAYOUTS[layout].features for layout in _considered(task))
        return [], [
            f"site {site}: the layout of {folder} is not recognised (looked for: {features}): name "
            "it by layout, or list the images in a manifest"
        ]
    if kind == "isic":
        raise ConfigError(
            f"site {site}: the layout isic is a folder of pictures and a table of them: name the "
            "table as the site's manifest"
        )
    if options and (kind != "bids" or "center" in options):
        raise ConfigError(
            f"site {site}: the options {', '.join(options)} are of another layout, and {folder} "
            f"has the layout {kind}: leave them out"
        )
    found, problems = _LAYOUTS[kind].find(site, folder, **options)
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
        return isic.from_isic(site, folder, manifest, center=options.get("center"))
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
    describe = _LAYOUTS[kind].describe if kind in _LAYOUTS else None
    found = DatasetDescription() if describe is None else describe(site, folder)
    ignored = [name for name in found.labels if name.casefold() == IGNORE]
    return replace(
        found,
        labels={name: values for name, values in found.labels.items() if name not in ignored},
        ignore=tuple(value for name in ignored for value in found.labels[name]),
    )


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
    names = set() if task is None else {*task.classes, *(task.coding or {})}
    further: dict[str, tuple[object, ...]] = {"lists": (site,), "classes": (names,)}
    for layout in _considered(task):
        if _LAYOUTS[layout].matches(folder, *further.get(layout, ())):
            return layout
    return None


def _considered(task: TaskConfig | None) -> list[str]:
    """Return the layouts that a task may have."""
    others = {"segmentation": "classes", "classification": "cases"}
    other = None if task is None else others[task.name]
    return [layout for layout in _LAYOUTS if layout != other]


def _duplicates(site: str, folder: Path, found: list[Case]) -> list[str]:
    counts = Counter(case.case for case in found)
    return [
        f"site {site}: {count} images of {folder} are called case {name}: rename them, or list "
        "them in a manifest"
        for name, count in counts.items()
        if count > 1
    ]
