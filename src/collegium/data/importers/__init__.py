"""Finds the cases of a site in the layouts that people's data already have.

One module a layout; each holds a pure function from a site's name and folder to its usable cases
and one sentence for each problem, like `discovery.from_folder`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from collegium.data.discovery import from_folder, subfolders
from collegium.data.importers import bids, classes, datalist, isic, lists, nnunet
from collegium.data.importers.about import About
from collegium.data.importers.bids import from_bids
from collegium.data.importers.classes import from_classes
from collegium.data.importers.datalist import from_datalist
from collegium.data.importers.files import Found
from collegium.data.importers.isic import from_isic
from collegium.data.importers.lists import from_lists
from collegium.data.importers.nnunet import from_nnunet
from collegium.data.joining import from_both
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
    "from_classes",
    "from_datalist",
    "from_isic",
    "from_lists",
    "from_nnunet",
]

LAYOUTS = ("auto", "images-labels", "nnunet", "datalist", "bids", "lists", "classes", "isic")
"""What a configuration may call a layout; auto is what `detect` says."""


OPTIONS = ("modality", "derivative", "center")
"""What the layouts bids and isic leave open, see `from_bids` and `from_isic`."""

_PLAIN: dict[str, Callable[[str, Path], Found]] = {
    "images-labels": from_folder,
    "nnunet": from_nnunet,
    "datalist": from_datalist,
    "lists": from_lists,
    "classes": from_classes,
}

_SIGNS: dict[str, Callable[[Path], bool]] = {
    "nnunet": nnunet.looks_like,
    "datalist": datalist.looks_like,
    "lists": lists.looks_like,
    "bids": bids.looks_like,
    "classes": classes.looks_like,
}


def find(
    site: str, folder: Path, *, layout: str = "auto", options: Mapping[str, str] | None = None
) -> tuple[list[Case], list[str]]:
    """Give the usable cases of a folder and one sentence for each problem.

    Args:
        site: The site's name.
        folder: The folder; of a datalist also the JSON file.
        layout: One of `LAYOUTS`.
        options: Values of `OPTIONS`.

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
    kind = _kind(layout, folder) or "images-labels"
    if kind == "isic":
        raise ConfigError(
            f"site {site}: the layout isic is a folder of pictures and a table of them: name the "
            "table as the site's manifest"
        )
    if kind == "bids" and "center" not in options:
        cases, problems = from_bids(
            site, folder, modality=options.get("modality"), derivative=options.get("derivative")
        )
    elif options:
        raise ConfigError(
            f"site {site}: the options {', '.join(options)} are of another layout, and {folder} "
            f"has the layout {kind}: leave them out"
        )
    else:
        cases, problems = _PLAIN[kind](site, folder)
    return cases, [*problems, *_doubles(site, folder, cases)]


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
    site: str, folder: Path, *, layout: str = "auto", options: Mapping[str, str] | None = None
) -> About:
    """Give what a data set says of itself: names of labels and channels, files not used.

    Args:
        site: The site's name.
        folder: The folder; of a datalist also the JSON file.
        layout: One of `LAYOUTS`.
        options: Values of `OPTIONS`.

    Raises:
        DataError: If the description is unusable, which `find` says too.
    """
    kind = _kind(layout, folder)
    if kind == "bids":
        return bids.about_of((options or {}).get("modality"))
    told = {"nnunet": nnunet.about_of, "datalist": datalist.about_of, "lists": lists.about_of}
    return told[kind](site, folder) if kind in told else About()


def detect(folder: Path) -> str | None:
    """Say which layout a folder has; None where it has no known one."""
    if not folder.is_dir():
        return "datalist" if datalist.looks_like(folder) else None
    if _SIGNS["nnunet"](folder):
        return "nnunet"
    images, labels, _ = subfolders(folder)
    if images is not None and labels is not None:
        return "images-labels"
    return next((layout for layout, sign in _SIGNS.items() if sign(folder)), None)


def _kind(layout: str, folder: Path) -> str | None:
    return detect(folder) if layout == "auto" else layout


def _doubles(site: str, folder: Path, cases: list[Case]) -> list[str]:
    counts = Counter(case.case for case in cases)
    return [
        f"site {site}: {count} images of {folder} are called case {name}: rename them, or list "
        "them in a manifest"
        for name, count in counts.items()
        if count > 1
    ]
