"""Start-up kits: what is in them, that they can be added to, and which of them are of no use."""

import json
import shutil
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from collegium.distributed import kits
from collegium.distributed.kits import (
    ADMIN,
    Provision,
    check_certificate,
    days_left,
    fingerprint,
    make_kits,
    read_kit,
    write_settings,
)
from collegium.errors import ConfigError

DAY = timedelta(days=1)
WANTED = Provision(server="localhost", sites=("alder", "birch"), port=18190, days=100)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits") / "con"
    return folder, make_kits(folder, WANTED)


@pytest.fixture
def folder(made, tmp_path):
    """A copy of the kits, to change."""
    shutil.copytree(made[0], tmp_path / "con")
    return tmp_path / "con"


@pytest.fixture
def kit(folder):
    return folder / "sites" / "alder"


def authority(folder):
    """The certificate and the key of a federation's authority."""
    (path,) = folder.joinpath("authority").rglob("cert.json")
    about = json.loads(path.read_text())
    key = serialization.load_pem_private_key(about["root_pri_key"].encode(), None)
    return x509.load_pem_x509_certificate(about["root_cert"].encode()), key


def sign_again(folder, kit, begin, end, name=None):
    """Replace a kit's certificate by one of the same authority with other dates or another name."""
    issuer, key = authority(folder)
    path = kit / "startup" / "client.crt"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    subject = [
        x509.NameAttribute(part.oid, name) if name and part.oid == NameOID.COMMON_NAME else part
        for part in old.subject
    ]
    builder = x509.CertificateBuilder(
        issuer.subject, x509.Name(subject), old.public_key(), x509.random_serial_number(),
        begin, end, list(old.extensions),
    )  # fmt: skip
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_is_a_kit_for_everybody_and_it_says_what_it_is_for(made):
    folder, places = made
    assert places == {
        "localhost": folder / "server",
        ADMIN: folder / "admin",
        "alder": folder / "sites" / "alder",
        "birch": folder / "sites" / "birch",
    }
    server, alder = read_kit(folder / "server", "server"), read_kit(places["alder"], "site")
    assert (server.name, server.server, server.port) == ("localhost", "localhost", 18190)
    assert (alder.name, alder.server, alder.port) == ("alder", "localhost", 18190)
    assert server.sites == read_kit(folder / "admin", "admin").sites == ("alder", "birch")
    assert alder.sites == ()  # a site does not learn who else takes part


def test_private_keys_are_their_owners_alone(made):
    folder, places = made
    for place in places.values():
        keys = list(place.rglob("*.key"))
        assert keys, place
        assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert stat.S_IMODE((folder / "authority").stat().st_mode) == 0o700
    (authority,) = (folder / "authority").rglob("cert.json")
    assert stat.S_IMODE(authority.stat().st_mode) == 0o600


def test_the_key_of_the_authority_is_in_no_kit(made):
    folder, places = made
    secret = authority(folder)[1].public_key()
    for place in places.values():
        for path in place.rglob("*.key"):
            key = serialization.load_pem_private_key(path.read_bytes(), None)
            assert key.public_key() != secret
        assert not [path for path, data in files(place).items() if b"root_pri_key" in data]


def test_no_key_is_left_beside_the_kits(made):
    folder, places = made
    kept = {path for place in places.values() for path in place.rglob("*.key")}
    assert {*folder.rglob("*.key")} == kept


def test_a_site_that_is_added_has_the_same_authority_and_changes_no_kit(folder):
    sites = files(folder / "sites")
    own = {name: files(folder / name / "startup") for name in ("server", "admin")}
    added = make_kits(folder, Provision(server="localhost", sites=("cedar",), port=18190))
    assert added == {"cedar": folder / "sites" / "cedar"}
    assert {path: path.read_bytes() for path in sites} == sites
    assert {name: files(folder / name / "startup") for name in own} == own
    roots = {path.read_bytes() for path in folder.rglob("rootCA.pem")}
    assert len(roots) == 1
    assert read_kit(folder / "sites" / "cedar", "site").name == "cedar"
    assert read_kit(folder / "server", "server").sites == ("alder", "birch", "cedar")
    assert read_kit(folder / "admin", "admin").sites == ("alder", "birch", "cedar")


