"""The description of a federation: its sites' files, and what the data mean."""

import os
import re
from dataclasses import field
from pathlib import Path

from collegium.core.settings import NonNegativeInt, settings
from collegium.core.text import did_you_mean
from collegium.data.columns import nfc
from collegium.data.decoded_image import listed
from collegium.data.patient_names import check_expression
from collegium.data.sampling import SamplingConfig
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.splits import SplitConfig
from collegium.data.tables import TableConfig
from collegium.errors import ConfigError


@settings
class SiteConfig:
    """The location of a site's files, and what may leave the site.

    Attributes:
        folder: A folder with subfolders of images and labels, relative to the federation's root.
        manifest: A CSV file with one line per case, relative to the federation's root. Beside a
            folder it names no images, but adds patient, split and class to them by their ids.
        table: A CSV or Parquet file with one row per case, if the federation learns from tables.
        remote: Whether the files are described at the site alone, in its own file: no other
            machine can open them, and an experiment reaches them over a network.
        layout: The layout of the folder, see `collegium.data.importers`; "auto" detects it.
        options: Settings of the layout, such as {modality: T1w} for BIDS.
        patient: A regular expression that matches the whole name of every case, and whose first
            group is the patient, where names alone tell the patients: "(.+)_t[0-9]". "(.+)" says
            that every case is a patient of its own. None: as the layout or the manifest says.
        label_map: Stored value to class at this site, instead of task.label_map.
        labelled: Names of the classes that the site's masks annotate, if these are not all of
            task.classes; the background is among them always. What belongs to another class is
            background in these masks. None: all, which is refused if the site's own description
            names some only. With task.regions it may only name all.
        unlabelled: Whether lines of the site's manifest, or rows of its table, may have an empty
            label or class: such cases are kept apart, and nothing is trained or scored on them.
            False: they are refused.
        columns: The site's own names of columns of its table, by those in federation.table:
            {crp: "CRP (mg/L)"}.
        coding: From what the site writes to what the federation does, by column of its table:
            {sex: {f: "0", m: "1"}, outcome: {"yes": "1", "no": "0"}}; an empty word stands for a
            missing value. Of a manifest, the column is `class`.
        channels: The network's input channels that the site has, counted from 0, if it lacks some;
            the others are 0. Its images hold these, in this order, or all channels, of which only
            these are used. None: all, or what a manifest states for each case.
        modalities: The same by names of `image.modalities`.
        allow: Names of the parts that may leave; None allows all that an algorithm declares.
        share: Names of opt-in parts that may leave in addition, such as `personal`: the site's
            personal model, for sites outside the federation.
        forbid: Names of the parts that may not leave.
        case_scores: Whether the scores of single cases may leave, under pseudonyms; otherwise their
            number and means leave, and the site alone can tell how sure a difference is.
    """

    folder: str | None = None
    manifest: str | None = None
    table: str | None = None
    remote: bool = False
    layout: str = "auto"
    options: dict[str, str | int] = field(default_factory=dict)
    patient: str | None = None
    label_map: dict[int, int] | None = None
    labelled: tuple[str, ...] | None = None
    unlabelled: bool = False
    columns: dict[str, str] | None = None
    coding: dict[str, dict[str, str]] | None = None
    channels: tuple[NonNegativeInt, ...] | None = None
    modalities: tuple[str, ...] | None = None
    allow: tuple[str, ...] | None = None
    share: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    case_scores: bool = True

    def __post_init__(self) -> None:
        images = self.folder is not None or self.manifest is not None
        if self.remote:
            said = images, self.table, self.share, self.forbid, self.labelled, self.unlabelled
            if any((*said, self.columns, self.coding)) or self.allow is not None:
                raise ConfigError("a remote site is described in its own file: leave the rest out")
            return
        if images == (self.table is not None):
            raise ConfigError(
                f"a site has folder {self.folder!r}, manifest {self.manifest!r} and table "
                f"{self.table!r}: give one of them, or a folder of images and a manifest of their "
                f"ids"
            )
        if self.unlabelled and self.folder is not None:
            raise ConfigError(
                f"unlabelled is of a manifest that names images, or of a table, and a site has the "
                f"folder {self.folder!r}: list its images in a manifest, with an empty label"
            )
        if self.table is None and (self.columns or (self.coding or {}).keys() - {"class"}):
            raise ConfigError(
                "columns and coding are of a table, and coding of the column class of a manifest: "
                "leave them out"
            )
        if self.patient is not None:
            check_expression(self.patient)
            if self.table is not None:
                raise ConfigError("patient is of images: name their column in table.patient")
        if self.folder is None and (self.layout != "auto" or self.options):
            raise ConfigError("layout and options say how a folder is laid out: name a folder")
        if self.channels is not None and self.modalities is not None:
            raise ConfigError("channels and modalities both say what a site has: give one of them")
        if self.modalities is not None and (
            not self.modalities or len(set(self.modalities)) < len(self.modalities)
        ):
            raise ConfigError(f"modalities is {list(self.modalities)}: name each once")


