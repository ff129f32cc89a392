"""Opens what an experiment needs, each thing once: its jobs, and the federation of each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from collegium.core.dataset import ConcatDataset, Dataset
from collegium.data.federation import open_federation, open_site, sites_of
from collegium.data.site import Site
from collegium.experiment.config.building import (
    build_algorithm,
    build_codecs,
    network_of,
    task_of,
)
from collegium.experiment.config.experiment import (
    ExperimentConfig,
    load_federation,
    parse_config,
    to_dict,
)
from collegium.experiment.grid import Job, JobKey, holders, jobs_of, variations_of
from collegium.experiment.scaling import agree_on_scaling
from collegium.runtime.client import ClientRuntime
from collegium.runtime.federation import Federation


def cache_folder() -> Path:
    """Return the folder of decoded cases: ``$COLLEGIUM_CACHE`` or one in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "collegium"
    return Path(os.environ.get("COLLEGIUM_CACHE", default)).expanduser()


def open_sites(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Site]:
    """Open the sites of a federation file, or of the federation in an experiment file.

    Their splits are those that a run draws; nothing is written but prepared cases in the cache.

    Args:
        path: The YAML file.
        overrides: See `collegium.experiment.config.experiment.load_federation`.

    Returns:
        The sites that train, by name.

    Raises:
        ConfigError: The file is not right; with one sentence for every problem.
        DataError: A site's files are unusable.
    """
    return open_federation(load_federation(path, overrides), cache_folder(), 0, None)


def stored_splits(config: ExperimentConfig) -> Path | None:
    """Return the folder of the splits of a run in the experiment's output folder, if there is one.

    Without one, the splits that a run would draw are drawn, and nothing is stored, so that a run
    may still be configured otherwise.
    """
    folder = Path(config.output) / "splits"
    return folder if folder.is_dir() else None


def open_configured(config: ExperimentConfig, *, splits: Path | None) -> Federation:
    """Open the federation that an experiment's settings describe; no site is asked for anything.

    Args:
        config: The experiment, in one variation and fold.
        splits: Where the sites' splits are stored and read back; None: they are drawn again.

    Raises:
        DataError: A site's files are unusable.
        ConfigError: There is no such model.
    """
    return Federation(
        open_federation(config.federation, cache_folder(), 0, splits),
        network_of(config),
        task_of(config),
        config.training,
        config.engine.device,
    )


def for_training(config: ExperimentConfig, opened: Federation, folder: Path) -> Federation:
    """Return a federation as it trains: its network holds the scaling that the sites agree on.

    Args:
        config: The experiment, in one variation and fold.
        opened: Its federation; of its sites those that train in the fold are taken.
        folder: Where the exchange of the scaling is kept, if the experiment asks for one.

    Raises:
        EgressError: A site's policy does not let out what scaling needs.
        ClientError: A site failed.
    """
    sites = {name: opened.sites[name] for name in sites_of(config.federation)}
    federation, table = replace(opened, sites=sites), config.federation.table
    if table is None or table.scale != "federation":
        return federation
    return agree_on_scaling(federation, table, folder)


class OpenedExperiment:
    """An experiment and everything that is opened for it in one process, at first use.

    Args:
        config: The experiment.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self._federations: dict[tuple[str, str], Federation] = {}
        self._outside: dict[tuple[str, str], Site] = {}

    @cached_property
    def data(self) -> dict[str, Any]:
        """The experiment as plain data, from which another process opens it again."""
        return to_dict(self.config)

    @cached_property
    def jobs(self) -> list[Job]:
        """All jobs, in the order in which they run."""
        return jobs_of(self.config)

    @cached_property
    def variations(self) -> dict[str, ExperimentConfig]:
        """The settings of every variation, by its name."""
        return variations_of(self.config)

    def job(self, key: JobKey) -> Job:
        """Return the job of a key."""
        return next(job for job in self.jobs if job.key == tuple(key))

    def holder(self, job: Job) -> Job:
        """Return the job that holds the training of another: itself, or one that trains the same.

        See `collegium.experiment.grid.holders`.
        """
        return holders(self.jobs)[job.key]

    def variation(self, name: str) -> Federation:
        """Return the federation of a variation, with all sites that train in one of its folds.

        Nothing is exchanged for its network: see `federation` for the one that is trained.
        """
        if (name, "") not in self._federations:
            splits = Path(self.config.output) / name / "splits"
            opened = open_configured(self.variations[name], splits=splits)
            self._federations[name, ""] = opened
        return self._federations[name, ""]

    def federation(self, job: Job) -> Federation:
        """Return the federation in which a job trains; the sites exchange what scaling needs."""
        place = job.variation, f"without {job.left_out}"
        if place not in self._federations:
            opened = self.variation(job.variation)
            self._federations[place] = for_training(job.config, opened, job.folder.parents[1])
        return self._federations[place]

    def clients(self, job: Job) -> dict[str, ClientRuntime]:
        """Return the clients of a job that trains."""
        return self.federation(job).clients(
            build_algorithm(job.algorithm),
            seed=job.seed,
            root=job.folder,
            codecs=build_codecs(job.config, job.algorithm),
        )

    def outside(self, job: Job, site: str) -> Dataset:
        """Return all cases of a site outside: none of them has trained a model that it receives.

        Args:
            job: The job in whose fold the site is outside.
            site: The site's name.
        """
        place = job.variation, site
        if place not in self._outside:
            inside = self.variation(job.variation).sites
            splits = job.base / "splits" / f"{site}.json"
            self._outside[place] = (
                inside[site]
                if site in inside
                else open_site(job.config.federation, site, cache_folder(), 0, splits)
            )
        opened = self._outside[place]
        return ConcatDataset([opened.train, opened.val, opened.test])


def job_clients(data: Mapping[str, Any], key: JobKey) -> dict[str, ClientRuntime]:
    """Return the clients of a job that trains, as a worker process builds them.

    Args:
        data: The experiment as plain data, see `OpenedExperiment.data`.
        key: The job's key.
    """
    opened = OpenedExperiment(parse_config(data))
    return opened.clients(opened.job(key))
