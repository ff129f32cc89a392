"""A vessel training, from the start of `collegium run` to its end, before and after.

Whole processes, one after the other: the tree as it is, with the settings of the experiment file;
the same with the settings of before (weights contiguous, one case and window per forward pass); the
same with compiled training, which the whole experiment chooses (its graphs are on disk already, as
for all but the first of its jobs); and the tree of a commit before all that, if git still has it.
FedAvg on one seed, all rounds, one job and thread, cases decoded already; float32. Judged by the
seconds of the processor, since other work on the machine can only add to those of the clock, which
stand beside. With fewer rounds, imports, pictures and the report would weigh more than they do in
the whole experiment.

The scripts that compare with other frameworks, kept elsewhere, follow where a framework is
installed.

    python benchmarks/end_to_end.py [--quick] [--before COMMIT] [--peers FOLDER]    (15 minutes)

COLLEGIUM_DATA names the folder that holds vessel/; without it, drawn pictures of equal sizes and
numbers are used.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml
from common.measuring import verdict
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]

LARGEST = 0.6
"""The most time by that of the tree before, or with its settings where there is no such tree."""

BEFORE = "194b7b1"
"""The last commit before training and evaluation were made faster."""

SITES = {"chase_db1": (28, 492), "hrf": (45, 341), "les_av": (22, 456)}
"""Of each site how many pictures there are, and their height; all are 512 wide."""

CONTIGUOUS = ["training.memory_format=contiguous", "inference.batch_size=1"]
"""The settings of before, as far as settings go."""

PEERS = {"bare": "torch", "pfl": "pfl", "fluke": "fluke", "flwr": "flwr",
         "fl4health": "fl4health", "nvflare": "nvflare"}  # fmt: skip
"""The scripts of other frameworks, and the package that each needs."""


def draw_data(folder: Path) -> None:
    """Write pictures of bright curves for three sites, as the real ones are laid out.

    Args:
        folder: gets the folder vessel/.
    """
    rng = np.random.default_rng(0)
    for site, (count, height) in SITES.items():
        own, rows = folder / "vessel" / site, ["site,case,patient,image,label"]
        own.mkdir(parents=True)
        y, x = np.mgrid[:height, :512] / 60.0
        for number in range(count):
            a, b, c, d = rng.uniform(0.5, 2, 4)
            field = np.sin(a * x + np.sin(b * y)) + np.sin(c * y + np.sin(d * x))
            label, noise = np.abs(field) < 0.12, rng.normal(0, 20, (height, 512, 3))
            picture = (90 + 70 * label[..., None] + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(picture).save(own / f"{number}.png")
            Image.fromarray(label.astype(np.uint8)).save(own / f"{number}-label.png")
            place = f"vessel/{site}/{number}"
            rows.append(f"{site},{number},{number},{place}.png,{place}-label.png")
        (own / "manifest.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def decode(data: Path, cache: Path) -> None:
    """Decode all cases into the cache, as a first run does.

    Args:
        data: the folder that holds vessel/.
        cache: the folder of decoded cases.
    """
    from collegium.data.federation import open_federation
    from collegium.experiment.config.experiment import load_config

    config = load_config(ROOT / "configs" / "vessel.yaml", [f"federation.root={data}"])
    for site in open_federation(config.federation, cache, 0, None).values():
        for split in (site.train, site.val, site.test):
            for index in range(len(split)):
                split.example(index)


@contextmanager
def tree_of(commit: str) -> Iterator[Path | None]:
    """Check a commit out into a folder of its own, and remove it afterwards; None: there is none.

    Args:
        commit: the commit.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        made = subprocess.run([*git, "add", "--detach", str(tree), commit], capture_output=True)
        try:
            yield tree if made.returncode == 0 else None
        finally:
            if made.returncode == 0:
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def write_experiment(folder: Path) -> None:
    """Write the experiment of FedAvg on one seed in float32, as the tree before can read it.

    Args:
        folder: where to.
    """
    text = (ROOT / "configs" / "vessel.yaml").read_text(encoding="utf-8")
    experiment = yaml.safe_load(text)
    del experiment["training"]["precision"]  # float32 is the default, and it was unknown before
    experiment |= {"seeds": [0], "algorithms": ["fedavg"]}
    (folder / "vessel.yaml").write_text(yaml.safe_dump(experiment), encoding="utf-8")


