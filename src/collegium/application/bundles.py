"""A trained model as a MONAI bundle, which MONAI loads and runs without Collegium.

The weights are safetensors, nothing is pickled. The bundle repeats the experiment's recipe with
MONAI's own transforms: orientation, spacing or size, clipping, normalisation, padding, sliding
window. What MONAI does otherwise (which affine of a NIfTI counts, resizing, how colours become
grey, files x_0000, x_0001 of one image, channels that a site lacks) stands in the bundle as an
expression. Fields of view and voxels that are no numbers are not heeded. Networks that MONAI does
not have are built by Collegium, which the bundle then names as a requirement.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch.nn.modules.conv import _ConvNd

from collegium.application.bundletexts import metadata_of, readme_of
from collegium.application.models import BUNDLE_SETTINGS, Handed
from collegium.building import network_of
from collegium.config import ExperimentConfig
from collegium.data.federation import ImageConfig, TaskConfig, find_cases
from collegium.data.formats.dicom import is_dicom
from collegium.errors import CollegiumError, ConfigError, DataError
from collegium.models.factory import parameters_of
from collegium.models.files import export_model
from collegium.models.standardised import Standardised
from collegium.outside import settings_of
from collegium.state import write_atomically

_NORMS = {"batch": ["BATCH", {}], "instance": ["INSTANCE", {"affine": True}]}
_NORMALISE: Mapping[str, dict[str, Any]] = {
    "zscore": {"_target_": "NormalizeIntensityd", "channel_wise": True},
    "zscore_nonzero": {"_target_": "NormalizeIntensityd", "channel_wise": True, "nonzero": True},
    "minmax": {"_target_": "ScaleIntensityd", "minv": 0.0, "maxv": 1.0, "channel_wise": True},
    "symmetric": {"_target_": "ScaleIntensityd", "minv": -1.0, "maxv": 1.0, "channel_wise": True},
    "scale": {
        "_target_": "Lambdad",  # by the range of the file's integer type
        "func": "$lambda x: x / (65535 if x.meta['mode'].startswith('I') else 255)",
    },
}
_CHANNELS: Mapping[str, str] = {
    "grey": "$lambda x: x if len(x) == 1 else "
    "(0.299 * x[:1].double() + 0.587 * x[1:2].double() + 0.114 * x[2:3].double()).float()",
    "rgb": "$lambda x: torch.cat([x, x, x]) if len(x) == 1 else x",
    "green": "$lambda x: x if len(x) == 1 else x[1:2]",
}
_PICTURES = ("png", "jpg", "jpeg", "bmp", "tif", "tiff")
_VOLUMES = ("nii", "nii.gz")
_CONVERT = (
    "$lambda image: (ImageOps.exif_transpose(image) if image.format in ('JPEG', 'MPO') "
    "else image).convert('L' if image.mode in ('1', 'LA') else image.mode "
    "if image.mode in ('L', 'F') or image.mode.startswith('I') else 'RGB')"
)
_PLACED = (
    "$lambda x: (x.meta.update(affine=torch.as_tensor("
    "nibabel.load(x.meta['filename_or_obj']).affine)), x)[1]"
)
"""The sform where it is set: MONAI takes the qform where only that agrees with the voxel sizes."""
_RESIZE: Mapping[str, str] = {
    "interpolate": "$torch.nn.functional.interpolate",
    "resize_plane": "$lambda x, size: @interpolate(x, size, mode='bilinear', antialias=True)",
    "resize_space": "$lambda x, size: @interpolate(x, size, mode='trilinear')",
    "resize_slices": "$lambda x, size: "
    "@resize_plane(x.permute(3, 0, 1, 2), size[:2]).permute(1, 2, 3, 0)",
    "resize_image": "$lambda x, size: x if list(x.shape[1:]) == size "
    "else @resize_plane(x[None], size)[0] if len(size) == 2 "
    "else @resize_slices(x, size) if x.shape[3] == size[2] else @resize_space(x[None], size)[0]",
    "resize_case": "$lambda x: "
    "(x.meta.update(before=[*x.shape[1:]]), @resize_image(x, @target_size(x)))[1]",
    "resize": "$lambda case: {**case, 'image': @resize_case(case['image'])}",
    "nearest": "$lambda old, new: (2 * torch.arange(new) + 1) * old // (2 * new)",
    "restore_case": "$lambda x: functools.reduce(lambda y, k: y.index_select(k, "
    "@nearest(y.shape[k], int(x.meta['before'][k - 1])).to(y.device)), range(1, x.ndim), x)",
    "restore": "$lambda case: {**case, 'image': @restore_case(case['image'])}",
}
"""Resizes as `collegium.data.recipe` does, and brings masks back by the nearest centre."""


def export_bundle(handed: Handed, folder: Path, *, pictures: bool | None = None) -> Path:
    """Write the model as a MONAI bundle.

    Run it with ``python -m monai.bundle run --config_file configs/inference.json --bundle_root .
    --dataset_dir IMAGES --output_dir OUT`` in its folder.

    Args:
        handed: The model; the first of several.
        folder: The bundle's folder; it must not hold anything.
        pictures: Whether a network of two spatial dimensions sees pictures (PNG) and not slices of
            volumes; None: what the federation's images are, pictures where they are not there.

    Returns:
        The folder.

    Raises:
        ConfigError: The model is one for tables, or its volumes are predicted in slices or turned.
        DataError: The folder is not empty.
        StorageError: A file cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} holds something already; choose another folder")
    config = handed.config
    if config.federation.table is not None or isinstance(handed.network(), Standardised):
        raise ConfigError("MONAI's bundles are for images; a model for tables stays safetensors")
    flat = _axes(handed) == 2
    if flat and not (_are_pictures(config) if pictures is None else pictures):
        raise ConfigError(
            "the network sees slices of volumes, which a bundle does not cut; use collegium predict"
        )
    if not flat and config.federation.image.slices_along != "z":
        raise ConfigError(
            "image.slices_along turns volumes, which a bundle does not; use collegium predict"
        )
    name, model = next(iter(handed.models.items()))
    whole = network_of(config)().state_dict()
    own = model.select(whole)  # without a method's own parts
    if any(name not in own or own[name].shape != whole[name].shape for name in whole):
        raise ConfigError(
            "an adapter that predicts by the statistics of its images wrote the model, which a "
            "bundle cannot do; use collegium predict"
        )
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for part in ("models", "configs", "docs"):
            (unfinished / part).mkdir(parents=True)
        if (code := _own_code(config)) is not None:
            (unfinished / "scripts").mkdir()
            shutil.copy(code, unfinished / "scripts" / code.name)
        export_model(own, unfinished / "models" / "model.safetensors")
        inference = _inference(config, _divisors(handed, 2 if flat else 3), name, flat=flat)
        contents = {
            "configs/inference.json": json.dumps(inference, indent=1),
            "configs/metadata.json": json.dumps(metadata_of(handed, name, flat=flat), indent=1),
            "docs/README.md": readme_of(handed),
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
    if config.model.name == "unet":
        channels = list(params.get("channels", (16, 32, 64, 128)))
        return {
            "_target_": "monai.networks.nets.UNet",
            "spatial_dims": params.get("spatial_dims", 2),
            "in_channels": params.get("in_channels", config.federation.image.inputs or 3),
            "out_channels": params.get("out_channels", config.federation.task.channels),
            "channels": channels,
            "strides": params.get("strides") or [2] * (len(channels) - 1),
            "num_res_units": params.get("num_res_units", 1),
            "norm": _NORMS[params.get("norm", "batch")],
            "dropout": params.get("dropout", 0.0),
        }
    known = {"in_channels": config.federation.image.inputs,
             "out_channels": config.federation.task.channels}  # fmt: skip
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


def _are_pictures(config: ExperimentConfig) -> bool:
    """Whether the first image that is found is a picture and no volume, or none is there.

    Raises:
        ConfigError: It is of a kind that a bundle does not read.
    """
    for site in config.federation.sites:
        try:
            image = find_cases(config.federation, site)[0].images[0]
        except (CollegiumError, OSError):
            continue
        if not image.name.lower().endswith((*_PICTURES, *_VOLUMES)):
            kind = "DICOM" if is_dicom(image) else image.suffix
            raise ConfigError(
                f"MONAI's bundle reads PNG pictures and NIfTI volumes, not {kind}, from which the "
                f"network learnt; use collegium predict"
            )
        return image.name.lower().endswith(_PICTURES)
    return config.federation.image.spacing is None


def _preprocessing(
    config: ExperimentConfig, divisors: Sequence[int], name: str, *, flat: bool
) -> list[dict[str, Any]]:
    image, site = config.federation.image, config.federation.sites.get(name)
    channels = site.channels if site is not None else None
    load = {"_target_": "LoadImaged", "ensure_channel_first": True, "reader": "NibabelReader"}
    if flat:
        load |= {"reader": "PILReader", "reverse_indexing": False, "converter": _CONVERT}
    steps: list[dict[str, Any]] = [load]
    if not flat:
        steps.append({"_target_": "Lambdad", "func": _PLACED})
        steps.append({"_target_": "Orientationd", "axcodes": "RAS", "labels": ["LR", "PA", "IS"]})
    if image.channels in _CHANNELS:
        steps.append({"_target_": "Lambdad", "func": _CHANNELS[image.channels]})
    if channels is not None and len(channels) < (image.inputs or 0):
        have = f"$lambda x: x[{[*channels]}] if len(x) == {image.inputs} else x"
        steps.append({"_target_": "Lambdad", "func": have})
    if image.clip is not None:
        low, high = image.clip
        steps += [
            {"_target_": "ThresholdIntensityd", "threshold": end, "above": end == low, "cval": end}
            for end in (low, high)
        ]
    if image.size is not None or image.spacing is not None:
        steps.append({"_target_": "Lambda", "func": "@resize", "inv_func": "@restore"})
    if image.normalise != "none":
        steps.append({**_NORMALISE[image.normalise]})
    if channels is not None:
        places = [channels.index(k) if k in channels else None for k in range(image.inputs or 0)]
        place = f"torch.stack([0 * x[0] if k is None else x[k] for k in {places}])"
        steps.append({"_target_": "Lambdad", "func": f"$lambda x: {place}"})
    if divisors and config.inference.window is None:
        steps.append({"_target_": "DivisiblePadd", "k": divisors})
    return [step if step["_target_"] == "Lambda" else {**step, "keys": "image"} for step in steps]


def _resizing(image: ImageConfig) -> dict[str, str]:
    """Give the expressions by which images are resized, where they are."""
    if image.spacing is not None:
        unit = "{1: 1000, 3: 0.001}.get(int(x.meta['xyzt_units']) & 7, 1)"  # metres, microns
        have = f"({unit} * numpy.linalg.norm(numpy.asarray(x.affine)[:3, :3], axis=0)).tolist()"
        zipped = f"zip(x.shape[1:], {have}, {[*image.spacing]})"
        rest = f"*x.shape[{1 + len(image.spacing)}:]"
        size = f"[*(max(1, round(n * old / new)) for n, old, new in {zipped}), {rest}]"
    elif isinstance(image.size, int):
        size = f"[max(1, round(n * {image.size} / max(x.shape[1:]))) for n in x.shape[1:]]"
    elif image.size is not None:
        size = f"[{', '.join(map(str, image.size))}, *x.shape[{1 + len(image.size)}:]]"
    else:
        return {}
    return {**_RESIZE, "target_size": f"$lambda x: {size}"}


def _inference(
    config: ExperimentConfig, divisors: Sequence[int], name: str, *, flat: bool
) -> dict[str, Any]:
    suffixes = _PICTURES if flat else _VOLUMES
    found = " + ".join(f"glob.glob(os.path.join(@dataset_dir, '*.{end}'))" for end in suffixes)
    return {
        "imports": [
            "$import functools", "$import glob", "$import itertools", "$import numpy",
            "$import os", "$import re", "$import torch",
            "$from safetensors.torch import load_file",
            "$from PIL import ImageOps" if flat else "$import nibabel",
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/predictions'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "weights": "$load_file(@bundle_root + '/models/model.safetensors')",
        "case_of": "$lambda path: re.sub(r'_[0-9]{4}(?=(\\.[A-Za-z]+)+$)', '', path)",
        "files": f"$sorted({found}, key=lambda path: (@case_of(path), path))",
        "datalist": "$[{'image': files if len(files) > 1 else files[0]} "
        "for files in (list(group) for _, group in itertools.groupby(@files, @case_of))]",
        "network_def": _network(config),
        "network": "$@network_def.to(@device)",
        **_resizing(config.federation.image),
        "preprocessing": {
            "_target_": "Compose", "transforms": _preprocessing(config, divisors, name, flat=flat)
        },
        "dataset": {
            "_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
        "inferer": _inferer(config),
        "postprocessing": {
            "_target_": "Compose", "transforms": _postprocessing(config.federation.task, flat=flat)
        },
        "handlers": _handlers(config.federation.task),
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "initialize": ["$@network.load_state_dict(@weights)", "$@network.eval()"],
        "run": ["$@evaluator.run()"],
    }  # fmt: skip


def _inferer(config: ExperimentConfig) -> dict[str, Any]:
    window = config.inference.window
    if window is None or config.federation.task.name == "classification":
        return {"_target_": "SimpleInferer"}
    return {
        "_target_": "SlidingWindowInferer",
        "roi_size": [*window],
        "sw_batch_size": 4,
        "overlap": config.inference.overlap,
    }


def _handlers(task: TaskConfig) -> list[dict[str, Any]]:
    """Give what writes the probabilities of a classification, image by image."""
    if task.name != "classification":
        return []
    return [
        {
            "_target_": "ClassificationSaver",
            "output_dir": "@output_dir",
            "batch_transform": "$lambda batch: [item['image'].meta for item in batch]",
            "output_transform": "$lambda output: [item['pred'] for item in output]",
        }
    ]


def _postprocessing(task: TaskConfig, *, flat: bool) -> list[dict[str, Any]]:
    if task.name == "classification":
        return [
            {"_target_": "Activationsd", "keys": "pred", "softmax": True},
        ]
    choose = {"threshold": 0.0} if task.regions else {"argmax": True}  # a channel for each region
    steps: list[dict[str, Any]] = [
        {"_target_": "AsDiscreted", "keys": "pred", **choose},
        {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing",
         "orig_keys": "image", "nearest_interp": True, "to_tensor": True},
    ]  # fmt: skip
    save: dict[str, Any] = {
        "_target_": "SaveImaged", "keys": "pred", "output_dir": "@output_dir",
        "output_postfix": "", "separate_folder": False, "resample": False,
        "output_dtype": "$torch.uint8",
        "output_name_formatter":
            "$lambda meta, saver: {'subject': @case_of(meta['filename_or_obj']), 'idx': None}",
    }  # fmt: skip
    if flat:  # MONAI writes columns before rows
        turn = {"_target_": "Transposed", "keys": "pred", "indices": [0, 2, 1]}
        return [*steps, turn, {**save, "output_ext": ".png"}]
    return [*steps, save]
