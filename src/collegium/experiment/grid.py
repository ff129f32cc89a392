"""The jobs of an experiment: variations by folds by seeds by algorithms.

Every job of the grid has settings of its own, an `ExperimentConfig` without variations and with
the fold's site outside, and a folder. Jobs that would train the same models share one training:
one of them holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from collegium.data.federation_config import sites_of
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import (
    AlgorithmConfig,
    ExperimentConfig,
    decisive,
    parse_config,
    to_dict,
    with_own_training,
)
from collegium.experiment.config.overrides import set_value
from collegium.experiment.config.schema import digest_of
from collegium.experiment.config.yaml_file import Place, Source
from collegium.runtime.records import TEST_FILE

JobKey = tuple[str, str, str, int]
"""Variation, the site left out, label of the algorithm, seed; the first two may be empty."""

TESTED = Path("server") / TEST_FILE
"""What the training of a job ends with, in its folder."""


@dataclass(frozen=True)
class Job:
    """One training of one algorithm, and what is tested of it.

    Attributes:
        config: the job's own settings, with the training of its algorithm.
        algorithm: the algorithm.
        seed: the seed.
        variation: name of the variation; empty where there are none.
        fold: number of the fold.
        left_out: the site that is outside in this fold; empty without leave-one-site-out.
        output: the experiment's folder.
    """

    config: ExperimentConfig
    algorithm: AlgorithmConfig
    seed: int
    variation: str
    fold: int
    left_out: str
    output: Path

    @property
    def key(self) -> JobKey:
        """The names by which the job is found."""
        return self.variation, self.left_out, self.algorithm.label, self.seed

    @property
    def name(self) -> str:
        """The job as messages name it."""
        parts = [self.variation, f"without {self.left_out}" if self.left_out else ""]
        return ", ".join(filter(None, [*parts, self.algorithm.label, f"seed {self.seed}"]))

    @property
    def base(self) -> Path:
        """The folder of the job's variation, which holds the sites' splits."""
        return self.output / self.variation

    @property
    def folder(self) -> Path:
        """The job's own folder."""
        fold = self.base / f"without-{self.left_out}" if self.left_out else self.base
        return fold / self.algorithm.label / f"seed-{self.seed}"

    @property
    def trained(self) -> bool:
        """Whether the job's own folder holds a training that is finished and tested."""
        return (self.folder / TESTED).exists()

    @cached_property
    def training(self) -> str:
        """32 hexadecimal digits that two jobs share if they train the same models."""
        data = decisive(self.config)
        for key in ("name", "algorithms", "adapters", "protocol", "variations", "seeds"):
            data.pop(key)
        federation, inside = data["federation"], sites_of(self.config.federation)
        federation["sites"] = {name: federation["sites"][name] for name in inside}
        del federation["outside"]
        about = {"seed": self.seed, "codec": data.pop("codec")}
        algorithm = {**about, **self.algorithm.to_dict(), "label": "", "adapters": None}
        algorithm.pop("training", None)  # is part of what the job's own settings say
        return digest_of({**data, "algorithm": algorithm})


def jobs_of(config: ExperimentConfig) -> list[Job]:
    """Return the jobs of an experiment, seed by seed, in the order in which they run.

    Raises:
        ConfigError: a variation names a key that does not exist, or a value that does not suit it.
    """
    output = Path(config.output)
    return [
        Job(
            with_own_training(settings, algorithm),
            algorithm,
            seed,
            variation,
            fold,
            left_out,
            output,
        )
        for variation, varied in variations_of(config).items()
        for seed in varied.seeds
        for fold, (left_out, settings) in enumerate(folds_of(varied))
        for algorithm in settings.algorithms
    ]


def holders(jobs: Sequence[Job]) -> dict[JobKey, Job]:
    """Return by key the job that holds the training of each: itself, or another one.

    Of several that would train the same models it is the first that has done so, else the first. So
    a run may be extended by a job before the one that has trained, and nothing is trained again.
    """
    first: dict[str, Job] = {}
    for job in sorted(jobs, key=lambda job: not job.trained):
        first.setdefault(job.training, job)
    return {job.key: first[job.training] for job in jobs}


def variations_of(config: ExperimentConfig) -> dict[str, ExperimentConfig]:
    """Return the settings of every variation; without any, those of the experiment under "".

    Raises:
        ConfigError: a variation names a key that does not exist, or a value that does not suit it.
    """
    if not config.variations:
        return {"": config}
    found = {}
    for name, changes in config.variations.items():
        data = to_dict(replace(config, variations={}))
        where = f"variation {name!r}"
        source = Source(Place(where, Path.cwd()))
        for key, value in changes.items():
            path = tuple(key.split("."))
            if path[0] in ("name", "output", "variations"):
                raise ConfigError(f"{where} sets {key}, which belongs to the whole experiment")
            set_value(data, path, value, source.root, source)
        found[name] = parse_config(data, where=where)
    return found


def folds_of(config: ExperimentConfig) -> list[tuple[str, ExperimentConfig]]:
    """Return the site left out, if any, and the settings of every fold."""
    if config.protocol == "inside":
        return [("", config)]
    federation = config.federation
    return [
        (site, replace(config, federation=replace(federation, outside=(site, *federation.outside))))
        for site in sites_of(federation)
    ]