def test_kits_that_are_there_are_not_made_again(folder):
    before = files(folder)
    assert make_kits(folder, WANTED) == {}
    assert files(folder) == before


def test_a_kit_that_was_lost_is_made_again_with_a_new_key_by_the_same_authority(folder):
    old = fingerprint(read_kit(folder / "sites" / "alder", "site"))
    authority = (folder / "server" / "startup" / "rootCA.pem").read_bytes()
    shutil.rmtree(folder / "sites" / "alder")
    assert list(make_kits(folder, WANTED)) == ["alder"]
    assert fingerprint(read_kit(folder / "sites" / "alder", "site")) != old
    assert (folder / "sites" / "alder" / "startup" / "rootCA.pem").read_bytes() == authority
    assert read_kit(folder / "server", "server").sites == ("alder", "birch")


def test_what_flare_cannot_make_is_one_sentence_and_leaves_no_kit(folder, capfd):
    (path,) = folder.joinpath("authority").rglob("cert.json")
    path.write_text(path.read_text().replace("-----BEGIN CERTIFICATE", "-----BEGIN NOTHING"))
    with pytest.raises(
        ConfigError, match=r"could not be made \(ValueError: .*authority damaged\?$"
    ):
        make_kits(folder, Provision(server="localhost", sites=("cedar",), port=18190))
    assert not (folder / "sites" / "cedar").exists()
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("other", [{"server": "example.org"}, {"port": 18191}])
def test_a_folder_holds_one_federation(folder, other):
    wanted = Provision(**{"server": "localhost", "sites": ("cedar",), "port": 18190, **other})
    with pytest.raises(ConfigError, match="holds the federation of localhost, port 18190; choose"):
        make_kits(folder, wanted)
    assert not (folder / "sites" / "cedar").exists()


@pytest.mark.parametrize("sites", [(), ("a", "a"), ("a", "A"), ("host",), ("Host",)])
def test_every_name_is_given_once(sites):
    with pytest.raises(ConfigError, match="each once and none like the server"):
        Provision(server="host", sites=sites)


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", "-a", "ä", "a\n", "server.example"])
def test_a_name_that_is_no_folder_and_no_certificate_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be in a certificate"):
        Provision(server="host", sites=(name,))


@pytest.mark.parametrize(
    ("name", "role", "found"),
    [("server", "site", "server"), ("admin", "server", "admin"), ("sites/alder", "admin", "site")],
)
def test_the_kit_of_another_role_is_refused(folder, name, role, found):
    with pytest.raises(ConfigError, match=f"is the kit of a {found}, and a {role}'s is needed"):
        read_kit(folder / name, role)


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", "null", '{"sites": 3}', '{"sites": []}'])
def test_a_folder_that_is_no_kit_is_refused(kit, text):
    (kit / "federation.json").unlink()
    if text is not None:
        (kit / "federation.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is no start-up kit .* name the folder"):
        read_kit(kit, "site")


def test_an_expired_certificate_is_refused_with_its_date(folder, kit):
    now = datetime.now(UTC)
    sign_again(folder, kit, now - 30 * DAY, now - DAY)
    with pytest.raises(ConfigError) as caught:
        read_kit(kit, "site")
    assert str(caught.value) == (
        f"{kit / 'startup' / 'client.crt'}: the certificate expired on {now - DAY:%Y-%m-%d}; ask "
        f"whoever runs the server for a new start-up kit ('collegium federation renew')"
    )


def test_a_certificate_of_tomorrow_is_refused_with_both_times(folder, kit):
    now = datetime.now(UTC)
    sign_again(folder, kit, now + DAY, now + 30 * DAY)
    with pytest.raises(
        ConfigError, match=f"not valid before {now + DAY:%Y-%m-%d %H:%M} UTC.*clock"
    ):
        read_kit(kit, "site")


