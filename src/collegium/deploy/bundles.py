"""A trained model as a MONAI bundle, which MONAI loads and runs without Collegium.

The weights are safetensors, nothing is pickled. The bundle repeats the experiment's recipe with
MONAI's own transforms: orientation, spacing or size, clipping, normalisation, padding, sliding
window, slices of volumes. What MONAI does otherwise stands in the bundle as an expression, see
`collegium.deploy.bundlegraph`. Low-rank adapters are added to the weights of their layers. Fields
of view and voxels that are no numbers are not heeded. Networks that MONAI does not have are built
by Collegium, which the bundle then names as a requirement.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from torch.nn.modules.conv import _ConvNd

from collegium.core.files import new_folder, write_atomically
from collegium.core.randomness import ambient
from collegium.data.federation import list_cases
from collegium.data.formats import decode, nifti, pictures
from collegium.data.site import Case
from collegium.deploy.bundlegraph import Plan, Sees, inference_of
from collegium.deploy.bundletexts import metadata_of, readme_of
from collegium.deploy.models import (
    BUNDLE_MODEL,
    BUNDLE_SETTINGS,
    OpenedModels,
    network_with,
    without_adapters,
)
from collegium.errors import CollegiumError, ConfigError
from collegium.experiment.config.building import build_algorithm, network_of
from collegium.experiment.config.experiment import AlgorithmConfig, ExperimentConfig
from collegium.experiment.model_settings import extends, write_settings
from collegium.models.files import export_model
from collegium.models.standardised import Standardised

_NORMS = {"batch": ["BATCH", {}], "instance": ["INSTANCE", {"affine": True}]}


def export_bundle(opened: OpenedModels, folder: Path, *, pictures: bool | None = None) -> Path:
    """Write the model as a MONAI bundle.

    Run it with ``python -m monai.bundle run --config_file configs/inference.json --bundle_root .
    --dataset_dir IMAGES --output_dir OUT`` in its folder.

    Args:
        opened: The model; the first of several.
        folder: The bundle's folder; it must not hold anything.
        pictures: Whether a network of two spatial dimensions sees pictures and not slices of
            volumes; None: what the first images of the sites are, and where none is found, what
            the settings speak of.

    Returns:
        The folder.

    Raises:
        ConfigError: The model is one for tables or an adapter's that predicts by the statistics of
            its images, it learnt from pictures and from slices of volumes, or its volumes are
            normalised as only pictures are.
        DataError: The folder is not empty.
        StorageError: A file cannot be written.
    """
    opened = without_adapters(opened)
    config = opened.config
    if config.federation.table is not None or isinstance(opened.network(), Standardised):
        raise ConfigError("MONAI's bundles are for images; a model for tables stays safetensors")
    name, model = next(iter(opened.models.items()))
    carried = _carried(opened)
    build = network_of(config) if carried is None else network_with(config, carried)
    with ambient(0, "bundle"):
        whole = build().state_dict()
    own = model.select(whole)  # without what an algorithm added for training alone
    if any(name not in own or own[name].shape != whole[name].shape for name in whole):
        raise ConfigError(
            "an adapter that predicts by the statistics of its images wrote the model, which a "
            "bundle cannot do; use collegium predict"
        )
    sees = _sees(opened, pictures)
    if sees != "pictures" and config.federation.image.normalise == "scale":
        raise ConfigError(
            "image.normalise is scale, which needs pictures, and a bundle reads volumes as NIfTI; "
            "use collegium predict"
        )
    divisors = _divisors(opened, 3 if sees == "volumes" else 2)
    plan = Plan(config, name, sees, _network(config, carried), divisors)
    contents = {
        "configs/inference.json": json.dumps(inference_of(plan), indent=1),
        "configs/metadata.json": json.dumps(metadata_of(opened, plan), indent=1),
        "docs/README.md": readme_of(opened, plan),
    }
    with new_folder(folder) as unfinished:
        for code, script in _own_code(config, carried).items():
            (unfinished / "scripts").mkdir(exist_ok=True)
            shutil.copy(code, unfinished / "scripts" / script)
        export_model(own, unfinished / BUNDLE_MODEL)
        write_settings(unfinished / BUNDLE_SETTINGS, config, opened.algorithm, opened.seed)
        for path, text in contents.items():
            write_atomically(unfinished / path, text.encode())
    return folder


def _carried(opened: OpenedModels) -> AlgorithmConfig | None:
    """Return the algorithm whose addition to the network takes part in predictions, if it is so."""
    method = build_algorithm(opened.algorithm)
    return opened.algorithm if extends(opened.algorithm) and method.extension_predicts else None


def _network(config: ExperimentConfig, carried: AlgorithmConfig | None) -> dict[str, Any]:
    """Return how the network is built, by MONAI's class if it has one that suffices."""
    params = network_of(config).params
    norm = params.get("norm", "batch")
    if config.model.name == "unet" and carried is None and norm in _NORMS:
        channels = list(params.get("channels", (16, 32, 64, 128)))
        return {
            "_target_": "monai.networks.nets.UNet",
            "spatial_dims": params.get("spatial_dims", 2),
            "in_channels": params.get("in_channels", 3),
            "out_channels": params["out_channels"],
            "channels": channels,
            "strides": params.get("strides") or [2] * (len(channels) - 1),
            "num_res_units": params.get("num_res_units", 1),
            "norm": _NORMS[norm],
            "dropout": params.get("dropout", 0.0),
        }
    code = _own_code(config, carried)
    model = {"name": _in_bundle(config.model.name, code), **params}
    if carried is None:
        return {"_target_": "collegium.models.factory.build_model", **model}
    return {
        "_target_": "collegium.experiment.config.building.build_extended_network",
        "model": model,
        "algorithm": {"name": _in_bundle(carried.name, code), **carried.params},
    }


