"""BIDS: `sub-*/[ses-*/]anat/*` with the labels in `derivatives/*/sub-*/...`.

Labels are files named `*_dseg` or `*_mask`, in the derivatives or beside the images. The patient is
the subject, so that the sessions of a subject are never in different splits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from collegium.data.discovery import complete_channels
from collegium.data.importers.common import DatasetDescription, FoundCases, visible_entries
from collegium.data.placeholders import missing_content
from collegium.data.site import Case

_ENDINGS = (".nii.gz", ".nii")
_LABELS = ("dseg", "mask")


@dataclass(frozen=True)
class BidsFile:
    """A file whose name follows BIDS.

    Attributes:
        path: The file.
        subject: The subject: "sub-01".
        case: The subject and, if there are any, the session: "sub-01_ses-1".
        rest: The name after these: "acq-ax_T1w".
        source: The folder below derivatives; "" for an image, "anat" for a label beside it.
    """

    path: Path
    subject: str
    case: str
    rest: str
    source: str = ""

    @property
    def suffix(self) -> str:
        """The last part of the name: "T1w"."""
        return self.rest.rpartition("_")[2]

    @property
    def entities(self) -> dict[str, str]:
        """The entities of the name: {"acq": "ax"}."""
        pairs = (part.partition("-") for part in self.rest.split("_")[:-1])
        return {key: value for key, _, value in pairs}

    def names(self) -> set[str]:
        """Return all names by which `modality` or `derivative` may refer to the file."""
        own = {self.rest, self.suffix}
        return own | {self.source, *(f"{self.source}/{name}" for name in own)} - {""}


def matches(folder: Path) -> bool:
    """Return whether a folder has this layout."""
    return any(path.name.startswith("sub-") and path.is_dir() for path in visible_entries(folder))


def from_bids(
    site: str, folder: Path, *, modality: str | None = None, derivative: str | None = None
) -> FoundCases:
    """Return the usable cases of a BIDS data set and one sentence for each problem.

    Args:
        site: The site's name.
        folder: The data set.
        modality: Which image of a session: its suffix (`T1w`) or all of its name after subject and
            session (`acq-ax_T1w`); several, separated by commas, are channels in this order.
        derivative: Which labels: the folder below `derivatives`, the name after subject and session
            (`desc-lesion_mask`), or both separated by a slash.
    """
    raw = [file for file in _files(folder) if file.path.parent.name == "anat"]
    images = [file for file in raw if file.suffix not in _LABELS]
    if not images:
        return [], [
            f"site {site}: {folder} holds no sub-*/anat/*.nii.gz or sub-*/ses-*/anat/*.nii.gz: "
            "correct the path, or name another layout"
        ]
    suffixes = sorted({file.suffix for file in images})
    wanted = [*describe(modality).channels] or suffixes
    if len(suffixes) > 1 and modality is None:
        return [], [
            f"site {site}: {folder} holds images of the kinds {', '.join(suffixes)}: "
            f"choose one by modality: {suffixes[0]}, or several as channels by "
            f"modality: '{', '.join(suffixes[:2])}'"
        ]
    groups, problems = _channels(site, folder, images, wanted)
    if problems:
        return [], problems

    def place(case: str, channel: str) -> Path:
        there = next(file.path.parent for file in images if file.case == case)
        return there / f"{case}_{channel}.nii.gz"

    complete, problems = complete_channels(site, groups, wanted, place=place)
    labels = _labels(folder, raw, derivative)
    problems += _without_image(site, folder, images, labels)
    cases = []
    for case, files in complete.items():
        chosen = [file for file in images if file.path in files]
        found = [label for label in labels if label.case == case and _agrees(label, chosen)]
        if len(found) == 1:
            cases.append(Case(site, case, chosen[0].subject, files, found[0].path, stated=True))
        else:
            problems.append(_wrong_labels(site, folder, case, found, derivative))
    return cases, problems


def describe(modality: str | None) -> DatasetDescription:
    """Return the names of the channels if the configuration chooses them."""
    names = (modality or "").split(",")
    return DatasetDescription(
        "modality", channels=tuple(name.strip() for name in names if modality)
    )


def _files(folder: Path, source: str = "") -> Iterable[BidsFile]:
    """Yield the images below the subjects of a folder."""
    for subject in visible_entries(folder):
        if not (subject.is_dir() and subject.name.startswith("sub-")):
            continue
        for path in sorted(subject.rglob("*")):
            ending = next((end for end in _ENDINGS if path.name.endswith(end)), None)
            if ending is None or path.name.startswith(".") or path.is_dir():
                continue
            parts = path.name.removesuffix(ending).split("_")
            inside = [part for part in parts if part.startswith("ses-")]
            inside = inside or [p for p in path.relative_to(subject).parts if p[:4] == "ses-"]
            rest = "_".join(part for part in parts if not part.startswith(("sub-", "ses-")))
            yield BidsFile(path, subject.name, "_".join([subject.name, *inside[:1]]), rest, source)


def _derived(folder: Path) -> list[BidsFile]:
    derivatives = folder / "derivatives"
    pipelines = [path for path in visible_entries(derivatives) if not path.name.startswith("sub-")]
    found = [file for path in pipelines for file in _files(path, path.name)]
    return [*found, *_files(derivatives, derivatives.name)]


def _channels(
    site: str, folder: Path, images: Sequence[BidsFile], wanted: Sequence[str]
) -> tuple[dict[str, dict[str, Path]], list[str]]:
    """Return the files of each case by channel, and a sentence if one cannot be chosen."""
    groups: dict[str, dict[str, Path]] = {file.case: {} for file in images}
    for channel in wanted:
        fitting = [file for file in images if channel in file.names()]
        if not fitting:
            known = ", ".join(sorted({file.rest for file in images}))
            return {}, [
                f"site {site}: {folder} holds no image {channel}: set modality to one of {known}"
            ]
        for file in fitting:
            if channel in groups[file.case]:
                same = [f.rest for f in fitting if f.case == file.case]
                return {}, [
                    f"site {site}: {file.case} in {folder} has {len(same)} images "
                    f"{channel}: {', '.join(same)}: choose one by modality: {same[0]}"
                ]
            groups[file.case][channel] = file.path
    return groups, []


def _labels(folder: Path, raw: Sequence[BidsFile], derivative: str | None) -> list[BidsFile]:
    """Return the labels beside the images and in the derivatives, or those that are chosen."""
    beside = (replace(file, source="anat") for file in raw)
    labels = [file for file in (*beside, *_derived(folder)) if file.suffix in _LABELS]
    return [file for file in labels if derivative is None or derivative in file.names()]


def _agrees(label: BidsFile, images: Iterable[BidsFile]) -> bool:
    """Return whether the entities of a label agree with those of an image."""
    return any(
        all(image.entities.get(key, value) == value for key, value in label.entities.items())
        for image in images
    )


def _without_image(
    site: str, folder: Path, images: Sequence[BidsFile], labels: Sequence[BidsFile]
) -> list[str]:
    """Name the labels of anatomical images that are not there, and subjects without any image."""
    there = {file.case for file in images}
    near = ("anat", "ses-", "sub-")
    alone = {
        label.case: label
        for label in labels
        if label.case not in there and label.path.parent.name.startswith(near)
    }
    known = {file.subject for file in (*images, *alone.values())}
    subjects = [path for path in visible_entries(folder) if path.name.startswith("sub-")]
    return [
        f"site {site}, case {case}: its label {label.path} has no image in a folder anat: add the "
        "image or take the label out"
        for case, label in alone.items()
    ] + [
        f"site {site}, case {path.name}: {path} "
        + (missing_content(path) or "holds no image in a folder anat: add it, in a data set of "
           "DataLad with `datalad get`, or take the subject out")
        for path in subjects
        if path.name not in known and (path.is_dir() or path.is_symlink())
    ]  # fmt: skip


def _wrong_labels(
    site: str, folder: Path, case: str, found: Sequence[BidsFile], derivative: str | None
) -> str:
    where = f"site {site}, case {case}"
    if not found:
        named = f" with the name {derivative}" if derivative else ""
        return (
            f"{where}: it has no label *_dseg or *_mask in {folder / 'derivatives'}{named}: "
            "add it, take the subject out, or correct derivative"
        )
    names = sorted(f"{file.source}/{file.rest}" for file in found)
    return f"{where}: it has the labels {', '.join(names)}: choose one by derivative: {names[0]}"
