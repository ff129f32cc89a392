"""A federation out of a folder that holds a folder for each site."""

import re
from dataclasses import replace
from pathlib import Path

from collegium.data.columns import SUFFIXES
from collegium.data.discovery import subfolders
from collegium.data.federation import label_and_channel_names, list_cases
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.importers.common import visible_entries
from collegium.data.settings import TaskConfig
from collegium.errors import DataError

MANIFEST = "manifest.csv"
"""The file in a site's folder that is taken as its manifest."""


def federation_of_folder(folder: Path) -> FederationConfig:
    """Return the federation whose sites are the subfolders of a folder.

    A site's `manifest.csv` is its manifest; otherwise its layout is detected. Cases with a mask
    make a segmentation, those with a class alone a classification. The classes are those that the
    data sets describe or, of a classification, those that occur. Segmentations whose classes no
    site describes get a background and a foreground.

    Args:
        folder: The folder, which must exist.

    Raises:
        DataError: It holds no folders of sites, or the classes cannot be learnt.
    """
    names = [path.name for path in visible_entries(folder) if path.is_dir()]
    _check_folder(folder, names)
    sites = {
        name: SiteConfig(manifest=f"{name}/{MANIFEST}")
        if (folder / name / MANIFEST).is_file()
        else SiteConfig(folder=name)
        for name in names
    }
    name = re.sub(r"[^\w .+-]", "-", folder.resolve().name).strip(" .+-") or "federation"
    config = FederationConfig(name, sites, root=str(folder.resolve()))
    if any(list_cases(config, site)[0] for site in sites):
        return replace(config, task=_described_task(config))
    classified = replace(config, task=TaskConfig("classification"))
    cases = [case for site in sites for case in list_cases(classified, site)[0]]
    classes = sorted({str(case.target) for case in cases})
    if len(classes) == 1:
        raise DataError(
            f"{folder}: all cases of all sites are of the class {classes[0]!r}: add cases of "
            f"another class, or write a federation file that names both"
        )
    return (
        replace(classified, task=TaskConfig("classification", tuple(classes))) if cases else config
    )


def _check_folder(folder: Path, names: list[str]) -> None:
    """Refuse a folder of tables, that of a single site, and one without folders."""
    if any(subfolders(folder)[:2]) or (folder / "dataset.json").is_file():
        raise DataError(
            f"{folder} is the folder of one site: name the folder that holds a folder for each site"
        )
    if not names:
        tables = any(path.suffix.lower() in SUFFIXES for path in visible_entries(folder))
        raise DataError(
            f"{folder} holds tables, whose columns have to be named: write a federation file with "
            f"the label and the columns under table, and name that"
            if tables
            else f"{folder} holds no folders: name the folder that holds a folder for each site"
        )


def _described_task(config: FederationConfig) -> TaskConfig:
    """Return the segmentation that the first site with a description of its labels states."""
    for site in config.sites:
        labels = label_and_channel_names(config, site).description.labels
        values = {value for held in labels.values() for value in held}
        if len(values) < 2 or values != set(range(len(values))):
            continue
        if all(len(held) == 1 for held in labels.values()):
            return TaskConfig(classes=tuple(sorted(labels, key=labels.__getitem__)))
        structures = {name: held for name, held in labels.items() if held != (0,)}
        numbered = (f"class_{value}" for value in range(1, len(values)))
        return TaskConfig(classes=("background", *numbered), regions=structures)
    return TaskConfig()
