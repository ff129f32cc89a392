"""Opens trained models: those of a finished run, or files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from collegium.adaptation import outside
from collegium.adaptation.base import GLOBAL
from collegium.adaptation.outside import SETTINGS_FILE
from collegium.core.algorithm import NetworkBuilder
from collegium.core.model_parts import find_parts
from collegium.core.payloads import PERSONAL
from collegium.core.randomness import ambient
from collegium.core.tensors import Tensors
from collegium.data.federation_config import sites_of
from collegium.data.tables import Scaling
from collegium.errors import CheckpointError, ConfigError
from collegium.experiment.config.building import algorithm_at, build_algorithm, network_of
from collegium.experiment.config.experiment import (
    AlgorithmConfig,
    ExperimentConfig,
    with_own_training,
)
from collegium.experiment.grid import Job, holders, jobs_of
from collegium.experiment.job_results import DEPLOYED
from collegium.experiment.model_settings import extends, read_settings
from collegium.experiment.runner import RUN_FILE, read_run_config
from collegium.experiment.scaling import FILE, read_scaling
from collegium.models.factory import parameters_of
from collegium.models.files import import_model
from collegium.models.lora import merge_adapters

BUNDLE_MODEL = Path("models") / "model.safetensors"
"""In a bundle, the model."""

BUNDLE_SETTINGS = Path("configs") / "collegium.json"
"""In a bundle, what `collegium.adaptation.outside.SETTINGS_FILE` is beside other models."""


@dataclass(frozen=True)
class Choice:
    """A choice among the models of a finished run; None: whichever there is.

    Attributes:
        algorithm: label of the algorithm.
        seed: the seed.
        left_out: the site that was outside in the fold.
        variation: name of the variation.
    """

    algorithm: str | None = None
    seed: int | None = None
    left_out: str | None = None
    variation: str | None = None


@dataclass(frozen=True)
class OpenedModels:
    """Models to apply, and the settings that they were trained with.

    Attributes:
        models: the models by name.
        network: builds their network, with what the algorithm added to it.
        config: the settings.
        algorithm: the algorithm that trained them.
        origin: where they are from, in words.
        server: which of them are the server's own, see `collegium.adaptation.base.Sources`.
        seed: the seed that they were trained with.
        scaling: how the site whose model it is scales the numbers of its table, where it does so by
            itself.
    """

    models: Mapping[str, Tensors]
    network: Callable[[], nn.Module]
    config: ExperimentConfig
    algorithm: AlgorithmConfig
    origin: str
    server: Collection[str] = (GLOBAL,)
    seed: int = 0
    scaling: Scaling | None = None


def open_models(
    place: Path, choice: Choice = Choice(), config: ExperimentConfig | None = None
) -> OpenedModels:
    """Open the models of a finished run, or those in a folder.

    Args:
        place: the output folder of a run; a bundle, whose one model is the global one; or a folder
            of ``<name>.safetensors``, where "global" names the global model and any other name a
            site's.
        choice: which job of the run; of a folder its seed counts, as that of the adaptation, and
            its algorithm, if ``config`` is given.
        config: the experiment that a folder's models were trained with; None: the settings that the
            folder holds.

    Raises:
        ConfigError: there are several jobs to choose from, or none; the settings are missing, or
            are not those of the models; or there is no such folder.
        CheckpointError: the run holds no models for sites outside.
        DataError: the folder holds no models.
    """
    if not place.is_dir():
        raise ConfigError(f"{place}: there is no such folder; correct the path")
    if not (place / RUN_FILE).exists():
        return _open_folder(place, choice, config)
    job, trained = _choose(place, choice)
    folder = trained / DEPLOYED
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent} holds no models for hospitals outside; continue with: "
            f"collegium resume {place}"
        )
    models = outside.ModelFiles(folder)
    origin = f"{job.config.name}: {job.name}"
    network = network_with(job.config, job.algorithm)
    return OpenedModels(models, network, job.config, job.algorithm, origin, models.server, job.seed)


def _open_folder(place: Path, choice: Choice, config: ExperimentConfig | None) -> OpenedModels:
    """Open models that were copied out of a run, or a bundle."""
    bundled = (place / BUNDLE_MODEL).is_file()
    label = None if config is None else choice.algorithm
    config = config or _settings_in(place / (BUNDLE_SETTINGS if bundled else SETTINGS_FILE), place)
    server: Collection[str] = (GLOBAL,)
    if bundled:
        models: Mapping[str, Tensors] = {GLOBAL: import_model(place / BUNDLE_MODEL)}
    else:
        models = files = outside.ModelFiles(place)
        server = files.server
    algorithm = _algorithm_of(next(iter(models.values())), config, label)
    network = network_with(config, algorithm)
    for name, model in models.items():
        _check_fit(model, network, f"the model {name} in {place}", config)
    seed = config.seeds[0] if choice.seed is None else choice.seed
    origin = f"models in {place.name}"
    return OpenedModels(models, network, config, algorithm, origin, server, seed)


def _open_file(place: Path, choice: Choice, config: ExperimentConfig | None) -> OpenedModels:
    """Open the model in a file, also one that an adapter wrote."""
    label = None if config is None else choice.algorithm
    config = config or _settings_in(place.parent / SETTINGS_FILE, place)
    model = import_model(place)
    algorithm = _algorithm_of(model, config, label)
    network = network_with(config, algorithm)

    def adapted() -> nn.Module:
        return outside.adapted_network(network(), model)

    _check_fit(model, adapted, f"the model {place}", config)
    models, seed = {place.stem: model}, config.seeds[0]
    return OpenedModels(models, adapted, config, algorithm, place.name, seed=seed)


def _settings_in(file: Path, place: Path) -> ExperimentConfig:
    """Return the settings that a file beside models holds.

    Raises:
        ConfigError: there is no such file.
    """
    if not file.is_file():
        raise ConfigError(
            f"{place} is no run, and models need the experiment that they were trained with; name "
            f"its file with --config"
        )
    return read_settings(file)


def network_with(config: ExperimentConfig, algorithm: AlgorithmConfig) -> NetworkBuilder:
    """Return what builds the network of an experiment as an algorithm extends it.

    Args:
        config: the experiment.
        algorithm: the algorithm that trained the models.
    """
    training = with_own_training(config, algorithm).training
    return NetworkBuilder(network_of(config), build_algorithm(algorithm), training.memory_format)


def without_adapters(opened: OpenedModels) -> OpenedModels:
    """Return models whose low-rank adapters are added to the weights of their layers.

    Args:
        opened: the models; they are returned as they are where their network has no adapters.
    """
    config, models = opened.config, {}
    params = {key: value for key, value in config.model.params.items() if key != "lora"}
    if params == config.model.params or "lora" in parameters_of(config.model.name):
        return opened
    for name, model in opened.models.items():
        with ambient(0, "adapters"):
            network = opened.network()
        network.load_state_dict(dict(model))
        merge_adapters(network)
        models[name] = Tensors(network.state_dict())
    config = replace(config, model=replace(config.model, params=params))
    network_without = network_with(config, opened.algorithm)
    return replace(opened, models=models, network=network_without, config=config)


def _algorithm_of(model: Tensors, config: ExperimentConfig, label: str | None) -> AlgorithmConfig:
    """Return the algorithm that trained a model: the one named, or the first whose tensors it has.

    Raises:
        ConfigError: no algorithm of the experiment has this label.
    """
    labels = [algorithm.label for algorithm in config.algorithms]
    if label is not None and label not in labels:
        raise ConfigError(
            f"the experiment {config.name!r} has no algorithm {label!r}; choose one of "
            f"{', '.join(labels)}"
        )
    candidates = [a for a in config.algorithms if label in (None, a.label)]
    extending = [a for a in candidates if extends(a)]
    for algorithm in extending:
        with ambient(0, "fit"):
            added = find_parts(network_with(config, algorithm)()).added
        if added and added <= model.keys():
            return algorithm
    return next((a for a in candidates if a not in extending), candidates[0])


def _check_fit(
    model: Tensors, network: Callable[[], nn.Module], what: str, config: ExperimentConfig
) -> None:
    """Refuse a model that is none of the network."""
    with ambient(0, "fit"):
        module = network()
    try:
        module.load_state_dict(dict(model))
    except RuntimeError as error:
        wanted = module.state_dict()
        raise ConfigError(
            f"{what} does not fit the network {config.model.name!r} of the experiment "
            f"{config.name!r} ({_difference(model, wanted)}); correct what stands under model, or "
            f"name the experiment that it was trained with by --config"
        ) from error


def _difference(model: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Return in words the first tensor that differs from what the network has."""
    for name, tensor in wanted.items():
        if name not in model:
            return f"it holds no {name}"
        have, want = (tuple(found.shape) for found in (model[name], tensor))
        if have != want:
            return f"its {name} has the shape {have}, the network's {want}"
    return f"it holds {min(model.keys() - wanted.keys())}, which the network does not have"


