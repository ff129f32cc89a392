"""The texts of a bundle: its metadata, as MONAI asks for them, and how it is run."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from collegium import __version__
from collegium.deploy.bundlegraph import SUFFIXES, Plan
from collegium.deploy.models import OpenedModels

_OTHERS = {
    "pictures": """Save other kinds, such as DICOM, NRRD or NumPy, as PNG with 8 or 16 bits, with
their rows as rows and, of DICOM's MONOCHROME1, inverted so that high values are bright.""",
    "volumes": """Convert other kinds, such as DICOM or NRRD, to NIfTI with their geometry; of a
NumPy array, which has none, rows run towards the right, columns to the front, slices to the
head.""",
}
_DONE = {
    "zscore": "brought to mean 0 and deviation 1, image by image",
    "zscore_nonzero": "where they are not 0 brought to mean 0 and deviation 1, image by image",
    "minmax": "brought to 0 to 1, image by image",
    "symmetric": "brought to -1 to 1, image by image",
    "scale": "divided by 255 (8 bits) or 65535 (16 bits)",
    "none": "taken as they are",
}
_SAME = "a converted image has to hold the same numbers as the images that the network learnt from"
_MEANS = {
    "zscore_nonzero": "an image multiplied by a number above 0 gives the same, a shifted one not",
    "scale": "a converted image has to fill the same share of its range as the images that the "
    "network learnt from",
    "none": _SAME,
}


def metadata_of(opened: OpenedModels, plan: Plan) -> dict[str, Any]:
    """Return the content of ``configs/metadata.json``.

    Args:
        opened: The model.
        plan: What the bundle computes.
    """
    config = opened.config
    versions = {package: metadata.version(package) for package in ("monai", "torch", "numpy")}
    reader = "pillow" if plan.sees == "pictures" else "nibabel"
    needs = {package: metadata.version(package) for package in ("safetensors", reader)}
    needs["pytorch-ignite"] = "0.4.11"  # of MONAI's evaluator
    if plan.needs_collegium:
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
        "name": f"{config.name} {plan.name}",
        "task": config.federation.task.name,
        "description": f"{opened.origin}; trained by federated learning",
        "authors": "the federation's sites",
        "copyright": "the federation's sites",
        "intended_use": "research; not a medical device",
        "network_data_format": _data_format(plan),
    }


def _data_format(plan: Plan) -> dict[str, Any]:
    config, task = plan.config, plan.task
    inputs = (plan.image.inputs or 0) * (2 * config.federation.sampling.neighbours + 1)
    channels = config.model.params.get("in_channels", inputs or 3)
    segmented = task.name == "segmentation"
    common = {"dtype": "float32", "value_range": [], "modality": "n/a"}
    space = ["*"] * (3 if plan.sees == "volumes" else 2)
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


def readme_of(opened: OpenedModels, plan: Plan) -> str:
    """Return the content of ``docs/README.md``.

    Args:
        opened: The model.
        plan: What the bundle computes.
    """
    needs = " collegium" if plan.needs_collegium else ""
    return f"""# {opened.config.name}

{opened.origin}. Exported by Collegium {__version__} as a MONAI bundle.

```bash
python -m monai.bundle run --config_file configs/inference.json --bundle_root . \\
    --dataset_dir IMAGES --output_dir PREDICTIONS
```

This needs `pip install 'monai[nibabel,pillow,ignite,fire]' safetensors{needs}`.
The weights are `models/model.safetensors`. For research; not a medical device.

## What it reads

{_reading(plan)}

{_intensities(plan)}
"""


def _reading(plan: Plan) -> str:
    """Return which files are read, and how others are converted to them."""
    kinds = f"({', '.join(SUFFIXES[plan.sees])}; also in upper case)"
    channels = "Files `x_0000`, `x_0001` are the channels of one image."
    if plan.sees == "pictures":
        return f"Pictures in a folder {kinds}. {channels}\n{_OTHERS['pictures']}"
    along = plan.image.slices_along
    which = "as they were acquired" if along == "acquisition" else f"along {along}"
    cut = f" Their slices {which} are predicted one by one." if plan.sees == "slices" else ""
    return f"NIfTI volumes in a folder {kinds}.{cut} {channels}\n{_OTHERS['volumes']}"


def _intensities(plan: Plan) -> str:
    """Return how intensities are normalised, and so how they have to be written."""
    how, clip = plan.image.normalise, plan.image.clip
    if plan.image.colour_constancy is not None:
        return f"The colour of the light is taken out, then intensities are {_DONE[how]}:\n{_SAME}."
    if clip is not None:
        cut = f"cut off below {clip[0]:g} and above {clip[1]:g}, then {_DONE[how]}"
        return f"Intensities are {cut}:\n{_SAME},\nbelow 0 too, which a PNG cannot."
    alike = "an image multiplied by a number above 0 or shifted by one gives the same"
    return f"Intensities are {_DONE[how]}:\n{_MEANS.get(how, alike)}."
