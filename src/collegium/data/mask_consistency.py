"""Notes on sites whose masks are all empty of a structure, or look inverted beside the others'."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from collegium.data.decoded_image import listed
from collegium.data.sampling import ImageDataset
from collegium.data.settings import TaskConfig
from collegium.data.site import Site

logger = logging.getLogger(__name__)

MOST, LEAST = 2 / 3, 1 / 3
"""Masks of a site look inverted if their foreground is above the first, the others' below both."""


@dataclass(frozen=True)
class MaskCounts:
    """The counts of what the masks of a site hold; pixels that do not count are left out.

    Attributes:
        cases: Number of masks.
        shown: Number of masks that hold each class.
        foreground: Share of the pixels that are not background; None without a pixel.
        labelled: The classes that the masks annotate, without the background; None: all.
    """

    cases: int
    shown: Mapping[int, int]
    foreground: float | None
    labelled: Collection[int] | None = None


def warn_of_masks(sites: Mapping[str, Site], task: TaskConfig) -> None:
    """Log what is to be told of the masks of sites that were opened, see `mask_notes`.

    Args:
        sites: The sites.
        task: The meaning of the labels.
    """
    if task.name != "segmentation":
        return
    counts = {name: _count(site, task) for name, site in sites.items()}
    for name, notes in mask_notes(counts, task).items():
        for note in notes:
            logger.warning("site %s: %s", name, note)


def _count(site: Site, task: TaskConfig) -> MaskCounts:
    """Count what the masks of all cases of a site hold, as they are trained and scored on."""
    pixels, shown, total = Counter[int](), Counter[int](), 0
    for split in (site.train, site.val, site.test):
        for case in split.cases if isinstance(split, ImageDataset) else ():
            arrays, inside = case.arrays(), case.arrays().mask
            if arrays.label is not None:
                label = arrays.label if inside is None else arrays.label[inside.astype(bool)]
                values, counts = np.unique(label, return_counts=True)
                pixels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
                shown.update(values.tolist())
                total += 1
    size, labelled = pixels.total(), site.labelled
    known = None if labelled is None else tuple(map(task.classes.index, labelled))
    return MaskCounts(total, shown, 1 - pixels[0] / size if size else None, known)


def mask_notes(sites: Mapping[str, MaskCounts], task: TaskConfig) -> dict[str, list[str]]:
    """Return for each site notes on structures that none of its masks holds, and on inverted masks.

    Args:
        sites: What the masks of each site hold.
        task: The meaning of the labels.
    """
    return {
        name: [*_empty(name, sites, task), *_inverted(name, sites)] if found.cases else []
        for name, found in sites.items()
    }


def _empty(name: str, sites: Mapping[str, MaskCounts], task: TaskConfig) -> list[str]:
    own, notes = sites[name], []
    for value, word in enumerate(task.classes):
        wanted = value > 0 and (own.labelled is None or value in own.labelled)
        if not wanted or own.shown.get(value):
            continue
        others = [
            f"{found.shown[value]} of {found.cases} at {other}"
            for other, found in sites.items()
            if found.shown.get(value)
        ]
        elsewhere = f" ({listed(others)} do)" if others else ""
        notes.append(
            f"none of its {own.cases} masks holds {word}{elsewhere}: look whether they were "
            f"exported whole; if {word} is not annotated there, leave it out of the site's "
            f"labelled, or take the site out, as it is learnt and scored as absent"
        )
    return notes


def _inverted(name: str, sites: Mapping[str, MaskCounts]) -> list[str]:
    share = sites[name].foreground
    others = [
        found.foreground
        for other, found in sites.items()
        if other != name and found.foreground is not None
    ]
    if share is None or share <= MOST or not others or median(others) >= LEAST:
        return []
    return [
        f"the foreground covers {share:.0%} of its masks, and {median(others):.0%} elsewhere: look "
        f"whether they are inverted; if so, set label_map: {{0: 1, 1: 0}} at the site, or "
        f"{{0: 1, 255: 0}} where they hold 255"
    ]
