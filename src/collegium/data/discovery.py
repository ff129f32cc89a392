"""Finds the cases of a site: from a manifest, or in a folder of images and a folder of masks."""

import csv
import io
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PureWindowsPath

from collegium.data.pairing import case_id, pair_cases
from collegium.data.placeholders import is_there, missing_content
from collegium.data.site import Case
from collegium.errors import DataError

logger = logging.getLogger(__name__)


# --- a manifest

SPLIT_NAMES = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
"""The usual names of the three splits, in lower case."""

Row = Mapping[str, str]
"""A row of a manifest or a table, by column."""

FILE_SEPARATOR = "|"
"""Separates the files of one image in a manifest."""

DICOM_UID = re.compile(r"\d+(\.\d+){3,}")

_ALIASES = {"patient_id": "patient", "case_id": "case", "mask": "label"}


def from_manifest(
    site: str, root: Path, manifest: Path, *, unlabelled: bool = False
) -> tuple[list[Case], list[str]]:
    """Return the usable cases of a manifest and one sentence for each problem.

    Args:
        site: The site's name; if the manifest has a column site, only its rows count.
        root: The folder that the manifest's paths are relative to, if not the manifest's own
            folder.
        manifest: The CSV file, with the columns image and label (or class, for classification), and
            optionally case, patient, fov, split, series, channels and site. An image may be several
            separated by `FILE_SEPARATOR`, each with some of its channels.
        unlabelled: Whether a line may name no label.

    Raises:
        DataError: The manifest as a whole is unusable.
    """
    bases = (root, manifest.parent)
    rows = rows_of_site(site, manifest)
    return collect_cases(
        rows, lambda row, where: _case_of_row(site, row, bases, where, unlabelled=unlabelled)
    )


def rows_of_site(site: str, manifest: Path, *, ids_only: bool = False) -> dict[str, Row]:
    """Return the rows of a site in a manifest, by their location.

    Args:
        site: The site's name; if the manifest has a column site, only its rows count.
        manifest: The CSV file.
        ids_only: See `read_manifest`.

    Raises:
        DataError: See `read_manifest`.
    """
    return {
        f"site {site}, line {line} of {manifest}": row
        for line, row in read_manifest(site, manifest, ids_only=ids_only)
        if row.get("site", site) == site
    }


def collect_cases(
    rows: Mapping[str, Row], make_case: Callable[[Row, str], Case]
) -> tuple[list[Case], list[str]]:
    """Build a case from each row; return the cases and one sentence for each row that has none.

    Args:
        rows: The rows by their location, such as "site A, line 3 of m.csv".
        make_case: Builds the case of a row, given the row and its location.
    """
    cases: dict[str, Case] = {}
    problems = []
    for where, row in rows.items():
        try:
            case = make_case(row, where)
            if case.case in cases:
                raise DataError(f"{where}: case {case.case} occurs twice: give each its own id")
            cases[case.case] = case
        except DataError as error:
            problems.append(str(error))
    return list(cases.values()), problems


def read_manifest(
    site: str, manifest: Path, *, ids_only: bool = False, labelled: bool = True
) -> Iterator[tuple[int, dict[str, str]]]:
    """Read a manifest's rows as text, with the line number of each.

    Column names are lower-cased and aliases resolved. Ids stay text, so that 0007 keeps its zeros.
    A byte order mark and semicolons, as spreadsheets write them, are understood.

    Args:
        site: The site's name.
        manifest: The CSV file.
        ids_only: Whether the manifest holds ids only, and a folder the images.
        labelled: Whether a column of labels or classes is required.

    Raises:
        DataError: The file cannot be read, is empty or lacks a column.
    """
    text = _read_text(site, manifest)
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    names = [name.strip().lower() for name in next(reader, [])]
    columns = [name if _ALIASES.get(name) in names else _ALIASES.get(name, name) for name in names]
    where = f"site {site}: the manifest {manifest}"
    if not text.strip():
        raise DataError(f"{where} is empty: write a line of columns, and one for each image")
    _check_columns(columns, where, ids_only=ids_only, labelled=labelled)
    for cells in reader:
        values = [cell.strip() for cell in cells]
        if any(values):
            if any(values[len(columns) :]):
                raise DataError(
                    f"site {site}, line {reader.line_num} of {manifest}: {len(values)} cells for "
                    f"{len(columns)} columns: put quotes around cells with a {delimiter!r}"
                )
            yield reader.line_num, dict(zip(columns, values, strict=False))


