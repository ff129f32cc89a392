"""Recipes by name: the papers', for images, training and prediction, and what was found to pay.

``recipe: iop-fl`` in an experiment file fills in what the file does not say itself.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from collegium.errors import ConfigError

_PATCHES = {"flips": True, "patches": 4, "scale": 0.1, "shift": 0.1}
_PROSTATE = {
    "image": {"size": [384, 384], "normalise": "zscore"},
    "sampling": {"crop": [384, 384], "flips": True, "rotations": True},
}
_ADAM = {"optimizer": "adam", "lr": 1e-3}
_SGD = {"optimizer": "sgd", "lr": 0.01, "momentum": 0.9}
_ISIC = {  # class of ISIC 2019: its weight in the focal loss of FLamby and GRACE
    "MEL": 5.5813, "NV": 2.0472, "BCC": 7.0204, "AK": 26.1194,
    "BKL": 9.5369, "DF": 101.0707, "VASC": 92.5224, "SCC": 38.3443,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Settings of a paper, or of `docs/recipes.md`.

    Attributes:
        description: Its use, the origin of the numbers, and what differs from the paper.
        values: Keys of an experiment file and what they hold.
    """

    description: str
    values: Mapping[str, Any]


def _distance_aware(data: str, spacing: list[float], crop: list[int], window: list[int]) -> Recipe:
    return Recipe(
        f"{data} of distance-aware averaging",
        {
            "federation": {
                "image": {"spacing": spacing, "normalise": "zscore_nonzero"},
                "sampling": {"crop": crop, **_PATCHES},
            },
            "training": {**_SGD, "batch_size": 1, "local_epochs": 1},
            "inference": {"window": window},
            "loss": "dice",
            "rounds": 25,
        },
    )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "home": Recipe(
            "what paid in docs/recipes.md: 25 rounds, the last five of them at home, with the "
            "optimiser's moments kept. With other rounds set home_rounds to a fifth of them; keep "
            "batch normalisation and compare fedbn, fedavg and local",
            {"training": {"optimizer_state": "keep"}, "rounds": 25, "home_rounds": 5},
        ),
        "iop-fl": Recipe(
            "prostate and fundus of IOP-FL: 384x384, z-score per case, quarter turns and flips; "
            "batch 16, Adam 1e-3 (with AMSGrad, as its code), Dice loss, 100 rounds of one epoch. "
            "The paper names rotation and flips without angles; quarter turns are what its code "
            "holds, commented out. Its arrays hold three slices each; of volumes set "
            "sampling.neighbours to 1 and, for slices with a label only, sampling.foreground to 1",
            {
                "federation": _PROSTATE,
                "training": {**_ADAM, "amsgrad": True, "batch_size": 16, "local_epochs": 1},
                "loss": "dice",
                "rounds": 100,
            },
        ),
        "grace-prostate": Recipe(
            "prostate of GRACE: as IOP-FL, with cross-entropy and Dice, 200 rounds of one epoch. "
            "The loss is their sum, in the paper its half; augmentation is IOP-FL's",
            {
                "federation": _PROSTATE,
                "training": {**_ADAM, "batch_size": 16, "local_epochs": 1},
                "loss": "dice_ce",
                "rounds": 200,
            },
        ),
        "grace-dermoscopy": Recipe(
            "dermoscopy of GRACE (Fed-ISIC2019 of FLamby): focal loss weighted by class, Adam "
            "5e-4, batch 64, 5 local epochs, 40 rounds, balanced accuracy; crops of 200x200 with "
            "zoom 0.07, angles up to 50 degrees, shear 0.1 degrees, flips, brightness 0.15, "
            "contrast 0.1 and up to 8 holes of 16x16, each in every second sample; colour "
            "constancy by shades of grey, shorter side 224. Differs: pictures are tested whole; no "
            "statistics of ImageNet; the network is the file's",
            {
                "federation": {
                    "task": {
                        "name": "classification",
                        "classes": list(_ISIC),
                        "weights": list(_ISIC.values()),
                        "metric": "balanced_accuracy",
                    },
                    "image": {
                        "channels": "rgb",
                        "size": 224,
                        "side": "shortest",
                        "colour_constancy": 6.0,
                        "normalise": "scale",
                    },
                    "sampling": {
                        "crop": [200, 200],
                        "flips": True,
                        "rotate": 50.0,
                        "zoom": 0.07,
                        "shear": 0.1,
                        "scale": 0.1,
                        "shift": 0.15,
                        "channels_alike": True,
                        "holes": 8,
                        "hole_side": 16,
                        "probability": 0.5,
                    },
                },
                "training": {**_ADAM, "lr": 5e-4, "batch_size": 64, "local_epochs": 5},
                "loss": "focal",
                "rounds": 40,
            },
        ),
        "distance-fets": _distance_aware(
            "brain tumours (FeTS)", [1.0, 1.0, 1.0], [224, 224, 144], [240, 240, 160]
        ),
        "distance-prostate": _distance_aware(
            "prostate", [0.3, 0.3, 1.0], [224, 224, 32], [224, 224, 32]
        ),
        "distance-kits": _distance_aware(
            "kidneys (KiTS; the paper lists the axes in the files' order)",
            [1.45, 1.45, 2.9],
            [256, 256, 64],
            [256, 256, 80],
        ),
        "pfednet-segmentation": Recipe(
            "brain tumours of pFedNet: slices of 64x64 in [-1, 1], missing channels zero; SGD "
            "1e-3, batch 2, 10 local epochs, 50 rounds",
            {
                "federation": {
                    "image": {"size": [64, 64], "normalise": "symmetric"},
                    "sampling": {"crop": [64, 64]},
                },
                "training": {**_SGD, "lr": 1e-3, "batch_size": 2, "local_epochs": 10},
                "loss": "ce",
                "rounds": 50,
            },
        ),
        "pfednet-classification": Recipe(
            "images of pFedNet: 32x32 in [-1, 1]; SGD 0.01, batch 32, 10 local epochs, 100 rounds",
            {
                "federation": {
                    "task": {"name": "classification"},
                    "image": {"size": [32, 32], "normalise": "symmetric"},
                    "sampling": {"crop": [32, 32]},
                },
                "training": {**_SGD, "batch_size": 32, "local_epochs": 10},
                "loss": "ce",
                "rounds": 100,
            },
        ),
        "resfim": Recipe(
            "prostate of pFL-ResFIM: slices of 384x384, z-score per volume; Adam 1e-4, batch 4, 4 "
            "local epochs, 100 rounds (vessels and glands: lr 1e-3, lr_decay 0.99); the paper "
            "leaves the loss open, here Dice with cross-entropy",
            {
                "federation": _PROSTATE,
                "training": {**_ADAM, "lr": 1e-4, "batch_size": 4, "local_epochs": 4},
                "loss": "dice_ce",
                "rounds": 100,
            },
        ),
    }
)
"""Recipe by name."""


def apply_recipe(data: dict[str, Any], name: str) -> None:
    """Fill a recipe into an experiment's mapping, in place; what is there already stays.

    Args:
        data: The mapping of an experiment.
        name: One of `RECIPES`.

    Raises:
        ConfigError: The recipe weighs other classes than the file lists.
    """
    _merge(data, RECIPES[name].values)


def _merge(data: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    for key, value in defaults.items():
        if key == "weights" and key not in data:
            _check_order(data["classes"], defaults["classes"])
        there = data.setdefault(key, {} if isinstance(value, Mapping) else copy.copy(value))
        if isinstance(value, Mapping) and isinstance(there, dict):
            _merge(there, value)


def _check_order(classes: Any, weighted: Sequence[str]) -> None:
    """Refuse to give weights to other classes, or to the same in another order."""
    if isinstance(classes, list) and classes != weighted:
        raise ConfigError(
            f"task.classes is {classes} and the recipe weighs {weighted}: list these, in this "
            f"order (task.coding translates what is written), or give task.weights, null for none"
        )
