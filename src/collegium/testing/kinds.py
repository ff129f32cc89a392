"""The kinds of data on which the conformance suite runs, the quickest first.

Between them their networks have batch normalisation, instance normalisation or none, dropout, a
head of one layer or of several, and two or three dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from collegium.core.dataset import Batch
from collegium.core.randomness import generator
from collegium.tasks import ClassificationTask, SegmentationTask
from collegium.testing.toy import REGRESSION, Kind

Noise = Callable[..., Tensor]
"""Returns normal random numbers of a shape."""


def _noise(name: str, seed: int, kind: str) -> Noise:
    random = generator(seed, "toy", name, kind)
    return lambda *shape: torch.randn(*shape, generator=random)


def _smooth(noise: Noise, count: int, sides: tuple[int, ...], shift: float) -> Tensor:
    """Return images (count, 1, *sides) without fine detail."""
    mode = "bilinear" if len(sides) == 2 else "trilinear"
    coarse = noise(count, 1, *(side // 4 for side in sides))
    fine = functional.interpolate(coarse, sides, mode=mode, align_corners=False)
    return fine + 0.1 * noise(count, 1, *sides) + shift


def rows_with_classes(name: str, count: int, seed: int) -> Batch:
    """Return rows of four features, with one of two classes each.

    Args:
        name: the site's name.
        count: how many.
        seed: decides the data.
    """
    noise = _noise(name, seed, "rows")
    features, slope = noise(count, 4), torch.tensor([1.0, -1.0, 0.5, 0.0]) + 0.3 * noise(4)
    return {"image": features, "label": (features @ slope > 0).long()}


def images_with_classes(name: str, count: int, seed: int) -> Batch:
    """Return images of 8 x 8 pixels, with one of three classes each: how bright they are.

    Args:
        name: the site's name.
        count: how many.
        seed: decides the data.
    """
    noise = _noise(name, seed, "classes")
    labels = (noise(count).abs() * 2).long().clamp(max=2)
    images = _smooth(noise, count, (8, 8), 0.2 * float(noise(1)))
    return {"image": images + labels.view(-1, 1, 1, 1), "label": labels}


def images_with_masks(name: str, count: int, seed: int) -> Batch:
    """Return images of 16 x 16 pixels with two classes, and a field of view without the corners.

    Args:
        name: the site's name.
        count: how many.
        seed: decides the data.
    """
    noise = _noise(name, seed, "masks")
    images = _smooth(noise, count, (16, 16), 0.2 * float(noise(1)))
    axis = torch.linspace(-1, 1, 16)
    view = (axis[:, None] ** 2 + axis[None, :] ** 2 < 1.5).expand(count, -1, -1).clone()
    return {"image": images, "label": (images[:, 0] > 0.3).long(), "mask": view}


def volumes_with_masks(name: str, count: int, seed: int) -> Batch:
    """Return volumes of 8 x 8 x 8 voxels with three classes.

    Args:
        name: the site's name.
        count: how many.
        seed: decides the data.
    """
    noise = _noise(name, seed, "volumes")
    images = _smooth(noise, count, (8, 8, 8), 0.2 * float(noise(1)))
    return {"image": images, "label": (images[:, 0] > 0).long() + (images[:, 0] > 0.5).long()}


def table_network(norm: str = "batch") -> nn.Module:
    """Return the perceptron of an experiment: batch normalisation, or with "none" none."""
    from collegium.models.factory import build_model

    return build_model("mlp", in_features=4, out_features=2, hidden=(4,), norm=norm)


def class_network(norm: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Return a small network for images with classes, with dropout.

    Args:
        norm: makes the layer of normalisation; None: instance normalisation.
    """
    layer = nn.InstanceNorm2d(3, affine=True) if norm is None else norm()
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), layer, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(3, 3),
    )  # fmt: skip


def mask_network() -> nn.Module:
    """Return the default network of an experiment, MONAI's U-Net, with few channels.

    It has batch normalisation, and its head consists of several layers.
    """
    from collegium.models.factory import build_model

    return build_model("unet", in_channels=1, out_channels=2, channels=(2, 4))


def volume_network() -> nn.Module:
    """Return a network for volumes without normalisation layers."""
    return nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv3d(3, 3, 1))


KINDS = {
    kind.name: kind
    for kind in (
        REGRESSION,
        Kind(
            "rows with classes", "table", table_network, lambda: ClassificationTask(2),
            rows_with_classes, lambda: table_network("none"),
        ),
        Kind(
            "images with classes", "classification", class_network, lambda: ClassificationTask(3),
            images_with_classes, lambda: class_network(nn.Identity),
        ),
        Kind(
            "volumes with masks", "segmentation", volume_network,
            lambda: SegmentationTask(3, metrics=("dice",)), volumes_with_masks,
        ),
        Kind(
            "images with masks", "segmentation", mask_network,
            lambda: SegmentationTask(2, metrics=("dice",)), images_with_masks,
        ),
    )
}  # fmt: skip
"""The kinds by name."""