@settings
class PublicConfig:
    """The location of data that the server holds, of no site's patients; labels are optional.

    Attributes:
        images: A folder or a manifest of images, relative to the federation's root, as
            `collegium.data.unlabelled.list_images` reads it.
        labels: A folder of masks, paired with the images by their names; None: the images have no
            labels but those that a manifest names.
        table: A CSV or Parquet file with one row per case, if the federation learns from tables.
        remote: Whether the data are at the server alone; what a site is told of them.
    """

    images: str | None = None
    labels: str | None = None
    table: str | None = None
    remote: bool = False

    def __post_init__(self) -> None:
        given = [self.images is not None, self.table is not None, self.remote]
        if sum(given) != 1:
            raise ConfigError("federation.public should name either images or a table")
        if self.labels is not None and self.images is None:
            raise ConfigError("federation.public.labels are masks of images: name the images")


@settings
class FederationConfig:
    """A federation: its sites, its task, and how files become training samples.

    Attributes:
        name: The federation's name.
        sites: Every site by its name.
        root: The folder that all paths are relative to; environment variables and ~ are expanded.
        outside: Names of the sites that take no part in training.
        task: The meaning of the labels.
        image: How a file becomes an array.
        sampling: How a training sample is drawn from a case.
        splits: The shares of the patients that are held out.
        table: The columns of the tables, if the sites have tables instead of images.
        public: Data that the server holds, for methods that train there; None: none.
    """

    name: str
    sites: dict[str, SiteConfig]
    root: str = "."
    outside: tuple[str, ...] = ()
    task: TaskConfig = field(default_factory=TaskConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    splits: SplitConfig = field(default_factory=SplitConfig)
    table: TableConfig | None = None
    public: PublicConfig | None = None

    def __post_init__(self) -> None:
        public = self.public
        if public and not public.remote and (public.table is None) != (self.table is None):
            raise ConfigError(
                "federation.public holds what the sites hold: name a table there if they have "
                "tables, and images otherwise"
            )
        for name, site in self.sites.items():
            if not site.remote and (site.table is None) != (self.table is None):
                raise ConfigError(
                    f"site {name} has {'no table' if site.table is None else 'a table'} and "
                    f"federation.table is {'not ' if self.table is None else ''}given: name tables "
                    f"at all sites and their columns in federation.table, or neither"
                )
        if self.table is not None and self.task.name != "classification":
            raise ConfigError("tables are learnt from by task.name classification: write that")
        for name in self.sites:
            site_channels(self, name)
        mapped = [name for name, site in self.sites.items() if site.label_map is not None]
        if mapped and self.task.name != "segmentation":
            raise ConfigError(f"site {mapped[0]} has a label_map, for segmentations: leave it out")
        self._check_labelled()
        if self.task.ignore in (self.task.label_map or {}):
            raise ConfigError(
                f"task.label_map makes a class of {self.task.ignore}, which nobody annotated, as "
                f"task.ignore says: leave it out of one of them"
            )
        for name in self.sites:
            self._check_wording(name)
        unknown = sorted(set(self.outside) - self.sites.keys())
        if unknown:
            raise ConfigError(
                f"federation.outside names {', '.join(unknown)}, which is not among the sites "
                f"{', '.join(sorted(self.sites))}: correct the name"
            )

    def _check_wording(self, name: str) -> None:
        """Refuse columns and words of a site that lead to none of the federation."""
        site, table = self.sites[name], self.table
        label = table.label if table else "class"
        kinds = (table.categorical or {}) if table else {}
        known = [
            label,
            *((table.case, table.patient, table.split, *table.columns) if table else ()),
        ]
        for column in (*(site.columns or {}), *(site.coding or {})):
            if nfc(column) not in known:
                raise ConfigError(
                    f"site {name} has columns or coding of {column!r}, which is no column of "
                    f"federation.table: correct the name"
                )
        for column, words in (site.coding or {}).items():
            for word in filter(None, words.values()):
                unknown = nfc(column) == label and self.task.find_class(word) is None
                if unknown or nfc(word) not in kinds.get(nfc(column), (nfc(word),)):
                    raise ConfigError(
                        f"site {name}: coding.{column} leads to {word!r}, which is not in "
                        f"{'task.classes' if column == label else f'table.categorical.{column}'}: "
                        f"correct one of them"
                    )

    def _check_labelled(self) -> None:
        """Refuse annotated classes that are none, or of which the loss has no form."""
        stated = {n: site.labelled for n, site in self.sites.items() if site.labelled is not None}
        every = set(self.task.classes[1:])
        in_part = any(set(labelled) != every for labelled in stated.values())
        if stated and (self.task.name != "segmentation" or (self.task.regions and in_part)):
            raise ConfigError(
                f"site {min(stated)} says which classes it has labelled, and the task is no "
                f"segmentation into classes (task.name, task.regions): leave labelled out"
            )
        for name, labelled in stated.items():
            wrong = sorted(set(labelled) - set(self.task.classes[1:]))
            if wrong or not labelled:
                said = f"{wrong[0]!r}" if wrong else "nothing"
                raise ConfigError(
                    f"site {name} has labelled {said}: choose from "
                    f"{listed(self.task.classes[1:])}; the background always is"
                )


def site_channels(config: FederationConfig, name: str) -> tuple[int, ...] | None:
    """Return the network's channels that a site has, counted from 0; None if it does not say so.

    Args:
        config: The federation.
        name: The site.

    Raises:
        ConfigError: The site has a modality that the federation does not name.
    """
    site, known = config.sites[name], config.image.modalities or ()
    if site.modalities is None:
        return site.channels
    unknown = [modality for modality in site.modalities if modality not in known]
    if unknown:
        raise ConfigError(
            f"site {name} has the modality {unknown[0]!r}, which is not in image.modalities"
            f"{did_you_mean(unknown[0], known) or ':'} name there every channel of the network, in "
            f"order"
        )
    return tuple(map(known.index, site.modalities))


def sites_of(config: FederationConfig) -> list[str]:
    """Return the names of the inside sites, sorted."""
    return sorted(set(config.sites) - set(config.outside))


def expand_root(root: str) -> Path:
    """Return the federation's root with environment variables and ~ expanded.

    Raises:
        ConfigError: A variable is not set.
    """
    for braced, plain in re.findall(r"\$(?:\{(\w+)\}|(\w+))", root):
        if (braced or plain) not in os.environ:
            raise ConfigError(
                f"federation.root is {root}, but the environment variable {braced or plain} is not "
                "set: set it, or pass federation.root=<folder>"
            )
    return Path(os.path.expandvars(root)).expanduser()
