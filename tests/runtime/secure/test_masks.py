"""Masks against a computation by RFC 7748 and RFC 5869, and the integers against exact ones."""

import hashlib
import hmac
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from collegium.errors import ProtocolError
from collegium.runtime.secure.masks import FixedPoint, Roster, mask, public_key

P = 2**255 - 19


def private(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def roster_of(names, nonce: str = "00") -> Roster:
    keys = {name: public_key(private(name)) for name in names}
    return Roster(1, 0, nonce, ["model"], "num_examples", keys, {})


def x25519(scalar: bytes, point: int) -> bytes:
    """The Montgomery ladder as RFC 7748 writes it down, in whole numbers."""
    k = int.from_bytes(scalar, "little")
    k = (k & ~7 & ~(1 << 255)) | 1 << 254
    x1, x2, z2, x3, z3, swap = point, 1, 0, point, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % P, b * b % P, d * a % P, c * b % P
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % P, x1 * (da - cb) ** 2 % P
        x2, z2 = aa * bb % P, e * (aa + 121665 * e) % P
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, P - 2, P) % P).to_bytes(32, "little")


def test_masks_are_those_of_the_standards():
    roster, count = roster_of("AB"), 5
    a, b = (bytes.fromhex(private(name)) for name in "AB")
    public = x25519(b, 9)
    assert public.hex() == roster.keys["B"]
    shared = x25519(a, int.from_bytes(public, "little") & ((1 << 255) - 1))
    extracted = hmac.digest(bytes(32), shared, "sha256")
    about = b"collegium secure mean " + bytes.fromhex(roster.digest)
    key = hmac.digest(extracted, about + b"\x01", "sha256")
    blocks = b"".join(number.to_bytes(16, "big") for number in range(3))
    stream = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)
    words = np.dtype("<u8")
    expected = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(count)]
    assert mask(private("A"), "A", roster, count, words).tolist() == expected
    other = mask(private("B"), "B", roster, count, words).tolist()
    assert other == [(-number) % 2**64 for number in expected]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("names", ["AB", "ABC", "ABCDEFG"])
def test_masks_of_all_sites_cancel_and_those_of_some_do_not(bits, names):
    roster, words = roster_of(names), FixedPoint(bits, 8).words
    masks = [mask(private(name), name, roster, 100, words) for name in names]
    assert not np.sum(masks, axis=0, dtype=words).any()
    assert np.count_nonzero(np.sum(masks[1:], axis=0, dtype=words)) > 95


def test_another_sum_has_other_masks_under_the_same_keys():
    words = np.dtype("<u8")
    first = mask(private("A"), "A", roster_of("ABC"), 100, words)
    for other in (roster_of("ABC", nonce="01"), roster_of("ABD"), roster_of("ABCD")):
        assert not np.intersect1d(first, mask(private("A"), "A", other, 100, words)).size


@pytest.mark.parametrize("bits", [32, 64])
def test_a_masked_reply_looks_uniform_whatever_is_masked(bits):
    """The same reply, all zeros, of each site: bytes by chi-square, integers by Kolmogorov."""
    numbers, count = FixedPoint(bits, 16), 1 << 15
    for name in "ABC":
        words = numbers.encode(np.zeros(count), 3)
        words = words + mask(private(name), name, roster_of("ABC"), count, numbers.words)
        counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-3
        assert stats.kstest(words / 2.0**bits, "uniform").pvalue > 1e-3


def test_what_is_no_public_key_is_refused():
    for key in ("00" * 32, "zz", "00"):
        roster = Roster(1, 0, "00", ["model"], None, {"A": public_key(private("A")), "B": key}, {})
        with pytest.raises(ProtocolError, match="'B' is no public key"):
            mask(private("A"), "A", roster, 1, np.dtype("<u8"))


@pytest.mark.parametrize(("bits", "fraction_bits"), [(32, 0), (32, 16), (64, 24), (64, 56)])
def test_a_sum_of_the_largest_numbers_does_not_wrap(bits, fraction_bits):
    numbers = FixedPoint(bits, fraction_bits)
    for sites in (1, 2, 3, 7, 100, 1000):
        limit = numbers.limit(sites)
        for sign in (1.0, -1.0):
            words = numbers.encode(np.array([sign * limit]), sites)
            total = np.sum([words] * sites, axis=0, dtype=numbers.words)
            exact = sites * int(words.view(f"<i{bits // 8}")[0])
            assert abs(exact) < 2 ** (bits - 1)
            assert Fraction(float(numbers.decode(total)[0])) == Fraction(
                float(exact) / 2.0**fraction_bits
            )
        for beyond in (np.nextafter(limit, np.inf), -1.01 * limit, np.nan, np.inf):
            with pytest.raises(OverflowError):
                numbers.encode(np.array([0.0, beyond]), sites)


@pytest.mark.parametrize(("bits", "fraction_bits"), [(32, 12), (64, 24)])
def test_numbers_are_off_by_half_a_step_at_most(bits, fraction_bits):
    numbers = FixedPoint(bits, fraction_bits)
    values = np.random.default_rng(5).normal(size=1000) * 1000
    found = numbers.decode(numbers.encode(values, 100))
    assert np.abs(found - values).max() <= 0.5 / 2**fraction_bits
    assert np.abs(found - values).max() > 0.4 / 2**fraction_bits
