"""Signed keys: a server that puts its own key in a site's place gets nothing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

from collegium.algorithms.fedavg import FedAvg
from collegium.core.message import pack, unpack
from collegium.errors import ClientError, ConfigError, ProtocolError
from collegium.runtime.engines.inprocess import respond_here
from collegium.runtime.participation import EVERYBODY, Participation
from collegium.runtime.requests import Request, Response
from collegium.runtime.secure.config import SecureMean
from collegium.runtime.secure.identity import Identity, read_identity
from collegium.runtime.secure.masks import new_private_key, public_key
from collegium.runtime.secure.parts import KEY, MASKED
from collegium.testing.toy import TRAINING, ToyFederation, toy_federation

NAMES = ("A", "B", "C", "D")
NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def certificate(name: str, key: Any, issuer: str, signer: Any, *, until: datetime = NOW + DAY):
    """A certificate as FLARE's provisioning makes one: a common name, and an authority's name."""
    subject, by = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer)
    )
    builder = x509.CertificateBuilder(
        by, subject, key.public_key(), x509.random_serial_number(), NOW - 9 * DAY, until
    )
    return builder.sign(signer, hashes.SHA256())


def pem(found: x509.Certificate | rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> str:
    encoding = serialization.Encoding.PEM
    if isinstance(found, x509.Certificate):
        return found.public_bytes(encoding).decode()
    form, hidden = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return found.private_bytes(encoding, form, hidden).decode()


ROOT = new_key()
AUTHORITY = pem(certificate("federation", ROOT, "federation", ROOT))


def identity(name: str, *, signer: Any = ROOT, run: str = "run", **more: Any) -> Identity:
    key = new_key()
    own = certificate(name, key, "federation", signer, **more)
    return Identity(pem(own), pem(key), AUTHORITY, run, {})


@pytest.fixture(scope="module")
def identities() -> dict[str, Identity]:
    return {name: identity(name) for name in (*NAMES, "server")}


def test_the_signature_is_rsa_pss_of_a_statement_that_names_all_it_is_for(identities):
    key = public_key(new_private_key())
    signed = identities["A"].sign("A", 3, 1, key)
    own = x509.load_pem_x509_certificate(signed["certificate"].encode())
    public = own.public_key()
    assert isinstance(public, rsa.RSAPublicKey)
    statement = f'["collegium secure mean", "run", "A", 3, 1, "{key}"]'.encode()
    form = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
    public.verify(bytes.fromhex(signed["signature"]), statement, form, hashes.SHA256())
    identities["B"].check("A", 3, 1, key, signed)


def test_what_another_has_signed_or_for_something_else_is_refused(identities):
    key, other = (public_key(new_private_key()) for _ in range(2))
    a, b = identities["A"], identities["B"]
    signed = a.sign("A", 3, 1, key)
    stranger, elsewhere = identity("A", signer=new_key()), identity("A", run="other")
    refused: list[tuple[str, tuple[Any, ...]]] = [
        ("is not signed", ("A", 3, 1, key, None)),
        ("not signed by a certificate", ("A", 3, 1, other, signed)),
        ("not signed by a certificate", ("A", 4, 1, key, signed)),
        ("not signed by a certificate", ("A", 3, 0, key, signed)),
        ("not signed by a certificate", ("B", 3, 1, key, signed)),
        ("by another participant", ("A", 3, 1, key, b.sign("A", 3, 1, key))),
        ("not signed by a certificate", ("A", 3, 1, key, stranger.sign("A", 3, 1, key))),
        ("not signed by a certificate", ("A", 3, 1, key, elsewhere.sign("A", 3, 1, key))),
        ("not valid today", ("A", 3, 1, key, identity("A", until=NOW - DAY).sign("A", 3, 1, key))),
        ("not signed by a certificate", ("A", 3, 1, key, {**signed, "signature": "zz"})),
        ("not signed by a certificate", ("A", 3, 1, key, {**signed, "certificate": "none"})),
        ("not signed by a certificate", ("A", 3, 1, key, {"signature": signed["signature"]})),
        ("not signed by a certificate", ("A", 3, 1, key, {**signed, "certificate": 3})),
    ]  # fmt: skip
    for text, given in refused:
        with pytest.raises(ProtocolError, match=text):
            b.check(*given)


def test_a_certificate_is_refused_that_is_not_the_one_that_was_compared(identities):
    key = public_key(new_private_key())
    own = x509.load_pem_x509_certificate(identities["A"].certificate.encode())
    known = {"A": own.fingerprint(hashes.SHA256()).hex()}
    careful = replace(identities["B"], known=known)
    careful.check("A", 1, 0, key, identities["A"].sign("A", 1, 0, key))
    minted = identity("A")  # by who holds the authority's key
    identities["B"].check("A", 1, 0, key, minted.sign("A", 1, 0, key))
    with pytest.raises(ProtocolError, match="is not the one that is known"):
        careful.check("A", 1, 0, key, minted.sign("A", 1, 0, key))


def test_the_files_of_a_kit_are_read_and_a_wrong_one_is_named(tmp_path, identities):
    own = identities["A"]
    for name, text in {"c": own.certificate, "k": own.private, "r": AUTHORITY}.items():
        (tmp_path / name).write_text(text)
    c, k, r = (tmp_path / name for name in "ckr")
    assert read_identity(c, k, r, "run", {}) == own
    assert own.private not in repr(own)
    (tmp_path / "e").write_text(pem(ec.generate_private_key(ec.SECP256R1())))
    for files, text in (
        ((c, tmp_path / "e", r), r"/e is no RSA key"),
        ((k, k, r), r"/k is missing or not what"),
        ((c, tmp_path / "x", r), r"/x is missing or not what"),
        ((c, k, k), r"/k is missing or not what"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_identity(*files, "run", {})


class Apart:
    """A federation whose participants have an identity each, and a transport that may forge."""

    def __init__(
        self,
        root: Any,
        identities: dict[str, Identity],
        forge_request: Callable[[Request, dict[str, Any]], None] = lambda request, parts: None,
        forge_reply: Callable[[Request, dict[str, Any]], None] = lambda request, parts: None,
        participation: Participation = EVERYBODY,
    ) -> None:
        self._forge_request, self._forge_reply = forge_request, forge_reply
        federation = toy_federation(NAMES, TRAINING)
        about: dict[str, Any] = {"seed": 7, "root": root, "secure": SecureMean()}
        self._clients = {
            name: replace(federation, identity=identities[name]).clients(FedAvg(), **about)[name]
            for name in NAMES
        }
        self.masked = 0
        self.run = replace(federation, identity=identities["server"]).run(
            FedAvg(), self, rounds=1, participation=participation, **about
        )

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        held = self.run.server.held
        for request in requests:
            parts = unpack(request.payload, held=held)
            self._forge_request(request, parts)
            forged = replace(request, payload=pack(parts, held))
            response = respond_here(self._clients[request.client], forged)
            envelope = unpack(response.data, held=held)
            if "reply" in envelope:
                self._forge_reply(request, envelope["reply"])
                self.masked += MASKED in envelope["reply"]
            yield replace(response, data=pack(envelope, held), signed=None)

    def close(self) -> None:
        """Nothing is held."""

    @property
    def model(self) -> Any:
        return self.run.server.state["model"]


def test_signed_keys_change_no_bit_of_a_mean(tmp_path, identities):
    apart = Apart(tmp_path / "apart", identities)
    apart.run.execute()
    plain = ToyFederation(FedAvg(), tmp_path / "plain", names=NAMES, secure=SecureMean()).run(1)
    for name, tensor in plain.server.state["model"].items():
        assert torch.equal(apart.model[name], tensor)


def own_key_in_place_of(site: str, signed: Callable[[str], dict[str, str]]):
    """Return a forgery by a server that replaces a site's key with its own to know its masks."""
    key = public_key(new_private_key())

    def forge(request: Request, parts: dict[str, Any]) -> None:
        if request.method == MASKED and request.client != site:
            parts["roster"]["keys"][site] = key
            parts["roster"]["signatures"][site] = signed(key)

    return forge


