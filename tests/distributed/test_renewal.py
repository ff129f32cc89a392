"""Start-up kits are replaced by new ones, by the same authority or by a new one."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from collegium.distributed.kits import (
    Provision,
    check_certificate,
    days_left,
    fingerprint,
    make_kits,
    read_kit,
)
from collegium.distributed.processes import hold
from collegium.distributed.renewal import authority_ends, renew_kits
from collegium.errors import ConfigError, StorageError

TEN_YEARS = datetime.now(UTC) + timedelta(days=3650)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A federation of the sites a and b."""
    make_kits(tmp_path / "f", Provision("localhost", ("a", "b"), scheme="http"))
    return tmp_path / "f"


def prints(folder: Path) -> dict[str, str]:
    places = {"server": "server", "admin": "admin", "a": "sites/a", "b": "sites/b"}
    return {
        name: fingerprint(read_kit(folder / place, name if name == place else "site"))
        for name, place in places.items()
    }


def root(folder: Path, kit: str) -> bytes:
    return (folder / kit / "startup" / "rootCA.pem").read_bytes()


def test_a_kit_is_valid_for_360_days_and_its_authority_for_years(folder: Path):
    assert days_left([read_kit(folder / "sites" / "a", "site")])["a"] in (359, 360)
    assert (authority_ends(folder) - datetime.now(UTC)).days in (1824, 1825)


def test_the_authority_keeps_no_key_but_its_own(folder: Path):
    kept = json.loads((folder / "authority" / "federation" / "state" / "cert.json").read_text())
    assert sorted(kept) == ["root_cert", "root_pri_key"]


def test_one_site_gets_a_new_key_and_the_others_keep_theirs(folder: Path):
    before, authority = prints(folder), root(folder, "server")
    assert renew_kits(folder, ["a"]) == {"a": folder / "sites" / "a"}
    after = prints(folder)
    assert {name for name in after if after[name] != before[name]} == {"a"}
    assert root(folder, "sites/a") == authority
    check_certificate(read_kit(folder / "sites" / "a", "site"))


def test_without_a_name_everybody_gets_a_new_key_of_the_same_authority(folder: Path):
    before, authority = prints(folder), root(folder, "server")
    (folder / "server" / "audit.log").write_text("kept")
    renew_kits(folder)
    after = prints(folder)
    assert all(after[name] != before[name] for name in before)
    assert root(folder, "sites/b") == authority
    assert (folder / "server" / "audit.log").read_text() == "kept"


def test_a_site_that_is_not_named_is_out_under_a_new_authority(folder: Path):
    authority = root(folder, "server")
    renew_kits(folder, ["a"], new_authority=True)
    assert root(folder, "server") == root(folder, "admin") == root(folder, "sites/a") != authority
    assert read_kit(folder / "server", "server").sites == ("a",)
    old = read_kit(folder / "sites" / "b", "site").certificate.read_bytes()
    with pytest.raises(InvalidSignature):
        x509.load_pem_x509_certificate(old).verify_directly_issued_by(
            x509.load_pem_x509_certificate(root(folder, "server"))
        )


def test_an_expired_authority_is_replaced_with_all_kits(folder: Path):
    authority = root(folder, "server")
    with pytest.raises(ConfigError, match=r"expired on .* every kit has to be replaced"):
        renew_kits(folder, ["a"], now=TEN_YEARS)
    assert len(renew_kits(folder, now=TEN_YEARS)) == 4
    assert root(folder, "sites/b") == root(folder, "server") != authority


def test_a_kit_in_use_stays_as_it_is(folder: Path):
    before = prints(folder)
    hold(read_kit(folder / "server", "server"))
    with pytest.raises(StorageError, match="another process uses the kit"):
        renew_kits(folder)
    assert prints(folder) == before


def test_an_unknown_site_and_a_folder_without_a_federation_are_named(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no site c in .* \(a, b\)"):
        renew_kits(folder, ["c"])
    with pytest.raises(ConfigError, match="holds no federation"):
        renew_kits(tmp_path / "nothing")


def test_a_site_that_joins_later_gets_the_federations_own_protocol(folder: Path):
    make_kits(folder, Provision("localhost", ("c",)))  # grpc by default
    settings = json.loads((folder / "sites" / "c" / "startup" / "fed_client.json").read_text())
    assert settings["servers"][0]["service"]["scheme"] == "http"
    assert read_kit(folder / "server", "server").sites == ("a", "b", "c")
