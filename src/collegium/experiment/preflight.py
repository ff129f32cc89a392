"""Checks before the first round of what can be known to fail: engine, device, network, data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from collegium.compression.session.groups import check_codecs
from collegium.core.algorithm import Algorithm, NetworkBuilder, check_needs
from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient, generator
from collegium.core.tensors import Tensors
from collegium.data.federation import labels_problem
from collegium.data.federation_config import sites_of
from collegium.errors import CollegiumError, ConfigError
from collegium.experiment.config.building import (
    adapters_of,
    build_adapter,
    build_algorithm,
    build_codecs,
    network_of,
    task_of,
)
from collegium.experiment.config.experiment import ExperimentConfig, with_own_training
from collegium.experiment.grid import fold_words, folds_of
from collegium.runtime.early_stopping import check_validation
from collegium.runtime.federation import Federation, check_task
from collegium.runtime.secure.config import check_secure
from collegium.tasks.segmentation import SPACED_AXES, SegmentationTask
from collegium.training.together import check_together

logger = logging.getLogger(__name__)

Sample = tuple[Tensor, Tensor]
"""The shapes of a batch's images and of what a network gives for them, as tensors on "meta"."""


def check_engine(config: ExperimentConfig) -> None:
    """Check that the device of the engine exists.

    Raises:
        ConfigError: It does not.
    """
    check_device(config.engine.device, "engine.device")


def check_device(device: str, key: str = "--device") -> None:
    """Check that torch can compute on a device.

    Args:
        device: The device.
        key: Where it is named.

    Raises:
        ConfigError: It cannot.
    """
    try:
        kind = torch.device(device)
        if kind.type != "cuda":  # whose memory other processes may want
            torch.empty(0, device=kind)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{key} is {device!r}; write cpu, cuda or cuda:0") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind.type == "cuda" and (kind.index or 0) >= count:
        found = {0: "no CUDA device", 1: "one CUDA device"}.get(count, f"{count} CUDA devices")
        other = "cuda" if count else "cpu"
        raise ConfigError(f"{key} is {device!r}, but torch finds {found}; use {other}")


def check_network(config: ExperimentConfig, federation: Federation) -> Sample | None:
    """Check that the network takes a batch of every site and that its loss can be computed.

    Args:
        config: The experiment, whose settings messages name.
        federation: Its federation.

    Returns:
        The last batch; None where no site has training cases.

    Raises:
        ConfigError: the network cannot be built, or does not suit the images or the task.
        DataError: a site's images do not fit into one batch.
    """
    network = _sample_network(federation.network).eval()
    if federation.start is not None:
        federation.start(Tensors(network.state_dict()), ())
    trainings = [with_own_training(config, each).training for each in config.algorithms]
    for training in dict.fromkeys(trainings) if config.engine.together else ():
        check_together(network, training)
    largest = max(training.batch_size for training in trainings)
    sample = None
    for site in federation.sites.values():
        rows = range(min(len(site.train), largest))
        if not rows:
            continue
        rngs = [generator(0, "preflight", site.name, row) for row in rows]
        batch = site.train.batch(rows, rngs)
        shape = tuple(batch["image"].shape[1:])
        try:
            with torch.no_grad():
                output = network(batch["image"])
                federation.task_at(site.name, site.labelled).loss(output, batch)
        except CollegiumError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            samples, remedy = _samples(site.name, shape)
            raise ConfigError(
                f"the model {config.model.name!r} cannot take the {samples} ({reason}); "
                f"correct {remedy}"
            ) from error
        sample = batch["image"].to("meta"), output.to("meta")
    return sample


