"""Fed-ISIC2019 as FLamby and GRACE publish it: one folder of pictures, one table of all centres.

The table has the columns `image` (the pictures' names without their ending), `target` (the class),
`center` and `fold` (train or test); optionally `patient`. Others, such as `fold2`, are not used.
"""

from collections.abc import Mapping
from pathlib import Path

from collegium.data.columns import read_columns
from collegium.data.decoded_image import listed
from collegium.data.discovery import Row, collect_cases, no_folder, split_of_row
from collegium.data.formats import FILE_SUFFIXES
from collegium.data.importers.common import FoundCases, visible_entries
from collegium.data.pairing import case_id
from collegium.data.site import Case
from collegium.errors import DataError

NEEDED = ("image", "target", "center")
"""The columns without which a table is not this one."""


def matches(table: Path) -> bool:
    """Return whether a file is such a table, by its first line."""
    try:
        with table.open(encoding="utf-8-sig") as file:
            columns = file.readline().lower().replace('"', "").split(",")
    except (OSError, UnicodeDecodeError):
        return False
    return {column.strip() for column in columns} >= set(NEEDED)


def from_isic(site: str, folder: Path, table: Path, *, center: str | None = None) -> FoundCases:
    """Return the usable cases of one centre and one sentence for each problem.

    Args:
        site: The site's name.
        folder: The pictures of all centres.
        table: The table of all centres.
        center: The site's centre, as written in the column `center`; None if there is only one.

    Raises:
        DataError: The table or the folder is unusable as a whole, or the centre is not in the
            table.
    """
    rows = _rows(site, table)
    centers = sorted({row["center"] for row in rows})
    if center is None and len(centers) > 1:
        raise DataError(
            f"site {site}: {table} holds the centres {listed(centers)}: choose the site's by "
            f"options: {{center: '{centers[0]}'}}"
        )
    if center is not None and center not in centers:
        raise DataError(
            f"site {site}: {table} holds no picture of center {center}: set the option to one of "
            f"{listed(centers)}"
        )
    if not folder.is_dir():
        raise DataError(no_folder(site, folder))
    there = {
        case_id(path): path
        for path in visible_entries(folder)
        if path.name.lower().endswith(FILE_SUFFIXES)
    }
    own = {
        f"site {site}, row {number} of {table}": row
        for number, row in enumerate(rows, 1)
        if center in (None, row["center"])
    }
    return collect_cases(own, lambda row, where: _case(site, row, there, where))


def _rows(site: str, table: Path) -> list[dict[str, str]]:
    try:
        columns, _ = read_columns(table)
    except DataError as error:
        raise DataError(f"site {site}: {error}") from error
    named = {name.lower(): cells for name, cells in columns.items()}
    missing = [name for name in NEEDED if name not in named]
    if missing:
        raise DataError(
            f"site {site}: {table} has no column {' nor '.join(missing)}: add it to the columns "
            f"{listed(columns)}"
        )
    return [dict(zip(named, cells, strict=True)) for cells in zip(*named.values(), strict=True)]


def _case(site: str, row: Row, there: Mapping[str, Path], where: str) -> Case:
    name = row["image"]
    image = there.get(name) or there.get(case_id(Path(name.replace("\\", "/"))))
    if image is None:
        raise DataError(
            f"{where}: the folder has no picture {name or 'without a name'}: restore it or take "
            "the row out"
        )
    if not row["target"]:
        raise DataError(f"{where}: picture {name} has no target: add its class or take the row out")
    case, patient = case_id(image), row.get("patient", "")
    split = split_of_row({"split": row.get("fold", "")}, where)
    return Case(
        site, case, patient or case, (image,), None, split=split, target=row["target"],
        stated=bool(patient),
    )  # fmt: skip
