"""Fingerprints of images' content, by which copies are found without names or identifiers.

A fingerprint is a keyed hash (BLAKE2b) of the decoded pixels: a copy that was saved in another
lossless format, under another name and with other metadata has the same. Two institutions that
agree on a secret salt can compare fingerprints and learn only which images both hold; without the
salt a fingerprint tells nothing, and with it only whether an image that one has already is among
them. Lossy copies and resampled ones differ.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from collegium.data.decoded import Array
from collegium.data.reading import read_image
from collegium.data.site import Case
from collegium.data.splits import Finding
from collegium.errors import ConfigError, DataError

SHORTEST_SALT = 16
"""The fewest characters of a salt: a short one can be guessed."""


def content_fingerprints(cases: Sequence[Case], salt: str) -> dict[Case, str]:
    """Give the fingerprint of each case's image.

    Args:
        cases: The cases of a site.
        salt: A secret that all who compare share, and nobody else knows.

    Raises:
        ConfigError: If the salt is too short.
        DataError: If an image cannot be read.
    """
    return {case: fingerprint(_pixels(case), salt) for case in cases}


def fingerprint(image: Array, salt: str) -> str:
    """Hash an image (channels, *spatial) under a salt.

    Values count as float32, whatever type they were stored in, and channels that are all the same
    count once: a grey picture saved in colours is the same picture.

    Raises:
        ConfigError: If the salt is too short.
    """
    if len(salt) < SHORTEST_SALT:
        raise ConfigError(
            f"the salt of fingerprints has {len(salt)} characters: agree on a secret of at least "
            f"{SHORTEST_SALT}"
        )
    if len(image) > 1 and (image == image[:1]).all():
        image = image[:1]
    values = np.ascontiguousarray(image, "<f4") + np.float32(0)  # no -0.0, which equals 0.0
    key = hashlib.blake2b(salt.encode()).digest()
    digest = hashlib.blake2b(repr(values.shape).encode(), key=key, digest_size=32)
    digest.update(values.data)
    return digest.hexdigest()


def find_copies(fingerprints: Mapping[Case, str], known: Iterable[Finding] = ()) -> list[Finding]:
    """Find images with the same pixels.

    Args:
        fingerprints: The fingerprint of each case, of all sites, under one salt.
        known: Findings of byte-identical files, which are not found again.
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
        named = " and ".join(str(case) for case in cases)
        text = (
            f"{named} have images of the same pixels ({', '.join(map(str, files[:3]))}"
            f"{f' and {len(files) - 3} more' if len(files) > 3 else ''}): keep one of them, or "
            "name one patient for them so that they stay in one split"
        )
        sites, patients = ({case.site for case in cases}, {case.patient for case in cases})
        findings.append(
            Finding("identical_pixels", tuple(sorted(sites)), tuple(sorted(patients)), files, text)
        )
    return findings


def _pixels(case: Case) -> Array:
    both = case.label is not None and case.label in case.images
    try:
        parts = [read_image(path, series=case.series, both=both).array for path in case.images]
        return np.concatenate(parts)
    except (DataError, ValueError) as error:
        raise DataError(f"{case}: {error}") from error
