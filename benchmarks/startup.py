"""How long commands take that compute nothing, and a run until its first optimiser step.

Each is a process of its own on a tiny federation of two sites: `list`; `tables` and `resume` of a
finished run; and `run`, whose network ends the process when its first step is done. They take
turns, and the least of several times is judged, since other work on the machine can only add to it;
the seconds of the processor stand beside it. A network of MONAI's takes longer to the first step,
by the import of MONAI: shown, not judged, without --quick.

    python benchmarks/startup.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common.measuring import verdict

from collegium import make_federation

NETWORKS = Path(__file__).resolve().parent / "common" / "first_step.py"

TARGETS = {"list": 0.6, "tables": 2.0, "resume": 3.0, "first step": 2.0}
"""The most seconds of each command."""

EXPERIMENT = """\
name: tiny
federation: data/federation.yaml
model: {name: iop_unet, in_channels: 1, base: 4}
algorithms: [local, fedavg]
rounds: 2
training: {batch_size: 2, local_steps: 2}
output: finished
"""


def seconds_of(arguments: Sequence[str], folder: Path) -> tuple[float, float]:
    """Run a command of Collegium, and return its seconds by the clock and of the processor.

    Args:
        arguments: its command line.
        folder: where it runs.
    """
    settings = {"COLLEGIUM_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "collegium.cli", *arguments],
        cwd=folder, env=os.environ | settings, check=True, capture_output=True,
    )  # fmt: skip
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def until_first_step(network: str, output: str) -> list[str]:
    """Return the command line of a run that ends when its first step is done.

    Args:
        network: the network, of `common/first_step.py`.
        output: the run's folder, which must be new.
    """
    return ["run", "x.yaml", f"model={{name: {NETWORKS}:{network}}}", f"output={output}"]


def measure(folder: Path, turns: int, *, monai: bool) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each command by the clock and of the processor, turn by turn.

    Args:
        folder: an empty folder.
        turns: how often each is measured.
        monai: whether the first step of MONAI's network is measured too.
    """
    make_federation(folder / "data", 2, cases=6, size=32)
    (folder / "x.yaml").write_text(EXPERIMENT, encoding="utf-8")
    seconds_of(["run", "x.yaml"], folder)
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(turns):
        commands = {
            "list": ["list"],
            "tables": ["tables", "finished"],
            "resume": ["resume", "finished"],
            "first step": until_first_step("network", f"run-{turn}"),
        }
        if monai:
            commands["first step, MONAI"] = until_first_step("monai_network", f"monai-{turn}")
        for name, arguments in commands.items():
            found.setdefault(name, []).append(seconds_of(arguments, folder))
    return found


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), 3 if options.quick else 9, monai=not options.quick)
    good = True
    for name, times in found.items():
        clock, processor = map(min, zip(*times, strict=True))
        if name in TARGETS:
            text = f"s, {processor:.2f} s of the processor"
            good &= verdict(f"startup, {name}", clock, TARGETS[name], text)
        else:
            print(f"{name}: {clock:.2f} s, {processor:.2f} s of the processor")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