def _check_columns(columns: Sequence[str], where: str, *, ids_only: bool, labelled: bool) -> None:
    """Refuse a manifest that lacks a column, or that names images itself beside a folder."""
    if ids_only and "image" in columns:
        raise DataError(f"{where} names images itself: leave out the site's folder, or the column")
    needed = ["image"] if "class" in columns or not labelled else ["image", "label"]
    if ids_only:
        needed = [] if "case" in columns else ["patient"]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise DataError(
            f"{where} has no column {' nor '.join(missing)}: "
            f"add it to the columns {', '.join(columns)}"
            + (" (or a column class, where cases are classified)" if "label" in missing else "")
        )


def _read_text(site: str, manifest: Path) -> str:
    try:
        return manifest.read_text("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(
            f"site {site}: there is no manifest {manifest}: correct the path or federation.root"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"site {site}: the manifest {manifest} is not UTF-8 text: save it as 'CSV UTF-8'"
        ) from error
    except OSError as error:
        raise DataError(
            f"site {site}: the manifest {manifest} cannot be read ({error.strerror}): "
            "check its permissions"
        ) from error


def _case_of_row(
    site: str, row: Row, bases: Sequence[Path], where: str, *, unlabelled: bool
) -> Case:
    case, target = case_of_row(row), row.get("class") or None
    if not case:
        raise DataError(f"{where} names no case and no image: fill in the line or remove it")
    where = f"{where}, case {case}"
    split, channels = split_of_row(row, where), channels_of_row(row, where)

    def find(name: str, column: str) -> Path:
        place = f"site {site}, case {case}"
        if not name:
            raise DataError(f"{place}: the manifest names no {column}: add it or remove the line")
        return find_file(name, bases, f"{place}: {column}", MANIFEST_PATHS)

    label, fov = row.get("label", ""), row.get("fov")
    return Case(
        site=site,
        case=case,
        patient=row.get("patient") or case,
        label=find(label, "label") if label or not (target or unlabelled) else None,
        fov=find(fov, "fov") if fov else None,
        images=tuple(find(name, "image") for name in files_of_row(row)),
        split=split,
        target=target,
        series=row.get("series") or None,
        channels=channels,
        stated=bool(row.get("patient")),
    )


def case_of_row(row: Row) -> str:
    """Return the id of a row's case: as written, or its first image's name; "" without either."""
    names = files_of_row(row)
    name = _name(names[0])
    return row.get("case") or (name.removesuffix("_0000") if len(names) > 1 else name)


def files_of_row(row: Row) -> list[str]:
    """Return the files of a row's image as written; a single empty name if it has none."""
    return [name.strip() for name in row.get("image", "").split(FILE_SEPARATOR)]


def channels_of_row(row: Row, where: str) -> tuple[int, ...] | None:
    """Return the channels that the image of a row holds; None if the row does not state them.

    Args:
        row: The row.
        where: Its location, for errors.

    Raises:
        DataError: They are not distinct whole numbers.
    """
    written = row.get("channels", "").split()
    if not written:
        return None
    if not all(number.isdecimal() for number in written) or len(set(written)) < len(written):
        raise DataError(
            f"{where}: the channels {row['channels']!r} are not distinct whole numbers: write them "
            f"with spaces between them, counted from 0"
        )
    return tuple(map(int, written))


def split_of_row(row: Row, where: str) -> str | None:
    """Return the split that a row names; None if it names none.

    Args:
        row: The row.
        where: Its location, for errors.

    Raises:
        DataError: There is no such split.
    """
    split = row.get("split", "").lower()
    if split and split not in SPLIT_NAMES:
        raise DataError(f"{where}: the split {split} is unknown: write train, val or test")
    return SPLIT_NAMES.get(split)


def _name(image: str) -> str:
    """Return the name up to its first dot; a folder named by a DICOM UID keeps its full name."""
    name = PureWindowsPath(image).name  # after the last / or \\
    return name if DICOM_UID.fullmatch(name) else name.split(".")[0]


MANIFEST_PATHS = (
    "correct the manifest (paths are relative to federation.root or to the manifest's folder)"
)
"""The remedy for a path of a manifest."""


