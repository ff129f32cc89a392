"""Subfolders of images and labels, optionally below folders train, val and test."""

import logging
from dataclasses import replace
from pathlib import Path

from collegium.data.discovery import SPLIT_NAMES, from_folder, subfolders
from collegium.data.importers.common import FoundCases, visible_entries

logger = logging.getLogger(__name__)


def matches(folder: Path) -> bool:
    """Return whether a folder, or a split's folder in it, has subfolders of images and labels."""
    return _is_pair(folder) or any(map(_is_pair, _splits_in(folder)))


def from_folders(site: str, folder: Path) -> FoundCases:
    """Return the usable cases of a folder and one sentence for each problem.

    Folders train, val and test are the splits of their cases; if only one of them has labels,
    splits are drawn. A case whose name also occurs in another split is prefixed with its folder's
    name.

    Args:
        site: The site's name.
        folder: The folder.
    """
    parts = [] if _is_pair(folder) else [part for part in _splits_in(folder) if _is_pair(part)]
    if not parts:
        return from_folder(site, folder)
    for part in _splits_in(folder):
        if part not in parts:
            logger.info("site %s: %s has no images and labels and is left out", site, part)
    found = [(part, *from_folder(site, part)) for part in parts]
    names = [case.case for _, cases, _ in found for case in cases]
    apart = len(set(names)) == len(names)
    splits = {part: SPLIT_NAMES[part.name.lower()] for part in parts}
    named = len(set(splits.values())) > 1
    together = []
    for part, cases, _ in found:
        for case in cases:
            name = case.case if apart else f"{part.name}_{case.case}"
            split = splits[part] if named else None
            together.append(replace(case, case=name, patient=name, split=split))
    return together, [problem for _, _, problems in found for problem in problems]


def _splits_in(folder: Path) -> list[Path]:
    return [
        path
        for path in visible_entries(folder)
        if path.is_dir() and path.name.lower() in SPLIT_NAMES
    ]


def _is_pair(folder: Path) -> bool:
    return folder.is_dir() and None not in subfolders(folder)[:2]
