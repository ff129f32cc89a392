"""A trained model as a MONAI bundle, which MONAI loads and runs without Collegium.

The weights are safetensors, nothing is pickled. The bundle repeats the experiment's recipe with
MONAI's own transforms: orientation, spacing or size, clipping, normalisation, sliding window. Only
interpolation differs in the last digits where images are resampled. Networks that MONAI does not
have are built by Collegium, which the bundle then names as a requirement.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from collegium import __version__
from collegium.application.models import Handed
from collegium.config import ExperimentConfig
from collegium.data.federation import TaskConfig
from collegium.errors import ConfigError, DataError
from collegium.models.files import export_model
from collegium.models.standardised import Standardised
from collegium.state import write_atomically

_NORMS = {"batch": ["BATCH", {}], "instance": ["INSTANCE", {"affine": True}]}
_NORMALISE: Mapping[str, dict[str, Any]] = {
    "zscore": {"_target_": "NormalizeIntensityd", "channel_wise": True},
    "zscore_nonzero": {"_target_": "NormalizeIntensityd", "channel_wise": True, "nonzero": True},
    "minmax": {"_target_": "ScaleIntensityd", "minv": 0.0, "maxv": 1.0, "channel_wise": True},
    "symmetric": {"_target_": "ScaleIntensityd", "minv": -1.0, "maxv": 1.0, "channel_wise": True},
    "scale": {"_target_": "ScaleIntensityRanged", "a_min": 0, "a_max": 255, "b_min": 0, "b_max": 1},
}
_PICTURES = ("png", "jpg", "jpeg", "bmp", "tif", "tiff")


def export_bundle(handed: Handed, folder: Path, *, pictures: bool | None = None) -> Path:
    """Write the model as a MONAI bundle.

    Run it with ``python -m monai.bundle run --config_file configs/inference.json --bundle_root .
    --dataset_dir IMAGES --output_dir OUT`` in its folder.

    Args:
        handed: The model; the first of several.
        folder: The bundle's folder; it must not hold anything.
        pictures: Whether the images are pictures (PNG) and not volumes; None: where the network
            has two spatial dimensions.

    Returns:
        The folder.

    Raises:
        ConfigError: The model is one for tables, or its volumes are predicted in slices.
        DataError: The folder is not empty.
        StorageError: A file cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} holds something already; choose another folder")
    config = handed.config
    if config.federation.table is not None or isinstance(handed.network(), Standardised):
        raise ConfigError("MONAI's bundles are for images; a model for tables stays safetensors")
    flat = int(config.model.params.get("spatial_dims", 2)) == 2
    if flat if pictures is None else pictures:
        reading = _read_pictures(config)
    elif flat:
        raise ConfigError(
            "the network sees slices of volumes, which a bundle does not cut; use collegium predict"
        )
    else:
        reading = _read_volumes(config)
    name, model = next(iter(handed.models.items()))
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for part in ("models", "configs", "docs"):
            (unfinished / part).mkdir(parents=True)
        export_model(model, unfinished / "models" / "model.safetensors")
        contents = {
            "configs/inference.json": json.dumps(_inference(config, reading, flat=flat), indent=1),
            "configs/metadata.json": json.dumps(_metadata(handed, name, flat=flat), indent=1),
            "docs/README.md": _readme(handed),
        }
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
    params.setdefault("out_channels", config.federation.task.channels)
    target = "collegium.models.factory.build_model"
    return {"_target_": target, "name": config.model.name, **params}


def _read_pictures(config: ExperimentConfig) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    channels = {"rgb": "RGB", "grey": "L"}.get(config.federation.image.channels)
    load = {
        "_target_": "LoadImaged",
        "keys": "image",
        "reader": "PILReader",
        "reverse_indexing": False,
        "ensure_channel_first": True,
    }
    if channels is not None:
        load["converter"] = f"$lambda image: image.convert({channels!r})"
    return [load], _PICTURES


def _read_volumes(config: ExperimentConfig) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    image = config.federation.image
    steps: list[dict[str, Any]] = [
        {"_target_": "LoadImaged", "keys": "image", "ensure_channel_first": True},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS"},
    ]
    if image.spacing is not None:
        pixdim = [*image.spacing, -1.0][:3]
        steps.append({"_target_": "Spacingd", "keys": "image", "pixdim": pixdim})
    return steps, ("nii", "nii.gz")


