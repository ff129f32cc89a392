"""Opens what an experiment needs, each thing once: its jobs, and the federation of each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from collegium.adaptation import outside
from collegium.core.dataset import ConcatDataset, Dataset
from collegium.core.tensors import Tensors
from collegium.data.federation import open_federation, open_site
from collegium.data.federation_config import FederationConfig, sites_of
from collegium.data.identity import record_contents
from collegium.data.public import open_public
from collegium.data.site import Site
from collegium.errors import CheckpointError
from collegium.experiment.adaptations import write_adaptation
from collegium.experiment.config.building import (
    build_algorithm,
    build_codecs,
    network_of,
    task_of,
)
from collegium.experiment.config.experiment import (
    AdapterConfig,
    AlgorithmConfig,
    ExperimentConfig,
    load_federation,
    parse_config,
    to_dict,
    with_own_training,
)
from collegium.experiment.grid import (
    Job,
    JobKey,
    folds_of,
    holders,
    jobs_of,
    parts_of,
    splits_base,
    variations_of,
    with_part,
)
from collegium.experiment.job_results import (
    DEPLOYED,
    write_overlays,
    write_site_models,
)
from collegium.experiment.preflight import (
    Sample,
    check_adapters,
    check_early_stopping,
    check_engine,
    check_network,
    check_private_scaling,
    check_scores,
    check_setups,
)
from collegium.experiment.scaling import (
    EXCHANGE,
    FILE,
    agree_on_scaling,
    scaling_exchange,
    write_scaling,
)
from collegium.runtime import process
from collegium.runtime.client import ClientRuntime
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.runtime.requests import Transport
from collegium.runtime.run import Run
from collegium.runtime.secure.identity import Identity


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


def open_configured(config: ExperimentConfig, *, splits: Path | None, only: str = "") -> Federation:
    """Open the federation that an experiment's settings describe; no site is asked for anything.

    Args:
        config: The experiment, in one variation and fold.
        splits: Where the sites' splits are stored and read back; None: they are drawn again.
        only: The one site that is opened; empty: all that train.

    Raises:
        DataError: A site's files are unusable.
        ConfigError: There is no such model, or a site's files are elsewhere.
    """
    federation = config.federation
    if only:
        federation = replace(federation, sites={only: federation.sites[only]}, outside=())
    return Federation(
        open_federation(federation, cache_folder(), 0, splits),
        network_of(config),
        task_of(config),
        config.training,
        config.engine.device,
        start_of(config),
        open_public(federation, cache_folder()),
    )


def start_of(config: ExperimentConfig) -> Callable[[Tensors, Collection[str]], Tensors] | None:
    """Return what puts the weights of an experiment's file into an initial model, if it has one.

    Args:
        config: The experiment.
    """
    start = config.initial_weights
    return start.put_into if start is not None and start.file else None


def for_training(
    config: ExperimentConfig,
    opened: Federation,
    folder: Path,
    transport: Callable[[], Transport | None] = lambda: None,
) -> Federation:
    """Return a federation as it trains: its network holds the scaling that the sites agree on.

    Args:
        config: The experiment, in one variation and fold.
        opened: Its federation; of its sites those that train in the fold are taken.
        folder: Where the exchange of the scaling is kept, if the experiment asks for one.
        transport: Returns what carries that exchange; None: this process.

    Raises:
        EgressError: A site's policy does not let out what scaling needs.
        ClientError: A site failed.
    """
    inside = sites_of(config.federation)
    sites = {name: site for name, site in opened.sites.items() if name in inside}
    federation, table = replace(opened, sites=sites), config.federation.table
    if table is None or table.scale != "federation":
        return federation
    return agree_on_scaling(federation, table, folder, transport)


def as_trained_by(
    federation: Federation, config: ExperimentConfig, algorithm: AlgorithmConfig
) -> Federation:
    """Return a federation with the training of an algorithm of its experiment.

    Args:
        federation: The federation.
        config: The experiment.
        algorithm: The algorithm.
    """
    if not algorithm.training:
        return federation
    return replace(federation, training=with_own_training(config, algorithm).training)


class OpenedExperiment:
    """An experiment and everything that is opened for it in one process, at first use.

    Args:
        config: The experiment.
        only: The one site whose data are on this machine; empty: all of them.
        identity: See `Federation`.
    """

    def __init__(
        self, config: ExperimentConfig, only: str = "", identity: Identity | None = None
    ) -> None:
        self.config, self._only, self._identity = config, only, identity
        self._federations: dict[tuple[str, int, str], Federation] = {}
        self._outside: dict[tuple[str, int, str], Site] = {}

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

    def variation(self, name: str, part: int = 0) -> Federation:
        """Return the federation of a variation, with all sites that train in one of its folds.

        Nothing is exchanged for its network: see `federation` for the one that is trained.

        Args:
            name: The variation's name.
            part: The fold of the patients that is the test; 0 without cross-validation.
        """
        if (name, part, "") not in self._federations:
            splits = splits_base(Path(self.config.output), name, part) / "splits"
            self._check_splits(name, part, splits)
            config = with_part(self.variations[name], part)
            opened = open_configured(config, splits=splits, only=self._only)
            self._federations[name, part, ""] = replace(opened, identity=self._identity)
        return self._federations[name, part, ""]

    def _check_splits(self, name: str, part: int, splits: Path) -> None:
        """Check that no stored splits are gone after training has begun.

        Raises:
            CheckpointError: Some are.
        """
        inside = [self._only] if self._only else sites_of(self.variations[name].federation)
        gone = [site for site in inside if not (splits / f"{site}.json").exists()]
        own = (job for job in self.jobs if (job.variation, job.part) == (name, part))
        if gone and any(job.folder.exists() for job in own):
            raise CheckpointError(
                f"{splits} lacks the splits of {', '.join(gone)}, by which this run has begun to "
                "train: restore them, or start the run in a new output folder; splits drawn anew "
                "would test its models on patients that they were trained on"
            )

    def federation(self, job: Job) -> Federation:
        """Return the federation in which a job trains; the sites exchange what scaling needs."""
        place = job.variation, job.part, f"without {job.left_out}"
        if place not in self._federations:
            opened = self.variation(job.variation, job.part)
            self._federations[place] = for_training(
                job.config, opened, job.folder.parents[1], partial(self._scaling_transport, job)
            )
        return as_trained_by(self._federations[place], job.config, job.algorithm)

    def scaling_clients(self, job: Job) -> dict[str, ClientRuntime]:
        """Return the clients of the exchange of the scaling in which a job trains."""
        table = job.config.federation.table
        assert table is not None
        root = job.folder.parents[1] / EXCHANGE
        federation = self.variation(job.variation, job.part)
        return federation.clients(scaling_exchange(table), seed=0, root=root)

    def _scaling_transport(self, job: Job) -> Transport | None:
        """Return what carries the exchange of the scaling; None: this process."""
        return None

    def check(self) -> None:
        """Check before the first round what can be known to fail.

        Raises:
            CollegiumError: In one sentence, what would fail.
        """
        for variation, config in self.variations.items():
            self.check_adapters(variation, self.check_data(variation))
            check_setups(config, variation)

    def check_adapters(self, variation: str, sample: Sample | None) -> None:
        """Check that every adapter finds what it needs, in every fold of a variation.

        Args:
            variation: The variation's name.
            sample: What `check_network` saw.

        Raises:
            ConfigError: One does not; see `collegium.experiment.preflight.check_adapters`.
        """
        for fold in folds_of(self.variations[variation]):
            check_adapters(fold.config, sample, self.shares(fold.config))

    def check_data(self, variation: str) -> Sample | None:
        """Check the sites of this machine: device, data, network, and what policies let out.

        Args:
            variation: The variation's name.

        Returns:
            What `check_network` saw.

        Raises:
            CollegiumError: In one sentence, what would fail.
        """
        config = self.variations[variation]
        opened = [self.variation(variation, part) for part in parts_of(config)]
        federation = opened[0]
        check_engine(config)
        sample = check_network(config, federation)
        check_scores(federation)
        if sample is not None and not self._only:  # otherwise other machines have the data
            for found in opened:
                check_early_stopping(config, found)
            federation.check_labelled()
        check_private_scaling(config)
        for algorithm in config.algorithms:
            own = as_trained_by(federation, config, algorithm)
            own.check(build_algorithm(algorithm))
        table = config.federation.table
        if table is not None and table.scale == "federation":
            federation.check(scaling_exchange(table))
        return sample

    def shares(self, config: ExperimentConfig) -> bool:
        """Return whether a site that trains in a fold shares its personal model.

        Args:
            config: The experiment, in one fold.
        """
        sites = config.federation.sites
        return any("personal" in sites[name].share for name in sites_of(config.federation))

    def transport(self, job: Job) -> Transport:
        """Return what carries the requests of a job that trains to its clients."""
        engine = job.config.engine
        build = partial(self.clients, job)
        if engine.workers > 1:  # these open the experiment themselves
            build = partial(job_clients, self.data, job.key)
        return InProcess(
            build,
            engine.workers,
            engine.threads,
            together=engine.together,
            gpus=process.shared_gpus(engine.device),
        )

    def finish(
        self, job: Job, run: Run, scores: Mapping[str, Mapping[str, list[dict[str, Any]]]]
    ) -> None:
        """Write what is made of the sites' own data after a training: scalings and pictures.

        Args:
            job: The job; its training may be held by another.
            run: The finished run of that training.
            scores: Its test scores, by site and kind of model, a mapping for each case.
        """
        selected = {site: run.global_model(site) for site in scores}
        self.finish_sites(job, self.holder(job), selected, scores)

    def finish_sites(
        self,
        job: Job,
        holder: Job,
        selected: Mapping[str, Tensors | None],
        scores: Mapping[str, Mapping[str, list[dict[str, Any]]]],
    ) -> None:
        """Write the scalings, models and pictures of the sites of this machine.

        Args:
            job: The job.
            holder: The job that holds its training; see `holder`.
            selected: The global model that each site uses; None for a method without one.
            scores: See `finish`.
        """
        sites = self.federation(holder).sites
        for name, site in sites.items():
            if site.scaling is not None:
                write_scaling(holder.folder / "clients" / name / FILE, site.scaling)
        write_site_models(holder.folder, selected)
        if job.seed == job.config.seeds[0]:
            metric, folder = task_of(job.config).metric, job.folder / "overlays"
            write_overlays(self.clients(holder), selected, scores, metric, folder)

    def conclude(self) -> None:
        """Do what remains after the results of all jobs are written; nothing on one machine."""

    def adapt(self, job: Job, config: AdapterConfig, site: str, folder: Path) -> None:
        """Adapt a job's models to one site outside, and store the outcome: the scores last.

        Args:
            job: The job.
            config: The adapter.
            site: The site's name.
            folder: Where the record, the scores and, for the first seed, pictures go.
        """
        models = outside.ModelFiles(self.holder(job).folder / DEPLOYED)
        federation = self.variation(job.variation, job.part)
        cases = site, self.outside(job, site)
        write_adaptation(federation, job, config, cases, models, folder)

    def clients(self, job: Job) -> dict[str, ClientRuntime]:
        """Return the clients of a job that trains; from now on the run's data are to stay."""
        federation = self.federation(job)
        for site in federation.sites.values():
            record_contents(site, job.base / "splits" / f"{site.name}.json")
        return federation.clients(
            build_algorithm(job.algorithm),
            seed=job.seed,
            root=job.folder,
            rounds=job.config.rounds,
            codecs=build_codecs(job.config, job.algorithm),
            secure=job.config.secure_mean,
        )

    def outside(self, job: Job, site: str) -> Dataset:
        """Return all cases of a site outside: none of them has trained a model that it receives.

        Args:
            job: The job in whose fold the site is outside.
            site: The site's name.
        """
        place = job.variation, job.part, site
        if place not in self._outside:
            inside = self.variation(job.variation, job.part).sites
            splits = job.base / "splits" / f"{site}.json"
            self._outside[place] = (
                inside[site]
                if site in inside
                else open_site(_of_all(job.config.federation), site, cache_folder(), 0, splits)
            )
            record_contents(self._outside[place], splits)
        opened = self._outside[place]
        return ConcatDataset([opened.train, opened.val, opened.test])


def _of_all(federation: FederationConfig) -> FederationConfig:
    """Return a federation without folds of patients, which a site outside does not need."""
    return replace(federation, splits=replace(federation.splits, fold=0))


def job_clients(data: Mapping[str, Any], key: JobKey) -> dict[str, ClientRuntime]:
    """Return the clients of a job that trains, as a worker process builds them.

    Args:
        data: The experiment as plain data, see `OpenedExperiment.data`.
        key: The job's key.
    """
    opened = OpenedExperiment(parse_config(data))
    return opened.clients(opened.job(key))
