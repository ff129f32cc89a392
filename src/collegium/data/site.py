"""A site: an institution's cases, its data as the library sees it, and what may leave it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collegium.core.dataset import Dataset, TensorDataset
from collegium.data.tables import Scaling

NO_CASES = TensorDataset({})
"""A dataset without cases."""


@dataclass(frozen=True)
class Case:
    """The files of one case, as found by a manifest or in a folder.

    Attributes:
        site: The site's name.
        case: The site's own id of the case, unique at the site.
        patient: The site's own id of the patient; by default the case's.
        images: The image's files, one per channel group (usually one); a DICOM series is a folder.
        label: The label's file; None for a case that is only predicted or has a class.
        fov: The file of the field of view, if there is one.
        split: The split that the manifest names: "train", "val", "test" or None.
        target: The class of a case that is classified, as written.
        series: Which DICOM series of the image's folder, by its UID or number; None: the only one.
        channels: Which of the network's input channels the files hold, counted from 0, if the site
            lacks some; None: all.
        stated: Whether the patient's id was stated, by a manifest, a datalist, a BIDS subject or a
            column of a table; otherwise it was derived from a file's name, which means nothing at
            other sites.
        labelled: The classes that the label annotates, without the background; None: all.
    """

    site: str
    case: str
    patient: str
    images: tuple[Path, ...]
    label: Path | None
    fov: Path | None = None
    split: str | None = None
    target: str | None = None
    series: str | None = None
    channels: tuple[int, ...] | None = None
    stated: bool = False
    labelled: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"site {self.site}, case {self.case}"


@dataclass(frozen=True)
class EgressPolicy:
    """The parts of messages that may leave a site.

    Attributes:
        allow: Names of the parts that may leave; None allows all that an algorithm declares, except
            its opt-in parts.
        share: Names of opt-in parts that may leave in addition, such as `personal`: the site's
            personal model, for sites outside the federation.
        forbid: Names of the parts that may not leave, whatever the others allow.
        case_scores: Whether the scores of single cases may leave, under pseudonyms; otherwise their
            number and means.
    """

    allow: frozenset[str] | None = None
    share: frozenset[str] = frozenset()
    forbid: frozenset[str] = frozenset()
    case_scores: bool = True


@dataclass(frozen=True)
class Site:
    """One institution: its name, its three splits and its egress policy.

    Attributes:
        name: The site's name.
        train: The cases that are trained on.
        val: The cases that select models.
        test: The cases that are scored.
        policy: What may leave the site.
        scaling: The scaling of its table's numbers, if the site determines it by itself.
        labelled: Names of the classes that its masks annotate, without the background, if these are
            not all: what belongs to another class is background there. None: all.
        unlabelled: Cases without a label, of patients who are not held out; no method of this
            library trains on them, and none is scored on them.
        declared: How many cases the site says it has, if they are elsewhere; None: they are here.
        contents: The content of its data, see `collegium.data.identity`; it never leaves the site.
    """

    name: str
    train: Dataset
    val: Dataset
    test: Dataset
    policy: EgressPolicy = EgressPolicy()
    scaling: Scaling | None = None
    labelled: tuple[str, ...] | None = None
    unlabelled: Dataset = NO_CASES
    declared: int | None = None
    contents: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        """The number of cases in the three splits together."""
        if self.declared is not None:
            return self.declared
        return len(self.train) + len(self.val) + len(self.test)


def never_labelled(classes: Iterable[str], sites: Iterable[Sequence[str] | None]) -> str | None:
    """Return a sentence on the classes that no site annotates; None if there is none.

    Args:
        classes: Names of the classes without the background.
        sites: What each of the sites that train annotates; None: all classes.
    """
    known: set[str] = set()
    for labelled in sites:
        if labelled is None:
            return None
        known |= {*labelled}
    missing = [name for name in classes if name not in known]
    if not missing:
        return None
    return (
        f"no site that trains has labelled {', '.join(missing)}: nothing can be learnt about it; "
        f"take it out of task.classes, or name it at a site whose masks annotate it"
    )