def run_once(
    source: Path, settings: Sequence[str], folder: Path, data: Path
) -> tuple[float, float]:
    """Run the experiment in a new process; return its seconds of the processor and by the clock.

    Args:
        source: the folder src/ of a tree.
        settings: what differs from the experiment file.
        folder: where the experiment, caches and outputs are.
        data: the folder that holds vessel/.
    """
    environment = {
        "PYTHONPATH": str(source), "COLLEGIUM_CACHE": str(folder / "cache"),
        "COLLEGIUM_DATA": str(data), "TORCHINDUCTOR_CACHE_DIR": str(folder / "graphs"),
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    output = tempfile.mkdtemp(dir=folder)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "from collegium.cli import main; main()", "run",
         str(folder / "vessel.yaml"), "engine.jobs=1", f"output={output}/run", *settings],
        env=os.environ | environment, check=True, capture_output=True,
    )  # fmt: skip
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, clock


def measure(
    ways: Mapping[str, tuple[Path, Sequence[str]]], folder: Path, data: Path
) -> dict[str, float]:
    """Return the seconds of the processor of each way, and print them with those by the clock.

    Args:
        ways: the sources and settings by name.
        folder: where caches and outputs are.
        data: the folder that holds vessel/.
    """
    found = {}
    for name, (source, settings) in ways.items():
        found[name], clock = run_once(source, settings, folder, data)
        print(f"{name}: {found[name]:.1f} s of the processor, {clock:.1f} s", flush=True)
    return found


def run_peers(folder: Path) -> None:
    """Run the scripts of the frameworks that are installed, and print what they print.

    Args:
        folder: of the scripts.
    """
    scripts = {peer: folder / f"bench_{peer}.py" for peer in PEERS}
    scripts["ours"] = ROOT / "benchmarks" / "peers" / "bench_ours.py"
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{folder}", "OMP_WAIT_POLICY": "passive"}
    for peer, script in scripts.items():
        if not script.exists() or not find_spec(PEERS.get(peer, "collegium")):
            print(f"{peer}: skipped, not installed")
            continue
        with tempfile.TemporaryDirectory() as place:
            try:
                done = subprocess.run(
                    [sys.executable, "-W", "ignore", str(script)], cwd=place, text=True,
                    env=os.environ | environment, capture_output=True, timeout=175,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                print(f"{peer}: skipped, it took longer than 175 s")
                continue
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(lines[-1] if lines else f"{peer}: failed ({why})", flush=True)


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round in two ways, not compiled")
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT")
    parser.add_argument("--peers", type=Path, default=ROOT.parent / "shared" / "bench" / "peers")
    options = parser.parse_args()
    shortened = (
        ["training.local_steps=10", "rounds=1", "evaluation.every=1"] if options.quick else []
    )
    with tempfile.TemporaryDirectory() as place, tree_of(options.before) as tree:
        folder, data = Path(place), Path(os.environ.get("COLLEGIUM_DATA", place))
        if not (data / "vessel").is_dir():
            data = folder
            draw_data(folder)
        decode(data, folder / "cache")
        write_experiment(folder)
        now, off = ROOT / "src", [*shortened, "training.compile=off"]
        ways = {"now": (now, off)}
        if tree is None or not options.quick:
            ways["now, settings of before"] = now, [*off, *CONTIGUOUS]
        if not options.quick:
            compiled = [*shortened, "training.compile=on"]
            cold = run_once(now, [*compiled, "rounds=1", "training.local_steps=1"], folder, data)
            print(f"compiled for the first time, one step: {cold[0]:.1f} s of the processor")
            ways["now, compiled"] = now, compiled
        if tree is not None:
            ways[f"commit {options.before}"] = tree / "src", shortened
        seconds = measure(ways, folder, data)
    least = min(value for name, value in seconds.items() if not name.startswith("commit"))
    for name, old in seconds.items():  # the last of them is what is judged against
        if name != "now":
            print(f"now: {seconds['now'] / old:.2f} of the time of {name!r}")
    if options.peers.is_dir() and not options.quick:
        run_peers(options.peers)
    text = "of the time before, float32"
    return 0 if verdict("end_to_end, the vessel experiment", least / old, LARGEST, text) else 1


if __name__ == "__main__":
    sys.exit(main())
