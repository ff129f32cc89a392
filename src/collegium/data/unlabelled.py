"""Images to predict, found in a folder or by a manifest, with or without labels.

Their names only need to distinguish the cases.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from collegium.data.decoded_image import listed
from collegium.data.discovery import (
    DICOM_UID,
    FOV_FOLDERS,
    Row,
    case_of_row,
    channels_of_row,
    collect_cases,
    files_in,
    files_of_row,
    find_file,
    read_manifest,
    split_channels,
)
from collegium.data.formats import FILE_SUFFIXES, SUFFIXES
from collegium.data.formats.dicom import Series, find_series, is_dicom
from collegium.data.importers.common import visible_entries
from collegium.data.pairing import case_id, pair_cases
from collegium.data.site import Case
from collegium.errors import DataError

SITE = "outside"
"""The site of such cases in messages."""


def list_images(
    place: Path, labels: Path | None = None, *, masks: bool = True
) -> tuple[list[Case], list[str]]:
    """Return the cases, sorted by id, and one sentence for each problem.

    Args:
        place: A folder of images; or a folder with a subfolder ``images`` and, optionally, ``fov``;
            or one of nnU-Net's raw data, of which ``imagesTs`` is used if it holds files, otherwise
            ``imagesTr``; or a CSV file with a column ``image`` and, optionally, ``case``,
            ``patient``, ``label`` (for a classification ``class``), ``fov``, ``series`` and
            ``channels``, whose paths are relative to its own folder. Files ``x_0000``, ``x_0001``
            are the channels of one image. A subfolder of DICOM files is one image, or as many as it
            has series. The same holds for a folder of DICOM files itself, except that a file is an
            image of its own if it is a picture without a place in space, has several frames or is
            the only one of its series.
        labels: A folder of masks, paired with the images by their names; then every case needs one.
        masks: Whether a file will be named by each case, so that its id has to be a file's name.

    Raises:
        DataError: There is no such place, no image in it, or a manifest that cannot be read.
    """
    if place.is_file() and place.suffix.lower() in (".csv", ".tsv"):
        return _from_manifest(place, masks=masks)
    if not place.is_dir():
        raise DataError(f"{place}: there is no such folder or manifest; correct the path")
    folder = _folder_of_images(place)
    files = _images(folder)
    scans = _scans(folder)
    if not files and not scans:
        raise _no_image(folder)
    groups, problems = _channels(files)
    duplicates = groups.keys() & scans.keys()
    if duplicates:
        raise DataError(
            f"there are several images called {min(duplicates)} in {folder}; rename one"
        )
    fovs = [place / name for name in FOV_FOLDERS if folder != place and (place / name).is_dir()]
    groups |= {case: (path,) for case, (path, _) in scans.items()}
    named = {
        folder / f"{case}.dcm" if case in scans else path: case
        for case, (path, *_) in groups.items()
    }
    found, problems = _paired(groups, named, (labels, fovs[0] if fovs else None), problems)
    series = {case: number for case, (_, number) in scans.items()}
    return [replace(case, series=series.get(case.case)) for case in found], problems


def is_file_name(name: str) -> bool:
    """Return whether a file of this name is written inside its folder, on every system."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _folder_of_images(place: Path) -> Path:
    if (place / "images").is_dir():
        return place / "images"
    raw = (place / "imagesTs", place / "imagesTr")
    return next((folder for folder in raw if visible_entries(folder)), place)


def _images(folder: Path) -> list[Path]:
    """Return the readable files, except DICOM files."""
    return [
        p
        for p in visible_entries(folder)
        if not p.is_dir() and p.name.lower().endswith(FILE_SUFFIXES)
    ]


def _no_image(folder: Path) -> DataError:
    """Return the error that there is no image, or that only subfolders hold some."""
    deeper = [
        path.name
        for path in visible_entries(folder)
        if path.is_dir() and any(p.name.lower().endswith(FILE_SUFFIXES) for p in path.rglob("*"))
    ]
    if deeper:
        return DataError(
            f"{folder} holds no image itself, only its subfolders do ({listed(deeper)}); name one "
            f"of them, or list the images in a manifest"
        )
    return DataError(f"{folder} holds no image; add some of the kinds {', '.join(SUFFIXES)}")


def _scans(folder: Path) -> dict[str, tuple[Path, str | None]]:
    """Return the DICOM images of a folder: by case the path, and its selector among series."""
    if _holds_dicom(folder.iterdir()):
        return _series(folder, flat=True)  # its subfolders are read with it
    scans: dict[str, tuple[Path, str | None]] = {}
    for place in visible_entries(folder):
        if place.is_dir() and _holds_dicom(place.rglob("*")):
            scans |= _series(place, flat=False)
    return scans


