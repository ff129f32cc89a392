"""FLARE's jobs: a job carries messages between the server and the sites, and no code."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from collegium.distributed.kits import ADMIN, Kit
from collegium.errors import StorageError

JOB = "collegium"
"""The name of our jobs."""

CONNECT_SECONDS = 10.0
"""How long a try to reach the server may take."""

CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"


class ServerUnreachable(StorageError):  # noqa: N818
    """FLARE's server did not answer."""


def write_job(folder: Path, sites: Collection[str]) -> None:
    """Write the job that connects some sites: names of installed classes.

    FLARE's own recipe would copy sources into the job.

    Args:
        folder: where.
        sites: the sites that take part. Any certificate of the authority may register at the
            server; only these are in the job.
    """
    parts: dict[str, list[Any]] = {"task_data_filters": [], "task_result_filters": []}
    server = {
        "format_version": 2,
        **parts,
        "workflows": [{"id": "controller", "path": CONTROLLER, "args": {"server_obj_id": "relay"}}],
        "components": [{"id": "relay", "path": "collegium.distributed.relay.ServerRelay"}],
    }
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "relay"}}
    client = {
        "format_version": 2,
        **parts,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "relay", "path": "collegium.distributed.relay.SiteRelay"}],
    }
    meta = {
        "name": JOB,
        "min_clients": 1,
        "resource_spec": {},
        "deploy_map": {"app": ["server", *sorted(sites)]},
    }
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))


class Coordinator:
    """Speaks to FLARE's server with the kit of the administrator.

    Args:
        kit: the administrator's kit.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._session: Any = None

    def connected(self) -> dict[str, float]:
        """Return the sites that are connected, and when each was last seen (seconds since 1970).

        Raises:
            ServerUnreachable: the server does not answer.
        """
        with self._asking() as session:
            found = session.get_system_info().client_info
        return {client.name: float(client.last_connect_time or 0) for client in found}

    def submit(self, sites: Collection[str]) -> str:
        """Submit a job that connects some sites; return its id.

        A job of ours that still runs is ended first: the command that it carried for is gone.

        Args:
            sites: the sites.

        Raises:
            ServerUnreachable: the server does not answer.
        """
        from nvflare.fuel.flare_api.api_spec import InternalError

        with self._asking() as session, tempfile.TemporaryDirectory() as folder:
            for job in _running(session):
                with contextlib.suppress(InternalError):  # it ended with an earlier server
                    session.abort_job(job)
            write_job(Path(folder) / JOB, sites)
            return str(session.submit_job(str(Path(folder) / JOB)))

    def status(self, job: str) -> str:
        """Return a job's status, in FLARE's words such as RUNNING or FINISHED:COMPLETED.

        Args:
            job: its id.

        Raises:
            ServerUnreachable: the server does not answer.
        """
        with self._asking() as session:
            return str(session.get_job_meta(job).get("status"))

    def left(self, job: str, sites: Collection[str]) -> set[str]:
        """Return those of some sites that say that they do not run a job, or no longer.

        A relay that is started again registers at once, and knows nothing of the job before.

        Args:
            job: its id.
            sites: the sites.

        Raises:
            ServerUnreachable: the server does not answer.
        """
        with self._asking() as session:
            rows = session.get_client_job_status(sorted(sites)) or []
        running = {row["client_name"] for row in rows if row.get("job_id") == job}
        idle = {row["client_name"] for row in rows if row.get("status") == "no_jobs"}
        return (idle - running) & set(sites)

    def running(self) -> list[str]:
        """Return the ids of the jobs of ours that have not ended, the newest last.

        Raises:
            ServerUnreachable: the server does not answer.
        """
        with self._asking() as session:
            return _running(session)

    def wait(self, sites: Collection[str], seconds: float, seen_within: float) -> set[str]:
        """Wait until sites are connected; return those that are after some time.

        Args:
            sites: the sites that are waited for.
            seconds: how long.
            seen_within: the seconds in which FLARE has to have heard from a site.

        Raises:
            ServerUnreachable: the server did not answer in all that time.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                seen = self.connected()
                found = {s for s in sites if seen.get(s, 0) > time.time() - seen_within}
            except ServerUnreachable:
                if time.monotonic() > until:
                    raise
                found = set()
            if len(found) == len(set(sites)) or time.monotonic() > until:
                return found
            time.sleep(0.5)

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
                self._session.close()
        self._session = None

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Any]:
        """Yield a session; what goes wrong with it is one error, and the next try has a new one."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        try:
            with contextlib.redirect_stdout(io.StringIO()):
                if self._session is None:
                    self._session = new_secure_session(
                        ADMIN, str(self._kit.folder), timeout=CONNECT_SECONDS
                    )
                yield self._session
        except Exception as error:
            self.close()
            raise ServerUnreachable(
                f"the server {self._kit.server}, port {self._kit.port}, does not answer "
                f"({type(error).__name__}); start it with 'collegium server start'"
            ) from error


def _running(session: Any) -> list[str]:
    """Return the ids of the jobs of ours that have not ended, as a session of FLARE lists them."""
    return [
        str(job["job_id"])
        for job in session.list_jobs()
        if job.get("job_name") == JOB and not str(job["status"]).startswith("FINISHED")
    ]
