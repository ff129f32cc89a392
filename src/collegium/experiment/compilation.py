"""Whether an experiment compiles its network, decided once for a run and kept in its record."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

from collegium.core.lazy import nn
from collegium.core.model_parts import has_convolutions
from collegium.core.randomness import ambient
from collegium.data.federation_config import sites_of
from collegium.errors import ConfigError
from collegium.experiment.config.building import network_of
from collegium.experiment.config.experiment import AlgorithmConfig, ExperimentConfig
from collegium.experiment.grid import jobs_of
from collegium.training.compilation import compiler_problem

logger = logging.getLogger(__name__)

WORTH_COMPILING = 10_000
"""Optimiser steps of a whole experiment above which compiling takes less time than it saves.

For the network of ``configs/vessel.yaml`` it takes 40 s and saves 5 ms a step of 43.
"""


def decide_compilation(
    config: ExperimentConfig, begun: ExperimentConfig | None, *, finished: bool = False
) -> ExperimentConfig:
    """Return the experiment with ``training.compile`` on or off.

    An algorithm that says "auto" of itself trains as the experiment decides.

    A run that has begun keeps what it began with. Otherwise "auto" is on for networks that gain
    (see `gains`), where ``local_steps`` is given and jobs, rounds, sites and steps make
    `WORTH_COMPILING` steps, and the machine has a compiler: a rule without any timing, since the
    last bits of results depend on it.

    Args:
        config: the experiment.
        begun: what the run has begun with, if it has.
        finished: whether nothing is left to train, so that no compiler is needed.

    Raises:
        ConfigError: it is on, and this machine cannot compile.
    """
    choice = config.training.compile
    if choice == "auto":
        choice = _choice(config) if begun is None else begun.training.compile
    decided = replace(
        config,
        training=replace(config.training, compile=choice),
        algorithms=tuple(map(_without_auto, config.algorithms)),
    )
    compiled = any(job.config.training.compile == "on" for job in jobs_of(decided))
    if compiled and not finished and (problem := compiler_problem(config.engine.device)):
        raise ConfigError(
            f"training.compile is on, and this machine cannot compile: {problem}; install it, or "
            f"set it to off in an experiment with another name, since it decides the last bits of "
            f"results"
        )
    return decided


def _without_auto(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return an algorithm whose own "auto" is what the experiment decides."""
    if algorithm.training.get("compile") != "auto":
        return algorithm
    kept = {key: value for key, value in algorithm.training.items() if key != "compile"}
    return replace(algorithm, training=kept)


def _choice(config: ExperimentConfig) -> Literal["on", "off"]:
    """Return what "auto" means for a run that begins."""
    if planned_steps(config) < WORTH_COMPILING:
        return "off"
    with ambient(0, "compilation"):
        if not gains(network_of(config)(), config.engine.device):
            return "off"
    if problem := compiler_problem(config.engine.device):
        logger.warning(
            "training is not compiled, which would be faster: %s; install it before a run begins",
            problem,
        )
        return "off"
    return "on"


def gains(module: nn.Module, device: str) -> bool:
    """Return whether compiled training of a network is quicker, by its layers alone.

    On a processor it is for convolutions with PReLU, as in MONAI's U-Nets, by some 8 percent: one
    pass over memory takes the place of several. IOP-FL's U-Net and DenseNet with their ReLU were
    not quicker (``benchmarks/training.py``), and DenseNet takes minutes to compile.

    Args:
        module: the network.
        device: where to compute, as torch writes it.
    """
    elsewhere = not device.startswith("cpu")
    slopes = any(isinstance(layer, nn.PReLU) for layer in module.modules())
    return has_convolutions(module) and (elsewhere or slopes)


def planned_steps(config: ExperimentConfig) -> int:
    """Return how many optimiser steps all sites take in an experiment; 0 if its data decide.

    Args:
        config: the experiment.
    """
    return sum(
        job.config.rounds
        * (job.config.training.local_steps or 0)
        * (job.config.participation.clients_per_round or len(sites_of(job.config.federation)))
        for job in jobs_of(config)
    )
