"""Prepared cases on disk compared with the same cases in memory: time, decodes and memory.

- An epoch of `LocalTraining.fit` with a small U-Net over mapped cases compared with the same epoch
  over the same arrays in memory, C-contiguous: pictures with a field of view, volumes with crops
  placed on the foreground, and more pictures than files are kept mapped. The crops and the trained
  weights are the same; one thread, processor seconds measured in turns, the minimum of each.
  Drawing alone is shown as well.
- How often the files of a site are decoded over several rounds of two runs of one configuration.
- The peak of anonymous memory of a process that opens a site of volumes, trains two rounds and
  tests, with 20 and with 200 of them. Pages of mapped files are not counted, since the system can
  reclaim them at any time; they are shown. Skipped by ``--quick``.

    python benchmarks/data.py [--quick] [--only epochs|decodes|memory]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common.measuring import in_turns, verdict

from collegium.data.cache import PreparedCase
from collegium.data.federation import open_site
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.preprocessing import CaseArrays
from collegium.data.sampling import ImageDataset, SamplingConfig
from collegium.data.site import Site
from collegium.data.splits import SplitConfig

MAX_SLOWDOWN, MAX_DECODES, MAX_MEMORY_SHARE = 1.15, 1.0, 0.1
"""Limits: time by that in memory, decodes of a file, memory by the size of the data."""

STABLE_ENVIRONMENT = os.environ | {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}
"""The environment in which a process keeps little memory beyond what it uses.

