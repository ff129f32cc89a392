"""The description of a federation, and how a site's files become a `Site`."""

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path

from collegium.core.dataset import UnlabelledDataset
from collegium.core.settings import NonNegativeInt, settings
from collegium.core.text import did_you_mean
from collegium.data.cache import prepare
from collegium.data.columns import AS_ELSEWHERE, SiteWording, nfc, translate_word
from collegium.data.decoded_image import listed
from collegium.data.discovery import find_path, from_manifest
from collegium.data.identity import check_contents, contents_of_cases, contents_of_rows
from collegium.data.importers import describe_dataset, find_in_folder, find_with_manifest
from collegium.data.importers.common import DatasetDescription
from collegium.data.label_meanings import class_notes, ignore_notes, segment_classes, with_ignored
from collegium.data.mask_consistency import warn_of_masks
from collegium.data.name_consistency import SiteNames, name_notes, name_problems
from collegium.data.patient_ids import similar_ids
from collegium.data.patient_names import check_expression, patient_note, with_patients
from collegium.data.placeholders import missing_content
from collegium.data.preprocessing import vanishing_notes
from collegium.data.sampling import ImageDataset, SamplingConfig
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case, EgressPolicy, Site, never_labelled
from collegium.data.splits import SPLITS, SplitConfig, load_or_draw_splits, split_unlabelled
from collegium.data.table_site import open_table_site, table_cases
from collegium.data.table_units import unit_notes
from collegium.data.table_words import word_notes
from collegium.data.tables import MISSING, Table, TableConfig, read_table
from collegium.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


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


def labelled_at(config: FederationConfig, name: str) -> tuple[str, ...] | None:
    """Return the names of the classes that a site's masks annotate; None: all.

    Args:
        config: The federation.
        name: The site.
    """
    labelled = config.sites[name].labelled
    return None if set(labelled or ()) == set(config.task.classes[1:]) else labelled


def labels_problem(config: FederationConfig) -> str | None:
    """Return a sentence on the classes that no site which trains annotates; None without any.

    A site that is described elsewhere counts as one that annotates all.
    """
    return never_labelled(
        config.task.classes[1:], [config.sites[name].labelled for name in sites_of(config)]
    )


def open_site(
    config: FederationConfig, name: str, cache: Path, seed: int, splits_file: Path | None
) -> Site:
    """Find a site's cases, split them by patient and prepare them in the cache.

    Args:
        config: The federation.
        name: The site, inside or outside.
        cache: The folder for prepared cases; nothing is ever written beside the data.
        seed: Draws the splits that the manifest does not name.
        splits_file: The file in which the splits are stored and from which they are read back; None
            to draw them every time.

    Raises:
        DataError: Files, manifest or splits are unusable, or labels of the site have names that the
            task gives to other classes, or the data have changed since a run began to train.
        StorageError: The cache or the splits cannot be written.
    """
    check_names(config, [name])
    fresh = splits_file is None or not splits_file.exists()
    site = _open(config, name, cache, seed, splits_file)
    if fresh:
        warn_of_masks({name: site}, config.task)
    return site


def check_names(config: FederationConfig, names: Sequence[str]) -> None:
    """Refuse sites at which the same name of a label or channel has different meanings.

    Args:
        config: The federation.
        names: The sites; a single one is compared with the classes of the task.

    Raises:
        DataError: The first conflict.
    """
    sites = [label_and_channel_names(config, name) for name in names]
    problems = name_problems(sites, config.task, config.image.inputs)
    if problems:
        raise DataError(problems[0])


def federation_notes(config: FederationConfig) -> list[str]:
    """Return a sentence for each thing that looks different between the sites.

    Of tables, units and words; of images, the names of classes and channels. A table that cannot be
    read or is elsewhere is left out here.

    Args:
        config: The federation.
    """
    if config.table is None:
        names = [label_and_channel_names(config, name) for name in sorted(config.sites)]
        return name_notes(names, config.task, config.image.inputs)
    tables = {}
    for name in sorted(config.sites):
        with suppress(DataError):
            if not config.sites[name].remote:
                tables[name] = read_site_table(config, name)
    words = word_notes(tables, config.table, config.task)
    return [*words, *unit_notes(tables, config.table.numeric)]


