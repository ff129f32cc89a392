"""A run that is stopped, by whatever it may be, goes on from its last round to the same bits."""

import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.core.files import append_durably, storage_error
from collegium.runtime import records

ROOT = Path(__file__).resolve().parents[2]
CELL = Path("run/ditto/seed-0")
LONG = "rounds=24"
SECOND_RECORD = 'records.jsonl:"round": 2, "losses'


@pytest.fixture(scope="session")
def whole(
    experiment: str, drawn: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, bytes]]:
    """Gives the bits of a run with these settings that nothing interrupted."""
    runs: dict[tuple[str, ...], dict[str, bytes]] = {}

    def run(*settings: str) -> dict[str, bytes]:
        if settings not in runs:
            place = tmp_path_factory.mktemp("whole")
            (place / "x.yaml").write_text(experiment)
            federation = f"federation={drawn / 'federation.yaml'}"
            ends_well(
                call("run", str(place / "x.yaml"), federation, f"output={place / 'run'}", *settings)
            )
            runs[settings] = bits(place / "run")
        return runs[settings]

    return run


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def ends_well(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("report.html\n")
    return result


def refused(result: Result, code: int, *words: str) -> None:
    """The command ended with this code and one sentence, in which these words stand."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    *before, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert not [line for line in before if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in last


def bits(output: Path) -> dict[str, bytes]:
    """All that a run stored and that no clock has a say in, by file."""
    kinds = ("*.state", "test.json", "splits/*.json", "cases-*.csv")
    files = [file for kind in kinds for file in output.rglob(kind)]
    assert len(files) > 15
    found = {str(file.relative_to(output)): file.read_bytes() for file in files}
    for file in output.rglob("records.jsonl"):
        found_records = records.Records(file.parent).read_all()
        rounds = [replace(record, seconds={}) for record in found_records]
        found[str(file.relative_to(output))] = repr(rounds).encode()
    return found


@contextmanager
def full_disk(patch: pytest.MonkeyPatch, file: str) -> Iterator[None]:
    """No room is left for this file, or for a line of it that holds what follows a colon."""
    original, original_append = Path.replace, append_durably
    name, _, line = file.partition(":")

    def append(path: Path, data: bytes, *, at: int) -> None:
        if str(path).endswith(name) and line in data.decode():
            original_append(path, data[: len(data) // 2], at=at)
            raise storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)
        original_append(path, data, at=at)

    def replace(self: Path, target: Path) -> Path:
        if str(target).endswith(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return original(self, target)

    with patch.context() as inner:
        inner.setattr(Path, "replace", replace)
        inner.setattr("collegium.runtime.records.append_durably", append)
        yield


# A full disk


SERVER = CELL / "server"
WRITTEN = (
    "run/run.json", "run/splits/alder.json", SERVER / "000000.state",
    SERVER / "ledgers.json", SERVER / "000001.state", SERVER / "kept/000001.state",
    SERVER / 'records.jsonl:"round": 1, "scores', SERVER / SECOND_RECORD, SERVER / "000002.state",
    SERVER / 'records.jsonl:"round": 2, "scores', SERVER / 'records.jsonl:"ended',
    SERVER / "test.json",
    CELL / "overlays/index.json", CELL / "rows.jsonl", "run/results.csv", "run/results.parquet",
    "run/results.sha256", "run/report.html",
)  # fmt: skip


def test_a_disk_that_is_full_again_and_again_costs_no_bit(folder: Path, monkeypatch, whole):
    """The disk fills up at one file after the other; each time the run goes on from there."""
    for file in [Path(name) for name in WRITTEN]:
        with full_disk(monkeypatch, str(file)):
            result = call("run", "x.yaml")
        refused(result, 5, str(file.parent))
        assert re.search(r"is full; free some space|No space left on device", result.stderr)
        assert not file.exists() or ":" in str(file)
        assert [p.name for p in file.parent.glob("*.tmp")] == []
        assert {p.name for p in file.parent.glob(".*")} <= {".lock"}
    ends_well(call("resume", "run"))
    assert bits(folder / "run") == whole()


def test_a_full_disk_at_a_client_is_told_in_the_log_of_its_site(
    folder: Path, monkeypatch, caplog, whole
):
    with full_disk(monkeypatch, "alder/states/000002-0000.state"):
        result = call("run", "x.yaml")
    refused(result, 4, "ditto, seed 0: client 'alder', round 2, train: StorageError", "log of this")
    assert f"the disk that holds {CELL}/clients/alder/states is full; free some" in caplog.text
    assert "round 1/2" not in ends_well(call("resume", "run")).stderr
    assert bits(folder / "run") == whole()


# What happens to a stopped run


def test_a_file_that_vanishes_in_the_middle_of_a_run_costs_no_round(
    folder: Path, monkeypatch, whole
):
    with full_disk(monkeypatch, SECOND_RECORD):
        refused(call("run", "x.yaml"), 5)
    path = folder / "data/alder/masks/alder_002.png"
    sound = path.read_bytes()
    path.unlink()
    refused(call("resume", "run"), 3, "site alder, case alder_002", str(path))
    path.write_bytes(sound)
    assert "round 1/2" not in ends_well(call("resume", "run")).stderr
    assert bits(folder / "run") == whole()


def test_other_settings_are_refused_with_the_difference_and_the_run_goes_on_as_it_was(
    folder: Path, monkeypatch, whole
):
    with full_disk(monkeypatch, SECOND_RECORD):
        refused(call("run", "x.yaml"), 5)
    words = ("run holds a run made with other settings", "choose another output folder")
    differences = ("rounds=2, now 3", "training.lr=0.001, now 0.01")
    refused(call("run", "x.yaml", "rounds=3", "training.lr=0.01"), 5, *words, *differences)
    ends_well(call("resume", "run"))
    assert bits(folder / "run") == whole()


def test_a_damaged_run_file_is_named_and_the_remedy_saves_the_rounds(
    folder: Path, monkeypatch, whole
):
    with full_disk(monkeypatch, SECOND_RECORD):
        refused(call("run", "x.yaml"), 5)
    damaged = folder / "run/run.json"
    for content in (b"", b'{"config": ', b"\xff\xfe", b"[]", b'{"config": null}', b"{}"):
        damaged.write_bytes(content)
        refused(call("resume", "run"), 5, "run/run.json is damaged; remove it", "'collegium run'")
        refused(call("run", "x.yaml"), 5, "run/run.json is damaged; remove it")
    damaged.unlink()
    assert "round 1/2" not in ends_well(call("run", "x.yaml")).stderr
    assert bits(folder / "run") == whole()
    for content in (b"", b"[]", b'{"config": []}'):
        damaged.write_bytes(content)
        refused(call("report", "run"), 3, "run/run.json: the description of the run cannot be read")


# Signals


@contextmanager
def running(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """A long run in a process group of its own that has finished its third round."""
    command = [sys.executable, "-c", "from collegium.cli import main; main()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [*command, "run", "x.yaml", LONG], cwd=folder, env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            assert any("round 3/24" in line for line in process.stderr)
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def goes_on_to_the_same_bits(folder: Path, expected: dict[str, bytes]) -> None:
    assert not (folder / "run/report.html").exists()
    shown = ends_well(call("resume", "run")).stderr
    numbers = [int(number) for number in re.findall(r"round (\d+)/24", shown)]
    assert numbers[0] > 2
    assert numbers == list(range(numbers[0], 25))
    assert bits(folder / "run") == expected


@pytest.mark.slow
def test_a_run_stopped_by_ctrl_c_says_how_to_go_on_and_ends_with_equal_bits(folder: Path, whole):
    expected = whole(LONG)
    with running(folder) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, text = process.communicate(timeout=300)
    assert process.returncode == 130
    sentence = "error: stopped; finished rounds are kept, continue with: collegium resume run"
    assert text.splitlines()[-1] == sentence
    assert "Traceback" not in text
    goes_on_to_the_same_bits(folder, expected)


@pytest.mark.slow
def test_a_second_process_is_kept_out_and_a_killed_one_ends_with_equal_bits(folder: Path, whole):
    expected = whole(LONG)
    with running(folder) as process:
        words = ("another process is running in run", "wait for it or choose another")
        refused(call("run", "x.yaml", LONG), 5, *words)
        refused(call("resume", "run"), 5, *words)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    goes_on_to_the_same_bits(folder, expected)


KILLS = 25
"""How often a run is killed before it may end, for each of four seeds: a hundred times."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_two_workers_killed_again_and_again_ends_with_equal_bits(
    folder: Path, whole, seed: int
):
    """Killed while it starts, or some moments after a few more rounds, as drawn."""
    moments, rounds = random.Random(seed), "rounds=300"
    settings = (rounds, "engine.workers=2")
    command = [sys.executable, "-c", "from collegium.cli import main; main()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    killed = 0
    for _ in range(KILLS):
        asked = ("resume", "run") if (folder / "run/run.json").exists() else ("run", "x.yaml")
        with subprocess.Popen(
            [*command, *asked, *(settings if asked[0] == "run" else ())], cwd=folder,
            env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            seen = (line for line in process.stderr if "/300" in line)
            for _ in range(moments.randrange(5)):
                next(seen, None)
            time.sleep(moments.uniform(0, 0.3))
            killed += process.poll() is None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert killed == KILLS
    ends_well(call("resume", "run"))
    assert bits(folder / "run") == whole(rounds)