@pytest.mark.parametrize("how", ["unsigned", "its own", "old", "of another"])
def test_a_server_that_hands_out_its_own_key_gets_no_masked_part(tmp_path, identities, how):
    signatures: dict[str, Callable[[str], dict[str, str]]] = {
        "unsigned": lambda key: {},
        "its own": lambda key: identities["server"].sign("B", 1, 0, key),
        "old": lambda key: identities["B"].sign("B", 1, 0, public_key("11" * 32)),
        "of another": lambda key: identities["C"].sign("C", 1, 0, key),
    }
    apart = Apart(tmp_path, identities, own_key_in_place_of("B", signatures[how]))
    with pytest.raises(ClientError, match=r"'A' was sent a key of 'B' that the certificate of 'B'"):
        apart.run.execute()
    assert apart.masked == 0


@pytest.mark.parametrize("how", ["unsigned", "of another"])
def test_a_site_whose_key_is_not_signed_is_left_out_alone(tmp_path, identities, how):
    def forge(request: Request, parts: dict[str, Any]) -> None:
        if request.client == "B" and KEY in parts:
            key = parts[KEY]["key"]
            more = {} if how == "unsigned" else identities["C"].sign("B", 1, 0, key)
            parts[KEY] = {"key": key, **more}

    with pytest.raises(ClientError, match=r"'B'.*the key of 'B' is (not signed|signed by another)"):
        Apart(tmp_path / "fail", identities, forge_reply=forge).run.execute()
    skipping = Participation(on_failure="skip")
    apart = Apart(tmp_path / "skip", identities, forge_reply=forge, participation=skipping)
    apart.run.execute()
    assert apart.masked == 3
    (left,) = apart.run.records()[0].left_out
    assert left["client"] == "B"
