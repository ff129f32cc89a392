"""Predicting and scoring test cases against a plain loop of MONAI's functions, with equal scores.

Pictures of 512 x 512 with thin curves, as retinal vessels are, and volumes of 48 x 64 x 48 with two
structures beside each other, as the parts of the hippocampus are, each predicted by the U-Net of
the experiment on such data in `configs`. The network's work is done, but its logits are read off
the image, so that a prediction is as good as a trained network's.

- Whole evaluation: windows (of small cases several in a forward pass), classes, and Dice, IoU and
  HD95 of every structure, against MONAI's sliding windows, `argmax` and three metrics.
- The scores alone, against the three metrics.
- A volume's windows, four in a forward pass (the default), against one.
- Embedding the pictures of a run in a report, against encoding them again.

Processor seconds of one thread, in turns.

    python benchmarks/evaluation.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.measuring import in_turns, medians, verdict
from PIL import Image
from scipy import ndimage
from torch import Tensor, nn

from collegium.core.dataset import Example
from collegium.evaluation.report.overlays import draw_layers, encode_for_web, prepare_case
from collegium.evaluation.report.pictures import Overlay, PictureSheet
from collegium.models.factory import build_model
from collegium.runtime.process import prepare
from collegium.tasks import SegmentationTask

MAX_WHOLE, MAX_SCORES, MAX_WINDOWS, MAX_PICTURES = {2: 0.85, 3: 0.6}, 0.5, 0.8, 0.3
"""Limits of the time by that of the reference."""

UNETS: Mapping[int, dict[str, Any]] = {
    2: {"in_channels": 3, "out_channels": 2, "channels": [16, 32, 64, 128], "num_res_units": 1},
    3: {"in_channels": 1, "out_channels": 3, "channels": [8, 16, 32, 64], "num_res_units": 1},
}
"""The networks of `configs/vessel.yaml` and `configs/hippocampus.yaml`, by the number of axes."""

WINDOWS: Mapping[int, tuple[int, ...]] = {2: (512, 512), 3: (48, 64, 48)}

Scores = list[list[float]]
"""Of every case Dice, IoU and HD95 of each structure."""


class Guessing(nn.Module):
    """A U-Net's work, and logits that are read off the image.

    Args:
        axes: The number of spatial axes.
    """

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.network = build_model("unet", spatial_dims=axes, **UNETS[axes])
        self.classes = UNETS[axes]["out_channels"]

    def forward(self, image: Tensor) -> Tensor:
        """Return for each class minus the distance of the image's number from the class's."""
        logits: Tensor = self.network(image)
        for k in range(self.classes):
            logits[:, k] = -(image[:, 0] - k).abs()
        return logits


def smooth(rng: np.random.Generator, shape: tuple[int, ...], width: float) -> np.ndarray:
    """Return smooth noise of unit deviation."""
    noise = ndimage.gaussian_filter(rng.standard_normal(shape), width)
    return np.asarray(noise / noise.std())


def make_picture(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return truth and prediction of a picture: curves of which a part is missed or moved."""
    shape = (492, 512)
    field = smooth(rng, shape, 12)
    moved = field + 0.05 * smooth(rng, shape, 6)
    return np.abs(field) < 0.08, np.abs(moved) < 0.08 * (smooth(rng, shape, 25) > -1)


