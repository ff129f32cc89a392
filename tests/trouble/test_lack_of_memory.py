"""Memory and files that do not suffice, and processes that are ended: a sentence, and a resume."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.core.memory import LACK, out_of_memory
from collegium.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
GREEDY = """\
import os, resource, signal
from pathlib import Path
import numpy as np
import torch
from collegium import settings
from collegium.core.algorithm import handler
from collegium.algorithms.fedavg import FedAvg

@settings
class Greedy(FedAvg):
    @handler
    def train(self, client, message):
        what = Path("greed").read_text() if Path("greed").exists() and client.round == 2 else ""
        if what == "numpy":
            np.empty(1 << 60, np.uint8)
        if what == "torch":
            torch.empty(1 << 60, dtype=torch.uint8)
        if what == "limit":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
            torch.empty(1 << 30, dtype=torch.uint8)
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(client, message)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def greedy(folder: Path) -> Path:
    """The current folder, with a method that wants what the file greed says in round 2."""
    (folder / "greedy.py").write_text(GREEDY)
    text = (folder / "x.yaml").read_text()
    (folder / "x.yaml").write_text(text.replace("ditto", "'greedy.py:Greedy'"))
    return folder


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def begin(*arguments: str, before: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
    """Start a command line in a process of its own."""
    command = [sys.executable, "-c", "from collegium.cli import main; main()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        command, env=environment, preexec_fn=before, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def failed(code: int, text: str, *words: str) -> None:
    """The command ended with one sentence, in which these words stand, and without a traceback."""
    last = text.splitlines()[-1]
    assert last.startswith("error: "), text
    for noise in ("Traceback", "This is a bug", "resource_tracker"):
        assert noise not in text
    for word in words:
        assert word in last
    assert code in (4, 5)


def goes_on() -> None:
    """The run in the folder ends well, with the round that was finished kept."""
    (records,) = Path("run").rglob("records.jsonl")
    assert '"round": 1' in records.read_text(encoding="utf-8")
    Path("greed").unlink(missing_ok=True)
    result = call("resume", "run")
    assert result.exit_code == 0, result.output
    assert "round 1/2" not in result.stderr
    assert "round 2/2" in result.stderr


@pytest.mark.parametrize("what", ["numpy", "torch"])
def test_a_lack_of_memory_at_a_site_is_one_sentence(greedy, what):
    (greedy / "greed").write_text(what)
    result = call("run", "x.yaml")
    failed(result.exit_code, result.stderr, "client 'alder', round 2, train: ", LACK)
    goes_on()


@linux
def test_a_limit_of_the_address_space_is_one_sentence(greedy):
    (greedy / "greed").write_text("limit")
    with begin("run", "x.yaml") as process:
        _, text = process.communicate(timeout=900)
    failed(process.returncode, text, "client 'alder', round 2, train: ", LACK)
    goes_on()


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["engine.jobs=2", "engine.workers=2"])
def test_a_process_that_the_system_kills_is_one_sentence(greedy, setting):
    (greedy / "greed").write_text("killed")
    with begin("run", "x.yaml", setting) as process:
        _, text = process.communicate(timeout=900)
    failed(process.returncode, text, "lack of memory", "smaller batch_size and resume")
    goes_on()


def test_a_file_larger_than_is_allowed_is_one_sentence(greedy):
    assert call("run", "x.yaml", "output=warm", "rounds=1").exit_code == 0

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, resource.RLIM_INFINITY))

    with begin("run", "x.yaml", before=limit) as process:
        _, text = process.communicate(timeout=900)
    failed(process.returncode, text, "the file is larger than", "continue with 'collegium resume'")
    assert not [*Path("run").rglob("*.tmp")]
    assert call("resume", "run").exit_code == 0


def test_what_interrupted_writes_left_goes_at_the_next_start(folder: Path):
    left = [folder / "run" / name for name in ("run.json.4711.tmp", "splits/alder.json.1.tmp")]
    own = folder / "run/notes.tmp"
    for path in (*left, own):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert call("run", "x.yaml", "rounds=1").exit_code == 0
    assert [path.exists() for path in (*left, own)] == [False, False, True]


def children_of(number: int) -> list[int]:
    """Return the processes that a process has started."""
    return [
        int(child)
        for tasks in Path(f"/proc/{number}/task").glob("*/children")
        for child in tasks.read_text().split()
    ]


def is_running(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("setting", ["engine.jobs=2", "engine.workers=2"])
def test_processes_end_with_the_command_that_started_them(folder, setting):
    slow = ("rounds=400", "training.local_steps=200")
    with begin("run", "x.yaml", *slow, "seeds=[0,1]", setting) as process:
        until = time.monotonic() + 120
        while not [*Path("run").rglob("clients/*/ledger.jsonl")] and time.monotonic() < until:
            time.sleep(0.2)
        children = children_of(process.pid)
        assert len(children) >= 2
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        while any(map(is_running, children)) and time.monotonic() < killed + 60:
            time.sleep(0.02)
        seconds = time.monotonic() - killed
    assert seconds < 3  # well below 1 on a machine with nothing else to do


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't "
                      "allocate memory: you tried to allocate 9 bytes."), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (DataError("case 7 ran out of memory aids"), False),
        (OSError(28, "No space left on device"), False),
    ],
)  # fmt: skip
def test_a_lack_of_memory_is_recognised_in_every_form(error, lacks):
    assert (out_of_memory(error) is not None) == lacks
    wrapped = DataError("x.dcm cannot be read; copy it again")
    wrapped.__cause__ = error
    assert str(out_of_memory(wrapped)) == (LACK if lacks else "None")
