"""A federation over a slow network that loses packets: namespaces with addresses of their own."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.distributed.commands import Processes
from tests.distributed.netns import Network, NotPermitted

from collegium.data.phantoms import make_federation
from collegium.distributed.kits import Provision, make_kits
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.runner import run_experiment

pytest.importorskip("nvflare")
pytestmark = pytest.mark.slow

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
    processes = Processes(tmp_path)
    try:
        server = network.inside(network.names[0], [])
        processes.start("server", "server", "start", "con/server", inside=server)
        for number, site in enumerate(SITES, 1):
            own: dict[str, Any] = {
                "name": site,
                "root": "phantom",
                "state": f"s/{site}",
                "accept": "all",
            }
            own |= {"data": {"manifest": f"{site}/manifest.csv"}, "release": ["scores"]}
            (tmp_path / f"{site}.yaml").write_text(json.dumps(own))
            kit = f"con/sites/{site}"
            place = network.inside(network.names[number], [])
            processes.start(site, "site", "start", f"{site}.yaml", "--kit", kit, inside=place)
        start = time.monotonic()
        run = processes.start("run", "run", "exp.yaml", inside=server)
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