Otherwise the C library's heap keeps freed arrays between others and grows by some 20 MB over the
first 40 cases, then no more; arrays that it maps one by one return to the system when freed.
"""

VOLUME = (64, 64, 48)
FEW, MANY = 20, 200


@dataclass(frozen=True)
class Setting:
    """Cases of one kind, and how they are sampled."""

    shape: tuple[int, ...]
    cases: int
    sampling: SamplingConfig
    batch: int


def settings(*, quick: bool) -> dict[str, Setting]:
    """Return the settings that are compared, by name."""
    plane = SamplingConfig((128, 128), flips=True, rotations=True)
    space = SamplingConfig((48, 48, 32), flips=True, rotations=True, foreground=0.5)
    few, large = (10, (64, 64, 48)) if quick else (32, (128, 128, 96))
    return {
        "pictures": Setting((512, 512), 2 * few, plane, 8),
        "volumes": Setting(large, few, space, 2),
        "many pictures": Setting((96, 96), 270, SamplingConfig((64, 64), flips=True), 8),
    }


@dataclass(frozen=True)
class InMemoryCase(PreparedCase):
    """A prepared case whose arrays are in memory."""

    in_memory: CaseArrays | None = None

    def arrays(self) -> CaseArrays:
        """Return the arrays in memory."""
        assert self.in_memory is not None
        return self.in_memory

    @classmethod
    def of(cls, case: PreparedCase) -> InMemoryCase:
        """Read a case into memory."""
        known = {field.name: getattr(case, field.name) for field in fields(case)}
        arrays = case.arrays().map(lambda values: np.array(values, order="C"))
        return cls(**known, in_memory=arrays)


def write_cases(folder: Path, shape: tuple[int, ...], count: int) -> None:
    """Write pictures with their fields of view, or volumes: a bright ball in noise."""
    import nibabel as nib
    from PIL import Image

    rng = np.random.default_rng(0)
    axes = np.ogrid[tuple(slice(-1, 1, complex(0, size)) for size in shape)]
    inside = sum(axis**2 for axis in axes) < 1
    names = ("images", "labels", "fov") if len(shape) == 2 else ("images", "labels")
    for name in names:
        (folder / name).mkdir(parents=True)
    for number in range(count):
        middle = rng.uniform(-0.4, 0.4, len(shape))
        ball = sum((a - m) ** 2 for a, m in zip(axes, middle, strict=True)) < 0.1
        image = rng.normal(100, 20, shape).astype(np.float32) + 60 * ball
        if len(shape) == 2:
            pixels = np.repeat(image.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2)
            for name, array in zip(names, (pixels, ball, inside), strict=True):
                stored = array if name == "images" else array * np.uint8(255)
                Image.fromarray(stored).save(folder / name / f"{number:03d}.png", compress_level=1)
        else:
            for name, values in zip(names, (image, ball.astype(np.uint8)), strict=True):
                nifti = nib.nifti1.Nifti1Image(values, np.eye(4))  # type: ignore[no-untyped-call]
                nib.loadsave.save(nifti, folder / name / f"{number:03d}.nii")


def open_cases(root: Path, sampling: SamplingConfig, seed: int = 0, *, test: float = 0.1) -> Site:
    """Open the only site below a folder; prepared cases are kept beside it."""
    config = FederationConfig(
        "benchmark",
        {"A": SiteConfig(folder="A")},
        root=str(root),
        sampling=sampling,
        splits=SplitConfig(validation=0.1, test=test),
    )
    return open_site(config, "A", root / "cache", seed, None)


def make_network(axes: int, channels: tuple[int, ...]) -> Any:
    """Return a U-Net for pictures in colours, or for volumes."""
    from collegium.models.factory import build_model

    inputs = 3 if axes == 2 else 1
    return build_model("unet", spatial_dims=axes, in_channels=inputs, channels=channels)


def epochs(setting: Setting, root: Path) -> dict[str, Callable[[], object]]:
    """Return an epoch of training, and one of drawing alone, over both kinds of cases."""
    from collegium.core.randomness import ambient
    from collegium.core.tensors import Tensors
    from collegium.tasks import SegmentationTask
    from collegium.training.batches import draw_batch, plan_batches
    from collegium.training.loop import LocalTraining, TrainingConfig

    write_cases(root / "A", setting.shape, setting.cases)
    mapped = open_cases(root, setting.sampling).train
    assert isinstance(mapped, ImageDataset)
    in_memory = ImageDataset([InMemoryCase.of(case) for case in mapped.cases], mapped.config)
    with ambient(0, "model"):
        network = make_network(len(setting.shape), (8, 16, 32))
    recipe = TrainingConfig(batch_size=setting.batch)
    local = LocalTraining(network, SegmentationTask(2), recipe)
    start, path = Tensors(network.state_dict()).clone(), ("epoch",)

    def train(data: ImageDataset) -> Tensors:
        return local.fit(start, data, seed=0, path=path, lr=1e-3)[0]

    def draw_only(data: ImageDataset) -> None:
        for samples in plan_batches(
            len(data), setting.batch, epochs=1, steps=None, seed=0, path=path
        ):
            draw_batch(data, samples, 0, path)

    ours, reference = train(mapped), train(in_memory)
    same = all(bool((ours[name] == reference[name]).all()) for name in ours)
    assert same, "other crops were drawn"
    return {
        "mapped": partial(train, mapped),
        "in memory": partial(train, in_memory),
        "mapped, drawing": partial(draw_only, mapped),
        "in memory, drawing": partial(draw_only, in_memory),
    }


def judge_epochs(repetitions: int, *, quick: bool) -> list[bool]:
    """Compare epochs, print and judge."""
    good = []
    for name, setting in settings(quick=quick).items():
        with tempfile.TemporaryDirectory() as folder:
            works = epochs(setting, Path(folder))
            times = in_turns(works, repetitions, time.process_time)
        least = {work: min(found) for work, found in times.items()}
        ratio, drawing = (
            least[f"mapped{part}"] / least[f"in memory{part}"] for part in ("", ", drawing")
        )
        shown = ", ".join(f"{work} {1000 * seconds:.0f} ms" for work, seconds in least.items())
        print(f"{name}: {shown}; drawing alone {drawing:.2f} times", flush=True)
        good.append(
            verdict(f"data, an epoch over {name}", ratio, MAX_SLOWDOWN, "times that in memory")
        )
    return good


def run_rounds(
    root: Path, sampling: SamplingConfig, *, rounds: int, seed: int = 0, test: float = 0.1
) -> None:
    """Open the site, train, and test."""
    from collegium import FedAvg, TrainingConfig, simulate
    from collegium.tasks import SegmentationTask

    site = open_cases(root, sampling, seed, test=test)
    axes = 2 if sampling.crop is None else len(sampling.crop)
    simulate(
        FedAvg(),
        [site],
        partial(make_network, axes, (4, 8)),
        SegmentationTask(2),
        rounds=rounds,
        training=TrainingConfig(batch_size=2),
        seed=seed,
    )


def count_decodes(shape: tuple[int, ...], crop: tuple[int, ...]) -> tuple[int, Counter[Path]]:
    """Return how many files there are, and how often each is decoded in two runs."""
    from collegium.data import formats

    decoded: Counter[Path] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Path, *arguments: Any, **options: Any) -> Any:
            decoded[path] += 1
            return function(path, *arguments, **options)

        return wrapper

    originals = {name: getattr(formats, name) for name in ("decode", "decode_label")}
    for name, function in originals.items():
        setattr(formats, name, counted(function))
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_cases(Path(folder) / "A", shape, 10)
            for seed in (0, 1):
                run_rounds(Path(folder), SamplingConfig(crop), rounds=3, seed=seed)
            files = sum(path.is_file() for path in (Path(folder) / "A").rglob("*"))
    finally:
        for name, function in originals.items():
            setattr(formats, name, function)
    return files, decoded


def judge_decodes() -> list[bool]:
    """Count decodes, print and judge."""
    good = []
    for name, shape, crop in (
        ("pictures", (64, 64), (32, 32)),
        ("volumes", (32, 32, 24), (16, 16, 8)),
    ):
        files, decoded = count_decodes(shape, crop)
        print(f"10 {name}: {files} files, {len(decoded)} of them decoded {decoded.total()} times")
        most = max(decoded.values()) if len(decoded) == files else float("inf")
        good.append(
            verdict(f"data, decodes of {name} in 2 runs of 3 rounds", most, MAX_DECODES, "a file")
        )
    return good


def process_memory(name: str) -> int:
    """Return an entry of this process's memory in the system's status file, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = next(line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(found.split()[1])


def memory_of_a_run(root: Path) -> dict[str, int]:
    """Open the site, train two rounds and test; return peaks of anonymous and of all memory."""
    peak, finished = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.005):
            peak = max(peak, process_memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    run_rounds(root, SamplingConfig((32, 32, 16)), rounds=2, test=0.8)
    finished.set()
    watcher.join()
    return {"anonymous": peak, "resident": process_memory("VmHWM")}


def peaks_in_a_child(cases: int) -> dict[str, int]:
    """Return the peaks of memory of a process that works on so many volumes."""
    with tempfile.TemporaryDirectory() as folder:
        write_cases(Path(folder) / "A", VOLUME, cases)
        command = [sys.executable, __file__, "--folder", folder]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=STABLE_ENVIRONMENT
        )
        return dict(json.loads(done.stdout))