def find_path(written: str, bases: Sequence[Path]) -> Path | None:
    """Return what a written path names, also one written under Windows; None if it is not there.

    Args:
        written: The path, with slashes or backslashes between its parts.
        bases: The folders that it may be relative to, in the order in which they are tried.
    """
    paths = (base / text for text in (written, written.replace("\\", "/")) for base in bases)
    return next((path for path in paths if is_there(path)), None)


def find_file(written: str, bases: Sequence[Path], what: str, remedy: str) -> Path:
    """Return the file that a written path names.

    Args:
        written: The path, with slashes or backslashes between its parts.
        bases: The folders that it may be relative to, in the order in which they are tried.
        what: Where the path is written and what it is to be: "site A, case 7: image".
        remedy: What to do with what is written.

    Raises:
        DataError: It is not there. Of a path of another machine only the last part is named.
    """
    path = find_path(written, bases)
    if path is not None:
        return path
    where, _, kind = what.rpartition(": ")
    windows = PureWindowsPath(written)
    if windows.drive or written.startswith("\\"):
        raise DataError(
            f"{where}: the {kind} {windows.name} has a path of another machine: {remedy}"
        )
    plain = written.replace("\\", "/")
    there = f"{where}: there is no {kind} {bases[0] / plain}"
    alike = next(filter(None, (_alike(base, windows.parts) for base in bases)), None)
    if alike is not None:
        raise DataError(
            f"{there}, but {alike}, which differs in upper and lower case or in the form of its "
            f"accents only: write it as it is there"
        )
    raise DataError(f"{there}: {remedy} or restore the file")


def _alike(base: Path, parts: Sequence[str]) -> Path | None:
    """Return the file whose path differs in case or Unicode form only, if there is one."""
    for part in parts:
        if not is_there(base / part):
            part = _names(base).get(_folded(part), "") if base.is_dir() else ""
            if not part:
                return None
        base /= part
    return base


def _names(folder: Path) -> dict[str, str]:
    return _names_then(folder, folder.stat().st_mtime_ns)


@lru_cache(maxsize=8)  # many rows may name files of one folder
def _names_then(folder: Path, modified: int) -> dict[str, str]:
    return {_folded(path.name): path.name for path in sorted(folder.iterdir())}


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


# --- a folder

_IMAGES = ("images", "image", "imagestr")
_LABELS = (
    "labels", "label", "labelstr", "manual", "1st_manual", "segmentations", "segmentation",
    "annotations", "masks", "mask",
)  # fmt: skip
FOV_FOLDERS = ("fov", "fovs", "fov_masks")
"""The usual names of folders of fields of view, in lower case."""


def from_folder(site: str, folder: Path) -> tuple[list[Case], list[str]]:
    """Return the usable cases of a folder and one sentence for each problem.

    Images are in the subfolder images, masks in labels, masks, manual or segmentations, fields of
    view in fov; masks are paired with images by their names.

    Args:
        site: The site's name.
        folder: The folder that holds these subfolders.
    """
    if not folder.is_dir():
        return [], [no_folder(site, folder)]
    images, labels, fovs = subfolders(folder)
    if images is None or labels is None:
        wanted = "images" if images is None else "labels (or masks, manual, segmentations)"
        for path in sorted(folder.iterdir()):
            if path.name.lower() in (*_IMAGES, *_LABELS) and (missing := missing_content(path)):
                return [], [f"site {site}: {path} {missing}"]
        return [], [
            f"site {site}: {folder} has no subfolder {wanted}: add it, name the layout that the "
            "folder has or use a manifest"
        ]
    channels, incomplete, problems = group_channels(site, files_in(images), files_in(labels))
    masks = [path for path in files_in(labels) if case_id(path) not in incomplete]
    try:
        pairing = pair_cases([files[0] for files in channels], masks, files_in(fovs))
    except DataError as error:
        return [], [*problems, f"site {site}: {error}"]
    for note in pairing.notes:
        logger.info("site %s: %s", site, note)
    problems += [
        f"site {site}, case {case}: its image in {images} has no mask in {labels}: "
        "add the mask or take the image out"
        for case in pairing.unpaired_images
    ]
    problems += [
        f"site {site}: the mask {mask} in {labels} has no image in {images}: "
        "add the image or take the mask out"
        for mask in pairing.unpaired_masks
    ]
    files_of = {files[0]: files for files in channels}
    cases = []
    for pair in pairing.cases:
        files = files_of[pair.image]
        case = image_id(files)
        if pair.mask is None:
            raise DataError(f"site {site}, case {case}: it has no mask: add one")
        cases.append(Case(site, case, case, files, pair.mask, pair.fov))
    return cases, problems


