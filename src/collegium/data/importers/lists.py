"""The folders of arrays that the released code of federated prostate and fundus papers reads.

- IOP-FL: `<SITE>/Case00.npy` and `Case00_segmentation.npy`, with the cases of each split in
  `<SITE>_train.txt`, `<SITE>_val.txt` and `<SITE>_test.txt` beside the folder;
- HarmoFL and GRACE: the same folder, of `.nii.gz`, without lists; their `<SITE>-dir.npy` and
  `<SITE>-index.npy` are not used;
- FedDG: `client1/data_npy/*.npy`, slices whose array holds the image (three channels) and after it
  the label, so that image and label are one file.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from collegium.data.decoded_image import listed
from collegium.data.formats import arrays
from collegium.data.importers.common import (
    DatasetDescription,
    FoundCases,
    unplaced,
    visible_entries,
)
from collegium.data.pairing import case_id
from collegium.data.site import Case
from collegium.data.splits import SPLITS

logger = logging.getLogger(__name__)

_BOTH = ("data_npy", "npy")
_VOLUMES = (".nii", ".nii.gz", ".nrrd", ".mha")
_LABEL = re.compile(r"[ _-]*segmentation.*", re.IGNORECASE)
_SLICE = re.compile(r"(.*\d.*?)[ _-]+(?:slice|sl|s|z)?[ _-]*\d+", re.IGNORECASE)


def matches(folder: Path, site: str = "") -> bool:
    """Return whether a folder, or its subfolder with the site's name, has one of these layouts.

    Args:
        folder: The folder.
        site: The site's name.
    """
    return _is_site(_own(site, folder))


def _is_site(folder: Path) -> bool:
    if any((folder / name).is_dir() for name in _BOTH) or _lists_of(folder):
        return True
    return any(_LABEL.search(path.name) and _is_array(path) for path in visible_entries(folder))


def from_lists(site: str, folder: Path) -> FoundCases:
    """Return the usable cases of a folder of arrays and one sentence for each problem.

    Args:
        site: The site's name.
        folder: The site's folder, or its parent if the folder has the site's name.
    """
    folder = _own(site, folder)
    both = next((folder / name for name in _BOTH if (folder / name).is_dir()), None)
    if both is not None:
        return _slices(site, both)
    for note in describe(site, folder).notes:
        logger.info("site %s: %s", site, note)
    lists = _lists_of(folder)
    images, labels = _sides(folder)
    if not images:
        return [], [
            f"site {site}: {folder} holds no image beside files *_segmentation: correct the path, "
            "or name another layout"
        ]
    splits, problems = _read_lists(site, lists, images)
    problems += unplaced(
        site, (p for p in visible_entries(folder) if not (_is_array(p) or p.is_dir()))
    )
    cases = []
    for case, image in images.items():
        if lists and case not in splits:
            continue
        label = labels.get(case.lower())
        if label is None:
            wanted = image.with_name(image.name.replace(case, f"{case}_segmentation", 1))
            problems.append(
                f"site {site}, case {case}: there is no label {wanted}: add it or take the image "
                + ("off the list" if lists else "out")
            )
        else:
            cases.append(Case(site, case, case, (image,), label, split=splits.get(case)))
    lone = labels.keys() - {case.lower() for case in images}
    problems += [
        f"site {site}, case {case}: its label {labels[case]} has no image: add the image or take "
        "the label out"
        for case in sorted(lone)
    ]
    if lists and len(splits) < len(images):
        logger.info("site %s: images of %s are on no list and are left out: %s",
                    site, folder, listed(sorted(images.keys() - splits.keys())))  # fmt: skip
    return cases, problems


def describe(site: str, folder: Path) -> DatasetDescription:
    """Return a note on the files of HarmoFL and GRACE that are present and not used.

    Args:
        site: The site's name.
        folder: The site's folder, or its parent if the folder has the site's name.
    """
    folder = _own(site, folder)
    files = [folder.with_name(f"{folder.name}-{kind}.npy") for kind in ("dir", "index")]
    names = " and ".join(path.name for path in files if path.is_file())
    if not names:
        return DatasetDescription()
    note = (
        f"the split in {names} is not used, since it puts slices of one patient into training and "
        "test: patients are shared out by splits, or by a manifest with a column split"
    )
    return DatasetDescription(notes=(note,))


def _own(site: str, folder: Path) -> Path:
    """Return the site's folder: the given one, or its subfolder with the site's name."""
    own = folder / site
    return own if own.is_dir() and _is_site(own) else folder


def _lists_of(folder: Path) -> dict[str, Path]:
    """Return the lists beside a site's folder, by split."""
    files = {split: folder.parent / f"{folder.name}_{split}.txt" for split in SPLITS}
    return {split: path for split, path in files.items() if path.is_file()}


def _is_array(path: Path) -> bool:
    return path.name.lower().endswith((*arrays.SUFFIXES, *_VOLUMES))


def _sides(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the images by case, and the labels by case in lower case."""
    files = [path for path in visible_entries(folder) if _is_array(path)]
    labels = [path for path in files if _LABEL.search(path.name)]
    images = [path for path in files if path not in set(labels)]
    return (
        {case_id(path): path for path in images},
        {_LABEL.sub("", case_id(path)).lower(): path for path in labels},
    )


def _read_lists(
    site: str, lists: dict[str, Path], images: dict[str, Path]
) -> tuple[dict[str, str], list[str]]:
    """Return the split of each case on a list, and a sentence for each wrong line."""
    splits: dict[str, str] = {}
    problems = []
    for split, path in lists.items():
        for line in path.read_text("utf-8-sig", errors="replace").splitlines():
            name = line.strip()
            case = case_id(Path(name.replace("\\", "/")))
            if not name or _LABEL.search(case):
                continue
            if case not in images:
                problems.append(
                    f"site {site}, case {case}: {path} lists {name}, which is not there: restore "
                    "the file or take it off the list"
                )
            elif splits.get(case, split) != split:
                problems.append(
                    f"site {site}, case {case}: it is on the lists {splits[case]} and {split}: "
                    "take it off one of them"
                )
            else:
                splits[case] = split
    return splits, problems


def _slices(site: str, folder: Path) -> FoundCases:
    """Return the slices of a folder of arrays that hold image and label."""
    files = [path for path in visible_entries(folder) if path.suffix.lower() in arrays.SUFFIXES]
    if not files:
        return [], [f"site {site}: {folder} holds no arrays: add some or correct the path"]
    cases = [Case(site, case_id(path), case_id(path), (path,), path) for path in files]
    patients = _patients([case.case for case in cases])
    if len(set(patients)) == len(cases) > 1:
        logger.warning(
            "site %s: the names in %s do not show which slices are of one patient, so that each is "
            "taken for a patient of its own: if that is wrong, use a manifest with the column "
            "patient", site, folder,
        )  # fmt: skip
    found = [replace(case, patient=who) for case, who in zip(cases, patients, strict=True)]
    return found, unplaced(site, (path for path in visible_entries(folder) if path not in files))


def _patients(names: Sequence[str]) -> list[str]:
    """Return the patient of each slice: the part before its number, if that has a number too.

    `Case03_slice_12` is a slice of Case03; `sample_12` and `12` name no patient. Neither do names
    that would all give the same patient.
    """
    found = [_SLICE.fullmatch(name) for name in names]
    patients = [match[1] if match else name for match, name in zip(found, names, strict=True)]
    return list(names) if len(set(patients)) == 1 else patients
