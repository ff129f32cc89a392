"""DICOM images: a file, or a folder that holds a series; install ``collegium[dicom]``.

A single picture (CR, DX, MG, US, one slice of a CT) is read as it is displayed, (channel, row,
column). Several slices, in as many files or in an enhanced multi-frame file, become a volume
(channel, x, y, z) in RAS+: see `collegium.data.formats.dicom_geometry`. For the meaning of the
pixels see `collegium.data.formats.dicom_pixels`.

Names and ids of patients are not read, and appear in no note and no error.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collegium.data.decoded_image import DecodedImage, listed, to_ras
from collegium.data.formats.dicom_files import files_below, ignore_value_warnings, is_dicom
from collegium.data.formats.dicom_geometry import (
    VolumeGrid,
    affine_of,
    build_grid,
    name_orientation,
    normal_of,
    same_orientation,
)
from collegium.data.formats.dicom_headers import Header, ImagePlane, read_header
from collegium.data.formats.dicom_pixels import read_pixels
from collegium.errors import DataError

__all__ = ["Series", "decode", "find_series", "is_dicom", "read_grid"]


@dataclass(frozen=True)
class Series:
    """One series of a folder, or the part of it with one orientation if it mixes several.

    Attributes:
        uid: The SeriesInstanceUID.
        number: The SeriesNumber, if there is one.
        modality: Such as "CT".
        description: The SeriesDescription; it may name a person and is not for messages.
        files: Its files; slices are sorted along the normal of their plane.
        rows: Of each picture.
        columns: Of each picture.
        orientation: "axial", "sagittal", "coronal" or "oblique"; "none" if it is not a slice.
        pictures: The number of pictures in its files, which may be multi-frame.
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
    """Find the image series in a folder and its subfolders, by the files' content.

    Returns:
        The series by number, and a sentence for each kind of file that was left out.
    """
    groups, notes = _scan(files_below(folder), folder.name)
    return [_describe(group) for group in groups], notes


def decode(path: Path, series: str | None = None) -> DecodedImage:
    """Decode a picture or a volume.

    Volumes of one series that differ in time, acquisition or echo are channels.

    Args:
        path: A file, or a folder that holds a series.
        series: The UID or number of the series, if there are several; an orientation may follow, as
            in "3 axial".

    Raises:
        DataError: There is no image, or several series, or slices that form no volume; a file is
            damaged, or a package is missing that decompresses its pixels.
    """
    with ignore_value_warnings():
        group, notes = _select(path, series)
        planes = [plane for header in group for plane in header.planes]
        if len(planes) == 1:
            return _decode_picture(planes[0], path, notes)
        grid = _grid(group, path)
        pixels = read_pixels(grid.volumes, path)
        measured = pixels.measured
        return to_ras(
            pixels.array.transpose(0, 3, 2, 1),  # (channel, column, row, slice)
            grid.affine,
            path.name,
            measured=None if measured is None else measured.transpose(0, 3, 2, 1),
            notes=(*notes, *grid.notes, *pixels.notes),
        )


def read_grid(path: Path, series: str | None = None) -> VolumeGrid:
    """Return the grid of a file or series without reading its pixels.

    Args:
        path: A file, or a folder that holds a series.
        series: As in `decode`.

    Raises:
        DataError: As `decode`.
    """
    with ignore_value_warnings():
        group, _ = _select(path, series)
        planes = [plane for header in group for plane in header.planes]
        if len(planes) > 1:
            return _grid(group, path)
        placed = planes[0].position is not None
        return VolumeGrid(((planes[0],),), affine_of(planes[0]) if placed else np.eye(4))


def _scan(files: Iterable[Path], name: str) -> tuple[list[list[Header]], list[str]]:
    """Group images by series and orientation, sorted by number; return notes on files left out."""
    groups: list[list[Header]] = []
    stray, other = [], []
    with ignore_value_warnings():
        for path in files:
            if not is_dicom(path):
                stray.append(path.name)
            elif (header := read_header(path)) is None:
                other.append(path.name)
            else:
                _add_to_group(header, groups)
    notes = []
    if stray:
        notes.append(f"{name}: files that are not DICOM were left out: {listed(stray)}")
    if other:
        notes.append(f"{name}: DICOM files that hold no image were left out: {listed(other)}")
    groups.sort(key=lambda group: (group[0].number is None, group[0].number or 0, group[0].uid))
    return [_along_normal(group) for group in groups], notes


def _add_to_group(header: Header, groups: list[list[Header]]) -> None:
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
    """Return the headers of the selected series, and notes."""
    groups, notes = _scan(files_below(path) if path.is_dir() else [path], path.name)
    if not groups:
        raise DataError(f"{path}: holds no DICOM image: name the file or folder of one")
    chosen = [group for group in groups if series is None or _is_named(_describe(group), series)]
    if len(chosen) == 1:
        return chosen[0], tuple(notes)
    words = "; ".join(_in_words(group) for group in groups)
    if series is not None and not chosen:
        raise DataError(f"{path}: has no series {series}: choose one of its series ({words})")
    raise DataError(
        f"{path}: holds {len(groups)} series ({words}): choose one by its number or UID or, if "
        "these are equal, with its orientation added, as in '3 axial'"
    )


def _is_named(series: Series, wanted: str) -> bool:
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


def _grid(group: Sequence[Header], path: Path) -> VolumeGrid:
    planes = [plane for header in group for plane in header.planes]
    where = f"{path}: series {group[0].uid}"
    if any(plane.position is None for plane in planes):
        raise DataError(
            f"{where} holds {len(planes)} pictures without a position in space, which form no "
            "volume: name the file of one picture"
        )
    return build_grid(planes, where, path.name)


def _decode_picture(plane: ImagePlane, path: Path, notes: tuple[str, ...]) -> DecodedImage:
    """Decode a picture as it is displayed; a slice keeps its position in space."""
    pixels = read_pixels(((plane,),), path)
    affine = None
    if plane.position is not None:
        affine = affine_of(plane)[:, [1, 0, 2, 3]]  # from (row, column)
    return DecodedImage(
        pixels.array[:, 0],
        plane.spacing,
        affine,
        (*notes, *pixels.notes),
        pixels.full_scale,
        None if pixels.measured is None else pixels.measured[:, 0],
    )
