"""Pictures of a case: the image with the contours of the truth and of the prediction.

Blue is the truth, orange the prediction, white is where both run. The image is drawn grey and a
little dark so that colour means contours only. The two colours differ for every kind of colour
vision. `draw_layers` gives the same as layers, which the report shows and hides one by one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collegium.core.files import write_atomically
from collegium.core.seals import digest_of, open_json, seal_json
from collegium.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

TRUTH, PREDICTION, BOTH = (86, 180, 233), (230, 159, 0), (255, 255, 255)
WRONG = (204, 121, 167)  # both see something, but not the same class
LARGEST, SMALLEST = 512, 256  # pixels of the longer side of a picture
INDEX = "index.json"
"""The file that says what the pictures of a folder show; it is written last."""

PICTURES = (".png", ".webp")
"""The endings of the pictures' files."""

RANKS = ("best", "median", "worst", "common")
"""Why a case is shown: for its score, or because it is shown under every method."""

_COMMON = 3
_BRIGHTNESS, _OUTSIDE = 0.75, 0.35
_THIN = 0.25  # share of a label's pixels on its contour, above which the structure is thin
_FILL = 190  # opacity of errors, of 255
_LEVEL = (
    3  # of PNG's compression: files of drawings are as small as at 6, in less than half the time
)
_QUALITY = 84  # of WebP


@dataclass(frozen=True)
class CasePlanes:
    """A case at the size of its picture, from `prepare_case`.

    Attributes:
        grey: The image (H, W), from 0 to 255, a little dark.
        labels: Truth and prediction (H, W), the classes numbered; 0 is background.
        lines: Their contours (H, W).
        inside: The field of view (H, W).
    """

    grey: NDArray[np.float64]
    labels: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    lines: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    inside: NDArray[np.bool_]


def write_index(folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write what the pictures of a folder show, with the digests of their files, sealed.

    Args:
        folder: The folder, with all its pictures.
        entries: An entry for each picture.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in PICTURES)
    digests = {path.name: digest_of(path.read_bytes()) for path in files}
    text = json.dumps({"pictures": [*entries], "files": digests})
    write_atomically(folder / INDEX, seal_json(text))


def read_index(folder: Path) -> tuple[list[Any], dict[str, str]]:
    """Return the entries of an index, and the digests of the files of pictures.

    An index from before there were digests is a list, and has none.

    Args:
        folder: The folder.

    Raises:
        OSError: The index cannot be read.
        ValueError: It is damaged.
        KeyError: It is no index.
    """
    data = (folder / INDEX).read_bytes()
    if data.startswith(b"["):
        return json.loads(data), {}
    found = open_json(data)
    return found["pictures"], found["files"]


def read_picture(path: Path, digests: Mapping[str, str]) -> bytes:
    """Return the content of a picture's file.

    Args:
        path: The file.
        digests: Of the files of its folder, as far as they are known; see `read_index`.

    Raises:
        OSError: It cannot be read.
        DataError: It is damaged.
    """
    content = path.read_bytes()
    found = digest_of(content)
    if digests.get(path.name, found) != found:
        raise DataError(
            f"{path} is damaged: restore it from a copy, or remove its folder to make a report "
            f"without its pictures"
        )
    return content


