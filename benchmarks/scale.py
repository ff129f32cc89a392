"""How a run grows with rounds, sites, cases and cells: seconds, files, bytes and memory of each.

Every run is what `collegium run` does with a small perceptron on made-up tables of two columns, in
a process that is forked where all imports are done. It has one of three sizes: a base, a small and
a large one. What a further unit costs is the slope between two of them. The growth, which is
judged, is the slope from the small size to the large one over that from the base to the small one:
1 where a unit always costs the same. Processor seconds are compared, the
least of two turns, since other work on the machine can only add to them. `resume` of the
finished run with the most rounds stands beside it, as do files, bytes and peak memory of a unit.

    python benchmarks/scale.py [--quick] [--only rounds]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from common.measuring import verdict

from collegium.experiment.config.experiment import load_config
from collegium.experiment.runner import run_experiment

GROWTH = 1.3
"""The most that a unit may cost at the large size, by what it costs at the small one."""

SEEDS = {True: 2, False: 10}
"""Seeds of the grid with and without --quick; more cells are those of more algorithms."""

TURNS = 2
"""How often every size is run."""

ROWS = 12
"""Cases of a site where cases are not what grows."""

EXPERIMENT = """\
name: scale
federation:
  name: scale
  sites: {{{sites}}}
  task: {{name: classification, classes: [no, yes]}}
  table: {{label: outcome, numeric: [x, y]}}
model: {{name: mlp, hidden: [4]}}
training: {{optimizer: sgd, lr: 0.1, batch_size: 256, local_steps: 1}}
rounds: {rounds}
seeds: {seeds}
algorithms: [{algorithms}]
engine: {{workers: 1, threads: 1, jobs: 1}}
output: {output}
"""


@dataclass(frozen=True)
class Size:
    """How large a run is: rounds, sites, cases of all sites together, and cells of its grid.

    Cells are of as many seeds, and of training alone and FedAvg at different learning rates.
    """

    rounds: int = 2
    sites: int = 2
    cases: int = 0
    cells: int = 2
    seeds: int = 1


AXES = [field.name for field in fields(Size) if field.name != "seeds"]

SIZES = {
    "rounds": (2, 200, 1500),
    "sites": (2, 100, 1000),
    "cases": (100, 10_000, 100_000),
    "cells": (20, 40, 100),
}
QUICK = {
    "rounds": (2, 22, 52),
    "sites": (2, 8, 18),
    "cases": (100, 1000, 2500),
    "cells": (4, 8, 12),
}


@dataclass
class Cost:
    """The processor and clock seconds, the peak memory in bytes, the files and bytes of a run."""

    processor: float
    clock: float
    memory: float
    files: int = 0
    bytes: int = 0


def run_file(folder: Path) -> None:
    """Do what `collegium run` and `resume` do with the experiment in a folder."""
    os.chdir(folder)
    run_experiment(load_config(Path("x.yaml")))


def forked(folder: Path) -> Cost:
    """Run or resume the experiment in a folder in a process of its own."""
    start = time.perf_counter()
    process = os.fork()
    if process == 0:
        try:
            run_file(folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status, usage = os.wait4(process, 0)
    if status:
        raise RuntimeError(f"the run in {folder} failed")
    seconds = usage.ru_utime + usage.ru_stime
    return Cost(seconds, time.perf_counter() - start, usage.ru_maxrss * 1024)


def write_experiment(size: Size, folder: Path, output: str) -> None:
    """Write the tables and the file of an experiment."""
    rows = size.cases // size.sites or ROWS
    for site in range(size.sites):
        x, y = np.random.default_rng(site).uniform(1, 2, (2, rows))
        outcomes = np.where(np.arange(rows) % 2 == 0, "no", "yes")
        lines = (f"{a:.4f},{b:.4f},{c}\n" for a, b, c in zip(x, y, outcomes, strict=True))
        (folder / f"{site}.csv").write_text("x,y,outcome\n" + "".join(lines), encoding="utf-8")
    sites = ", ".join(f"site{site}: {{table: {site}.csv}}" for site in range(size.sites))
    others = (
        f"{{name: fedavg, label: rate{k}, training: {{lr: {k / 64}}}}}"
        for k in range(1, size.cells // size.seeds - 1)
    )
    text = EXPERIMENT.format(
        sites=sites,
        rounds=size.rounds,
        seeds=[*range(size.seeds)],
        algorithms=", ".join(["local", "fedavg", *others]),
        output=output,
    )
    (folder / "x.yaml").write_text(text, encoding="utf-8")


def cost_of(size: Size, folder: Path, output: str) -> Cost:
    """Run an experiment in a new folder, and return what it took."""
    write_experiment(size, folder, output)
    cost = forked(folder)
    written = [path for path in (folder / output).rglob("*") if path.is_file()]
    cost.files, cost.bytes = len(written), sum(path.stat().st_size for path in written)
    return cost


def least(costs: Sequence[Cost]) -> Cost:
    """Return the least of each figure."""
    return Cost(*(min(getattr(cost, field.name) for cost in costs) for field in fields(Cost)))


def growth_of(axis: str, folder: Path, *, quick: bool) -> float:
    """Measure the runs of an axis, print what a unit costs, and return the growth.

    Args:
        axis: what grows.
        folder: an empty folder.
        quick: whether the sizes are smaller.
    """
    sizes = (QUICK if quick else SIZES)[axis]
    seeds = SEEDS[quick] if axis == "cells" else 1
    found: dict[int, list[Cost]] = {size: [] for size in sizes}
    for turn in range(TURNS):
        for size in sizes:
            found[size].append(cost_of(Size(**{axis: size}, seeds=seeds), folder, f"{size}-{turn}"))
    base, small, large = (least(found[size]) for size in sizes)
    steps = sizes[1] - sizes[0], sizes[2] - sizes[1]
    first = (small.processor - base.processor) / steps[0]
    second = (large.processor - small.processor) / steps[1]
    files, size, memory = (
        (getattr(large, name) - getattr(small, name)) / steps[1]
        for name in ("files", "bytes", "memory")
    )
    print(
        f"{axis}: {sizes[0]}, {sizes[1]} and {sizes[2]} in {base.processor:.1f}, "
        f"{small.processor:.1f} and {large.processor:.1f} s of the processor ({large.clock:.1f} s "
        f"by the clock); a unit {1000 * first:.2f} and {1000 * second:.2f} ms, growth "
        f"{second / first:.2f}, {files:.1f} files, {size / 1000:.1f} kB, "
        f"{memory / 1000:.0f} kB of memory"
    )
    if axis == "rounds":
        write_experiment(Size(rounds=sizes[2]), folder, f"{sizes[2]}-0")
        again = forked(folder)
        print(
            f"resume of the finished run of {sizes[2]} rounds: {again.processor:.2f} s of the "
            f"processor ({again.clock:.1f} s by the clock)"
        )
    return second / first


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--only", choices=AXES, help="one axis alone")
    options = parser.parse_args()
    growths = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"COLLEGIUM_CACHE": f"{folder}/cache", "CUDA_VISIBLE_DEVICES": ""}
        write_experiment(Size(), Path(folder), "first")
        run_file(Path(folder))  # imports all that runs need
        for axis in [options.only] if options.only else AXES:
            own = Path(folder) / axis
            own.mkdir()
            growths[axis] = growth_of(axis, own, quick=options.quick)
    axis, growth = max(growths.items(), key=lambda found: found[1])
    good = verdict("scale", growth, GROWTH, f"times the cost of a unit, {axis}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
