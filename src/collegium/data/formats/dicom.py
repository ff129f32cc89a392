"""DICOM images: a file, or a folder that holds a series; install ``collegium[dicom]``.

A single picture (CR, DX, MG, US, one slice of a CT) is read as it is displayed, (channel, row,
column). Several slices, in as many files or in an enhanced multi-frame file, become a volume
(channel, x, y, z) in RAS+: see `collegium.data.formats.dicomstack`. What the pixels mean is said in
`collegium.data.formats.dicompixels`.

Names and ids of patients are not read, and appear in no note and no error.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collegium.data.decoded import Decoded, listed, upright
from collegium.data.formats.dicomfiles import files_below, is_dicom, quiet
from collegium.data.formats.dicomheaders import Header, Plane, read_header
from collegium.data.formats.dicompixels import read_pixels
from collegium.data.formats.dicomstack import (
    Stack,
    affine_of,
    name_orientation,
    normal_of,
    same_orientation,
    stack,
)
from collegium.errors import DataError

__all__ = ["Series", "decode", "find_series", "geometry", "is_dicom"]


@dataclass(frozen=True)
class Series:
    """One series of a folder; where it mixes orientations, the part with one of them.

    Attributes:
        uid: The SeriesInstanceUID.
        number: The SeriesNumber, where there is one.
        modality: Such as "CT".
        description: The SeriesDescription; it may name a person and is not for messages.
        files: Its files; slices are sorted along the normal of their plane.
        rows: Of each picture.
        columns: Of each picture.
        orientation: "axial", "sagittal", "coronal" or "oblique"; "none" where it is no slice.
        pictures: How many pictures its files hold, more than one each where they are multi-frame.
    """

    uid: str
    number: int | None
    modality: str
    description: str
    files: tuple[Path, ...]
    rows: int
    columns: int
    orientation: str
    pictures: int


def find_series(folder: Path) -> tuple[list[Series], list[str]]:
    """Find the image series of a folder and of those in it, by the files' content.

    Returns:
        The series by number, and a sentence for each kind of file that was left out.
    """
    groups, notes = _scan(files_below(folder), folder.name)
    return [_describe(group) for group in groups], notes


def decode(path: Path, series: str | None = None) -> Decoded:
    """Decode a picture or a volume.

    Volumes of one series that a time, an acquisition or an echo tells apart are channels.

    Args:
        path: A file, or a folder that holds a series.
        series: The UID or number of the series, where there are several; the word of an orientation
            may follow, as in "3 axial".

    Raises:
        DataError: There is no image, or several series, or slices that make no volume; a file is
            damaged, or a package is missing that decompresses its pixels.
    """
    with quiet():
        group, notes = _select(path, series)
        planes = [plane for header in group for plane in header.planes]
        if len(planes) == 1:
            return _decode_picture(planes[0], path, notes)
        grid = _grid(group, path)
        pixels = read_pixels(grid.volumes, path)
        measured = pixels.measured
        return upright(
            pixels.array.transpose(0, 3, 2, 1),  # (channel, column, row, slice)
            grid.affine,
            path.name,
            measured=None if measured is None else measured.transpose(0, 3, 2, 1),
            notes=(*notes, *grid.notes, *pixels.notes),
        )


def geometry(path: Path, series: str | None = None) -> Stack:
    """Return the grid that a file or series is read on, without its pixels.

    Raises:
        DataError: As `decode`.
    """
    with quiet():
        group, _ = _select(path, series)
        planes = [plane for header in group for plane in header.planes]
        if len(planes) > 1:
            return _grid(group, path)
        placed = planes[0].position is not None
        return Stack(((planes[0],),), affine_of(planes[0]) if placed else np.eye(4))


def _scan(files: Iterable[Path], name: str) -> tuple[list[list[Header]], list[str]]:
    """Group the images among some files to series of one orientation, sorted by number."""
    groups: list[list[Header]] = []
    stray, other = [], []
    with quiet():
        for path in files:
            if not is_dicom(path):
                stray.append(path.name)
            elif (header := read_header(path)) is None:
                other.append(path.name)
            else:
                _put(header, groups)
    notes = []
    if stray:
        notes.append(f"{name}: files that are not DICOM were left out: {listed(stray)}")
    if other:
        notes.append(f"{name}: DICOM files that hold no image were left out: {listed(other)}")
    groups.sort(key=lambda group: (group[0].number is None, group[0].number or 0, group[0].uid))
    return [_along_normal(group) for group in groups], notes


def _put(header: Header, groups: list[list[Header]]) -> None:
    plane = header.planes[0].orientation
    for group in groups:
        first = group[0]
        if first.uid == header.uid and same_orientation(first.planes[0].orientation, plane):
            group.append(header)
            return
    groups.append([header])


def _along_normal(group: list[Header]) -> list[Header]:
    orientation = group[0].planes[0].orientation
    if orientation is None:
        return group
    normal = normal_of(orientation)
    return sorted(group, key=lambda header: float(normal @ (header.planes[0].position or (0,) * 3)))


def _describe(group: Sequence[Header]) -> Series:
    first = group[0]
    rows, columns, _ = first.planes[0].shape
    return Series(
        first.uid,
        first.number,
        first.modality,
        first.description,
        files=tuple(header.planes[0].file for header in group),
        rows=rows,
        columns=columns,
        orientation=name_orientation(first.planes[0].orientation),
        pictures=sum(len(header.planes) for header in group),
    )


def _select(path: Path, series: str | None) -> tuple[list[Header], tuple[str, ...]]:
    """Return the headers of the one series that is meant, and notes."""
    groups, notes = _scan(files_below(path) if path.is_dir() else [path], path.name)
    if not groups:
        raise DataError(f"{path}: holds no DICOM image: name the file or folder of one")
    meant = [group for group in groups if series is None or _is_called(_describe(group), series)]
    if len(meant) == 1:
        return meant[0], tuple(notes)
    words = "; ".join(_in_words(group) for group in groups)
    if series is not None and not meant:
        raise DataError(f"{path}: has no series {series}: choose one of its series ({words})")
    raise DataError(
        f"{path}: holds {len(groups)} series ({words}): choose one by its number or UID, where "
        "these are equal with its orientation behind, as in '3 axial'"
    )


def _is_called(series: Series, wanted: str) -> bool:
    name, _, orientation = wanted.strip().partition(" ")
    if orientation.strip() not in ("", series.orientation):
        return False
    return name == series.uid or (name.isdecimal() and int(name) == series.number)


def _in_words(group: Sequence[Header]) -> str:
    series, count = _describe(group), sum(len(header.planes) for header in group)
    number = "without number" if series.number is None else f"number {series.number}"
    plane = "" if series.orientation == "none" else f" {series.orientation}"
    images = "1 image" if count == 1 else f"{count} images"
    return f"{number}: {images} {series.rows}x{series.columns}{plane}, UID {series.uid}"


def _grid(group: Sequence[Header], path: Path) -> Stack:
    planes = [plane for header in group for plane in header.planes]
    where = f"{path}: series {group[0].uid}"
    if any(plane.position is None for plane in planes):
        raise DataError(
            f"{where} holds {len(planes)} pictures without a place in space, which make no volume: "
            "name the file of one picture"
        )
    return stack(planes, where, path.name)


def _decode_picture(plane: Plane, path: Path, notes: tuple[str, ...]) -> Decoded:
    """Decode a picture as it is displayed; a slice keeps its place in space."""
    pixels = read_pixels(((plane,),), path)
    affine = None
    if plane.position is not None:
        affine = affine_of(plane)[:, [1, 0, 2, 3]]  # from (row, column)
    return Decoded(
        pixels.array[:, 0],
        plane.spacing,
        affine,
        (*notes, *pixels.notes),
        pixels.full_scale,
        None if pixels.measured is None else pixels.measured[:, 0],
    )