def _own_code(config: ExperimentConfig, carried: AlgorithmConfig | None) -> dict[Path, str]:
    """Return the files that the user has written and the bundle needs -> their names in it."""
    names: dict[Path, str] = {}
    for name in (config.model.name, carried.name if carried else ""):
        place = name.rpartition(":")[0]
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            taken = path.name in names.values() and path not in names
            names.setdefault(path, f"algorithm_{path.name}" if taken else path.name)
    return names


def _in_bundle(name: str, code: Mapping[Path, str]) -> str:
    """Return the name of a model or an algorithm; of the user's own file as an expression."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return name
    file = code[Path(place).expanduser().resolve()]
    return f"$@bundle_root + '/scripts/{file}:{attribute}'"


def _divisors(opened: OpenedModels, axes: int) -> list[int]:
    """Return what sizes are padded to multiples of, by axis; empty if nothing is padded."""
    strides = getattr(opened.network(), "strides", None)
    if opened.config.federation.task.name == "classification" or not isinstance(strides, Sequence):
        return []
    levels = [[level] * axes if isinstance(level, int) else level for level in strides]
    return [prod(level[axis] for level in levels) for axis in range(axes)]


def _axes(opened: OpenedModels) -> int:
    """Return how many spatial axes the network takes: as configured, or as its convolutions."""
    said = opened.config.model.params.get("spatial_dims")
    if said is not None:
        return int(said)
    convolutions = (module for module in opened.network().modules() if isinstance(module, _ConvNd))
    return max((len(module.kernel_size) for module in convolutions), default=2)


def _sees(opened: OpenedModels, pictured: bool | None) -> Sees:
    """Return what the network takes; in two dimensions, whether these are pictures may be known."""
    if _axes(opened) == 3:
        return "volumes"
    if pictured is None:
        pictured = _are_pictures(opened.config)
    return "pictures" if pictured else "slices"


def _are_pictures(config: ExperimentConfig) -> bool:
    """Whether the sites' images are pictures; where none is found, whether volumes are unsaid.

    Raises:
        ConfigError: Some are pictures and others volumes.
    """
    sites = config.federation.sites
    found = {seen: site for site in sites for seen in islice(_seen_at(config, site), 1)}
    if len(found) == 2:
        raise ConfigError(
            f"the network learnt from pictures (site {found[True]}) and from slices of volumes "
            f"(site {found[False]}), and a bundle reads either; use collegium predict, or "
            f"export_bundle with pictures=True or False"
        )
    if found:
        return True in found
    image, sampling = config.federation.image, config.federation.sampling
    return image.spacing is None and image.slices_along == "z" and not sampling.neighbours


def _seen_at(config: ExperimentConfig, site: str) -> Iterator[bool]:
    """Yield whether a site's images are pictures, one after the other, if they can be read."""
    with suppress(CollegiumError, OSError):  # its images are elsewhere
        for case in list_cases(config.federation, site)[0]:
            with suppress(CollegiumError, OSError):
                yield _is_picture(case)


def _is_picture(case: Case) -> bool:
    """Whether an image is a picture: told by its name or, of a kind that holds both, its content.

    Raises:
        DataError: It cannot be read.
        ConfigError: What reads it is not installed.
    """
    image = case.images[0]
    if image.name.lower().endswith((*nifti.SUFFIXES, *pictures.SUFFIXES)):
        return not image.name.lower().endswith(nifti.SUFFIXES)
    decoded = decode(image, series=case.series, both=case.label in case.images)
    return decoded.array.ndim == 3 and decoded.orientation is None  # else a slice in space
