"""DICOM images: a file, or a folder that holds a series; install ``collegium[dicom]``.

A single picture (CR, DX, MG, US, one slice of a CT) is read as it is displayed, (channel, row,
column). Several slices, in as many files or in an enhanced multi-frame file, become a volume
(channel, x, y, z) in RAS+: see `collegium.data.formats.dicom_geometry`. For the meaning of the
pixels see `collegium.data.formats.dicom_pixels`.

Names and ids of patients are not read, and appear in no note and no error.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from collegium.data.decoded_image import DecodedImage, listed, to_ras
from collegium.data.formats.dicom_files import (
    check_content,
    files_below,
    ignore_value_warnings,
    is_dicom,
)
from collegium.data.formats.dicom_geometry import (
    VolumeGrid,
    affine_of,
    build_grid,
    same_orientation,
)
from collegium.data.formats.dicom_headers import ImagePlane, Series, normal_of, read_header
from collegium.data.formats.dicom_objects import other_object
from collegium.data.formats.dicom_pixels import read_pixels
from collegium.errors import DataError

__all__ = ["Series", "decode", "find_series", "is_dicom", "read_grid"]


def find_series(folder: Path) -> tuple[list[Series], list[str]]:
    """Find the image series in a folder and its subfolders, by the files' content.

    Returns:
        The series by number, and a sentence for each kind of file that was left out.

    Raises:
        DataError: A file is damaged, or its content is elsewhere.
    """
    check_content(folder)
    return _scan(files_below(folder), folder.name)


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
        found, notes = _select(path, series)
        if len(found.planes) == 1:
            return _decode_picture(found.planes[0], path, notes)
        grid = _grid(found, path)
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
        found, _ = _select(path, series)
        if len(found.planes) > 1:
            return _grid(found, path)
        (plane,) = found.planes
        return VolumeGrid(((plane,),), np.eye(4) if plane.position is None else affine_of(plane))


def _scan(files: Iterable[Path], name: str) -> tuple[list[Series], list[str]]:
    """Return the series, sorted by number, and notes on the files left out."""
    groups: list[list[Series]] = []
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
    return [_joined(group) for group in groups], notes


def _add_to_group(header: Series, groups: list[list[Series]]) -> None:
    plane = header.planes[0].orientation
    for group in groups:
        first = group[0]
        if first.uid == header.uid and same_orientation(first.planes[0].orientation, plane):
            group.append(header)
            return
    groups.append([header])


def _joined(group: list[Series]) -> Series:
    """Join the files of a series, sorted along the normal of their plane."""
    orientation = group[0].planes[0].orientation
    if orientation is not None:
        normal = normal_of(orientation)
        group = sorted(
            group, key=lambda file: float(normal @ (file.planes[0].position or (0,) * 3))
        )
    return replace(group[0], planes=tuple(plane for file in group for plane in file.planes))


def _select(path: Path, series: str | None) -> tuple[Series, tuple[str, ...]]:
    """Return the selected series, and notes."""
    found, notes = find_series(path) if path.is_dir() else _scan([path], path.name)
    if not found:
        other = other_object(files_below(path) if path.is_dir() else [path])
        raise DataError(other or f"{path}: holds no DICOM image: name the file or folder of one")
    chosen = [each for each in found if series is None or _is_named(each, series)]
    if len(chosen) == 1:
        return chosen[0], tuple(notes)
    words = "; ".join(map(_in_words, found))
    if series is not None and not chosen:
        raise DataError(f"{path}: has no series {series}: choose one of its series ({words})")
    raise DataError(
        f"{path}: holds {len(found)} series ({words}): choose one by its number or UID or, if "
        "these are equal, with its orientation added, as in '3 axial'"
    )


def _is_named(series: Series, wanted: str) -> bool:
    name, _, orientation = wanted.strip().partition(" ")
    if orientation.strip() not in ("", series.orientation):
        return False
    return name == series.uid or (name.isdecimal() and int(name) == series.number)


def _in_words(series: Series) -> str:
    count, (rows, columns, _) = len(series.planes), series.planes[0].shape
    number = "without number" if series.number is None else f"number {series.number}"
    plane = "" if series.orientation == "none" else f" {series.orientation}"
    return (
        f"{number}: {count} image{'' if count == 1 else 's'} {rows}x{columns}{plane}, "
        f"UID {series.uid}"
    )


def _grid(series: Series, path: Path) -> VolumeGrid:
    where = f"{path}: series {series.uid}"
    if any(plane.position is None for plane in series.planes):
        raise DataError(
            f"{where} holds {len(series.planes)} pictures without a position in space, which form "
            "no volume: name the file of one picture"
        )
    return build_grid(series.planes, where, path.name)


def _decode_picture(plane: ImagePlane, path: Path, notes: tuple[str, ...]) -> DecodedImage:
    """Decode a picture as it is displayed; a slice keeps its position in space."""
    pixels = read_pixels(((plane,),), path)
    return DecodedImage(
        pixels.array[:, 0],
        plane.spacing,
        None if plane.position is None else affine_of(plane)[:, [1, 0, 2, 3]],  # from (row, column)
        (*notes, *pixels.notes),
        pixels.full_scale,
        None if pixels.measured is None else pixels.measured[:, 0],
    )
