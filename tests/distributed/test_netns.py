"""A federation over a slow network that loses packets: namespaces with addresses of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.distributed.netns import Network, NotPermitted

from collegium.data.phantoms import make_federation
from collegium.distributed.kits import Provision, make_kits
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.runner import run_experiment

pytest.importorskip("nvflare")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from collegium.cli import main; main()"]
SITES = ("alder", "birch", "cedar")
PORT = 18350
DELAY, LOSS = 0.05, 0.01
"""Seconds that a packet is on its way, and the share of packets that get lost."""


@pytest.fixture
def network() -> Iterator[Network]:
    names = [f"cg{os.getpid()}-{who}" for who in ("server", *SITES)]
    try:
        with Network(names, "coordinator.test", delay=DELAY, loss=LOSS) as opened:
            yield opened
    except NotPermitted as error:
        pytest.skip(str(error))


class Processes:
    """Processes in namespaces; they end with the test."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, number: int, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start our command line in the namespace of a number; what it says goes to a log."""
        command = self._network.inside(self._network.names[number], [*COMMAND, *arguments])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        with (self._folder / f"{log}.log").open("ab") as file:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def end(self) -> None:
        """Kill them all, and what they started: FLARE's jobs are in groups of their own."""
        for process in self._running:
            for number in _family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()


def _family(process: int) -> list[int]:
    """A process, and all that it and they started."""
    found = [process]
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text(encoding="ascii").split():
            found += _family(int(child))
    return found


def _settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "net",
        "federation": yaml.safe_load((folder / "phantom" / "federation.yaml").read_text())
        | {"root": str(folder / "phantom")},
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1},
        "algorithms": ["fedavg", "iopfl"],
        "rounds": 2,
        "training": {"batch_size": 2, "local_steps": 2, "lr": 0.01},
        "engine": {"threads": 1},
        **changes,
    }


def _bits(runs: Path, whose: str) -> dict[str, bytes]:
    """Every state, model and test score in the folders of a name, by file."""
    files = [f for kind in ("*.state", "*.safetensors", "test.json") for f in runs.rglob(kind)]
    found = {file.relative_to(runs): file for file in files}
    return {str(path): file.read_bytes() for path, file in found.items() if whose in path.parts}


def test_slow_and_lossy_network_changes_no_bit(network, tmp_path):
    make_federation(tmp_path / "phantom", 3, cases=8, size=32)
    alone = parse_config(_settings(tmp_path, output=str(tmp_path / "alone")))
    run_experiment(alone)

    kits = tmp_path / "con"
    make_kits(kits, Provision("coordinator.test", SITES, PORT))
    engine = {"name": "flare", "folder": str(kits), "threads": 1, "patience": 90, "deadline": 120}
    settings = _settings(tmp_path, output=str(tmp_path / "over"), engine=engine)
    settings["federation"]["sites"] = {site: {"remote": True} for site in SITES}
    (tmp_path / "exp.yaml").write_text(json.dumps(settings))
    processes = Processes(network, tmp_path)
    try:
        processes.start(0, "server", "server", "start", "con/server")
        for number, site in enumerate(SITES, 1):
            own = {"name": site, "root": "phantom", "state": f"s/{site}", "accept": "all"}
            own["data"] = {"manifest": f"{site}/manifest.csv"}  # type: ignore[assignment]
            (tmp_path / f"{site}.yaml").write_text(json.dumps(own))
            kit = f"con/sites/{site}"
            processes.start(number, site, "site", "start", f"{site}.yaml", "--kit", kit)
        start = time.monotonic()
        run = processes.start(0, "run", "run", "exp.yaml")
        assert run.wait(timeout=560) == 0, (tmp_path / "run.log").read_text()
        print(f"{time.monotonic() - start:.0f} s, {network.carried} packets, {network.lost} lost")
    finally:
        processes.end()
    assert network.lost > 0
    expected, found = _bits(tmp_path / "alone", "server"), _bits(tmp_path / "over", "server")
    assert len(expected) > 5
    assert found == expected
    for site in SITES:
        expected = _bits(tmp_path / "alone", site)
        assert len(expected) > 1
        assert _bits(tmp_path / "s" / site / "runs" / "net", site) == expected
