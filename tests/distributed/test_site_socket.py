"""Who may reach a site process by its socket."""

import grp
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from collegium.distributed.frames import listen
from collegium.distributed.site import SiteProcess, read_site_settings
from collegium.errors import ConfigError, StorageError


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="site") as name:
        yield Path(name)


def write(folder: Path, more: str = "") -> Path:
    (folder / "site.yaml").write_text(f"name: north\ndata: {{folder: images}}\n{more}")
    return folder / "site.yaml"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_socket_and_state_are_the_owners_alone(folder: Path):
    settings = read_site_settings(write(folder))
    with SiteProcess(settings)._listen():
        assert settings.socket == folder / "state" / "site.sock"
        assert mode(settings.socket) == 0o600
        assert mode(folder / "state") == 0o700


def test_a_group_may_use_the_socket_and_still_not_enter_the_state(folder: Path):
    group = os.getgroups()[-1] if os.getgroups() else os.getgid()
    name = grp.getgrgid(group).gr_name
    more = f"socket_folder: sockets\nsocket_group: {name}\n"
    settings = read_site_settings(write(folder, more))
    with SiteProcess(settings)._listen():
        assert settings.socket == folder / "sockets" / "site.sock"
        assert mode(settings.socket) == 0o660
        assert settings.socket.stat().st_gid == group
        assert (mode(folder / "sockets"), (folder / "sockets").stat().st_gid) == (0o750, group)
        assert mode(folder / "state") == 0o700


def test_a_group_needs_a_folder_beside_the_state(folder: Path):
    with pytest.raises(ConfigError, match="name another folder for it under socket_folder"):
        read_site_settings(write(folder, "socket_group: staff\n"))


def test_a_group_that_does_not_exist_is_named(folder: Path):
    settings = read_site_settings(write(folder, "socket_folder: s\nsocket_group: no-such\n"))
    with pytest.raises(ConfigError, match="no group 'no-such' on this machine"):
        SiteProcess(settings)._listen()


def test_a_second_process_does_not_take_the_socket_of_the_first(folder: Path):
    settings = read_site_settings(write(folder))
    with SiteProcess(settings)._listen() as first:
        with pytest.raises(StorageError, match=r"another process listens at .*site\.sock"):
            SiteProcess(settings)._listen()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(settings.socket))
            first.accept()[0].close()
    with listen(settings.socket):  # what is left of a process that ended is no obstacle
        assert settings.socket.exists()


def test_a_path_that_is_too_long_is_named(folder: Path):
    settings = read_site_settings(write(folder, f"state: {'x' * 120}\n"))
    with pytest.raises(StorageError, match=r"too long for a Unix socket \(at most 107 bytes\)"):
        SiteProcess(settings)._listen()
