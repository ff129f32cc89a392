"""A trained model as a MONAI bundle, which MONAI loads and runs without Collegium.

The weights are safetensors, nothing is pickled. The bundle repeats the experiment's recipe with
MONAI's own transforms: orientation, spacing or size, clipping, normalisation, padding, sliding
window, slices of volumes. What MONAI does otherwise stands in the bundle as an expression, see
`collegium.deploy.bundlegraph`. Fields of view and voxels that are no numbers are not heeded.
Networks that MONAI does not have are built by Collegium, which the bundle then names as a
requirement.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch.nn.modules.conv import _ConvNd

from collegium.core.files import write_atomically
from collegium.data.federation import list_cases
from collegium.data.formats import decode, nifti, pictures
from collegium.data.site import Case
from collegium.deploy.bundlegraph import Plan, Sees, inference_of
from collegium.deploy.bundletexts import metadata_of, readme_of
from collegium.deploy.models import BUNDLE_SETTINGS, Handed
from collegium.errors import CollegiumError, ConfigError, DataError
from collegium.experiment.config.building import network_of
from collegium.experiment.config.experiment import ExperimentConfig
from collegium.experiment.model_settings import settings_of
from collegium.models.factory import parameters_of
from collegium.models.files import export_model
from collegium.models.standardised import Standardised

_NORMS = {"batch": ["BATCH", {}], "instance": ["INSTANCE", {"affine": True}]}


def export_bundle(handed: Handed, folder: Path, *, pictures: bool | None = None) -> Path:
    """Write the model as a MONAI bundle.

    Run it with ``python -m monai.bundle run --config_file configs/inference.json --bundle_root .
    --dataset_dir IMAGES --output_dir OUT`` in its folder.

    Args:
        handed: The model; the first of several.
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
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} holds something already; choose another folder")
    config = handed.config
    if config.federation.table is not None or isinstance(handed.network(), Standardised):
        raise ConfigError("MONAI's bundles are for images; a model for tables stays safetensors")
    name, model = next(iter(handed.models.items()))
    whole = network_of(config)().state_dict()
    own = model.select(whole)  # without a method's own parts
    if any(name not in own or own[name].shape != whole[name].shape for name in whole):
        raise ConfigError(
            "an adapter that predicts by the statistics of its images wrote the model, which a "
            "bundle cannot do; use collegium predict"
        )
    sees = _sees(handed, pictures)
    if sees != "pictures" and config.federation.image.normalise == "scale":
        raise ConfigError(
            "image.normalise is scale, which needs pictures, and a bundle reads volumes as NIfTI; "
            "use collegium predict"
        )
    divisors = _divisors(handed, 3 if sees == "volumes" else 2)
    plan = Plan(config, name, sees, _network(config), divisors)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for part in ("models", "configs", "docs"):
            (unfinished / part).mkdir(parents=True)
        if (code := _own_code(config)) is not None:
            (unfinished / "scripts").mkdir()
            shutil.copy(code, unfinished / "scripts" / code.name)
        export_model(own, unfinished / "models" / "model.safetensors")
        contents = {
            "configs/inference.json": json.dumps(inference_of(plan), indent=1),
            "configs/metadata.json": json.dumps(metadata_of(handed, plan), indent=1),
            "docs/README.md": readme_of(handed, plan),
        }
        if (settings := settings_of(config, handed.seed)) is not None:
            contents[str(BUNDLE_SETTINGS)] = json.dumps(settings, indent=1)
        for path, text in contents.items():
            write_atomically(unfinished / path, text.encode())
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _network(config: ExperimentConfig) -> dict[str, Any]:
    """Say how the network is made, with MONAI's classes where it has them."""
    params = {**config.model.params}
    inputs = config.federation.image.inputs
    if inputs is not None:
        inputs *= 2 * config.federation.sampling.neighbours + 1
    if config.model.name == "unet":
        channels = list(params.get("channels", (16, 32, 64, 128)))
        return {
            "_target_": "monai.networks.nets.UNet",
            "spatial_dims": params.get("spatial_dims", 2),
            "in_channels": params.get("in_channels", inputs or 3),
            "out_channels": params.get("out_channels", config.federation.task.channels),
            "channels": channels,
            "strides": params.get("strides") or [2] * (len(channels) - 1),
            "num_res_units": params.get("num_res_units", 1),
            "norm": _NORMS[params.get("norm", "batch")],
            "dropout": params.get("dropout", 0.0),
        }
    known = {"in_channels": inputs, "out_channels": config.federation.task.channels}
    taken = parameters_of(config.model.name)
    filled = {key: value for key, value in known.items() if key in taken and value is not None}
    target, name = "collegium.models.factory.build_model", config.model.name
    if (code := _own_code(config)) is not None:
        made = f"{code.name}:{name.rpartition(':')[2]}"
        name = f"$@bundle_root + '/scripts/{made}'"
    return {"_target_": target, "name": name, **filled, **params}


def _own_code(config: ExperimentConfig) -> Path | None:
    """Give the file of a network that the user has written, which goes into the bundle."""
    place = config.model.name.rpartition(":")[0]
    return Path(place).expanduser().resolve() if place.endswith(".py") else None


def _divisors(handed: Handed, axes: int) -> list[int]:
    """Give what sizes are padded to multiples of, axis by axis; none where nothing is padded."""
    strides = getattr(handed.network(), "strides", None)
    if handed.config.federation.task.name == "classification" or not isinstance(strides, Sequence):
        return []
    levels = [[level] * axes if isinstance(level, int) else level for level in strides]
    return [prod(level[axis] for level in levels) for axis in range(axes)]


def _axes(handed: Handed) -> int:
    """How many spatial axes the network sees: as is said, or as its convolutions have."""
    said = handed.config.model.params.get("spatial_dims")
    if said is not None:
        return int(said)
    convolutions = (module for module in handed.network().modules() if isinstance(module, _ConvNd))
    return max((len(module.kernel_size) for module in convolutions), default=2)


def _sees(handed: Handed, pictured: bool | None) -> Sees:
    """What the network is shown; whether in two dimensions these are pictures may be known.

    Raises:
        ConfigError: The federation has both pictures and volumes.
    """
    if _axes(handed) == 3:
        return "volumes"
    if pictured is None:
        pictured = _are_pictures(handed.config)
    return "pictures" if pictured else "slices"


def _are_pictures(config: ExperimentConfig) -> bool:
    """Whether the sites' images are pictures; where none is found, whether volumes are unsaid.

    Raises:
        ConfigError: Some are pictures and others volumes.
    """
    found = {seen: site for site in config.federation.sites for seen in _seen_at(config, site)}
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
    """Say of a site's first image that can be read whether it is a picture; else nothing."""
    try:
        cases = list_cases(config.federation, site)[0]
    except (CollegiumError, OSError):  # its images are elsewhere
        return
    for case in cases:
        try:
            yield _is_picture(case)
        except (CollegiumError, OSError):
            continue
        return


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
    return decoded.array.ndim == 3 and decoded.stored is None  # else a slice in space