def _open(
    config: FederationConfig, name: str, cache: Path, seed: int, splits_file: Path | None
) -> Site:
    cases = find_cases(config, name)
    if splits_file is None or not splits_file.exists():  # said once, before splits are drawn
        for finding in similar_ids({name: cases}, named=False):
            logger.warning("%s", finding.text)
        alike = names_note(config, name, cases)
        for note in [*([alike[0]] if alike else []), *site_notes(config, name, cases)]:
            logger.warning("site %s: %s", name, note)
    splits = load_or_draw_splits(cases, config.splits, seed, splits_file)
    site = config.sites[name]
    allow = None if site.allow is None else frozenset(site.allow)
    policy = EgressPolicy(allow, frozenset(site.share), frozenset(site.forbid), site.case_scores)
    labelled = {case: splits[case.case] for case in cases}
    apart = split_unlabelled(list_unlabelled(config, name), labelled)
    apart_to_train = [case for case, split in apart.items() if split == "train"]
    used = [*cases, *apart_to_train]
    if config.table is not None:
        table = read_site_table(config, name)
        contents = contents_of_rows(table, [case.case for case in used])
    else:
        table, contents = None, contents_of_cases(used, cache)
    if splits_file is not None:
        check_contents(name, contents, splits_file)
    if config.table is not None and table is not None:
        opened = open_table_site(
            name,
            table,
            splits,
            (config.table, config.task),
            policy,
            unlabelled=[case.case for case in apart_to_train],
        )
        return replace(opened, contents=contents)
    task = task_of_site(config, name)
    prepared = [prepare(case, config.image, task, cache) for case in cases]
    unlabelled = [prepare(case, config.image, task, cache) for case in apart_to_train]
    channels = {case.shape[0] for case in [*prepared, *unlabelled]}
    if len(channels) > 1:
        raise DataError(
            f"site {name}: its images have {sorted(channels)} channels: "
            "set image.channels to grey, rgb or green"
        )
    gone = [(case.case, value) for case in prepared for value in case.vanished]
    for note in vanishing_notes(task.classes, gone):
        logger.warning("site %s: %s", name, note)
    train, val, test = (
        ImageDataset([case for case in prepared if splits[case.case] == split], config.sampling)
        for split in SPLITS
    )
    logger.info(
        "site %s: %d cases (train %d, val %d, test %d)",
        name, len(cases), len(train), len(val), len(test),
    )  # fmt: skip
    if apart:
        logger.info("site %s: %d cases without a label are kept apart", name, len(apart))
    return Site(
        name,
        train,
        val,
        test,
        policy,
        labelled=labelled_at(config, name),
        unlabelled=UnlabelledDataset(ImageDataset(unlabelled, config.sampling)),
        contents=contents,
    )


