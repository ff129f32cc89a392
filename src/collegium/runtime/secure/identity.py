"""Signatures of the sites' public keys, so that no server can put its own in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collegium.core.text import short
from collegium.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import PSS

PURPOSE = "collegium secure mean"
"""The first words of every statement that is signed, so that it passes for nothing else."""


@dataclass(frozen=True)
class Identity:
    """A participant's certificate and key, and the authority that signs for the others.

    The key's signature is RSA with PSS and SHA-256, as the start-up kits of FLARE hold RSA keys.

    Attributes:
        certificate: the participant's own, PEM.
        private: its private key, PEM.
        authority: the certificate of the authority, PEM.
        run: what a signature is for: the digest of the experiment.
        known: by site the SHA-256 of its certificate (DER, hexadecimal digits), as two people have
            compared it; any other certificate of such a site is refused, whoever signed it.
    """

    certificate: str
    private: str = field(repr=False)
    authority: str
    run: str
    known: Mapping[str, str]

    def sign(self, site: str, number: int, exchange: int, key: str) -> dict[str, str]:
        """Return this participant's certificate and its signature of a public key.

        Args:
            site: its name.
            number: the round.
            exchange: the exchange in it.
            key: the public key, in hexadecimal digits.
        """
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import rsa
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        private = load_pem_private_key(self.private.encode(), None)
        assert isinstance(private, rsa.RSAPrivateKey)  # see `read_identity`
        text = self._statement(site, number, exchange, key)
        return {
            "certificate": self.certificate,
            "signature": private.sign(text, _padding(), hashes.SHA256()).hex(),
        }

    def check(
        self, site: str, number: int, exchange: int, key: str, signed: Mapping[str, Any] | None
    ) -> None:
        """Check that the certificate of a site has signed a public key.

        Args:
            site: the site's name.
            number: the round.
            exchange: the exchange in it.
            key: the public key, in hexadecimal digits.
            signed: what `sign` returned there; None: nothing came.

        Raises:
            ProtocolError: it has not, or the certificate is not one that holds today.
        """
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import rsa
        from cryptography.x509.oid import NameOID

        if signed is None:
            raise ProtocolError(f"the key of {short(site)} is not signed")
        try:
            found = x509.load_pem_x509_certificate(signed["certificate"].encode())
            found.verify_directly_issued_by(x509.load_pem_x509_certificate(self.authority.encode()))
            public = found.public_key()
            if not isinstance(public, rsa.RSAPublicKey):
                raise TypeError
            signature = bytes.fromhex(signed["signature"])
            text = self._statement(site, number, exchange, key)
            public.verify(signature, text, _padding(), hashes.SHA256())
            names = [a.value for a in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        except (InvalidSignature, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProtocolError(
                f"the key of {short(site)} is not signed by a certificate of the federation"
            ) from error
        if names != [site[:64]]:
            raise ProtocolError(f"the key of {short(site)} is signed by another participant")
        if not found.not_valid_before_utc <= datetime.now(UTC) <= found.not_valid_after_utc:
            raise ProtocolError(f"the certificate of {short(site)} is not valid today")
        digest = found.fingerprint(hashes.SHA256()).hex()
        if self.known.get(site, digest) != digest:
            raise ProtocolError(f"the certificate of {short(site)} is not the one that is known")

    def _statement(self, site: str, number: int, exchange: int, key: str) -> bytes:
        return json.dumps([PURPOSE, self.run, site, number, exchange, key]).encode()


def _padding() -> PSS:
    """Return the padding of signatures, the same for those who sign and those who check."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


def read_identity(
    certificate: Path, private: Path, authority: Path, run: str, known: Mapping[str, str]
) -> Identity:
    """Read a participant's identity from the files of a start-up kit.

    Args:
        certificate: the file of its certificate.
        private: the file of its private key.
        authority: the file of the authority's certificate.
        run: see `Identity`.
        known: see `Identity`.

    Raises:
        ConfigError: a file is missing or is none of these.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    path = certificate
    try:
        own = path.read_text("ascii")
        x509.load_pem_x509_certificate(own.encode())
        path = authority
        root = path.read_text("ascii")
        x509.load_pem_x509_certificate(root.encode())
        path = private
        key = path.read_text("ascii")
        usable = isinstance(load_pem_private_key(key.encode(), None), rsa.RSAPrivateKey)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is missing or not what its name says ({type(error).__name__}), and keys are "
            f"signed with it; ask for the start-up kit again"
        ) from error
    if not usable:
        raise ConfigError(f"{path} is no RSA key, as a start-up kit has one; ask for the kit again")
    return Identity(own, key, root, run, known)