def prepare_case(
    image: NDArray[Any],
    truth: NDArray[Any],
    prediction: NDArray[Any],
    mask: NDArray[Any] | None = None,
) -> CasePlanes:
    """Return what the pictures of a case are drawn from.

    Contours are found after scaling and lie inside the label: one pixel wide where structures are
    thin, else two. Each class has a contour.

    Args:
        image: Floats (C, H, W) of any range; one channel, three (taken as red, green, blue), or
            any other number, of which the first is shown.
        truth: Labels (H, W); 0 is background.
        prediction: Labels (H, W).
        mask: Field of view (H, W); outside it the picture is dark and nothing is drawn.

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
    grey = _resize(_grey(image, inside), size, smooth=True).astype(np.float64) * _BRIGHTNESS
    inside = _resize(inside.astype(np.uint8), size) > 0
    grey[~inside] *= _OUTSIDE
    true, guess = (_resize(labels, size) for labels in _small(truth, prediction))
    blue, orange = (line & inside for line in _contours((true, guess)))
    return CasePlanes(grey, (true, guess), (blue, orange), inside)


def draw_overlay(planes: CasePlanes) -> "Image":
    """Draw the contours of truth and prediction over the image.

    Returns:
        An RGB picture; its longer side has 256 to 512 pixels.
    """
    from PIL import Image

    canvas = np.repeat(planes.grey[..., None], 3, axis=2)
    blue, orange = planes.lines
    for where, colour in ((blue, TRUTH), (orange, PREDICTION), (blue & orange, BOTH)):
        canvas[where] = colour
    return Image.fromarray(canvas.round().astype(np.uint8))


def draw_layers(planes: CasePlanes) -> dict[str, "Image"]:
    """Draw a case as pictures of one size, to be laid over each other.

    Returns:
        ``image``, grey; and with a transparent background ``truth`` and ``prediction``, their
        contours, and ``errors``, filled: blue where something was missed, orange where something is
        too much, purple where the class is another.
    """
    from PIL import Image

    true, guess = planes.labels
    errors = np.zeros(true.shape, np.uint8)
    errors[(true > 0) & (guess == 0)] = 1
    errors[(true == 0) & (guess > 0)] = 2
    errors[(true > 0) & (guess > 0) & (true != guess)] = 3
    errors[~planes.inside] = 0
    return {
        "image": Image.fromarray(planes.grey.round().astype(np.uint8)),
        "truth": _transparent(planes.lines[0], [TRUTH], 255),
        "prediction": _transparent(planes.lines[1], [PREDICTION], 255),
        "errors": _transparent(errors, [TRUTH, PREDICTION, WRONG], _FILL),
    }


def encode_png(picture: "Image") -> bytes:
    """Return a picture as the bytes of a PNG file."""
    buffer = BytesIO()
    picture.save(buffer, "PNG", compress_level=_LEVEL)
    return buffer.getvalue()


def encode_for_web(picture: "Image") -> tuple[bytes, str]:
    """Return a picture as a report embeds it: the bytes of a file, and its format.

    A picture with a palette, for few colours or a transparent background, is a PNG ("png"), which
    keeps every pixel; any other is a WebP ("webp").
    """
    if picture.mode == "P":
        return encode_png(picture), "png"
    buffer = BytesIO()
    converted = picture.convert("RGBA" if picture.mode == "RGBA" else "RGB")
    converted.save(buffer, "WEBP", quality=_QUALITY, method=4)
    return buffer.getvalue(), "webp"


def choose_cases(
    cases: Iterable[Mapping[str, Any]], metric: str
) -> dict[str, tuple[str, float | None]]:
    """Choose which test cases of a site to draw.

    Args:
        cases: The scores of a model by case.
        metric: The metric that ranks them.

    Returns:
        Pseudonym -> why it is drawn (see `RANKS`) and its score: the best, the median and the worst
        of the defined scores, then up to three cases by their names alone, which are the same for
        every method.
    """
    scores = {case["case"]: case[metric] for case in cases}
    names = sorted(scores)
    last = len(names) - 1
    chosen = {names[round(last * k / (_COMMON - 1))]: "common" for k in range(_COMMON) if names}
    ranked = sorted((name for name in names if scores[name] is not None), key=scores.__getitem__)
    if ranked:
        chosen |= {ranked[0]: "worst", ranked[len(ranked) // 2]: "median"} | {ranked[-1]: "best"}
    return {name: (rank, scores[name]) for name, rank in sorted(chosen.items())}


def _transparent(
    plane: NDArray[Any], colours: Sequence[tuple[int, int, int]], opacity: int
) -> "Image":
    """Return a picture with a palette; 0 is transparent, 1 the first colour, and so on."""
    from PIL import Image

    picture = Image.fromarray(plane.astype(np.uint8))
    picture.putpalette([0, 0, 0, *(part for colour in colours for part in colour)])
    picture.info["transparency"] = bytes([0, *[opacity] * len(colours)])
    return picture


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


def _small(*planes: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """Return the planes in bytes; classes that do not fit are numbered, the same in all planes."""
    if all(not plane.size or (plane.min() >= 0 and plane.max() <= 255) for plane in planes):
        return [plane.astype(np.uint8) for plane in planes]
    classes, numbers = np.unique(np.stack(planes), return_inverse=True)
    offset = 0 if classes.size and classes[0] == 0 else 1
    return list((numbers.reshape(len(planes), *planes[0].shape) + offset).astype(np.uint8))


def _resize(
    plane: NDArray[np.uint8], size: tuple[int, int], *, smooth: bool = False
) -> NDArray[np.uint8]:
    from PIL import Image

    method = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    return np.asarray(Image.fromarray(plane).resize(size[::-1], method))


def _contours(planes: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.bool_]]:
    """Return one contour per plane, all of the same width."""
    from scipy import ndimage

    lines = [_contour(labels) for labels in planes]
    if sum(line.sum() for line in lines) > _THIN * sum((labels > 0).sum() for labels in planes):
        return lines
    wide = [ndimage.binary_dilation(line) for line in lines]
    return [line & (labels > 0) for line, labels in zip(wide, planes, strict=True)]


def _contour(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return the pixels of a class beside a pixel of another; the edge of the image is none."""
    from scipy import ndimage

    cross = ndimage.generate_binary_structure(2, 1)
    differs = ndimage.morphological_gradient(labels, footprint=cross, mode="nearest") > 0
    return np.asarray(differs & (labels > 0))
