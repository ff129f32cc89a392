"""Pictures of a case: the image with the contours of the truth and of the prediction.

Blue is the truth, orange the prediction, white is where both run. The image is drawn grey and a
little dark so that colour means contours only. The two colours differ for every kind of colour
vision.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

TRUTH, PREDICTION, BOTH = (86, 180, 233), (230, 159, 0), (255, 255, 255)
LARGEST, SMALLEST = 512, 256  # pixels of the longer side of a picture
_RANKS = ("best", "median", "worst")
_BRIGHTNESS, _OUTSIDE = 0.75, 0.35
_THIN = 0.25  # share of a label's pixels on its contour, above which the structure is thin


@dataclass(frozen=True)
class Overlay:
    """A picture of one test case.

    Attributes:
        site: Name of the site.
        algorithm: Label of the algorithm.
        seed: Seed of the run.
        model: ``"global"`` or ``"personal"``.
        rank: ``"best"``, ``"median"`` or ``"worst"`` of the site's cases.
        case: Pseudonym of the case.
        metric: What ranks the cases.
        value: The score of the case; None where undefined.
        file: The picture.
    """

    site: str
    algorithm: str
    seed: int
    model: str
    rank: str
    case: str
    metric: str
    value: float | None
    file: Path


def draw_overlay(
    image: NDArray[Any],
    truth: NDArray[Any],
    prediction: NDArray[Any],
    mask: NDArray[Any] | None = None,
) -> "Image":
    """Draw the contours of truth and prediction over an image.

    Contours are drawn after scaling and inside the label: one pixel wide where structures are
    thin, else two. Each class has a contour.

    Args:
        image: Floats (C, H, W) of any range; one channel, three (taken as red, green, blue), or
            any other number, of which the first is shown.
        truth: Labels (H, W); 0 is background.
        prediction: Labels (H, W).
        mask: Field of view (H, W); outside it the picture is dark and nothing is drawn.

    Returns:
        An RGB picture; its longer side has 256 to 512 pixels.

    Raises:
        DataError: The shapes do not fit together.
    """
    shape = image.shape[1:]
    masks = () if mask is None else (mask,)
    if image.ndim != 3 or any(plane.shape != shape for plane in (truth, prediction, *masks)):
        raise DataError(
            f"An overlay needs an image (C, H, W) and labels (H, W); got {image.shape}, "
            f"{truth.shape} and {prediction.shape}; pass one 2-D slice of the case."
        )
    size = _size(shape)
    inside = np.ones(shape, bool) if mask is None else np.asarray(mask, bool)
    grey = _resize(_grey(image, inside), size, smooth=True)
    inside = _resize(inside.astype(np.uint8), size) > 0
    canvas = np.repeat(grey[..., None] * _BRIGHTNESS, 3, axis=2)
    canvas[~inside] *= _OUTSIDE
    planes = [_resize(_small(labels), size) for labels in (truth, prediction)]
    lines = [line & inside for line in _contours(planes)]
    for where, colour in ((lines[0], TRUTH), (lines[1], PREDICTION), (lines[0] & lines[1], BOTH)):
        canvas[where] = colour
    from PIL import Image

    return Image.fromarray(canvas.round().astype(np.uint8))


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of the picture: small images grow by a whole factor, large ones shrink."""
    longest = max(shape)
    factor = float(-(-SMALLEST // longest)) if longest < SMALLEST else min(1.0, LARGEST / longest)
    height, width = (max(1, round(side * factor)) for side in shape)
    return height, width


def _grey(image: NDArray[Any], inside: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Luminance, stretched between the first and the last percentile inside the mask."""
    values = np.asarray(image, np.float64)
    grey = np.tensordot([0.299, 0.587, 0.114], values, 1) if len(values) == 3 else values[0]
    grey = np.nan_to_num(grey)
    low, high = np.percentile(grey[inside] if inside.any() else grey, [1, 99])
    stretched = (grey - low) / max(high - low, 1e-12)
    return np.asarray((stretched.clip(0, 1) * 255).round(), np.uint8)


def _small(labels: NDArray[Any]) -> NDArray[np.uint8]:
    """Number the classes from 0, so that they fit a byte."""
    classes, numbers = np.unique(labels, return_inverse=True)
    offset = 0 if classes.size and classes[0] == 0 else 1
    return (numbers.reshape(labels.shape) + offset).astype(np.uint8)


def _resize(
    plane: NDArray[np.uint8], size: tuple[int, int], *, smooth: bool = False
) -> NDArray[np.uint8]:
    from PIL import Image

    method = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(plane).resize(size[::-1], method))


def _contours(planes: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.bool_]]:
    """One contour per plane, all of the same width."""
    lines = [_contour(labels) for labels in planes]
    if sum(line.sum() for line in lines) > _THIN * sum((labels > 0).sum() for labels in planes):
        return lines
    return [_widen(line) & (labels > 0) for line, labels in zip(lines, planes, strict=True)]


def _widen(line: NDArray[np.bool_]) -> NDArray[np.bool_]:
    padded = np.pad(line, 1)
    near = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    return np.asarray(np.logical_or.reduce([line, *near]))


def _contour(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Pixels of a class of which one of the four neighbours is of another; the border is none."""
    padded = np.pad(labels, 1, mode="edge")
    neighbours = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    differs = np.logical_or.reduce([labels != neighbour for neighbour in neighbours])
    return np.asarray(differs & (labels > 0))


def read_overlays(output: Path) -> list[Overlay]:
    """Find the pictures of a run: ``<label>/seed-<s>/overlays/index.json``.

    Args:
        output: The output folder of an experiment.

    Returns:
        The pictures of the lowest seed of each algorithm, by site, algorithm, model and rank.

    Raises:
        DataError: An index cannot be read.
    """
    found: list[Overlay] = []
    for index in output.glob("*/seed-*/overlays/index.json"):
        cell = index.parent.parent
        seed = int(cell.name.removeprefix("seed-"))
        try:
            entries = json.loads(index.read_text(encoding="utf-8"))
            found += [
                Overlay(entry["site"], cell.parent.name, seed, entry["model"], entry["rank"],
                        entry["case"], entry["metric"], entry["value"],
                        index.parent / entry["file"])
                for entry in entries
            ]  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{index}: this is not an index of overlays ({error!r}); remove the folder "
                "to make a report without its pictures."
            ) from error
    return _first_seed(found)


def _first_seed(overlays: Iterable[Overlay]) -> list[Overlay]:
    overlays = list(overlays)
    first: dict[str, int] = {}
    for overlay in overlays:
        first[overlay.algorithm] = min(overlay.seed, first.get(overlay.algorithm, overlay.seed))
    kept = [overlay for overlay in overlays if overlay.seed == first[overlay.algorithm]]
    return sorted(kept, key=lambda o: (o.site, o.algorithm, o.model, _position(o.rank), o.case))


def _position(rank: str) -> int:
    return _RANKS.index(rank) if rank in _RANKS else len(_RANKS)


def embed(path: Path) -> str:
    """Return a picture as a data URI, made smaller where its longer side is above 512 pixels.

    Args:
        path: The picture.

    Returns:
        ``data:image/jpeg;base64,...``

    Raises:
        DataError: The file is absent or not a picture.
    """
    from PIL import Image, UnidentifiedImageError

    buffer = BytesIO()
    try:
        with Image.open(path) as picture:
            picture = picture.convert("RGB")
            picture.thumbnail((LARGEST, LARGEST))
            picture.save(buffer, "JPEG", quality=88, subsampling=0)
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(
            f"{path}: the overlay cannot be read ({error}); remove its line from index.json."
        ) from error
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
