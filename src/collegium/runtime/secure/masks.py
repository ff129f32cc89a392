"""Keys, masks that cancel in a sum, and the integers that are masked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from collegium.errors import ProtocolError

Words = npt.NDArray[np.unsignedinteger[Any]]
"""Integers modulo 2^32 or 2^64: what is added to them wraps around."""


@dataclass(frozen=True)
class Roster:
    """The sites of one sum: what each of them has to agree on before it masks its reply.

    Attributes:
        round: the round.
        exchange: the exchange of training in it.
        nonce: a new random value for every sum.
        parts: the parts that are averaged.
        weight: the part that holds the weight; None: all weigh the same.
        keys: by site its public key, in hexadecimal digits.
        signatures: by site the certificate and the signature of its key; empty where there are
            none.
    """

    round: int
    exchange: int
    nonce: str
    parts: Sequence[str]
    weight: str | None
    keys: Mapping[str, str]
    signatures: Mapping[str, Mapping[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """The SHA-256 of all of it, from which masks are derived: another sum has other masks."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class FixedPoint:
    """Numbers as multiples of a step, in integers modulo a power of two.

    Attributes:
        bits: of an integer, 32 or 64.
        fraction_bits: the step is two to the minus this.
    """

    bits: int
    fraction_bits: int

    @property
    def words(self) -> np.dtype[Any]:
        """The type of the integers."""
        return np.dtype(f"<u{self.bits // 8}")

    def limit(self, sites: int) -> float:
        """Return the largest number that a site may send so that no sum over sites can wrap.

        Args:
            sites: how many sites are added.
        """
        most = ((1 << (self.bits - 1)) - 1) // sites
        return float(np.nextafter(np.float64(most), 0.0)) / 2.0**self.fraction_bits

    def encode(self, numbers: npt.NDArray[np.float64], sites: int) -> Words:
        """Return numbers as integers, each rounded to the nearest step.

        Args:
            numbers: finite numbers.
            sites: how many sites are added.

        Raises:
            OverflowError: one is beyond `limit`.
        """
        if not (np.abs(numbers) <= self.limit(sites)).all():
            raise OverflowError
        steps = np.rint(numbers * 2.0**self.fraction_bits)
        return steps.astype(np.int64).view(np.uint64).astype(self.words)

    def decode(self, total: Words) -> npt.NDArray[np.float64]:
        """Return the numbers that integers stand for.

        Args:
            total: a sum of what `encode` returned.
        """
        signed = total.view(np.dtype(f"<i{self.bits // 8}"))
        return signed.astype(np.float64) / 2.0**self.fraction_bits


def new_private_key() -> str:
    """Return a new X25519 private key, in hexadecimal digits."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate().private_bytes_raw().hex()


def public_key(private: str) -> str:
    """Return the public key of a private key, both in hexadecimal digits."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    return key.public_key().public_bytes_raw().hex()


def mask(private: str, own: str, roster: Roster, count: int, words: np.dtype[Any]) -> Words:
    """Return the sum of a site's masks: added up over all sites of a roster they are zero.

    The key of two sites is that of X25519, stretched by HKDF-SHA256 together with the roster's
    digest; the mask is the keystream of AES-256 in counter mode. Of two sites, the one whose name
    comes first adds the mask, and the other subtracts it.

    Args:
        private: the site's private key, in hexadecimal digits.
        own: its name.
        roster: the sites of the sum.
        count: how many integers are masked.
        words: their type.

    Raises:
        ProtocolError: the key of another site is none.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    mine = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
    about = b"collegium secure mean " + bytes.fromhex(roster.digest)
    zeros = bytes(count * words.itemsize)
    total = np.zeros(count, words)
    for other, key in sorted(roster.keys.items()):
        if other == own:
            continue
        try:
            shared = mine.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
        except ValueError as error:
            raise ProtocolError(f"the key of {other!r} is no public key") from error
        seed = HKDF(hashes.SHA256(), 32, salt=None, info=about).derive(shared)
        stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(zeros)
        numbers = np.frombuffer(stream, words)
        if own < other:
            total += numbers
        else:
            total -= numbers
    return total
