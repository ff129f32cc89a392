"""Fingerprints of images' content, which find copies without names or identifiers.

A fingerprint is a keyed hash (BLAKE2b) of the decoded pixels: a copy that was saved in another
lossless format, under another name and with other metadata has the same one. Two institutions that
agree on a secret salt can compare fingerprints and learn only which images both hold. Without the
salt a fingerprint reveals nothing; with it, only whether an image that one already has is among
them. Lossy and resampled copies have other fingerprints.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from collegium.data.decoded_image import Array
from collegium.data.reading import read_image
from collegium.data.site import Case
from collegium.data.splits import LeakageFinding, copies_finding
from collegium.errors import ConfigError, DataError

MIN_SALT_LENGTH = 16
"""In characters; a shorter salt could be guessed."""


def content_fingerprints(cases: Sequence[Case], salt: str) -> dict[Case, str]:
    """Return the fingerprint of each case's image.

    Args:
        cases: The cases of a site.
        salt: A secret that all institutions in the comparison share, and nobody else knows.

    Raises:
        ConfigError: The salt is too short.
        DataError: An image cannot be read.
    """
    return {case: fingerprint(_pixels(case), salt) for case in cases}


def fingerprint(image: Array, salt: str) -> str:
    """Return the fingerprint of an image under a salt.

    Values count as float32, whatever their stored type, and channels that are all identical count
    once: a grey picture saved in colour is the same picture.

    Args:
        image: (channels, *spatial).
        salt: See `content_fingerprints`.

    Raises:
        ConfigError: The salt is too short.
    """
    if len(salt) < MIN_SALT_LENGTH:
        raise ConfigError(
            f"the salt of fingerprints has {len(salt)} characters: agree on a secret of at least "
            f"{MIN_SALT_LENGTH}"
        )
    if len(image) > 1 and (image == image[:1]).all():
        image = image[:1]
    values = np.ascontiguousarray(image, "<f4") + np.float32(0)  # no -0.0, which equals 0.0
    key = hashlib.blake2b(salt.encode()).digest()
    digest = hashlib.blake2b(repr(values.shape).encode(), key=key, digest_size=32)
    digest.update(values.data)
    return digest.hexdigest()


def find_copies(
    fingerprints: Mapping[Case, str], known: Iterable[LeakageFinding] = ()
) -> list[LeakageFinding]:
    """Find images with identical pixels.

    Args:
        fingerprints: The fingerprint of each case, of all sites, under one salt.
        known: Findings of byte-identical files, which are not reported again.
    """
    same: dict[str, list[Case]] = defaultdict(list)
    for case, digest in fingerprints.items():
        same[digest].append(case)
    before = [set(finding.files) for finding in known]
    findings = []
    for cases in sorted((sorted(group, key=str) for group in same.values()), key=str):
        files = tuple(sorted({path for case in cases for path in case.images}))
        if len(cases) < 2 or any(set(files) <= group for group in before):
            continue
        what = "images of the same pixels"
        findings.append(copies_finding("identical_pixels", what, cases, files))
    return findings


def _pixels(case: Case) -> Array:
    both = case.label is not None and case.label in case.images
    try:
        parts = [read_image(path, series=case.series, both=both).array for path in case.images]
        return np.concatenate(parts)
    except (DataError, ValueError) as error:
        raise DataError(f"{case}: {error}") from error