def open_federation(
    config: FederationConfig, cache: Path, seed: int, splits_dir: Path | None
) -> dict[str, Site]:
    """Open every inside site.

    Args:
        config: The federation.
        cache: The folder for prepared cases; nothing is ever written beside the data.
        seed: Draws the splits that the manifests do not name.
        splits_dir: The folder in which the splits of a site are stored as `<site>.json` and from
            which they are read back, with the content of the data that training began with; None to
            draw them every time.

    Raises:
        DataError: As `open_site`; or the same name of a label or a channel has different meanings
            at two sites, inside or outside, or their images have different numbers of channels.
        StorageError: The cache or the splits cannot be written.
    """
    check_names(config, sorted(config.sites))
    files = {name: splits_dir and splits_dir / f"{name}.json" for name in sites_of(config)}
    fresh = any(file is None or not file.exists() for file in files.values())
    for note in federation_notes(config) if fresh else ():
        logger.warning("%s", note)
    sites = {name: _open(config, name, cache, seed, file) for name, file in files.items()}
    if fresh:
        warn_of_masks(sites, config.task)
    channels = {
        name: case.shape[0]
        for name, site in sites.items()
        for split in (site.train, site.val, site.test)
        if isinstance(split, ImageDataset)
        for case in split.cases
    }
    if len(set(channels.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in channels.items())
        raise DataError(
            f"the images have different numbers of channels ({listed}): "
            "set image.channels to grey, rgb or green"
        )
    return sites


def labelled_values(config: FederationConfig, name: str) -> tuple[int, ...] | None:
    """Return the classes that a site says its masks annotate, by value; None if it does not say.

    Args:
        config: The federation.
        name: The site.
    """
    labelled = config.sites[name].labelled
    return None if labelled is None else tuple(sorted(map(config.task.classes.index, labelled)))


def find_cases(config: FederationConfig, name: str) -> list[Case]:
    """Return the cases of a site, sorted by id.

    Args:
        config: The federation.
        name: The site.

    Raises:
        DataError: A case is unusable; the message has the first problem and the number of others.
    """
    cases, problems = list_cases(config, name)
    problems += [
        f"{case}: {path}: {missing}"
        for case in cases
        for path in (*case.images, case.label, case.fov)
        if path is not None and (missing := missing_content(path))
    ]
    if problems:
        more = len(problems) - 1
        raise DataError(problems[0] + (f" (and {more} more problems at this site)" if more else ""))
    return cases


def list_cases(config: FederationConfig, name: str) -> tuple[list[Case], list[str]]:
    """Return the usable cases of a site, sorted by id, and one sentence for each problem.

    Cases without a label are problems, unless the site may have some: see `list_unlabelled`.

    Args:
        config: The federation.
        name: The site.

    Raises:
        ConfigError: There is no such site, or its layout, options or root are wrong.
    """
    found, problems = _all_cases(config, name)
    cases = [case for case in found if _has_label(config, case)]
    site = config.sites[name]
    if not site.unlabelled:
        classified = config.task.name == "classification"
        remedy = "it has no class: name its class" if classified else "it has no label: add a mask"
        lacking = [case for case in found if not _has_label(config, case)]
        problems += [f"{case}: {remedy}, or take it out" for case in lacking]
    if not found and not problems:
        place = site.manifest or site.folder or site.table
        problems = [f"site {name}: {place} holds no cases of it: add some or take the site out"]
    return sorted(cases, key=lambda case: case.case), problems


def list_unlabelled(config: FederationConfig, name: str) -> list[Case]:
    """Return the cases of a site that have no label, sorted by id; none unless it may have some.

    Args:
        config: The federation.
        name: The site.
    """
    if not config.sites[name].unlabelled:
        return []
    found, _ = _all_cases(config, name)
    lacking = (case for case in found if not _has_label(config, case))
    return sorted(lacking, key=lambda case: case.case)


def _has_label(config: FederationConfig, case: Case) -> bool:
    """Return whether a case has a mask, or a class where cases are classified."""
    if config.task.name != "classification":
        return case.label is not None
    if case.target is None or config.task.find_class(case.target) is not None:
        return case.target is not None
    # elsewhere the class of a row is read with its number, which the error names
    empty = MISSING if config.table is not None and config.sites[case.site].unlabelled else ()
    return case.target.lower() not in empty


def _all_cases(config: FederationConfig, name: str) -> tuple[list[Case], list[str]]:
    """Return the cases of a site, with a label or not, and one sentence for each problem."""
    if name not in config.sites:
        known = ", ".join(sorted(config.sites))
        raise ConfigError(f"the federation {config.name} has no site {name}: choose one of {known}")
    if config.sites[name].remote:
        raise ConfigError(
            f"the files of site {name} can be opened only there (it is remote); run the experiment "
            f"with engine.name=flare"
        )
    root, site = expand_root(config.root), config.sites[name]
    problems: list[str] = []
    try:
        if site.table is not None:
            cases = table_cases(name, read_site_table(config, name))
        elif site.manifest is not None and site.folder is not None:
            folder, manifest = _below(root, site.folder), _below(root, site.manifest)
            cases, problems = find_with_manifest(
                name, folder, manifest, layout=site.layout, options=_options(site)
            )
        elif site.manifest is not None:
            manifest = _below(root, site.manifest)
            cases, problems = from_manifest(name, root, manifest, unlabelled=site.unlabelled)
        else:
            folder = _below(root, str(site.folder))
            cases, problems = find_in_folder(
                name, folder, layout=site.layout, options=_options(site), task=config.task
            )
    except DataError as error:
        cases, problems = [], [str(error)]
    if site.table is None and site.coding:
        words = site.coding["class"]
        cases = [
            case
            if case.target is None
            else replace(case, target=translate_word(case.target, words))
            for case in cases
        ]
    if site.patient is not None:
        cases = with_patients(cases, site.patient, problems)
    channels = site_channels(config, name)
    if channels is not None:
        cases = [replace(case, channels=channels) for case in cases]
    numbers = labelled_values(config, name)
    if numbers is not None:
        cases = [replace(case, labelled=numbers) for case in cases]
    return cases, problems


def label_and_channel_names(config: FederationConfig, name: str) -> SiteNames:
    """Return the names of a site's labels and channels, as far as its data set describes them.

    A description that cannot be read counts as none here; `list_cases` reports it as a problem.

    Args:
        config: The federation.
        name: The site.
    """
    site, description, task = config.sites[name], _description(config, name), config.task
    label_map = task_of_site(config, name).label_map or {}
    undecided = task.name == "segmentation" and not description.labels and site.labelled is None
    segments: frozenset[frozenset[int]] = frozenset()
    if undecided and not site.remote:
        segments = segment_classes(_all_cases(config, name)[0], task_of_site(config, name))
    return SiteNames(
        name,
        description,
        label_map,
        site_channels(config, name),
        site.labelled,
        segments,
    )


def _description(config: FederationConfig, name: str) -> DatasetDescription:
    """Return the description of a site's data set; an empty one if it cannot be read."""
    site = config.sites[name]
    if site.folder is None:
        return DatasetDescription()
    with suppress(DataError, ConfigError):
        folder = _below(expand_root(config.root), site.folder)
        return describe_dataset(
            name, folder, layout=site.layout, options=_options(site), task=config.task
        )
    return DatasetDescription()


def _below(root: Path, written: str) -> Path:
    """Return the place of a site's files, which may be written with backslashes."""
    return find_path(written, (root,)) or root / written


def _options(site: SiteConfig) -> dict[str, str]:
    return {key: str(value) for key, value in site.options.items()}


def task_of_site(config: FederationConfig, name: str) -> TaskConfig:
    """Return the task with the site's own label map, and the values that nobody annotated there.

    If the site's data set names a label ignore, its values are to be ignored, beside `task.ignore`.

    Args:
        config: The federation.
        name: The site.

    Raises:
        ConfigError: A label map makes a class of what the data set calls ignore.
    """
    own, task = config.sites[name].label_map, config.task
    task = task if own is None else replace(task, label_map=own)
    return with_ignored(task, _description(config, name), name)


def wording_of(config: FederationConfig, name: str) -> SiteWording:
    """Return what the table of a site writes otherwise than the federation.

    Args:
        config: The federation.
        name: The site; one that it does not have writes nothing otherwise.
    """
    site = config.sites.get(name)
    if site is None:
        return AS_ELSEWHERE
    columns = {nfc(column): nfc(own) for column, own in (site.columns or {}).items()}
    coding = {
        nfc(column): {nfc(word): nfc(meant) for word, meant in words.items()}
        for column, words in (site.coding or {}).items()
    }
    return SiteWording(columns, coding)


def site_notes(config: FederationConfig, name: str, cases: Sequence[Case]) -> list[str]:
    """Return notes on what a site does not annotate, by its own description.

    Args:
        config: The federation.
        name: The site.
        cases: Its cases.
    """
    site = config.sites[name]
    in_folders = site.folder is not None and site.manifest is None
    notes = ignore_notes(config.task, _description(config, name))
    return notes + (class_notes(config.task, cases) if in_folders else [])


def names_note(
    config: FederationConfig, name: str, cases: Sequence[Case]
) -> tuple[str, int] | None:
    """Return a note, and the number of patients, if cases look like those of fewer by their names.

    Args:
        config: The federation.
        name: The site.
        cases: Its cases.

    Returns:
        None if somebody has said who the patients are, or if names suggest nothing.
    """
    site = config.sites[name]
    if site.patient is not None:
        return None
    if site.table is not None:
        return patient_note(cases, "table")
    return patient_note(cases, "folder" if site.manifest is None else "manifest")


def read_site_table(config: FederationConfig, name: str) -> Table:
    """Read a site's table.

    Args:
        config: The federation, whose sites have tables.
        name: The site.

    Raises:
        DataError: The table cannot be read or understood.
    """
    assert config.table is not None, "the federation has no tables"
    try:
        path = _below(expand_root(config.root), str(config.sites[name].table))
        return read_table(path, config.table, wording=wording_of(config, name))
    except DataError as error:
        raise DataError(f"site {name}: {error}") from error


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
