"""FLARE's jobs: what is in them, and that a server that is not there is one sentence."""

import json

import pytest

from collegium.distributed import jobs
from collegium.distributed.jobs import Coordinator, ServerUnreachable, write_job
from collegium.distributed.kits import ALLOWED, Provision, make_kits, read_kit
from collegium.distributed.processes import hold, relay_command, server_command
from collegium.errors import StorageError


def values(data):
    """Every value in nested lists and mappings."""
    if isinstance(data, dict | list):
        for item in data.values() if isinstance(data, dict) else data:
            yield from values(item)
    else:
        yield data


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs") / "con"
    make_kits(folder, Provision(server="localhost", sites=("alder",), port=18192))
    return folder


def test_no_code_travels_in_a_job(tmp_path):
    write_job(tmp_path / "job", {"birch", "alder"})
    files = {path.name for path in (tmp_path / "job").rglob("*") if path.is_file()}
    assert files == {"meta.json", "config_fed_server.json", "config_fed_client.json"}


def test_the_classes_of_a_job_are_those_that_kits_allow(tmp_path):
    write_job(tmp_path / "job", {"alder"})
    for name in ("config_fed_server.json", "config_fed_client.json"):
        data = json.loads((tmp_path / "job" / "app" / "config" / name).read_text())
        classes = [v for v in values(data) if isinstance(v, str) and v.count(".") > 1]
        assert len(classes) == 2
        for path in classes:
            assert any(path == word or path.startswith(word) for word in ALLOWED)


def test_a_job_is_for_the_sites_that_are_asked_alone(tmp_path):
    write_job(tmp_path / "job", {"birch", "alder"})
    meta = json.loads((tmp_path / "job" / "meta.json").read_text())
    assert meta["deploy_map"] == {"app": ["server", "alder", "birch"]}


def test_a_server_that_is_not_there_is_one_sentence(kits, monkeypatch):
    monkeypatch.setattr(jobs, "CONNECT_SECONDS", 0.2)
    coordinator = Coordinator(read_kit(kits / "admin", "admin"))
    with pytest.raises(ServerUnreachable, match=r"server localhost, port 18192, does not answer"):
        coordinator.connected()
    coordinator.close()


def test_one_process_uses_a_kit_at_a_time(kits):
    import os

    kit = read_kit(kits / "sites" / "alder", "site")
    descriptor = hold(kit)
    with pytest.raises(StorageError, match=r"another process uses the kit .*alder; end it first"):
        hold(kit)
    os.close(descriptor)
    os.close(hold(kit))


def test_relays_know_a_socket_and_nothing_else_of_ours(kits, tmp_path, monkeypatch):
    kit = read_kit(kits / "sites" / "alder", "site")
    command, environment = relay_command(kit, tmp_path / "site.sock")
    added = {name for name in environment if name.startswith("COLLEGIUM_S")}
    assert added == {"COLLEGIUM_SITE_SOCKET"}
    assert environment["COLLEGIUM_SITE_SOCKET"] == str(tmp_path / "site.sock")
    assert "uid=alder" in command
    assert "secure_train=true" in command
    command, environment = server_command(read_kit(kits / "server", "server"))
    assert environment["COLLEGIUM_SERVER_SOCKET"] == str(kits / "server" / "collegium.sock")