def _choose(place: Path, choice: Choice) -> tuple[Job, Path]:
    """Return a job of a run, and the folder of its training."""
    jobs = jobs_of(read_run_config(place))
    wanted = (choice.variation, choice.left_out, choice.algorithm, choice.seed)
    found = [
        job
        for job in jobs
        if all(value in (None, own) for value, own in zip(wanted, job.key, strict=True))
    ]
    if len(found) == 1:
        return found[0], holders(jobs)[found[0].key].folder
    names = [job.name for job in found or jobs]
    there = "; ".join(names[:4] + [f"{len(names) - 4} more"] * (len(names) > 4))
    if not found:
        raise ConfigError(f"{place} has no such job; there is {there}")
    names_of_key = ("variation", "fold", "algorithm", "seed")
    columns = zip(names_of_key, *(job.key for job in found), strict=True)
    options = ", ".join(f"--{name}" for name, *values in columns if len(set(values)) > 1)
    raise ConfigError(f"{place} has {len(found)} jobs; choose one by {options} ({there})")


def open_model(
    place: Path,
    choice: Choice = Choice(),
    config: ExperimentConfig | None = None,
    *,
    site: str | None = None,
) -> OpenedModels:
    """Open one model: the global one of a finished run, a site's own, or a file.

    Args:
        place: the output folder of a run; or a ``.safetensors`` file, also one that an adapter
            wrote, see `collegium.adaptation.outside.adapted_network`.
        choice: which job of the run.
        config: the experiment that a file's model was trained with; None: the settings beside it.
        site: whose model: its personal one or, of a method without, the global one of the round
            that the site uses; None: the global one that the federation has chosen.

    Raises:
        ConfigError: there are several jobs to choose from, no such site or place, or no settings
            or others than those of the model.
        CheckpointError: there is no such model.
    """
    if not place.exists():
        raise ConfigError(f"{place}: there is no such run or file; correct the path")
    if place.is_file():
        return _open_file(place, choice, config)
    if not (place / RUN_FILE).exists():
        raise ConfigError(f"{place} is no run; name a run or the file of a model")
    job, root = _choose(place, choice)
    inside = sites_of(job.config.federation)
    if site is not None and site not in inside:
        raise ConfigError(f"{place} has no site {site!r}; choose one of {', '.join(inside)}")
    file = root / "server" / "global.safetensors"
    if site is not None:
        files = [root / "clients" / site / f"{kind}.safetensors" for kind in (PERSONAL, GLOBAL)]
        file = next((found for found in files if found.is_file()), files[0])
    if not file.is_file():
        what = "global model" if site is None else f"model of {site}"
        raise CheckpointError(
            f"{job.name} has no {what}; choose another model with --site or --algorithm, or "
            f"continue with: collegium resume {place}"
        )
    model, kept = import_model(file), file.parent / FILE
    algorithm = job.algorithm if site is None else algorithm_at(job.algorithm, site)
    return OpenedModels(
        {site or GLOBAL: model},
        network_with(job.config, algorithm),
        job.config,
        algorithm,
        f"{job.config.name}: {job.name}, {site or 'global'}",
        seed=job.seed,
        scaling=read_scaling(kept) if site is not None and kept.is_file() else None,
    )
