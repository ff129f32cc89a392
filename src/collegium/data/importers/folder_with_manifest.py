"""A folder of images, and a manifest that adds patients, splits or classes by the images' ids."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from collegium.data.discovery import (
    Row,
    files_in,
    from_folder,
    group_channels,
    image_id,
    rows_of_site,
    split_of_row,
    subfolders,
)
from collegium.data.formats import is_readable
from collegium.data.importers.common import unplaced
from collegium.data.pairing import case_id, pair_cases
from collegium.data.site import Case
from collegium.errors import DataError

Lines = dict[str, tuple[str, Row]]
"""The location and the cells of each line, by id."""


def from_folder_and_manifest(
    site: str, folder: Path, manifest: Path
) -> tuple[list[Case], list[str]]:
    """Return the usable cases of a folder joined with a manifest, and the problems.

    The manifest has a column case or, if each patient has one image, patient; ids are matched with
    images by the rules that pair masks with images. Optional columns are patient, split and class;
    if the folder holds no masks, the column label is the class.

    Args:
        site: The site's name; if the manifest has a column site, only its rows count.
        folder: A folder of images, or one with subfolders of images and, optionally, of masks.
        manifest: The CSV file.

    Raises:
        DataError: Manifest or folder is unusable as a whole, or ids and names cannot be matched.
    """
    lines = _lines(site, manifest)
    if not folder.is_dir() or subfolders(folder)[1] is not None:
        found, problems = from_folder(site, folder)
    else:
        found, problems = _images(site, folder, [*lines])
    id_of = _match([case.case for case in found], [*lines], f"site {site}: {manifest}")
    cases = []
    for case in found:
        try:
            if case.case not in id_of:
                raise DataError(
                    f"site {site}, case {case.case}: its image has no line in {manifest}: add the "
                    "line or take the image out"
                )
            cases.append(_with_row(case, *lines[id_of[case.case]]))
        except DataError as error:
            problems.append(str(error))
    problems += [
        f"{where}: {folder} has no image of {name}: add the image or take the line out"
        for name, (where, _) in lines.items()
        if name not in id_of.values()
    ]
    return cases, problems


def _lines(site: str, manifest: Path) -> Lines:
    lines: Lines = {}
    for where, row in rows_of_site(site, manifest, ids_only=True).items():
        name = row.get("case") or row.get("patient", "")
        if not name or name in lines:
            state = f"id {name} occurs twice" if name else "id is missing"
            raise DataError(f"{where}: the {state}: give each line the id of its image")
        lines[name] = where, row
    return lines


def _images(site: str, folder: Path, ids: Sequence[str]) -> tuple[list[Case], list[str]]:
    """Return the images of a folder; 7_0000 and 7_0001 are one image of two channels if 7 is an id.

    Raises:
        DataError: There is none.
    """
    images = subfolders(folder)[0] or folder
    files = [path for path in files_in(images) if is_readable(path)]
    if not files:
        raise DataError(f"site {site}: {images} holds no readable image: correct the path")
    wanted = [Path(f"{name}.png") for name in ids]
    groups, _, problems = group_channels(site, files, wanted)
    others = [path for path in files_in(images) if path not in files and not path.is_dir()]
    problems += unplaced(site, others)
    cases = [(image_id(files), files) for files in groups]
    return [Case(site, case, case, files, None) for case, files in cases], problems


def _match(names: Sequence[str], ids: Sequence[str], where: str) -> dict[str, str]:
    """Return the id that belongs to each image's name, if one does."""
    images, others = ([Path(f"{name}.png") for name in some] for some in (names, ids))
    if not images or not others:
        return {}
    try:
        pairs = pair_cases(images, others).cases
    except DataError as error:
        raise DataError(
            f"{where}: lines and images cannot be matched by their names: write the images' names, "
            "without their endings, into a column case"
        ) from error
    return {case_id(pair.image): case_id(pair.mask) for pair in pairs if pair.mask is not None}


def _with_row(case: Case, where: str, row: Mapping[str, str]) -> Case:
    """Add patient, split and class of a manifest's line to a case."""
    target = row.get("class") or (row.get("label") if case.label is None else None)
    if case.label is None and not target:
        raise DataError(f"{where}: it names no class: fill in the column class or label")
    return replace(
        case,
        patient=row.get("patient") or case.case,
        stated=bool(row.get("patient")),
        split=split_of_row(row, where),
        target=target or None,
    )
