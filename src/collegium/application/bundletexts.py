"""What a bundle says of itself: its metadata, as MONAI asks for them, and how it is run."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from collegium import __version__
from collegium.application.models import Handed
from collegium.config import ExperimentConfig


def metadata_of(handed: Handed, name: str, *, flat: bool) -> dict[str, Any]:
    """Give what stands in ``configs/metadata.json``.

    Args:
        handed: The model.
        name: Its name.
        flat: Whether it sees pictures.
    """
    config = handed.config
    versions = {package: metadata.version(package) for package in ("monai", "torch", "numpy")}
    reader = "pillow" if flat else "nibabel"
    needs = {package: metadata.version(package) for package in ("safetensors", reader)}
    needs["pytorch-ignite"] = "0.4.11"  # of MONAI's evaluator
    if config.model.name != "unet":
        needs["collegium"] = __version__
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
        "network_data_format": _data_format(config, flat=flat),
    }


def _data_format(config: ExperimentConfig, *, flat: bool) -> dict[str, Any]:
    image, task = config.federation.image, config.federation.task
    channels = config.model.params.get("in_channels", image.inputs or 3)
    segmented = task.name == "segmentation"
    common = {"dtype": "float32", "value_range": [], "modality": "n/a"}
    space = ["*"] * (2 if flat else 3)
    return {
        "inputs": {
            "image": {
                **common,
                "type": "image",
                "format": "magnitude",
                "num_channels": channels,
                "spatial_shape": space,
                "is_patch_data": config.inference.window is not None,
                "channel_def": {str(index): f"channel {index}" for index in range(channels)},
            }
        },
        "outputs": {
            "pred": {
                **common,
                "type": "image" if segmented else "probabilities",
                "format": "labels" if segmented and not task.regions else "classes",
                "num_channels": task.channels,
                "spatial_shape": space if segmented else [],
                "is_patch_data": segmented and config.inference.window is not None,
                "channel_def": {
                    str(k): name for k, name in enumerate(task.regions or task.classes)
                },
            }
        },
    }


def readme_of(handed: Handed) -> str:
    """Give what stands in ``docs/README.md``."""
    return f"""# {handed.config.name}

{handed.origin}. Exported by Collegium {__version__} as a MONAI bundle.

```bash
python -m monai.bundle run --config_file configs/inference.json --bundle_root . \\
    --dataset_dir IMAGES --output_dir PREDICTIONS
```

This needs `pip install 'monai[nibabel,pillow,ignite,fire]' safetensors`.
The weights are `models/model.safetensors`. For research; not a medical device.
"""
