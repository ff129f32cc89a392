"""Relays that run as another user, who may read neither images nor state."""

import grp
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.distributed.conftest import SHARED, RealFederation

READER, CARRIER = 61001, 61002
"""The user of the site processes, and that of the relays."""


def give(folder: Path, user: int, mode: int) -> None:
    """Make a user the owner of a folder and of what is in it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, SHARED)
    folder.chmod(mode)


@pytest.fixture
def federation() -> Iterator[RealFederation]:
    """Site processes of one user and relays of another, below a folder that all may enter."""
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of other users")
    try:
        subprocess.run(
            [sys.executable, "-V"], user=CARRIER, group=SHARED, extra_groups=[], check=True,
            capture_output=True,
        )  # fmt: skip
    except PermissionError:
        pytest.skip(f"other users may not run {sys.executable}")
    with tempfile.TemporaryDirectory(prefix="users") as name:
        folder = Path(name)
        folder.chmod(0o755)
        made = RealFederation(folder)
        made.draw_phantoms()
        group, images = grp.getgrgid(SHARED).gr_name, folder / "phantom"
        for site in made.names:
            for place in (f"s/{site}", f"sockets/{site}", f"cache/{site}", f"cache/{site} relay"):
                (folder / place).mkdir(parents=True)
            words = yaml.safe_load((folder / f"{site}.yaml").read_text())["data"]
            made.describe_site(
                site, words, root="phantom", socket_folder=f"sockets/{site}", socket_group=group
            )
            give(images / site, READER, 0o700)
            give(folder / "s" / site, READER, 0o700)
            give(folder / "sockets" / site, READER, 0o750)
            give(folder / "cache" / site, READER, 0o700)
            give(folder / "con" / "sites" / site, CARRIER, 0o700)
            made.users |= {site: READER, f"{site} relay": CARRIER}
        (folder / "con").chmod(0o755)
        (folder / "con" / "sites").chmod(0o755)
        try:
            made.start_server()
            for site in made.names:
                made.start_site_process(site)
                made.start_relay(site)
            yield made
        finally:
            made.stop()


@pytest.mark.slow
def test_relays_of_another_user_carry_a_run_with_the_bits_of_one_process(federation):
    file = federation.write("apart", algorithms=["fedavg"])
    reference = federation.reference(file)
    federation.wait()
    code, text = federation.run(file)
    assert code == 0, text
    federation.check_equal("apart", reference)
    for site in federation.names:
        relays = federation.pids(f"con/sites/{site}", "nvflare")
        assert {Path(f"/proc/{pid}").stat().st_uid for pid in relays} == {CARRIER}
        assert (federation.state(site) / "runs" / "apart").stat().st_uid == READER
