"""Finds the cases of a site in the layouts that people's data already have.

One module a layout; each holds a pure function from a site's name and folder to its usable cases
and one sentence for each problem, like `discovery.from_folder`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from collegium.data.discovery import from_folder, subfolders
from collegium.data.importers import bids, classes, datalist, lists, nnunet
from collegium.data.importers.bids import from_bids
from collegium.data.importers.classes import from_classes
from collegium.data.importers.datalist import from_datalist
from collegium.data.importers.files import Found
from collegium.data.importers.lists import from_lists
from collegium.data.importers.nnunet import from_nnunet
from collegium.data.site import Case
from collegium.errors import ConfigError

__all__ = [
    "LAYOUTS",
    "OPTIONS",
    "detect",
    "find",
    "from_bids",
    "from_classes",
    "from_datalist",
    "from_lists",
    "from_nnunet",
]

LAYOUTS = ("auto", "images-labels", "nnunet", "datalist", "bids", "lists", "classes")
"""What a configuration may call a layout; auto is what `detect` says."""


OPTIONS = ("modality", "derivative")
"""What the layout bids leaves open, see `from_bids`."""

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
    if layout not in LAYOUTS:
        raise ConfigError(
            f"site {site}: the layout {layout!r} is unknown: choose one of {', '.join(LAYOUTS)}"
        )
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            f"site {site}: the option {unknown[0]!r} is unknown: choose among {', '.join(OPTIONS)}"
        )
    if not folder.exists():
        return [], [
            f"site {site}: there is no folder {folder}: correct the path or federation.root"
        ]
    kind = layout if layout != "auto" else detect(folder) or "images-labels"
    if kind == "bids":
        cases, problems = from_bids(
            site, folder, modality=options.get("modality"), derivative=options.get("derivative")
        )
    elif options:
        raise ConfigError(
            f"site {site}: options choose among the files of the layout bids, and {folder} has the "
            f"layout {kind}: leave them out"
        )
    else:
        cases, problems = _PLAIN[kind](site, folder)
    return cases, [*problems, *_doubles(site, folder, cases)]


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


def _doubles(site: str, folder: Path, cases: list[Case]) -> list[str]:
    counts = Counter(case.case for case in cases)
    return [
        f"site {site}: {count} images of {folder} are called case {name}: rename them, or list "
        "them in a manifest"
        for name, count in counts.items()
        if count > 1
    ]
