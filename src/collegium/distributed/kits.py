"""Start-up kits of a federation: certificates and settings, made by FLARE's own provisioning.

`collegium federation init` makes them once, on a machine of whoever runs the server. A kit holds a
private key: it goes to its site over a channel that others cannot read. No copy of a participant's
key stays with the authority.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import yaml

from collegium.core.files import write_atomically
from collegium.core.settings import PositiveInt, settings
from collegium.errors import ConfigError, StorageError

ADMIN = "coordinator@collegium.org"
"""The administrator by whose kit `collegium run` submits jobs."""

PROJECT = "federation"
"""The folder below ``authority`` in which FLARE keeps the authority's key."""

SETTINGS = "federation.json"
"""The file of a kit that says what it is for; see `Kit`."""

ALLOWED = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "collegium.distributed.relay.",
)
"""The classes that a job may name; an entry that ends in a dot is a prefix. No code travels."""


CONNECTIONS = {
    "internal": {
        "scheme": "tcp",
        "resources": {"host": "localhost", "connection_security": "mtls"},
    }
}
"""How FLARE's processes of one machine speak to each other: its default is a port without a key."""

SHARED = Path("/", "tmp", "nvflare")
"""Where FLARE's defaults keep the jobs of all servers of a machine."""


@settings
class Provision:
    """The parts of a federation, from which its kits are made.

    Attributes:
        server: the host name under which the sites reach the server; its certificate is for it.
        sites: the sites' names.
        port: the port to which sites and `collegium run` connect.
        scheme: the protocol below mutual TLS.
        days: how long the authority is valid; a kit is as long as that, and 360 days at most.
    """

    server: str
    sites: tuple[str, ...]
    port: PositiveInt = 8002
    scheme: Literal["grpc", "tcp", "http"] = "grpc"
    days: PositiveInt = 1825

    def __post_init__(self) -> None:
        names = [*self.sites, self.server]
        if not self.sites or len({name.lower() for name in names}) < len(names):
            raise ConfigError("name one or more sites, each once and none like the server")
        for name in self.sites:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise ConfigError(
                    f"the site {name!r} cannot be in a certificate; use a-z, 0-9, _, -"
                )


@dataclass(frozen=True)
class Kit:
    """A participant's start-up kit, a folder.

    Attributes:
        folder: the folder.
        role: server, site or admin.
        name: the participant's name, which is in its certificate.
        server: the host name of the server.
        port: the server's port.
        sites: the sites for which kits were made; empty in a site's kit.
    """

    folder: Path
    role: Literal["server", "site", "admin"]
    name: str
    server: str
    port: int
    sites: tuple[str, ...] = ()

    @property
    def certificate(self) -> Path:
        """The file of its own certificate."""
        return self.folder / "startup" / ("server.crt" if self.role == "server" else "client.crt")

    @property
    def private_key(self) -> Path:
        """The file of its own private key."""
        return self.certificate.with_suffix(".key")

    @property
    def authority(self) -> Path:
        """The file of the certificate of the authority that has signed its own."""
        return self.folder / "startup" / "rootCA.pem"


