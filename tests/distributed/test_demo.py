"""`make demo-network`: a server and three hospitals as processes, from images to the report."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from collegium.distributed.demo import run_demo
from collegium.errors import ClientError, ConfigError
from collegium.runtime.ledger import first_break, read_ledger

COMMAND = [sys.executable, "-m", "collegium.cli", "federation", "demo"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="demo") as name:
        yield Path(name) / "d"


def left(folder: Path) -> list[list[str]]:
    """The commands of all processes that name a folder."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in found if any(str(folder) in word for word in command)]


@pytest.mark.slow
def test_the_demo_trains_between_processes_and_leaves_none_behind(folder: Path):
    done = subprocess.run(
        [*COMMAND, str(folder)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == folder / "run" / "report.html"
    report = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert all(name in report for name in ("alder", "birch", "cedar", "iopfl"))
    for site in ("alder", "birch", "cedar"):
        state = folder / "hospitals" / "state" / site / "runs" / "network"
        lines = read_ledger(state / "iopfl" / "seed-0" / "clients" / site / "ledger.jsonl")
        assert len([line for line in lines if "model" in line["parts"]]) == 6
        assert first_break(lines) is None
        assert (state / "iopfl" / "seed-0" / "clients" / site / "personal.safetensors").is_file()
    assert not list((folder / "run").rglob("personal.safetensors"))  # these stay at their sites
    assert not left(folder)


@pytest.mark.slow
def test_an_interrupted_demo_ends_all_its_processes_and_goes_on_when_called_again(folder: Path):
    with subprocess.Popen([*COMMAND, str(folder)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "fedavg seed 0  round 2/6" in line:
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert said.endswith("error: stopped\n")
    assert not left(folder)
    said_again: list[str] = []
    report = run_demo(folder, said_again.append)
    assert report.is_file()
    rows = (folder / "run" / "results.csv").read_text(encoding="utf-8").splitlines()
    assert {row.split(",")[1] for row in rows[1:]} == {"fedavg", "iopfl"}
    assert not left(folder)


@pytest.mark.slow
def test_a_site_that_cannot_start_ends_the_demo_with_its_sentence(folder: Path):
    (folder / "hospitals").mkdir(parents=True)
    (folder / "hospitals" / "birch.yaml").write_text("name: birch\ndata: {manifest: 3}\n")
    with pytest.raises(ClientError, match=r"'birch' ended with exit code 2 \(error: .*manifest"):
        run_demo(folder, lambda line: None)
    assert not left(folder)


def test_a_path_that_is_too_long_for_a_socket_is_named_before_anything_is_written(tmp_path: Path):
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    with pytest.raises(ConfigError, match=r"characters too long for the Unix sockets"):
        run_demo(folder, lambda line: None)
    assert not folder.exists()
