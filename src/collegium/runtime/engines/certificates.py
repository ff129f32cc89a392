"""Checks of the certificates by which sites and servers authenticate each other."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from collegium.errors import ConfigError, DataError


@dataclass(frozen=True)
class Certificate:
    """A certificate.

    Attributes:
        subject: Whom it is for.
        begins: The time from which it is valid.
        ends: The time after which it is not.
    """

    subject: str
    begins: datetime
    ends: datetime


def read_certificates(path: Path) -> list[Certificate]:
    """Read the certificates of a PEM file.

    Raises:
        DataError: It cannot be read, or holds no certificate of an authority or by itself.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one
        reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise DataError(f"{path} cannot be read ({reason}); name a PEM file") from error
    found = [_certificate(about) for about in context.get_ca_certs()]
    if not found:
        raise DataError(f"{path} holds no root certificate; name the one that signs the server's")
    return found


def check_certificates(path: Path, now: datetime | None = None) -> list[Certificate]:
    """Read the certificates of a PEM file and check that all are valid today.

    Args:
        path: The file.
        now: The time of the check; None: this machine's clock.

    Raises:
        DataError: It cannot be read.
        ConfigError: One of them has expired or is not valid yet.
    """
    now = now or datetime.now(UTC)
    found = read_certificates(path)
    for certificate in found:
        if now > certificate.ends:
            raise ConfigError(
                f"{path}: the certificate of {certificate.subject} expired on "
                f"{certificate.ends:%Y-%m-%d}; ask for a new one"
            )
        if now < certificate.begins:
            raise ConfigError(
                f"{path}: the certificate of {certificate.subject} is not valid before "
                f"{certificate.begins:%Y-%m-%d}, and today is {now:%Y-%m-%d} here; is this "
                f"machine's clock right?"
            )
    return found


def _certificate(about: Mapping[str, Any]) -> Certificate:
    names = {key: value for entry in about["subject"] for key, value in entry}
    begins, ends = (
        datetime.fromtimestamp(ssl.cert_time_to_seconds(str(about[key])), UTC)
        for key in ("notBefore", "notAfter")
    )
    return Certificate(names.get("commonName", "nobody"), begins, ends)