def image_id(files: Sequence[Path]) -> str:
    """Return the id of an image: its file's name, of several channels without its number."""
    name = case_id(files[0])
    return name.removesuffix("_0000") if len(files) > 1 else name


def no_folder(site: str, folder: Path) -> str:
    """Return the sentence that a site's folder does not exist.

    Args:
        site: The site's name.
        folder: The folder.
    """
    return f"site {site}: there is no folder {folder}: correct the path or federation.root"


def files_in(folder: Path | None) -> list[Path]:
    """List a folder without the detached voxels of header files such as .mhd."""
    there = sorted(folder.iterdir()) if folder is not None else []
    return [path for path in there if not path.name.lower().endswith((".raw", ".zraw", ".raw.gz"))]


def group_channels(
    site: str, images: Sequence[Path], labels: Sequence[Path]
) -> tuple[list[tuple[Path, ...]], set[str], list[str]]:
    """Group b01_0000, b01_0001 into one image of two channels if there is a label b01.

    Args:
        site: The site's name.
        images: The images' files.
        labels: The labels' files; only their names count.

    Returns:
        The files of each image, the cases that lack a channel, and a sentence for each of these.
    """
    labelled = {case_id(path) for path in labels}
    named = ((case_id(path), path) for path in images)
    single, groups = split_channels(named, lambda base: base in labelled)
    wanted = sorted({channel for group in groups.values() for channel in group})

    def place(base: str, channel: str) -> Path:
        there = next(iter(groups[base].values()))
        return there.with_name(there.name.replace(case_id(there), f"{base}_{channel}", 1))

    complete, problems = complete_channels(site, groups, wanted, place=place)
    whole = [(path,) for _, path in single]
    return [*whole, *complete.values()], groups.keys() - complete.keys(), problems


def split_channels(
    files: Iterable[tuple[str, Path]], is_image: Callable[[str], bool]
) -> tuple[list[tuple[str, Path]], dict[str, dict[str, Path]]]:
    """Separate images that are one file from channels such as b01_0000 and b01_0001 of b01.

    Args:
        files: The files with their stems.
        is_image: Whether a stem without the number of its channel is the name of an image.

    Returns:
        The images that are one file, and the files of the others by image and channel.
    """
    single = []
    groups: dict[str, dict[str, Path]] = {}
    for stem, path in files:
        match = re.fullmatch(r"(.+)_(\d{4})", stem)
        if match and is_image(match[1]):
            groups.setdefault(match[1], {})[match[2]] = path
        else:
            single.append((stem, path))
    return single, groups


def complete_channels(
    site: str,
    groups: Mapping[str, Mapping[str, Path]],
    wanted: Sequence[str],
    *,
    place: Callable[[str, str], Path],
) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """Select the cases that have every channel.

    Args:
        site: The site's name.
        groups: The files by case and channel.
        wanted: The channels, in their order.
        place: Returns the path that the file of a case and a channel should have.

    Returns:
        The files of each complete case, and a sentence for each channel that a case lacks.
    """
    complete = {
        case: tuple(group[channel] for channel in wanted)
        for case, group in groups.items()
        if group.keys() >= set(wanted)
    }
    problems = [
        f"site {site}, case {case}: channel {channel} is missing ({place(case, channel)}): add "
        f"it or take the case out; {len(complete)} of {len(groups)} cases are complete"
        for case, group in groups.items()
        for channel in wanted
        if channel not in group
    ]
    return complete, problems


def subfolders(folder: Path) -> tuple[Path | None, Path | None, Path | None]:
    """Find the folders of images, labels and fields of view; `masks` beside labels are the last."""
    there = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_dir()}
    images, labels, fovs = (
        [there[name] for name in names if name in there]
        for names in (_IMAGES, _LABELS, FOV_FOLDERS)
    )
    if not fovs and labels and labels[0].name.lower() not in ("masks", "mask"):
        fovs = [path for path in labels[1:] if path.name.lower() in ("masks", "mask")]
    image, label, fov = (next(iter(found), None) for found in (images, labels, fovs))
    return image, label, fov
