"""Patches around positions in volumes, such as LUNA16's candidates: from a table to a site.

A table lists positions in world coordinates with a class each, as LUNA16's ``candidates_V2.csv``
(Setio et al., Medical Image Analysis 2017) does: ``seriesuid,coordX,coordY,coordZ,class``. Around
each a slice of its volume is cut, and all patches with their classes become a manifest.
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collegium.core.files import new_folder, storage_error
from collegium.core.settings import NonNegative, PositiveInt, settings
from collegium.core.text import without_formula
from collegium.data.columns import read_columns
from collegium.data.decoded_image import DecodedImage, listed
from collegium.data.formats import itk, nifti
from collegium.data.pairing import case_id
from collegium.data.reading import read_image
from collegium.errors import DataError

Affine = NDArray[np.float64]

SUFFIXES = (*itk.SUFFIXES, *nifti.SUFFIXES)
"""How the names of volumes end, in lower case."""

SERIES, POSITION, CLASS = "seriesuid", ("coordX", "coordY", "coordZ"), "class"
"""The columns of the table."""

_TO_RAS = {"LPS": (-1.0, -1.0, 1.0), "RAS": (1.0, 1.0, 1.0)}


@settings
class PatchConfig:
    """The patches that are cut around positions.

    Attributes:
        size: The side of a patch in pixels.
        spacing: The side of its pixels in millimetres, in which the volume is interpolated
            linearly around the exact position; 0: the voxels as they are, around the nearest one.
        coordinates: The directions in which the table's coordinates grow: "LPS" towards the
            patient's left, back and head (ITK, DICOM and LUNA16), "RAS" towards right, front and
            head (NIfTI).
        patient: The table's column that names the patient.
    """

    size: PositiveInt = 32
    spacing: NonNegative = 1.0
    coordinates: Literal["LPS", "RAS"] = "LPS"
    patient: str = SERIES


@dataclass(frozen=True)
class Candidate:
    """A row of the table.

    Attributes:
        row: Its number, from 1.
        series: The name of the volume, without its suffix.
        patient: The patient.
        position: Millimetres, in the directions of the table.
        target: The class as written.
    """

    row: int
    series: str
    patient: str
    position: tuple[float, float, float]
    target: str

    def __str__(self) -> str:
        return f"row {self.row} (series {self.series})"


@dataclass(frozen=True)
class Patches:
    """The patches that were written.

    Attributes:
        classes: The number of patches of each class.
        left_out: One sentence for each candidate of which there is no patch.
    """

    classes: Mapping[str, int]
    left_out: Sequence[str]


def write_patches(
    volumes: Path, table: Path, output: Path, config: PatchConfig, *, leave_out: bool = False
) -> Patches:
    """Cut a patch around every candidate, and write them with a manifest of their classes.

    A patch is the slice at the candidate's height, in the volume's own axes: its first axis runs
    towards the patient's right, its second to the front, as far as the volume is cut so. The folder
    holds a NIfTI file for each patch, with its place in space, below ``images/<series>``;
    ``manifest.csv`` with the columns case, patient, image and class; and, if candidates are left
    out, ``left-out.csv``, which names them.

    Args:
        volumes: The folder of the volumes, which may be in folders below it; their names without
            suffix are those in the table.
        table: The table.
        output: The folder to write, which is absent or empty.
        config: The patches.
        leave_out: Whether candidates without a volume, or outside it, are listed and left out; an
            error otherwise.

    Raises:
        DataError: The table or a volume is unusable, a candidate has no volume or lies outside it,
            or the output holds something.
        StorageError: A file cannot be written.
    """
    candidates = read_candidates(table, config.patient)
    found = find_volumes(volumes)
    of_series: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        of_series[candidate.series].append(candidate)
    missing = sorted(of_series.keys() - found.keys())
    if missing and not leave_out:
        raise DataError(
            f"{table.name}: {volumes} holds no volume of {len(missing)} series: {listed(missing)}; "
            f"add them, or leave their candidates out (--leave-out), which lists them"
        )
    reasons = {c.row: "there is no volume of its series" for s in missing for c in of_series[s]}
    written: dict[int, Path] = {}
    with new_folder(output) as folder:
        for series in sorted(of_series.keys() & found.keys()):
            here, outside = _cut_series(found[series], of_series[series], folder, config)
            if outside and not leave_out:
                rows = listed(sorted(outside))
                raise DataError(
                    f"{table.name}: {len(outside)} candidates lie outside {found[series].name}, in "
                    f"the rows {rows}; correct them or the coordinates (they are taken as "
                    f"{config.coordinates}), or leave them out (--leave-out), which lists them"
                )
            written |= here
            reasons |= dict.fromkeys(outside, "it lies outside its volume")
        if not written:
            raise DataError(f"{table.name}: no candidate lies in a volume of {volumes}; correct it")
        try:
            _write_manifest(folder, [c for c in candidates if c.row in written], written)
            left_out = [c for c in candidates if c.row in reasons]
            if left_out:
                rows_out = [
                    [c.row, *map(without_formula, (c.series, c.target)), reasons[c.row]]
                    for c in left_out
                ]
                _write_csv(folder / "left-out.csv", ["row", SERIES, CLASS, "reason"], rows_out)
        except OSError as error:
            raise storage_error(error, folder) from error
    classes = Counter(c.target for c in candidates if c.row in written)
    sentences = [f"{c} is left out: {reasons[c.row]}" for c in left_out]
    return Patches(dict(sorted(classes.items())), sentences)


def read_candidates(table: Path, patient: str = SERIES) -> list[Candidate]:
    """Read a table of positions.

    Args:
        table: A CSV file.
        patient: The column that names the patient.

    Raises:
        DataError: A column is missing, a coordinate is no number, a cell is empty, or a series is
            of two patients.
    """
    columns, _ = read_columns(table)
    absent = [c for c in dict.fromkeys((SERIES, *POSITION, CLASS, patient)) if c not in columns]
    if absent:
        raise DataError(
            f"{table.name} has no column {listed(absent)} (it has {listed(columns)}); rename its "
            f"columns to those of LUNA16: {', '.join((SERIES, *POSITION, CLASS))}"
        )
    found, patients = [], dict[str, str]()
    for row, cells in enumerate(zip(*(columns[c] for c in (SERIES, patient, CLASS, *POSITION)),
                                    strict=True), start=1):  # fmt: skip
        series, person, target, *position = cells
        if not (series and person and target):
            raise DataError(f"{table.name}, row {row}: the series, patient or class is empty")
        if patients.setdefault(series, person) != person:
            raise DataError(
                f"{table.name}, row {row}: series {series} is of another patient than above; "
                f"correct column {patient}"
            )
        x, y, z = (_number(cell, f"{table.name}, row {row}") for cell in position)
        found.append(Candidate(row, series, person, (x, y, z), target))
    if not found:
        raise DataError(f"{table.name} holds no candidates; add some")
    return found


def find_volumes(folder: Path) -> dict[str, Path]:
    """Return the volumes in a folder and below it, by their names without suffix.

    Args:
        folder: The folder; hidden files are ignored.

    Raises:
        DataError: There is none, or two have one name.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(".") or not path.name.lower().endswith(SUFFIXES):
            continue
        other = found.setdefault(case_id(path), path)
        if other != path:
            raise DataError(f"{other} and {path} have one name; take one of them away")
    if not found:
        raise DataError(f"{folder} holds no volume ({', '.join(SUFFIXES)}); correct the folder")
    return found


