"""Embeddings of images, to compare sites by what a network sees (distance-aware averaging).

An image goes through an encoder, and its feature map is reduced to two numbers per channel by a
principal component analysis of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional

from collegium.core.randomness import generator
from collegium.errors import ConfigError, DataError

Array = NDArray[np.float64]
Encoder = Callable[[Tensor], Tensor]
"""Gives a feature map (B, C, *spatial') for images (B, channels, *spatial).

A pre-trained network in evaluation mode is one, as is `SeededEncoder`. All sites must use the same.
"""

COMPONENTS = 2


def pca2(table: ArrayLike) -> tuple[Array, Array]:
    """The first two principal components of a table, of which every row is an observation.

    Columns are centred, not scaled. The sign of a component is arbitrary and would make equal sites
    look different; here the largest of its loadings by magnitude is positive, of equals the first.
    (The paper says nothing about signs.) A component that does not exist, because the rows vary in
    fewer directions, is 0 throughout.

    Args:
        table: (rows, columns); for a feature map, channels and positions.

    Returns:
        Scores (rows, 2) and loadings (columns, 2), each loading vector of length 1.

    Raises:
        DataError: the table is empty, has not two axes, or holds NaN or infinite values.
    """
    rows = np.asarray(table, np.float64)
    if rows.ndim != 2 or not rows.size:
        raise DataError(f"principal components are taken of a table, not of shape {rows.shape}")
    if not np.isfinite(rows).all():
        raise DataError("a feature map holds NaN or infinite values; look at image and encoder")
    centred = rows - rows.mean(0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    noise = np.finfo(np.float64).eps * max(rows.shape) * np.abs(rows).max() * math.sqrt(rows.size)
    loadings = np.zeros((rows.shape[1], COMPONENTS))
    for component in range(min(COMPONENTS, len(sizes))):
        if sizes[component] > noise:
            direction = directions[component]
            loadings[:, component] = direction * np.sign(direction[np.abs(direction).argmax()])
    return centred @ loadings, loadings


def component_angle(v: ArrayLike, w: ArrayLike) -> float:
    """The angle between two vectors in degrees, from 0 to 180 (paper, Appendix E).

    Raises:
        DataError: a vector has no length, or the two have different shapes.
    """
    a, b = np.asarray(v, np.float64), np.asarray(w, np.float64)
    sizes = np.linalg.norm(a), np.linalg.norm(b)
    if a.shape != b.shape or not all(0 < size < math.inf for size in sizes):
        raise DataError("an angle needs two vectors of one shape and of a finite length above 0")
    a, b = a / sizes[0], b / sizes[1]
    return math.degrees(2 * math.atan2(np.linalg.norm(a - b), np.linalg.norm(a + b)))


def embed(features: ArrayLike) -> Array:
    """The embedding of one image: its feature map's channels, each by two components.

    Channels are the observations and positions the variables, so that maps to be compared must
    have one size, and images one grid. The paper's encoder has 512 channels, its embeddings 1024
    numbers.

    Args:
        features: (C, *spatial), a feature map.

    Returns:
        (2 C,): both scores of the first channel, both of the second, and so on.

    Raises:
        DataError: the map has no spatial axes, is empty, or holds NaN or infinite values.
    """
    table: NDArray[Any] = np.asarray(features)
    if table.ndim < 2:
        raise DataError(
            f"the encoder gave features of shape {table.shape}; it must give a map (channels, "
            f"*spatial) of every image"
        )
    scores, _ = pca2(table.reshape(len(table), -1))
    return scores.reshape(-1)


def embed_image(image: Tensor, encoder: Encoder, grid: int = 64) -> Array:
    """The embedding of an image of any size: brought to a fixed grid, encoded, reduced.

    Args:
        image: (channels, *spatial), with two or three spatial axes.
        encoder: gives the feature map.
        grid: every side is resized to this many pixels by averaging over areas, so that the maps of
            all images of all sites agree.

    Returns:
        (2 C,), see `embed`.

    Raises:
        ConfigError: there are other than two or three spatial axes, or the grid is not positive.
        DataError: the encoder gave no feature map, or NaN or infinite values.
    """
    axes = image.ndim - 1
    if axes not in (2, 3) or grid < 1:
        raise ConfigError(
            f"an image of shape {tuple(image.shape)} cannot be brought to a grid of {grid} pixels "
            f"a side; embed images or volumes, on a grid of at least 1"
        )
    with torch.no_grad():
        resized = functional.interpolate(image[None].float(), (grid,) * axes, mode="area")
        return embed(encoder(resized)[0].cpu().numpy())


@dataclass(frozen=True)
class SeededEncoder:
    """An untrained convolutional network: the encoder where no pre-trained one is at hand.

    Layers of 3 x 3 (x 3) convolutions of stride 2 with ReLU between them. Its weights are drawn
    from named generators, so that every site has the same without exchanging them, and they are
    the same in every run.

    What it is worth: random filters respond to brightness, contrast and coarse structure, which is
    where cameras, scanners and protocols differ. Three public sites of retinal photographs come out
    farther from each other (energy distance, 20 images each) than any half of one from its other
    half. They know nothing of anatomy or disease, so that sites that differ in these alone may look
    equal. Distances have no unit, and are comparable only between equal ``seed``, ``widths`` and
    grid. Prefer an encoder trained on images of the kind, as the paper does with MedicalNet.

    Attributes:
        seed: which random network.
        widths: output channels of the layers; each halves the sides.
    """

    seed: int = 0
    widths: tuple[int, ...] = (16, 32, 64)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the feature map (B, widths[-1], *spatial / 2^layers) of (B, channels, *spatial).

        Raises:
            ConfigError: there are other than two or three spatial axes.
        """
        axes = images.ndim - 2
        if axes not in (2, 3):
            raise ConfigError(
                f"images of shape {tuple(images.shape)} cannot be embedded; the encoder takes "
                f"images or volumes"
            )
        convolve = functional.conv2d if axes == 2 else functional.conv3d
        features = images.float()
        for layer, width in enumerate(self.widths, start=1):
            features = functional.relu(features) if layer > 1 else features
            weight = self._weight(layer, (width, features.shape[1], *(3,) * axes))
            features = convolve(features, weight.to(features), stride=2, padding=1)
        return features

    def _weight(self, layer: int, shape: tuple[int, ...]) -> Tensor:
        """Normal weights whose variance keeps the size of the features (He et al., 2015)."""
        draw = generator(self.seed, "encoder", len(shape) - 2, shape[1], layer)
        return torch.randn(shape, generator=draw) * math.sqrt(2 / math.prod(shape[1:]))
