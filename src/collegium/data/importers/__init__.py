"""Finds the cases of a site in the layouts that people's data already have.

One module a layout; each holds a pure function from a site's name and folder to its usable cases
and one sentence for each problem, like `discovery.from_folder`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from collegium.data.discovery import subfolders
from collegium.data.importers import bids, cases, classes, datalist, folders, isic, lists, nnunet
from collegium.data.importers.about import About
from collegium.data.importers.bids import from_bids
from collegium.data.importers.cases import from_cases
from collegium.data.importers.classes import from_classes
from collegium.data.importers.datalist import from_datalist
from collegium.data.importers.files import Found
from collegium.data.importers.folders import from_folders
from collegium.data.importers.isic import from_isic
from collegium.data.importers.lists import from_lists
from collegium.data.importers.nnunet import from_nnunet
from collegium.data.joining import from_both
from collegium.data.settings import TaskConfig
from collegium.data.site import Case
from collegium.errors import ConfigError

__all__ = [
    "LAYOUTS",
    "OPTIONS",
    "About",
    "about",
    "detect",
    "find",
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
"""What a configuration may call a layout; auto is what `detect` says."""


OPTIONS = ("modality", "derivative", "center")
"""What the layouts bids and isic leave open, see `from_bids` and `from_isic`."""

_PLAIN: dict[str, Callable[[str, Path], Found]] = {
    "images-labels": from_folders,
    "nnunet": from_nnunet,
    "datalist": from_datalist,
    "lists": from_lists,
    "cases": from_cases,
    "classes": from_classes,
}

_SIGNS = {
    "nnunet": "dataset.json and imagesTr",
    "images-labels": "subfolders images and labels, of choice below train, val and test",
    "datalist": "a JSON file with a list training",
    "lists": "arrays beside their *_segmentation",
    "bids": "subfolders sub-*",
    "cases": "a subfolder for each case with its images and one mask",
    "classes": "a subfolder for each class, one alone called as in task.classes or task.coding",
}
"""By what the layouts are recognised, in the order in which they are tried."""

_OF_OTHER_TASKS = {"segmentation": "classes", "classification": "cases"}
"""The layout that a folder never has by itself where cases are segmented, or classified."""


def find(
    site: str,
    folder: Path,
    *,
    layout: str = "auto",
    options: Mapping[str, str] | None = None,
    task: TaskConfig | None = None,
) -> tuple[list[Case], list[str]]:
    """Give the usable cases of a folder and one sentence for each problem.

    Args:
        site: The site's name.
        folder: The folder; of a datalist also the JSON file.
        layout: One of `LAYOUTS`.
        options: Values of `OPTIONS`.
        task: What is learnt, see `detect`.

    Raises:
        ConfigError: If the layout or an option is unknown, or does not fit the folder.
        DataError: If the folder as a whole is unusable.
    """
    options = options or {}
    _check(site, layout, options)
    if not folder.exists():
        return [], [
            f"site {site}: there is no folder {folder}: correct the path or federation.root"
        ]
    kind = detect(folder, site=site, task=task) if layout == "auto" else layout
    if kind is None and folder.is_dir() and any(subfolders(folder)[:2]):
        kind = "images-labels"  # which says what it lacks
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
    return found, [*problems, *_doubles(site, folder, found)]


def find_told(
    site: str,
    folder: Path,
    manifest: Path,
    *,
    layout: str = "auto",
    options: Mapping[str, str] | None = None,
) -> tuple[list[Case], list[str]]:
    """Give the usable cases of a folder of which a manifest tells more, and the problems.

    Args:
        site: The site's name.
        folder: The folder.
        manifest: What tells more by the images' names: see `from_both`, and for Fed-ISIC2019's
            table `from_isic`.
        layout: One of `LAYOUTS`; "isic", or "auto" with its table, is Fed-ISIC2019.
        options: Values of `OPTIONS`.

    Raises:
        ConfigError: If the layout or an option is unknown.
        DataError: If folder or manifest is unusable as a whole.
    """
    options = options or {}
    _check(site, layout, options)
    if layout == "isic" or (layout == "auto" and isic.looks_like(manifest)):
        return from_isic(site, folder, manifest, center=options.get("center"))
    return from_both(site, folder, manifest)


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


def about(
    site: str,
    folder: Path,
    *,
    layout: str = "auto",
    options: Mapping[str, str] | None = None,
    task: TaskConfig | None = None,
) -> About:
    """Give what a data set says of itself: names of labels and channels, files not used.

    Args:
        site: The site's name.
        folder: The folder; of a datalist also the JSON file.
        layout: One of `LAYOUTS`.
        options: Values of `OPTIONS`.
        task: What is learnt, see `detect`.

    Raises:
        DataError: If the description is unusable, which `find` says too.
    """
    kind = detect(folder, site=site, task=task) if layout == "auto" else layout
    if kind == "bids":
        return bids.about_of((options or {}).get("modality"))
    told = {
        "nnunet": nnunet.about_of,
        "datalist": datalist.about_of,
        "lists": lists.about_of,
        "cases": cases.about_of,
    }
    return told[kind](site, folder) if kind in told else About()


def detect(folder: Path, *, site: str = "", task: TaskConfig | None = None) -> str | None:
    """Say which layout a folder has; None where it has no known one.

    Args:
        folder: The folder, or a file.
        site: The site's name: its own folder may be called so and lie in this one.
        task: What is learnt: a folder for each case is of a segmentation, one for each class of a
            classification, whose classes have names. None: either.
    """
    if not folder.is_dir():
        return "datalist" if datalist.looks_like(folder) else None
    signs: dict[str, Callable[[Path], bool]] = {
        "nnunet": nnunet.looks_like,
        "images-labels": folders.looks_like,
        "datalist": datalist.looks_like,
        "lists": partial(lists.looks_like, site=site),
        "bids": bids.looks_like,
        "cases": cases.looks_like,
        "classes": partial(classes.looks_like, names=_class_names(task)),
    }
    return next((layout for layout in _tried(task) if signs[layout](folder)), None)


def _tried(task: TaskConfig | None) -> list[str]:
    other = None if task is None else _OF_OTHER_TASKS[task.name]
    return [layout for layout in _SIGNS if layout != other]


def _class_names(task: TaskConfig | None) -> set[str]:
    return set() if task is None else {*task.classes, *(task.coding or {})}


def _unknown(site: str, folder: Path, task: TaskConfig | None) -> str:
    """Say that no layout was recognised, and by what the ones that were tried would be."""
    looked_for = "; ".join(_SIGNS[layout] for layout in _tried(task))
    return (
        f"site {site}: the layout of {folder} is not recognised (looked for: {looked_for}): name "
        "it by layout, or list the images in a manifest"
    )


def _doubles(site: str, folder: Path, found: list[Case]) -> list[str]:
    counts = Counter(case.case for case in found)
    return [
        f"site {site}: {count} images of {folder} are called case {name}: rename them, or list "
        "them in a manifest"
        for name, count in counts.items()
        if count > 1
    ]
