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
    CROSS_VALIDATION,
    LEAVE_ONE_SITE_OUT,
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
"""Variation, key of the fold (see `fold_key`), label of the algorithm, seed.

The first two may be empty.
"""

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
        fold: number of the site left out, from 0.
        left_out: the site that is outside in this fold; empty without leave-one-site-out.
        part: the fold of the sites' patients that is the test, from 1; 0 without cross-validation.
        output: the experiment's folder.
    """

    config: ExperimentConfig
    algorithm: AlgorithmConfig
    seed: int
    variation: str
    fold: int
    left_out: str
    part: int
    output: Path

    @property
    def key(self) -> JobKey:
        """The names by which the job is found."""
        fold = fold_key(self.left_out, self.part)
        return self.variation, fold, self.algorithm.label, self.seed

    @property
    def name(self) -> str:
        """The job as messages name it."""
        parts = [self.variation, fold_words(self.left_out, self.part)]
        return ", ".join(filter(None, [*parts, self.algorithm.label, f"seed {self.seed}"]))

    @property
    def base(self) -> Path:
        """The folder that holds the sites' splits; see `splits_base`."""
        return splits_base(self.output, self.variation, self.part)

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
            with_own_training(fold.config, algorithm),
            algorithm,
            seed,
            variation,
            fold.number,
            fold.left_out,
            fold.part,
            output,
        )
        for variation, varied in variations_of(config).items()
        for seed in varied.seeds
        for fold in folds_of(varied)
        for algorithm in fold.config.algorithms
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


def masks_means(config: ExperimentConfig) -> bool:
    """Return whether sites mask what is averaged in any variation of an experiment."""
    return any(variation.secure_mean for variation in variations_of(config).values())


@dataclass(frozen=True)
class Fold:
    """A fold of an experiment: a site left out, or a part of the patients, or both, or neither.

    Attributes:
        left_out: the site that is outside; empty without leave-one-site-out.
        number: its number among the sites, from 0.
        part: the fold of the sites' patients that is the test, from 1; 0 without cross-validation.
        config: the settings, in which the site is outside and the part is the test.
    """

    left_out: str
    number: int
    part: int
    config: ExperimentConfig


def folds_of(config: ExperimentConfig) -> list[Fold]:
    """Return the folds of an experiment; one without protocols that have any.

    Args:
        config: the experiment, in one variation.
    """
    return [
        Fold(left_out, number, part, _without(with_part(config, part), left_out))
        for number, left_out in enumerate(_left_out(config))
        for part in parts_of(config)
    ]


def parts_of(config: ExperimentConfig) -> list[int]:
    """Return the numbers of the folds of cross-validation; 0 alone without it.

    Args:
        config: the experiment, in one variation.
    """
    if not config.protocol.endswith(CROSS_VALIDATION):
        return [0]
    return [*range(1, config.federation.splits.folds + 1)]


def with_part(config: ExperimentConfig, part: int) -> ExperimentConfig:
    """Return an experiment whose test cases are one fold of cross-validation.

    Args:
        config: the experiment.
        part: the number of the fold; 0: none.
    """
    if not part:
        return config
    splits = replace(config.federation.splits, fold=part)
    return replace(config, federation=replace(config.federation, splits=splits))


def fold_key(left_out: str, part: int) -> str:
    """Return the text by which a fold is named on a command line; empty if there is one only.

    Args:
        left_out: the site that is outside, if any.
        part: the fold of the patients, if any.
    """
    return ",".join(filter(None, [left_out, str(part) if part else ""]))


def fold_words(left_out: str, part: int) -> str:
    """Return the name of a fold in messages; empty if there is one only.

    Args:
        left_out: the site that is outside, if any.
        part: the fold of the patients, if any.
    """
    words = [f"without {left_out}" if left_out else "", f"fold {part}" if part else ""]
    return ", ".join(filter(None, words))


def splits_base(output: Path, variation: str, part: int) -> Path:
    """Return the folder in which the folder of the sites' splits lies.

    Args:
        output: the experiment's folder.
        variation: the variation, if any.
        part: the fold of the patients, if any; each has splits of its own.
    """
    base = output / variation
    return base / f"fold-{part}" if part else base


def _left_out(config: ExperimentConfig) -> list[str]:
    """Return the sites that are outside in turn; an empty name alone without leave-one-site-out."""
    leaves_out = config.protocol.startswith(LEAVE_ONE_SITE_OUT)
    return sites_of(config.federation) if leaves_out else [""]


def _without(config: ExperimentConfig, site: str) -> ExperimentConfig:
    if not site:
        return config
    federation = config.federation
    outside = (site, *federation.outside)
    return replace(config, federation=replace(federation, outside=outside))