def read_kit(folder: Path, role: str) -> Kit:
    """Read what a kit is for, and check that FLARE can use it today.

    FLARE's client waits for ever, without a word, where its certificate is of no use.

    Args:
        folder: the kit.
        role: server, site or admin.

    Raises:
        ConfigError: it is no such kit, or its certificate is expired, not valid yet, of another
            authority or for another name.
    """
    path = folder / SETTINGS
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        kit = Kit(folder.resolve(), **{**about, "sites": tuple(about["sites"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{folder} is no start-up kit ({SETTINGS} is missing or damaged); name the folder that "
            f"'collegium federation init' made"
        ) from error
    if kit.role != role:
        raise ConfigError(f"{folder} is the kit of a {kit.role}, and a {role}'s is needed")
    check_certificate(kit)
    return kit


def check_certificate(kit: Kit, now: datetime | None = None) -> datetime:
    """Check dates, authority and name of a kit's certificate.

    Args:
        kit: the kit.
        now: the time of the check; None: this machine's clock.

    Returns:
        When the kit ends to be valid: its own certificate, or that of its authority.

    Raises:
        ConfigError: the certificate is of no use.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509.oid import NameOID

    now = now or datetime.now(UTC)
    own, root = kit.certificate, kit.authority
    try:
        found = {path: x509.load_pem_x509_certificate(path.read_bytes()) for path in (own, root)}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{kit.folder} holds no readable certificate ({type(error).__name__}); ask for the "
            f"start-up kit of {kit.name} again"
        ) from error
    for path, certificate in found.items():
        if now > certificate.not_valid_after_utc:
            raise ConfigError(
                f"{path}: the certificate expired on {certificate.not_valid_after_utc:%Y-%m-%d}; "
                f"ask whoever runs the server for a new start-up kit ('collegium federation renew')"
            )
        if now < certificate.not_valid_before_utc:
            raise ConfigError(
                f"{path}: the certificate is not valid before "
                f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and it is "
                f"{now:%Y-%m-%d %H:%M} here; set this machine's clock"
            )
    try:
        found[own].verify_directly_issued_by(found[root])
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ConfigError(
            f"{own} is not signed by the authority in {root.name}; the files of two federations "
            f"are mixed up: ask for the start-up kit of {kit.name} again"
        ) from error
    names = [str(a.value) for a in found[own].subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if kit.name[:64] not in names:
        raise ConfigError(
            f"{own} is for {', '.join(names)}, and the kit is that of {kit.name}; ask for the "
            f"start-up kit of {kit.name} again"
        )
    return min(certificate.not_valid_after_utc for certificate in found.values())


def make_kits(folder: Path, wanted: Provision) -> dict[str, Path]:
    """Make the start-up kits of a federation: ``server``, ``admin`` and ``sites/<name>``.

    A folder that holds a federation already keeps its authority: only the kits of sites that it
    has not are made, so that sites can join later.

    Args:
        folder: where; the certificate authority is in ``authority``, which stays there.
        wanted: what the kits are made of.

    Returns:
        The new kits by the participants' names.

    Raises:
        ConfigError: the folder holds a federation of another server.
        StorageError: it cannot be written.
    """
    places = {wanted.server: folder / "server", ADMIN: folder / "admin"}
    places |= {site: folder / "sites" / site for site in wanted.sites}
    if (folder / "server" / SETTINGS).exists():
        wanted = _extended(folder / "server", wanted)
    missing = {name: place for name, place in places.items() if not place.exists()}
    if not missing:
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "authority").mkdir(mode=0o700, exist_ok=True)
        place_kits(folder, wanted, missing)
        for name in (wanted.server, ADMIN):  # which sites there are
            _describe(places[name], wanted, name)
    except OSError as error:
        raise StorageError(f"the kits cannot be written to {folder} ({error.strerror})") from error
    return missing


def _extended(kit: Path, wanted: Provision) -> Provision:
    """Return what there are kits for together with the sites that are wanted."""
    there = read_provision(kit.parent)
    if (there.server, there.port) != (wanted.server, wanted.port):
        raise ConfigError(
            f"{kit.parent} holds the federation of {there.server}, port {there.port}; choose "
            f"another folder, or add sites with the same server and port"
        )
    return replace(there, sites=tuple(dict.fromkeys([*there.sites, *wanted.sites])))


def read_provision(folder: Path) -> Provision:
    """Return what the kits in a folder were made of.

    Args:
        folder: the folder that `make_kits` made.

    Raises:
        ConfigError: it holds no federation, or not its authority.
    """
    try:
        about = json.loads((folder / "server" / SETTINGS).read_text(encoding="utf-8"))
        project = yaml.safe_load((folder / "authority" / "project.yml").read_text("utf-8"))
        builders = [builder.get("args", {}) for builder in project["builders"]]
        days, scheme = (
            next(given[key] for given in builders if key in given)
            for key in ("root_valid_days", "scheme")
        )
        sites = tuple(about["sites"])
        return Provision(about["server"], sites, port=about["port"], scheme=scheme, days=days)
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{folder} holds no federation ({type(error).__name__}); name the folder that "
            f"'collegium federation init' made, with its authority"
        ) from error


def place_kits(folder: Path, wanted: Provision, places: Mapping[str, Path]) -> None:
    """Make kits with new keys, and put them into their places; what is there beside them stays.

    Args:
        folder: the folder of the federation.
        wanted: what the kits are made of.
        places: the folders of the kits that are made, by the participants' names.

    Raises:
        OSError: a kit cannot be written.
    """
    made = _provision(folder / "authority", wanted)
    for name, place in places.items():
        for part in ("startup", "local"):
            shutil.rmtree(place / part, ignore_errors=True)
        shutil.copytree(made / name, place, copy_function=_copy, dirs_exist_ok=True)
        _describe(place, wanted, name)
    shutil.rmtree(made)  # the keys are in the kits now, and nowhere else
    state = folder / "authority" / PROJECT / "state" / "cert.json"
    kept = json.loads(state.read_text(encoding="utf-8"))
    kept = {name: value for name, value in kept.items() if isinstance(value, str)}
    write_atomically(state, json.dumps(kept).encode(), private=True)


def _copy(source: str, target: str) -> str:
    """Copy a file of a kit, a private key so that nobody but its owner could ever read it."""
    if not source.endswith(".key"):
        return shutil.copy2(source, target)
    write_atomically(Path(target), Path(source).read_bytes(), private=True)
    return target


def _provision(root: Path, wanted: Provision) -> Path:
    """Run FLARE's provisioning; return the folder with a kit for every participant."""
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.provision import prepare_builders, prepare_project
    from nvflare.lighter.provisioner import Provisioner

    org = {"org": "collegium"}
    project = {
        "api_version": 3,
        "name": PROJECT,
        "participants": [
            {"name": wanted.server, "type": "server", **org, "fed_learn_port": wanted.port}
            | {"admin_port": wanted.port},
            *({"name": site, "type": "client", **org} for site in wanted.sites),
            {"name": ADMIN, "type": "admin", **org, "role": "project_admin"},
        ],
        "builders": [
            {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder"},
            {
                "path": "nvflare.lighter.impl.static_file.StaticFileBuilder",
                "args": {"config_folder": "config", "scheme": wanted.scheme},
            },
            {
                "path": "nvflare.lighter.impl.cert.CertBuilder",
                "args": {"root_valid_days": wanted.days},
            },
            {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
        ],
    }
    write_atomically(root / "project.yml", yaml.safe_dump(project, sort_keys=False).encode())
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        context = Provisioner(str(root), prepare_builders(project)).provision(
            prepare_project(project)
        )
    if context.get(CtxKey.BUILD_ERROR):
        reason = said.getvalue().strip().rpartition("\n")[2]
        raise ConfigError(f"the kits could not be made ({reason}); is {root} damaged?")
    return Path(context["current_prod_dir"])


def _describe(kit: Path, wanted: Provision, name: str) -> None:
    """Write what a kit is for."""
    role = "server" if name == wanted.server else "admin" if name == ADMIN else "site"
    about = {"role": role, "name": name, "server": wanted.server, "port": wanted.port}
    about["sites"] = [] if role == "site" else list(wanted.sites)
    write_atomically(kit / SETTINGS, json.dumps(about, indent=1).encode())


def write_settings(kit: Kit) -> None:
    """Write FLARE's settings of a server or a site from its defaults, before each start.

    Jobs may name our classes only; no log is streamed to the server, since a site's log may hold
    tracebacks and paths; the job store is in the kit, not in a folder that all servers of a machine
    share; and nobody on the machine enters without the kit's key.

    Args:
        kit: the kit.
    """
    local = kit.folder / "local"
    found = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    found["class_allow_list"] = list(ALLOWED)
    found["class_list_enforcement_mode"] = "enforce"
    found["allow_log_streaming"] = False
    found["components"] = [
        part for part in found.get("components", []) if part["id"] != "site_log_streamer"
    ]
    text = json.dumps(found, indent=1).replace(f"{SHARED}/", f"{kit.folder / 'store'}/")
    write_atomically(local / "resources.json", text.encode())
    write_atomically(local / "comm_config.json", json.dumps(CONNECTIONS).encode())


def days_left(kits: Sequence[Kit], now: datetime | None = None) -> dict[str, int]:
    """Return for how many days the certificate of each kit is valid still.

    Args:
        kits: the kits.
        now: see `check_certificate`.
    """
    now = now or datetime.now(UTC)
    return {kit.name: (check_certificate(kit, now) - now).days for kit in kits}


def fingerprint(kit: Kit) -> str:
    """Return the SHA-256 of a kit's certificate, which two people can compare by telephone."""
    from hashlib import sha256

    data = ssl.PEM_cert_to_DER_cert(kit.certificate.read_text(encoding="ascii"))
    return sha256(data).hexdigest()