def _samples(site: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Return in words what a site trains on, images or rows of a table, and what decides on it."""
    if len(shape) == 1:
        rows = f"rows of site {site}, which have {shape[0]} features"
        return rows, "model.in_features, or choose a model for tables, such as mlp"
    sizes = f"{shape[0]} channels and {shape[1:]} pixels"
    images = f"images of site {site}, whose samples have {sizes}"
    return images, "model.in_channels, sampling.crop or image.channels"


def check_early_stopping(config: ExperimentConfig, federation: Federation) -> None:
    """Check that training can be stopped early in every fold, if it is to be.

    Args:
        config: The experiment.
        federation: Its federation, with the data of all sites.

    Raises:
        ConfigError: no site that trains has validation cases.
    """
    for fold in folds_of(config) if config.early_stopping is not None else ():
        inside = sites_of(fold.config.federation)
        check_validation(federation.sites[name] for name in inside)


def check_private_scaling(config: ExperimentConfig) -> None:
    """Check that no scaling tells of training cases what private training is to hide.

    Warns of one that stays at its site.

    Args:
        config: The experiment.

    Raises:
        ConfigError: the sites exchange statistics of their columns.
    """
    trainings = [with_own_training(config, each).training for each in config.algorithms]
    private = any(each.privacy and not each.privacy.is_plain for each in trainings)
    table = config.federation.table
    if not private or table is None or table.scale == "none":
        return
    if table.scale == "federation":
        raise ConfigError(
            "table.scale is federation, for which sites send sums or limits of their columns that "
            "the noise of training.privacy does not cover; set table.scale to site or none"
        )
    logger.warning(
        "table.scale is site: by how much columns are scaled follows from the training cases, and "
        "the epsilon of training.privacy does not count that; it does with table.scale: none"
    )


def check_scores(federation: Federation) -> None:
    """Check that the metric that selects models can be defined, and warn of others that cannot.

    Args:
        federation: The federation; its sites on this machine are looked at.

    Raises:
        ConfigError: a site's cases have no spacing, and models are selected by what needs one.
    """
    task, lacking = federation.task, dict[str, list[str]]()
    for name, site in sorted(federation.sites.items()):
        cases = site.val if len(site.val) else site.test
        if not isinstance(task, SegmentationTask):
            if task.needs_validation and not len(site.val):
                lacking.setdefault("threshold, without validation cases", []).append(name)
        elif len(cases) and not SPACED_AXES.keys().isdisjoint(task.metrics):
            undefined = task.undefined_at(cases.example(0))
            if task.metric in undefined:
                raise ConfigError(
                    f"task.metric is {task.metric}, which is undefined at site {name}, whose "
                    f"images have no spacing: choose another metric, or give the images in a "
                    f"format that states it"
                )
            for metric in undefined:
                lacking.setdefault(f"{metric}, without a spacing of its axes", []).append(name)
    for what, sites in lacking.items():
        logger.warning("%s: no %s", ", ".join(sites), what)


def check_setups(config: ExperimentConfig, variation: str = "") -> None:
    """Check that every algorithm suits the task and has what it needs in every fold.

    That is sites, and parts of the network.

    Warns of one that is another one on this network, see `Algorithm.same_as`.

    Args:
        config: The experiment, without variations.
        variation: Of which it is.

    Raises:
        ConfigError: An algorithm has not; the sentence names variation and fold where there are
            several.
    """
    alike = " if trained alike" if any(a.training for a in config.algorithms) else ""
    for algorithm in config.algorithms:
        method = build_algorithm(algorithm)
        check_task(method, "table" if config.federation.table else config.federation.task.name)
        frozen = with_own_training(config, algorithm).training.freeze
        build = NetworkBuilder(network_of(config), method, freeze=frozen)
        parts = find_parts(_sample_network(build))
        codecs = build_codecs(config, algorithm)
        for fold in folds_of(config):
            federation = fold.config.federation
            try:
                if problem := labels_problem(federation):
                    raise ConfigError(problem)
                check_needs(method, sorted(sites_of(federation)), parts)
                _check_participants(method, config, sorted(sites_of(federation)))
                check_codecs(method, codecs)
                if (secure := config.secure_mean) is not None:
                    check_secure(
                        method,
                        len(sites_of(federation)),
                        least=secure.min_sites,
                        coded=bool(codecs),
                        participation=config.participation,
                        diagnostics=config.diagnostics,
                    )
            except ConfigError as error:
                names = [variation, fold_words(fold.left_out, fold.part), algorithm.label]
                raise ConfigError(f"{', '.join(filter(None, names))}: {error}") from error
        if other := method.same_as(parts):
            logger.warning(
                "%s%s is %s on this network with these settings: it has nothing of its own there, "
                "and its scores are those of %s%s",
                f"variation {variation!r}: " if variation else "",
                algorithm.label,
                other,
                other,
                alike,
            )


def _check_participants(
    method: Algorithm, config: ExperimentConfig, clients: Sequence[str]
) -> None:
    """Check that every round of training asks as many sites as the method needs.

    Args:
        method: The method.
        config: The experiment.
        clients: The sites that train.

    Raises:
        ConfigError: a round does not.
    """
    participation = config.participation.among(clients)
    for number in range(1, config.rounds - config.home_rounds + 1):
        count = len(participation.drawn(clients, number, 0))
        if count < method.fewest_clients:
            raise ConfigError(
                f"participation lets {count} sites train in round {number}, and the method needs "
                f"{method.fewest_clients}; raise clients_per_round, or take sites out of absent"
            )


def check_adapters(config: ExperimentConfig, sample: Sample | None, shared: bool) -> None:
    """Check that every adapter finds what it needs in the models that sites outside will get.

    Args:
        config: The experiment, in one fold.
        sample: What `check_network` saw.
        shared: Whether a site that trains shares its personal model.

    Raises:
        ConfigError: an adapter does not suit an algorithm, the sites' policies or the network.
    """
    for algorithm in config.algorithms:
        method = build_algorithm(algorithm)
        models = {
            "global": ("a global model", method.has_global),
            "personal": ("personal models", method.has_personal or config.home_rounds > 0),
        }
        for chosen in adapters_of(config, algorithm):
            adapter = build_adapter(chosen)
            for kind, (words, there) in models.items():
                if kind in adapter.needs and not there:
                    raise ConfigError(
                        f"the adapter {chosen.label!r} needs {words}, and {algorithm.label!r} has "
                        f"none; give {algorithm.label!r} adapters of its own"
                    )
            if "personal" in adapter.needs and not shared:
                raise ConfigError(
                    f"the adapter {chosen.label!r} needs personal models, and no site shares "
                    f"its own; write share: [personal] at those that agree to it"
                )
            adapter.check(_sample_network(NetworkBuilder(network_of(config), method)))
            if sample is not None:
                adapter.check_output(task_of(config), *sample)


def _sample_network(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a network to try things with; torch's generator stays as it is."""
    with ambient(0, "preflight"):
        return build()