def make_volume(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return truth and prediction of a volume: an ellipsoid in two parts, and one like it."""
    shape = (36, 52, 35)
    places = np.indices(shape) - np.array([17, 25, 17]).reshape(3, 1, 1, 1)
    radius = np.sqrt(sum((places[k] / r) ** 2 for k, r in enumerate((7, 18, 7))))
    sides = []
    for rough in (0.15, 0.25):
        inside = radius + rough * smooth(rng, shape, 2) < 1
        sides.append(inside * np.where(places[1] + smooth(rng, shape, 3) > 0, 1, 2))
    return sides[0], sides[1]


def make_cases(axes: int, count: int) -> list[Example]:
    """Return cases whose first channel holds what is predicted."""
    rng, cases = np.random.default_rng(axes), []
    for number in range(count):
        truth, guess = make_picture(rng) if axes == 2 else make_volume(rng)
        image = rng.standard_normal((UNETS[axes]["in_channels"], *truth.shape))
        image[0] = guess
        batch = {
            "image": torch.from_numpy(image).float()[None],
            "label": torch.from_numpy(truth.astype(np.int64))[None],
        }
        cases.append(Example(str(number), str(number), batch, (1.0,) * axes))
    return cases


def evaluate(network: nn.Module, axes: int, cases: Sequence[Example]) -> Scores:
    """Predict and score as Collegium does."""
    task = task_of(axes)
    found = task.predict_all(network, cases)
    return [values_of(task.scores(prediction, case)) for case, prediction in found]


def task_of(axes: int) -> SegmentationTask:
    """Return the task of pictures or volumes."""
    return SegmentationTask(UNETS[axes]["out_channels"], window=WINDOWS[axes], overlap=0.0)


def values_of(scores: Mapping[str, float | None]) -> list[float]:
    """Return Dice, IoU and HD95 of each structure."""
    apart = {name: value for name, value in scores.items() if name.endswith(("_1", "_2"))}
    return [np.nan if value is None else value for value in (apart or scores).values()]


def evaluate_by_monai(network: nn.Module, axes: int, cases: Sequence[Example]) -> Scores:
    """Predict and score as a plain loop of MONAI's functions does."""
    from monai.inferers.utils import sliding_window_inference

    found: Scores = []
    for case in cases:
        image = case.batch["image"]
        logits: Any = sliding_window_inference(image, WINDOWS[axes], 4, network, overlap=0.0)
        found.append(score_by_monai(logits.argmax(dim=1), case, UNETS[axes]["out_channels"]))
    return found


def score_by_monai(prediction: Tensor, case: Example, classes: int) -> list[float]:
    """Score as MONAI's metrics do."""
    from monai.metrics.hausdorff_distance import HausdorffDistanceMetric
    from monai.metrics.meandice import DiceMetric
    from monai.metrics.meaniou import MeanIoU
    from monai.networks.utils import one_hot

    found, true = (
        one_hot(labels[:, None], classes) for labels in (prediction, case.batch["label"])
    )
    plain: dict[str, Any] = {"include_background": False, "reduction": "none"}
    scores: list[Any] = [
        DiceMetric(**plain)(found, true),
        MeanIoU(**plain)(found, true),
        HausdorffDistanceMetric(percentile=95, **plain)(found, true, spacing=case.spacing),
    ]
    return [float(value) for by_class in scores for value in by_class.flatten()]


def judge_evaluation(axes: int, count: int, repetitions: int) -> list[bool]:
    """Measure whole evaluations and scores alone, print, and judge."""
    name, cases = "pictures" if axes == 2 else "volumes", make_cases(axes, count)
    network, task = Guessing(axes).eval(), task_of(axes)
    whole: dict[str, Callable[[], Scores]] = {
        "ours": partial(evaluate, network, axes, cases),
        "MONAI": partial(evaluate_by_monai, network, axes, cases),
    }
    predicted = [(task.predict(network, case), case) for case in cases]
    alone: dict[str, Callable[[], Scores]] = {
        "ours": lambda: [values_of(task.scores(*pair)) for pair in predicted],
        "MONAI": lambda: [score_by_monai(*pair, task.classes) for pair in predicted],
    }
    good = []
    for what, works, limit in (("whole", whole, MAX_WHOLE[axes]), ("scores", alone, MAX_SCORES)):
        ours, theirs = works["ours"](), works["MONAI"]()
        assert np.allclose(ours, theirs, rtol=1e-6, atol=0), "other scores"
        seconds = medians(in_turns(works, repetitions, time.process_time))
        shown = ", ".join(f"{n} {1000 * value / count:.1f} ms" for n, value in seconds.items())
        print(f"{name}, {what}, a case: {shown}", flush=True)
        ratio = seconds["ours"] / seconds["MONAI"]
        good.append(verdict(f"evaluation, {name}, {what}", ratio, limit, "times MONAI"))
    return good


def judge_windows(repetitions: int) -> bool:
    """Measure windows in batches and one by one, print, and judge."""
    (case,), network = make_cases(3, 1), Guessing(3).eval()
    task = SegmentationTask(3, window=(16, 16, 16), overlap=0.25)
    works = {
        "four": partial(task.predict, network, case),
        "one": partial(task.with_batch_size(1).predict, network, case),
    }
    assert torch.equal(works["four"](), works["one"]()), "other classes"
    seconds = medians(in_turns(works, repetitions, time.process_time))
    ratio = seconds["four"] / seconds["one"]
    return verdict("evaluation, windows of a volume, four at once", ratio, MAX_WINDOWS, "times one")


def judge_pictures(count: int, repetitions: int) -> bool:
    """Measure the embedding of pictures as they are stored and as PNG files, print, and judge."""
    rng, cases = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(count):
            truth, guess = make_picture(rng)
            image = truth[None] + 0.3 * rng.standard_normal((1, *truth.shape))
            layers = draw_layers(prepare_case(image, truth, guess))
            cases.append({key: folder / f"{number}-{key}" for key in layers})
            for key, layer in layers.items():
                cases[-1][key].write_bytes(encode_for_web(layer)[0])
            with Image.open(cases[-1]["image"]) as picture:
                picture.save(folder / f"{number}-plain", "PNG")
        stored = [overlay(files) for files in cases]
        plain = [
            overlay({**files, "image": folder / f"{number}-plain"})
            for number, files in enumerate(cases)
        ]
        works = {"stored": partial(embed, stored), "encoded": partial(embed, plain)}
        seconds = medians(in_turns(works, repetitions, time.process_time))
    ratio = seconds["stored"] / seconds["encoded"]
    return verdict("evaluation, pictures of a report", ratio, MAX_PICTURES, "times encoding them")


def overlay(layers: Mapping[str, Path]) -> Overlay:
    """Return a picture of a case."""
    return Overlay("a", "b", 0, "global", "best", "c", "dice", 0.5, layers["image"], layers)


def embed(pictures: Sequence[Overlay]) -> str:
    """Return the style sheet of pictures."""
    sheet = PictureSheet()
    for picture in pictures:
        sheet.add(picture)
    return sheet.css


@torch.no_grad()
def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions")
    options = parser.parse_args()
    count, repetitions = (4, 3) if options.quick else (12, 7)
    prepare(threads=1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", ".*always_return_as_numpy", FutureWarning)  # MONAI's own
    good = [
        *judge_evaluation(2, count, repetitions),
        *judge_evaluation(3, 2 * count, repetitions),
        judge_windows(repetitions),
        judge_pictures(count, repetitions),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
