"""The models that are applied: those of a finished run, or files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from collegium import outside
from collegium.algorithm import Extended
from collegium.building import build_algorithm, network_of
from collegium.config import ExperimentConfig
from collegium.data.federation import sites_of
from collegium.errors import CheckpointError, ConfigError
from collegium.experiment import RUN_FILE, read_run_config
from collegium.grid import Cell, cells_of, holders
from collegium.models.files import import_model
from collegium.models.rotation import ROTATION, attach_rotation_head
from collegium.outcome import DEPLOYED
from collegium.tensors import Tensors


@dataclass(frozen=True)
class Choice:
    """Which models of a finished run to take; None: whichever there is.

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
class Handed:
    """Models that were handed out, and the settings that they were trained with.

    Attributes:
        models: the models by name.
        network: makes their network.
        config: the settings.
        origin: where they are from, in words.
    """

    models: Mapping[str, Tensors]
    network: Callable[[], nn.Module]
    config: ExperimentConfig
    origin: str


def open_models(
    place: Path, choice: Choice = Choice(), config: ExperimentConfig | None = None
) -> Handed:
    """Open the models of a finished run, or those in a folder.

    Args:
        place: the output folder of a run, or a folder of ``<name>.safetensors``, where "global"
            names the global model and any other name a site's.
        choice: which cell of the run.
        config: the experiment that a folder's models were trained with.

    Raises:
        ConfigError: there are several cells to choose from, or none; or the settings are missing.
        CheckpointError: the run holds no models for sites outside.
        DataError: the folder holds no models.
    """
    if not (place / RUN_FILE).exists():
        if config is None:
            raise ConfigError(
                f"{place} is no run, and a folder of models needs the experiment they were trained "
                f"with; name its file with --config"
            )
        models = outside.ModelFiles(place)
        network = partial(_network, config, next(iter(models.values())))
        return Handed(models, network, config, f"models in {place.name}")
    stored = read_run_config(place)
    cells = cells_of(stored)
    cell = _choose(cells, choice, place)
    folder = holders(cells)[cell.key].folder / DEPLOYED
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent} holds no models for hospitals outside; go on with: "
            f"collegium resume {place}"
        )
    extended = Extended(network_of(cell.config), build_algorithm(cell.algorithm))
    return Handed(outside.ModelFiles(folder), extended, cell.config, f"{stored.name}: {cell.name}")


def _network(config: ExperimentConfig, model: Tensors) -> nn.Module:
    """Make the network of a model in a folder, with a rotation head where the model has one."""
    module = network_of(config)()
    if any(name.startswith(f"{ROTATION}.") for name in model):
        attach_rotation_head(module)
    return module


def _choose(cells: Sequence[Cell], choice: Choice, place: Path) -> Cell:
    wanted = {
        "algorithm": choice.algorithm,
        "seed": choice.seed,
        "fold": choice.left_out,
        "variation": choice.variation,
    }

    def about(cell: Cell) -> dict[str, Any]:
        values = (cell.algorithm.label, cell.seed, cell.left_out, cell.variation)
        return dict(zip(wanted, values, strict=True))

    found = [
        cell
        for cell in cells
        if all(value is None or about(cell)[key] == value for key, value in wanted.items())
    ]
    if len(found) == 1:
        return found[0]
    names = [cell.name for cell in found or cells]
    there = "; ".join(names[:4] + [f"{len(names) - 4} more"] * (len(names) > 4))
    if not found:
        raise ConfigError(f"{place} has no such cell; there is {there}")
    differing = [key for key in wanted if len({about(cell)[key] for cell in found}) > 1]
    options = ", ".join(f"--{key}" for key in differing)
    raise ConfigError(f"{place} has {len(found)} cells; choose one by {options} ({there})")


def open_model(
    place: Path,
    choice: Choice = Choice(),
    config: ExperimentConfig | None = None,
    *,
    site: str | None = None,
) -> Handed:
    """Open one model: the global one of a finished run, a site's own, or a file.

    Args:
        place: the output folder of a run, or a ``.safetensors`` file.
        choice: which cell of the run.
        config: the experiment that a file's model was trained with.
        site: whose personal model; None: the global one.

    Raises:
        ConfigError: there are several cells to choose from, no such site, or no settings.
        CheckpointError: there is no such model.
    """
    if not (place / RUN_FILE).exists():
        if config is None or not place.is_file():
            raise ConfigError(
                f"{place} is no run; a file of a model needs the experiment it was trained with: "
                f"name it with --config"
            )
        model = import_model(place)
        return Handed({place.stem: model}, partial(_network, config, model), config, place.name)
    stored = read_run_config(place)
    cells = cells_of(stored)
    cell = _choose(cells, choice, place)
    root = holders(cells)[cell.key].folder
    inside = sites_of(cell.config.federation)
    if site is not None and site not in inside:
        raise ConfigError(f"{place} has no site {site!r}; choose one of {', '.join(inside)}")
    file = root / "server" / "global.safetensors"
    if site is not None:
        file = root / "clients" / site / "personal.safetensors"
    if not file.is_file():
        what = "global model" if site is None else f"personal model of {site}"
        raise CheckpointError(
            f"{cell.name} has no {what}; choose another model with --site or --algorithm, or go on "
            f"with: collegium resume {place}"
        )
    network = Extended(network_of(cell.config), build_algorithm(cell.algorithm))
    origin = f"{stored.name}: {cell.name}, {site or 'global'}"
    return Handed({site or "global": import_model(file)}, network, cell.config, origin)
