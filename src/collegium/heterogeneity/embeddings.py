"""Embeddings of images, to compare sites by what a network sees (distance-aware averaging).

An image goes through an encoder, and its feature map is reduced to two numbers per channel by a
principal component analysis of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collegium.core.dataset import Dataset
from collegium.core.lazy import functional, torch
from collegium.core.randomness import ambient, generator
from collegium.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float64]
Encoder: TypeAlias = "Callable[[Tensor], Tensor]"
"""Returns a feature map (B, C, *spatial') of images (B, channels, *spatial).

A pre-trained network in evaluation mode is one, as is `SeededEncoder`. All sites must use the same.
"""

COMPONENTS = 2


def pca2(table: ArrayLike) -> tuple[Array, Array]:
    """Return the first two principal components of a table whose rows are observations.

    Columns are centred, not scaled. The sign of a component is arbitrary and would make equal sites
    look different; here the largest of its loadings by magnitude is positive, of equal ones the
    first. (The paper does not mention signs.) A component that does not exist, because the rows
    vary in fewer directions, is 0 throughout.

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


def embed(features: ArrayLike) -> Array:
    """Return the embedding of one image: its feature map's channels, each by two components.

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
    return _components(features)[0]


def _components(features: ArrayLike) -> tuple[Array, Array]:
    """Return the embedding of a feature map (C, *spatial), and its first component (positions,)."""
    table: NDArray[Any] = np.asarray(features)
    if table.ndim < 2:
        raise DataError(
            f"the encoder gave features of shape {table.shape}; it must give a map (channels, "
            f"*spatial) of every image"
        )
    scores, loadings = pca2(table.reshape(len(table), -1))
    return scores.reshape(-1), loadings[:, 0]


def embed_image(image: Tensor, encoder: Encoder, grid: int = 64) -> Array:
    """Return the embedding of an image of any size, resized to a fixed grid.

    Args:
        image: (channels, *spatial), with two or three spatial axes.
        encoder: returns the feature map.
        grid: every side is resized to this many pixels by averaging over areas, so that the maps of
            all images of all sites agree.

    Returns:
        (2 C,), see `embed`.

    Raises:
        ConfigError: there are other than two or three spatial axes, or the grid is below 1.
        DataError: the encoder gave no feature map, or NaN or infinite values.
    """
    return embed(_feature_map(image, encoder, grid))


def _feature_map(image: Tensor, encoder: Encoder, grid: int) -> NDArray[Any]:
    """Return the feature map (C, *spatial') of an image. See `embed_image`."""
    axes = image.ndim - 1
    if axes not in (2, 3) or grid < 1:
        raise ConfigError(
            f"an image of shape {tuple(image.shape)} cannot be brought to a grid of {grid} pixels "
            f"a side; embed images or volumes, on a grid of at least 1"
        )
    with torch.no_grad():
        resized = functional.interpolate(image[None].float(), (grid,) * axes, mode="area")
        found: NDArray[Any] = encoder(resized)[0].cpu().numpy()
    return found


def embed_cases(data: Dataset, encoder: Encoder, grid: int) -> Tensor:
    """Return one embedding per case, in the order of the cases: (n, D) float32.

    Args:
        data: whole cases. A volume is embedded as one, whether or not it is trained on in slices;
            an image without spatial axes is its own embedding.
        encoder: takes images (1, channels, *spatial) and returns feature maps (1, C, *spatial').
        grid: see `embed_image`.
    """
    return embed_with_components(data, encoder, grid)[0]


def embed_with_components(data: Dataset, encoder: Encoder, grid: int) -> tuple[Tensor, Tensor]:
    """Return one embedding per case, see `embed_cases`, and the first components of their maps.

    Args:
        data: see `embed_cases`.
        encoder: see `embed_cases`.
        grid: see `embed_image`.

    Returns:
        (n, D) float32, and (n, positions) float64, the first component of each case's feature map;
        without positions where images have no spatial axes.
    """
    rows, components = [], []
    for index in range(len(data)):
        image = data.example(index).image.float()
        if image.ndim > 2:
            whole = image.movedim(0, 1) if len(image) > 1 else image[0]
            embedding, component = _components(_feature_map(whole, encoder, grid))
            rows.append(torch.from_numpy(embedding).float())
            components.append(torch.from_numpy(component))
        else:
            rows.append(image[0])
            components.append(torch.zeros(0, dtype=torch.float64))
    if not rows:
        return torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.float64)
    return torch.stack(rows), torch.stack(components)


def mean_direction(components: ArrayLike) -> Array:
    """Return the direction that components have in common, whatever their signs.

    It is the vector m of length 1 with the largest mean of (u m)^2 over the components u, the first
    right singular vector of the table, times the root of this mean. Its length is so the cosine of
    a typical component's angle to it: 1 where all are alike.

    Args:
        components: (cases, positions), of length 1 each; those of length 0, which do not exist, are
            left out.

    Returns:
        (positions,), with its largest number by magnitude positive; empty without a component.
    """
    table = np.asarray(components, np.float64)
    table = table[np.linalg.norm(table, axis=1) > 0.5] if table.size else table
    if not table.size:
        return np.zeros(0)
    _, sizes, directions = np.linalg.svd(table, full_matrices=False)
    found = directions[0] * np.sign(directions[0][np.abs(directions[0]).argmax()])
    return np.asarray(found * (sizes[0] / math.sqrt(len(table))))


def component_angle(first: ArrayLike, second: ArrayLike) -> float:
    """Return the angle between the lines of two components in degrees, from 0 to 90.

    Args:
        first: (positions,), of any length above 0 and either sign.
        second: the same.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    b = b if a @ b >= 0 else -b
    return math.degrees(2 * math.atan2(np.linalg.norm(a - b), np.linalg.norm(a + b)))


def make_encoder(name: str) -> Encoder:
    """Return an encoder in evaluation mode; random weights are the same at every site.

    Args:
        name: a built-in model such as "resnet18_encoder", or the user's own as "file.py:factory",
            with its default parameters; "resnet18_encoder@file.safetensors" with trained weights.
            Empty: `SeededEncoder`.

    Raises:
        ConfigError: there is no such model, or the user's factory or the weights cannot be used.
    """
    from collegium.models.factory import MODELS, build_model

    if not name:
        return SeededEncoder()
    built_in, _, weights = name.partition("@")
    given = {"weights": weights} if weights and built_in in MODELS else {}
    try:
        with ambient(0, "encoder"):
            return build_model(built_in if given else name, **given).eval()
    except ConfigError as error:
        raise ConfigError(f"encoder: {error}") from error


@dataclass(frozen=True)
class SeededEncoder:
    """An untrained convolutional network, the encoder if no pre-trained one is available.

    Layers of 3 x 3 (x 3) convolutions of stride 2 with ReLU between them. Its weights are drawn
    from named generators, so that every site has the same without exchanging them, and they are
    the same in every run.

    Random filters respond to brightness, contrast and coarse structure, in which cameras, scanners
    and protocols differ. Three public sites of retinal photographs come out
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
        """Return normal weights whose variance keeps the size of the features (He et al., 2015)."""
        draw = generator(self.seed, "encoder", len(shape) - 2, shape[1], layer)
        return torch.randn(shape, generator=draw) * math.sqrt(2 / math.prod(shape[1:]))
