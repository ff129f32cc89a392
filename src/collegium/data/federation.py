"""Makes a `Site` of the files that the description of a federation names."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from collegium.core.dataset import UnlabelledDataset
from collegium.data.cache import prepare
from collegium.data.columns import AS_ELSEWHERE, SiteWording, nfc, translate_word
from collegium.data.discovery import find_path, from_manifest
from collegium.data.federation_config import (
    FederationConfig,
    SiteConfig,
    expand_root,
    site_channels,
    sites_of,
)
from collegium.data.identity import check_contents, contents_of_cases, contents_of_rows
from collegium.data.importers import describe_dataset, find_in_folder, find_with_manifest
from collegium.data.importers.common import DatasetDescription
from collegium.data.label_meanings import class_notes, ignore_notes, segment_classes, with_ignored
from collegium.data.mask_consistency import warn_of_masks
from collegium.data.name_consistency import SiteNames, name_notes, name_problems
from collegium.data.patient_ids import similar_ids
from collegium.data.patient_names import patient_note, with_patients
from collegium.data.placeholders import missing_content
from collegium.data.preprocessing import vanishing_notes
from collegium.data.sampling import ImageDataset
from collegium.data.settings import TaskConfig
from collegium.data.site import Case, EgressPolicy, Site, never_labelled
from collegium.data.splits import SPLITS, load_or_draw_splits, split_unlabelled
from collegium.data.table_site import open_table_site, table_cases
from collegium.data.table_units import unit_notes
from collegium.data.table_words import word_notes
from collegium.data.tables import MISSING, Table, read_table
from collegium.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


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