def _holds_dicom(paths: Iterable[Path]) -> bool:
    files = (p for p in paths if p.is_file() and not p.name.lower().endswith(FILE_SUFFIXES))
    return any(is_dicom(path) for path in files)


def _series(place: Path, *, flat: bool) -> dict[str, tuple[Path, str | None]]:
    """Name the images of a folder; return the path of each and its selector among series."""
    found, _ = find_series(place)
    folder, uids = place.resolve().name, Counter(series.uid for series in found)
    single = [series for series in found if flat and _is_of_files(series, place)]
    rest = [series for series in found if series not in single]
    if len(found) == len(rest) == 1:
        return {folder: (place, None)}
    names: dict[str, tuple[Path, str | None]] = {}
    for path in sorted(path for series in single for path in series.files):
        name = path.name if DICOM_UID.fullmatch(path.name) else case_id(path)
        if name in names:
            raise DataError(f"there are several images called {name} in {place}; rename one")
        names[name] = path, None
    for position, series in enumerate(rest, 1):
        name = f"{folder}-{position if series.number is None else series.number}"
        for more in (f"-{series.orientation}", f"-{position}"):
            name += more if name in names else ""
        alone = uids[series.uid] == 1  # otherwise the series mixes orientations
        names[name] = place, series.uid if alone else f"{series.uid} {series.orientation}"
    return names


def _is_of_files(series: Series, folder: Path) -> bool:
    """Return whether each file of a series is an image of its own, as in training."""
    if any(path.parent != folder for path in series.files):
        return False
    stacked = len(series.planes) == len(series.files) > 1 and series.orientation != "none"
    return not stacked


def _channels(files: Sequence[Path]) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """Group the channels of an image; return the images by case, and sentences on missing channels.

    Channels count from 0000; files that count otherwise, such as x_0001 to x_0100, are images.
    """
    groups: dict[str, tuple[Path, ...]] = {}
    counted = {case_id(path).removesuffix("_0000") for path in files}
    named = ((case_id(path), path) for path in files)
    single, numbered = split_channels(named, lambda base: base in counted)
    for stem, path in single:
        if stem in groups:
            raise DataError(
                f"{groups[stem][0].name} and {path.name} are both the case {stem}; rename one"
            )
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
    """Return the cases with the labels and fields of view that belong to them by name."""
    labels, fovs = beside
    if labels is not None and not labels.is_dir():
        raise DataError(f"{labels}: there is no such folder of labels; correct the path")
    pairing = pair_cases(list(named), files_in(labels), files_in(fovs))
    problems += [
        f"case {case}: it has no mask in {labels}; add it, or adapt without labels"
        for case in pairing.unpaired_images
    ]
    problems += [
        f"the mask {mask} in {labels} has no image; add the image or take the mask out"
        for mask in pairing.unpaired_masks
    ]
    pairs = ((named[pair.image], pair) for pair in pairing.cases)
    found = [Case(SITE, case, case, groups[case], pair.mask, pair.fov) for case, pair in pairs]
    return sorted(found, key=lambda case: case.case), problems


def _from_manifest(path: Path, *, masks: bool) -> tuple[list[Case], list[str]]:
    """Read a manifest; labels or classes are used only if every line has one."""
    rows = [*read_manifest(SITE, path, labelled=False)]
    if not rows:
        raise DataError(f"{path} holds no line below its columns; add one for each image")
    column = "label" if masks else "class"
    labelled = all(row.get(column) for _, row in rows)

    def make(row: Row, where: str) -> Case:
        case = _case_of_row(row, path.parent, where, column if labelled else None)
        if not case.case or (masks and not is_file_name(case.case)):
            raise DataError(
                f"{where}: the case id {case.case!r} cannot be a file's name; give it an id "
                f"without / and \\"
            )
        return case

    cases, problems = collect_cases({f"{path}, line {number}": row for number, row in rows}, make)
    return sorted(cases, key=lambda case: case.case), problems


def _case_of_row(row: Row, folder: Path, where: str, scored_by: str | None) -> Case:
    names = files_of_row(row)
    if not all(names):
        raise DataError(f"{where}: it names no image; fill in the line or take it out")

    def find(name: str, column: str) -> Path:
        remedy = "correct the line (paths are relative to the manifest's folder)"
        return find_file(name, (folder,), f"{where}: {column}", remedy)

    images = tuple(find(name, "image") for name in names)
    case = case_of_row(row)
    mask = find(row["label"], "label") if scored_by == "label" else None
    target = row["class"] if scored_by == "class" else None
    fov = find(row["fov"], "fov") if row.get("fov") else None
    return Case(
        SITE, case, row.get("patient") or case, images, mask, fov,
        target=target, series=row.get("series") or None, channels=channels_of_row(row, where),
    )  # fmt: skip