def _inference(
    config: ExperimentConfig,
    reading: tuple[list[dict[str, Any]], tuple[str, ...]],
    *,
    flat: bool,
) -> dict[str, Any]:
    steps, suffixes = reading
    image, task = config.federation.image, config.federation.task
    if image.clip is not None:
        low, high = image.clip
        steps.append({"_target_": "ThresholdIntensityd", "keys": "image", "threshold": low,
                      "above": True, "cval": low})  # fmt: skip
        steps.append({"_target_": "ThresholdIntensityd", "keys": "image", "threshold": high,
                      "above": False, "cval": high})  # fmt: skip
    if image.size is not None:
        size = [image.size] if isinstance(image.size, int) else [*image.size]
        mode = {"size_mode": "longest"} if isinstance(image.size, int) else {}
        size_ = size[0] if mode else size
        steps.append({"_target_": "Resized", "keys": "image", "spatial_size": size_, **mode,
                      "mode": "bilinear" if flat else "trilinear"})  # fmt: skip
    if image.normalise != "none":
        steps.append({**_NORMALISE[image.normalise], "keys": "image"})
    found = " + ".join(f"glob.glob(os.path.join(@dataset_dir, '*.{end}'))" for end in suffixes)
    return {
        "imports": ["$import glob", "$import os", "$import torch", "$import safetensors.torch"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/predictions'",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "weights": "$safetensors.torch.load_file(@bundle_root + '/models/model.safetensors')",
        "datalist": f"$[{{'image': path}} for path in sorted({found})]",
        "network_def": _network(config),
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": steps},
        "dataset": {
            "_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
        "inferer": _inferer(config),
        "postprocessing": {
            "_target_": "Compose", "transforms": _postprocessing(task, flat=flat)
        },
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": [],
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


def _postprocessing(task: TaskConfig, *, flat: bool) -> list[dict[str, Any]]:
    if task.name == "classification":
        return [
            {"_target_": "Activationsd", "keys": "pred", "softmax": True},
            {"_target_": "SaveClassificationd", "keys": "pred", "output_dir": "@output_dir"},
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
    }  # fmt: skip
    return [*steps, {**save, "output_ext": ".png"} if flat else save]


def _metadata(handed: Handed, name: str, *, flat: bool) -> dict[str, Any]:
    config = handed.config
    versions = {package: metadata.version(package) for package in ("monai", "torch", "numpy")}
    needs = {"safetensors": metadata.version("safetensors")}
    if config.model.name != "unet":
        needs["collegium"] = __version__
    image, classes = config.federation.image, config.federation.task.classes
    params = config.model.params
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/"
        "0.8.1/meta_schema_20240725.json",
        "version": "0.1.0",
        "changelog": {"0.1.0": "exported by Collegium"},
        "monai_version": versions["monai"],
        "pytorch_version": versions["torch"].partition("+")[0],
        "numpy_version": versions["numpy"],
        "required_packages_version": needs,
        "name": f"{config.name} {name}",
        "task": config.federation.task.name,
        "description": f"{handed.origin}; trained by federated learning",
        "authors": "the federation's sites",
        "copyright": "the federation's sites",
        "intended_use": "research; not a medical device",
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "magnitude",
                    "num_channels": params.get("in_channels", image.inputs or 3),
                    "spatial_shape": ["*"] * (2 if flat else 3),
                    "dtype": "float32",
                    "value_range": [],
                    "is_patch_data": config.inference.window is not None,
                }
            },
            "outputs": {
                "pred": {
                    "type": "image" if config.federation.task.name == "segmentation" else "vector",
                    "format": config.federation.task.name,
                    "num_channels": config.federation.task.channels,
                    "dtype": "float32",
                    "channel_def": {str(index): label for index, label in enumerate(classes)},
                }
            },
        },
    }


def _readme(handed: Handed) -> str:
    return f"""# {handed.config.name}

{handed.origin}. Exported by Collegium {__version__} as a MONAI bundle.

```bash
python -m monai.bundle run --config_file configs/inference.json --bundle_root . \\
    --dataset_dir IMAGES --output_dir PREDICTIONS
```

The weights are `models/model.safetensors`. For research; not a medical device.
"""
