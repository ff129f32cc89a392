"""New start-up kits for those that end, or whose key is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from collegium.distributed.kits import (
    ADMIN,
    PROJECT,
    SETTINGS,
    Kit,
    place_kits,
    read_provision,
)
from collegium.distributed.processes import hold
from collegium.errors import ConfigError, StorageError


def renew_kits(
    folder: Path,
    sites: Collection[str] = (),
    *,
    new_authority: bool = False,
    now: datetime | None = None,
) -> dict[str, Path]:
    """Replace start-up kits of a federation by new ones, with new keys.

    A new authority, which an expired one makes necessary, ends the life of every kit before it: all
    are replaced, and sites that are not named have none afterwards.

    Args:
        folder: the folder that `collegium federation init` made.
        sites: the sites whose kits are replaced; without one those of all participants.
        new_authority: whether the authority is replaced too.
        now: the time of the check; None: this machine's clock.

    Returns:
        The new kits by the participants' names.

    Raises:
        ConfigError: there is no such federation or site, or the authority has expired and only some
            kits would be replaced.
        StorageError: a kit is in use, or cannot be written.
    """
    wanted = read_provision(folder)
    unknown = sorted(set(sites) - set(wanted.sites))
    if unknown:
        raise ConfigError(
            f"there is no site {', '.join(unknown)} in {folder} ({', '.join(wanted.sites)}); "
            f"correct the name, or add it with 'collegium federation init'"
        )
    ends = authority_ends(folder)
    expired = ends <= (now or datetime.now(UTC))
    if expired and sites and not new_authority:
        raise ConfigError(
            f"the authority in {folder} expired on {ends:%Y-%m-%d}, so that every kit has to be "
            f"replaced: name no site, or add --new-authority to go on with these sites only"
        )
    places = {site: folder / "sites" / site for site in sites or wanted.sites}
    if expired or new_authority:
        wanted = replace(wanted, sites=tuple(s for s in wanted.sites if s in places))
    if expired or new_authority or not sites:
        places = {wanted.server: folder / "server", ADMIN: folder / "admin", **places}
    for name, place in places.items():
        if (place / SETTINGS).exists():  # a site's may have been removed once it was handed over
            os.close(hold(Kit(place, "site", name, wanted.server, wanted.port)))
    try:
        if expired or new_authority:
            shutil.rmtree(folder / "authority" / PROJECT)
        place_kits(folder, wanted, places)
    except OSError as error:
        raise StorageError(f"the kits cannot be written to {folder} ({error.strerror})") from error
    return places


def authority_ends(folder: Path) -> datetime:
    """Return when the authority of a federation ends to be valid.

    Args:
        folder: the folder that `collegium federation init` made.

    Raises:
        ConfigError: it holds no certificate of an authority.
    """
    from cryptography import x509

    path = folder / "server" / "startup" / "rootCA.pem"
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no readable certificate ({type(error).__name__}); name the folder that "
            f"'collegium federation init' made"
        ) from error
