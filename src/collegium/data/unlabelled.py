"""Images that are only to be predicted: found in a folder or by a manifest, with or without labels.

Nothing is asked of their names but that they tell the cases apart.
"""

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from collegium.data.discovery import channels_of_row, files_of_row
from collegium.data.formats import FILES, SUFFIXES
from collegium.data.formats.dicom import find_series, is_dicom
from collegium.data.pairing import case_id, pair_cases
from collegium.data.site import Case
from collegium.errors import DataError

SITE = "outside"
"""What messages call the site of such cases."""

_FOVS = ("fov", "fovs", "fov_masks")

_CHANNEL = re.compile(r"(.+)_(\d{4})")


def list_images(place: Path, labels: Path | None = None) -> tuple[list[Case], list[str]]:
    """Give the cases, sorted by id, and one sentence for each problem.

    Args:
        place: A folder of images; or a folder with a subfolder ``images`` and, of choice, ``fov``;
            or a CSV file with a column ``image`` and, of choice, ``case``, ``patient``, ``label``,
            ``fov``, ``series`` and ``channels``, whose paths are relative to its own folder. Files
            ``x_0000``, ``x_0001`` are the channels of one image. A subfolder of DICOM files is one
            image, of several series as many; so is a folder of DICOM files itself.
        labels: A folder of masks, paired with the images by their names; then every case needs one.

    Raises:
        DataError: There is no such place, or no image in it.
    """
    if place.is_file() and place.suffix.lower() in (".csv", ".tsv"):
        return _from_manifest(place)
    if not place.is_dir():
        raise DataError(f"{place}: there is no such folder or manifest; correct the path")
    folder = place / "images" if (place / "images").is_dir() else place
    files = _images(folder)
    scans = _scans(folder)
    if not files and not scans:
        raise DataError(f"{folder} holds no image; add some of the kinds {', '.join(SUFFIXES)}")
    groups, problems = _channels(files)
    doubles = groups.keys() & scans.keys()
    if doubles:
        raise DataError(f"there are several images called {min(doubles)} in {folder}; rename one")
    fovs = [place / name for name in _FOVS if (place / name).is_dir()] if folder != place else []
    groups |= {case: (path,) for case, (path, _) in scans.items()}
    named = {
        path / f"{case}.dcm" if case in scans else path: case for case, (path, *_) in groups.items()
    }
    found, problems = _paired(groups, named, (labels, fovs[0] if fovs else None), problems)
    series = {case: number for case, (_, number) in scans.items()}
    return [replace(case, series=series.get(case.case)) for case in found], problems


def _images(folder: Path) -> list[Path]:
    """The files that are read, DICOM files of a series left out."""
    there = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in there if path.is_file()]
    return [path for path in files if path.name.lower().endswith(FILES)]


def _scans(folder: Path) -> dict[str, tuple[Path, str | None]]:
    """The DICOM series in a folder and its subfolders: by case the folder, and which of several."""
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    scans: dict[str, tuple[Path, str | None]] = {}
    for place in places:
        if place != folder and place.name.startswith("."):
            continue
        there = place.iterdir() if place == folder else place.rglob("*")
        own = [path for path in there if path.is_file() and not path.name.lower().endswith(FILES)]
        if not any(is_dicom(path) for path in own):
            continue
        for name, key in _series(place).items():
            scans[name] = (place, key)
        if place == folder:
            break  # its subfolders were read with it
    return scans


def _series(place: Path) -> dict[str, str | None]:
    """Name the series of a folder; give how each is chosen among several."""
    found, _ = find_series(place)
    folder, uids = place.resolve().name, Counter(series.uid for series in found)
    if len(found) == 1:
        return {folder: None}
    names: dict[str, str | None] = {}
    for position, series in enumerate(found, 1):
        name = f"{folder}-{position if series.number is None else series.number}"
        for more in (f"-{series.orientation}", f"-{position}"):
            name += more if name in names else ""
        alone = uids[series.uid] == 1  # else it mixes orientations
        names[name] = series.uid if alone else f"{series.uid} {series.orientation}"
    return names


def _channels(files: Sequence[Path]) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """Group the channels of an image; give the images by case, and what lacks a channel."""
    numbered: dict[str, dict[str, Path]] = defaultdict(dict)
    groups: dict[str, tuple[Path, ...]] = {}
    for path in files:
        stem = case_id(path)
        if match := _CHANNEL.fullmatch(stem):
            numbered[match[1]][match[2]] = path
        elif stem in groups:
            raise DataError(
                f"{groups[stem][0].name} and {path.name} are both the case {stem}; rename one"
            )
        else:
            groups[stem] = (path,)
    wanted = sorted({channel for group in numbered.values() for channel in group})
    problems = []
    for case, group in numbered.items():
        if len(group) == len(wanted):
            groups[case] = tuple(group[channel] for channel in wanted)
        else:
            missing = ", ".join(sorted(set(wanted) - set(group)))
            problems.append(f"case {case}: channel {missing} is missing; add it or leave it out")
    return groups, problems


def _paired(
    groups: dict[str, tuple[Path, ...]],
    named: dict[Path, str],
    beside: tuple[Path | None, Path | None],
    problems: list[str],
) -> tuple[list[Case], list[str]]:
    """Give the cases with the labels and fields of view that belong to them by name."""
    labels, fovs = beside
    if labels is not None and not labels.is_dir():
        raise DataError(f"{labels}: there is no such folder of labels; correct the path")
    pairing = pair_cases(list(named), _files(labels), _files(fovs))
    problems += [
        f"case {case}: it has no mask in {labels}; add it, or adapt without labels"
        for case in pairing.unpaired_images
    ]
    problems += [
        f"the mask {mask} in {labels} has no image; add the image or take the mask out"
        for mask in pairing.unpaired_masks
    ]
    found = []
    for pair in pairing.cases:
        case = named[pair.image]
        found.append(Case(SITE, case, case, groups[case], pair.mask, pair.fov))
    return sorted(found, key=lambda case: case.case), problems


def _files(folder: Path | None) -> list[Path]:
    return sorted(folder.iterdir()) if folder is not None else []


def _from_manifest(path: Path) -> tuple[list[Case], list[str]]:
    """Read a manifest; labels are taken only where every line names one."""
    text = path.read_text("utf-8-sig")
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    rows = [{(k or "").strip().lower(): (v or "").strip() for k, v in row.items()} for row in rows]
    if not rows or "image" not in rows[0]:
        raise DataError(f"{path}: a manifest needs a column image, and a line for each image")
    labelled = all(row.get("label") for row in rows)
    cases: dict[str, Case] = {}
    problems = []
    for number, row in enumerate(rows, start=2):
        images = tuple(path.parent / name for name in files_of_row(row))
        case = row.get("case") or case_id(images[0])
        missing = next((image for image in images if not image.exists()), None)
        if missing is not None:
            problems.append(f"{path}, line {number}: there is no image {missing}; correct the line")
        elif case in cases:
            problems.append(f"{path}, line {number}: case {case} is there twice; rename one")
        else:
            mask = path.parent / row["label"] if labelled else None
            fov = path.parent / row["fov"] if row.get("fov") else None
            cases[case] = Case(
                SITE, case, row.get("patient") or case, images, mask, fov,
                series=row.get("series") or None,
                channels=channels_of_row(row, f"{path}, line {number}"),
            )  # fmt: skip
    return sorted(cases.values(), key=lambda case: case.case), problems
