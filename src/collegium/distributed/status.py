"""What a federation's coordinator sees: server, job, sites, and the life of certificates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from collegium.distributed.connection import SEEN_SECONDS
from collegium.distributed.jobs import Coordinator, ServerUnreachable
from collegium.distributed.kits import Kit, days_left, read_kit
from collegium.distributed.processes import PROGRESS
from collegium.errors import ConfigError


def federation_status(folder: Path) -> dict[str, Any]:
    """Return the state of the server, of the current job and of every site.

    Args:
        folder: the folder with the kits of server and administrator.

    Raises:
        ConfigError: the kits are not there or not valid.
    """
    server, admin = read_kit(folder / "server", "server"), read_kit(folder / "admin", "admin")
    coordinator = Coordinator(admin)
    try:
        seen, running, state = coordinator.connected(), coordinator.running(), "running"
    except ServerUnreachable:
        seen, running, state = {}, [], "does not answer"
    finally:
        coordinator.close()
    return {
        "server": f"{server.server}:{server.port}",
        "state": state,
        "certificate_days": days_left([server])[server.name],
        "job": running[-1] if running else None,
        "run": _progress(server) if running else None,
        "sites": [_site(folder, name, seen.get(name)) for name in server.sites],
    }


def _progress(server: Kit) -> dict[str, Any] | None:
    """Return where the current run stands, as `collegium run` wrote it last."""
    path = server.folder / PROGRESS
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _site(folder: Path, name: str, seen: float | None) -> dict[str, Any]:
    ago = None if seen is None else max(0.0, time.time() - seen)
    state = "not connected" if ago is None or ago > SEEN_SECONDS else "connected"
    return {"name": name, "state": state, "seen": ago, "certificate_days": _days(folder, name)}


def _days(folder: Path, site: str) -> int | None:
    """Return for how long a site's certificate is valid still; None where its kit is not here."""
    try:
        kit: Kit = read_kit(folder / "sites" / site, "site")
    except ConfigError:
        return None
    return days_left([kit])[site]