@pytest.mark.parametrize(
    ("days", "said"), [(-2, "set this machine's clock"), (101, "the certificate expired on")]
)
def test_a_clock_that_is_off_shows(kit, days, said):
    found = read_kit(kit, "site")
    with pytest.raises(ConfigError, match=said):
        check_certificate(found, datetime.now(UTC) + days * DAY)


def test_a_clock_that_is_off_by_minutes_matters_not(kit):
    check_certificate(read_kit(kit, "site"), datetime.now(UTC) + timedelta(minutes=5))


def test_a_certificate_of_another_authority_is_refused(kit, tmp_path):
    make_kits(tmp_path / "other", WANTED)
    other = tmp_path / "other" / "sites" / "alder"
    shutil.copy(other / "startup" / "client.crt", kit / "startup" / "client.crt")
    with pytest.raises(
        ConfigError, match=r"is not signed by the authority in rootCA.pem; the files"
    ):
        read_kit(kit, "site")
    shutil.copy(other / "startup" / "rootCA.pem", kit / "startup" / "rootCA.pem")
    read_kit(kit, "site")  # all of one federation again, though of another one


def test_a_certificate_for_another_name_is_refused(folder, kit):
    now = datetime.now(UTC)
    sign_again(folder, kit, now - DAY, now + DAY, name="birch")
    with pytest.raises(ConfigError, match=r"client.crt is for birch, and the kit is that of alder"):
        read_kit(kit, "site")


@pytest.mark.parametrize("name", ["client.crt", "rootCA.pem"])
@pytest.mark.parametrize("text", [None, "", "no certificate"])
def test_a_kit_without_readable_certificates_is_refused(kit, name, text):
    (kit / "startup" / name).unlink()
    if text is not None:
        (kit / "startup" / name).write_text(text)
    with pytest.raises(ConfigError, match=r"holds no readable certificate .* kit of alder again"):
        read_kit(kit, "site")


def test_the_days_that_are_left_are_those_that_were_asked_for(folder):
    found = [read_kit(folder / "server", "server"), read_kit(folder / "sites" / "birch", "site")]
    assert set(days_left(found).values()) <= {99, 100}  # the authority's end is the kits' end
    assert days_left(found, datetime.now(UTC) + 90 * DAY)["birch"] in {9, 10}


def test_a_fingerprint_is_that_of_the_certificate(kit):
    certificate = x509.load_pem_x509_certificate((kit / "startup" / "client.crt").read_bytes())
    found = fingerprint(read_kit(kit, "site"))
    assert found == certificate.fingerprint(hashes.SHA256()).hex()


@pytest.fixture(params=["server", "sites/alder"])
def written(folder, request):
    """A kit after its start, FLARE's defaults and its settings."""
    place = folder / request.param
    before = json.loads((place / "local" / "resources.json.default").read_text())
    write_settings(read_kit(place, "server" if place.name == "server" else "site"))
    return place, before, json.loads((place / "local" / "resources.json").read_text())


def test_a_job_may_name_our_classes_only(written):
    _, before, after = written
    assert after["class_allow_list"] == list(kits.ALLOWED)
    assert len(after["class_allow_list"]) == 3 < len(before["class_allow_list"])
    assert after["class_list_enforcement_mode"] == "enforce"


def test_no_log_is_streamed_to_the_server(written):
    _, before, after = written
    assert after["allow_log_streaming"] is False
    assert "LogStreamer" in json.dumps(before) or "server" in str(written[0])
    assert "site_log_streamer" not in json.dumps(after)


def test_nothing_is_stored_in_a_folder_that_servers_share(written):
    place, before, after = written
    assert "/tmp/nvflare" not in json.dumps(after)
    if place.name == "server":
        assert "/tmp/nvflare" in json.dumps(before)
        assert f"{place}/store/jobs-storage" in json.dumps(after)


def test_settings_that_were_changed_by_hand_or_by_a_job_are_written_again(folder):
    kit = read_kit(folder / "sites" / "alder", "site")
    write_settings(kit)
    path = kit.folder / "local" / "resources.json"
    wanted = path.read_bytes()
    path.write_text("{}")
    write_settings(kit)
    assert path.read_bytes() == wanted