def judge_memory(many: int) -> bool:
    """Measure in processes of their own, print and judge."""
    few, lots = peaks_in_a_child(FEW), peaks_in_a_child(many)
    for cases, peaks in ((FEW, few), (many, lots)):
        shown = ", ".join(f"{name} {value / 1e6:.0f} MB" for name, value in peaks.items())
        print(f"{cases:3d} volumes, peaks: {shown}")
    size = (many - FEW) * int(np.prod(VOLUME)) * 4
    share = (lots["anonymous"] - few["anonymous"]) / size
    label = f"data, memory of {many - FEW} volumes more"
    return verdict(label, share, MAX_MEMORY_SHARE, "of their size")


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller and fewer")
    parser.add_argument("--only", choices=["epochs", "decodes", "memory"], help="one part of it")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        print(json.dumps(memory_of_a_run(options.folder)))
        return 0
    parts = ["epochs", "decodes"] if options.quick else ["epochs", "decodes", "memory"]
    if options.only:
        parts = [options.only]
    from collegium.runtime.process import prepare

    prepare(threads=1)
    good = []
    if "epochs" in parts:
        good += judge_epochs(4 if options.quick else 11, quick=options.quick)
    if "decodes" in parts:
        good += judge_decodes()
    if "memory" in parts:
        good.append(judge_memory(MANY))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