def cut_patch(
    volume: DecodedImage, position: Sequence[float], config: PatchConfig
) -> tuple[NDArray[np.float32], Affine] | None:
    """Cut one patch out of a volume.

    What lies beyond the volume's border becomes the smallest value of the volume, which in CT is
    air.

    Args:
        volume: A volume of one channel, with its affine.
        position: (x, y, z) of the patch's centre in millimetres, in RAS+.
        config: The patch. Of an even size, the centre lies between the two middle pixels; with a
            spacing of 0, on the second of them.

    Returns:
        The patch (size, size) and its affine; None if the position lies outside the volume.
    """
    array, affine = volume.array[0], volume.affine
    assert affine is not None
    last = np.array(array.shape) - 0.5
    centre = np.linalg.solve(affine, [*position, 1.0])[:3]
    if (centre < -0.5).any() or (centre > last).any():
        return None
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    pixels = np.arange(config.size, dtype=float)
    if config.spacing:
        steps = np.array([*(config.spacing / lengths[:2]), 1.0])
        first = centre - np.array([1.0, 1.0, 0.0]) * (config.size - 1) / 2 * steps
    else:
        steps = np.ones(3)
        first = np.rint(centre) - np.array([1, 1, 0]) * (config.size // 2)
    axes = np.meshgrid(first[0] + steps[0] * pixels, first[1] + steps[1] * pixels, indexing="ij")
    places = np.stack([*axes, np.full_like(axes[0], first[2])])
    return _sample(array, places), affine @ np.vstack(
        [np.column_stack([np.diag(steps), first]), [0, 0, 0, 1]]
    )


def _sample(array: NDArray[np.float32], places: NDArray[np.float64]) -> NDArray[np.float32]:
    """Interpolate linearly at (3, size, size) voxel indices; beyond the border, the minimum."""
    from scipy import ndimage

    last = np.array(array.shape).reshape(3, 1, 1) - 1.0
    inside = ((places >= -0.5) & (places <= last + 0.5)).all(axis=0)
    patch: NDArray[np.float32] = ndimage.map_coordinates(array, np.clip(places, 0, last), order=1)
    if not inside.all():
        patch[~inside] = array.min()
    return patch


def _cut_series(
    path: Path, candidates: Iterable[Candidate], folder: Path, config: PatchConfig
) -> tuple[dict[int, Path], list[int]]:
    """Write the patches of one volume; return their files by row, and the rows outside it."""
    import nibabel

    library: Any = nibabel  # it is not typed throughout
    volume = read_image(path)
    if volume.affine is None or volume.array.ndim != 4 or len(volume.array) != 1:
        raise DataError(f"{path}: positions need a volume of three axes and one channel")
    written, outside = {}, []
    flips = np.array(_TO_RAS[config.coordinates])
    for number, candidate in enumerate(candidates, start=1):
        cut = cut_patch(volume, candidate.position * flips, config)
        if cut is None:
            outside.append(candidate.row)
            continue
        patch, affine = cut
        file = Path("images", candidate.series, f"{number:05}.nii.gz")
        try:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            library.save(library.Nifti1Image(patch[..., None], affine), folder / file)
        except OSError as error:
            raise storage_error(error, folder / file) from error
        written[candidate.row] = file
    return written, outside


def _write_manifest(
    folder: Path, candidates: Iterable[Candidate], files: Mapping[int, Path]
) -> None:
    """Write which patch shows what; its paths are relative to its folder."""
    rows = [
        [f"{c.series}_{case_id(files[c.row])}", c.patient, files[c.row].as_posix(), c.target]
        for c in candidates
    ]
    _write_csv(folder / "manifest.csv", ["case", "patient", "image", CLASS], rows)


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _number(cell: str, where: str) -> float:
    """Return a coordinate."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{where}: a coordinate is no number (with a decimal point): correct it")
    return value
