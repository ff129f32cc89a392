"""The commands of a federation over NVIDIA FLARE: `federation`, `server`, `site` and `status`."""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from collegium.cli.base import INTERRUPTED, AsJson, app, guarded, print_table
from collegium.core.text import format_bytes
from collegium.errors import NotInstalled

federation_app = typer.Typer(help="Prepare a federation of real sites.", no_args_is_help=True)
server_app = typer.Typer(help="Run the server of a federation.", no_args_is_help=True)
site_app = typer.Typer(help="Take part in a federation as a site.", no_args_is_help=True)
app.add_typer(federation_app, name="federation")
app.add_typer(server_app, name="server")
app.add_typer(site_app, name="site")

KitFolder = Annotated[Path, typer.Argument(metavar="KIT", help="The start-up kit.")]
SiteFile = Annotated[Path, typer.Argument(metavar="SITE", help="The site's own YAML file.")]


def _need_flare() -> None:
    from importlib.util import find_spec

    if find_spec("nvflare") is None:
        raise NotInstalled("NVIDIA FLARE is not installed; run: pip install 'collegium[flare]'")


@federation_app.command("init")
@guarded
def federation_init(
    folder: Annotated[Path, typer.Argument(help="Where the kits go.")],
    *,
    server: Annotated[str, typer.Option(help="Host name under which sites reach the server.")],
    site: Annotated[list[str], typer.Option(help="A site's name; once for each site.")],
    port: Annotated[int, typer.Option(help="The server's port.")] = 8002,
    scheme: Annotated[str, typer.Option(help="grpc, tcp or http, below mutual TLS.")] = "grpc",
    days: Annotated[
        int, typer.Option(help="How long the authority is valid; a kit: 360 days of it at most.")
    ] = 1825,
) -> None:
    """Make the start-up kits of a federation; again with more sites to add them."""
    _need_flare()
    from collegium.core.settings import from_mapping
    from collegium.distributed.kits import Provision, make_kits
    from collegium.errors import ConfigError

    wanted, problems = from_mapping(
        Provision,
        {"server": server, "sites": site, "port": port, "scheme": scheme, "days": days},
    )
    if wanted is None:
        raise ConfigError("; ".join(f"{'.'.join(map(str, p.path))}: {p.text}" for p in problems))
    _show_kits(folder, make_kits(folder, wanted))
    typer.echo(
        f"{folder / 'authority'} signs certificates: it stays here, and nobody else reads it"
    )


def _show_kits(folder: Path, kits: Mapping[str, Path]) -> None:
    """Print where new kits are, how long they are valid, and by what they can be compared."""
    from collegium.distributed.kits import check_certificate, fingerprint, read_kit

    for name, place in kits.items():
        role = place.name if place.parent == folder else "site"
        kit = read_kit(place, role)
        until = f"{check_certificate(kit):%Y-%m-%d}"
        typer.echo(f"{role} {name}: {place}, until {until}, fingerprint {fingerprint(kit)}")


@federation_app.command("renew")
@guarded
def federation_renew(
    folder: Annotated[Path, typer.Argument(help="The folder that 'federation init' made.")],
    sites: Annotated[
        list[str] | None, typer.Argument(metavar="[SITE]...", help="Without one: all kits.")
    ] = None,
    *,
    new_authority: Annotated[
        bool,
        typer.Option(
            "--new-authority",
            help="Replace the authority too: every kit before it is of no use from then on, and "
            "sites that are not named are out. An expired authority is always replaced.",
        ),
    ] = False,
) -> None:
    """Replace start-up kits that end, or whose key is lost, by new ones."""
    _need_flare()
    from collegium.distributed.renewal import renew_kits

    _show_kits(folder, renew_kits(folder, sites or (), new_authority=new_authority))


@site_app.command("fingerprint")
@guarded
def site_fingerprint(kit: KitFolder) -> None:
    """Check a start-up kit, and print the fingerprint to compare with the coordinator's."""
    _need_flare()
    from collegium.distributed.kits import check_certificate, fingerprint, read_kit

    found = read_kit(kit, "site")
    typer.echo(f"site {found.name}, server {found.server}, port {found.port}")
    typer.echo(f"valid until {check_certificate(found):%Y-%m-%d}")
    typer.echo(fingerprint(found))


@federation_app.command("demo")
@guarded
def federation_demo(
    folder: Annotated[
        Path, typer.Argument(help="The folder of everything; an earlier demo in it goes on.")
    ] = Path("collegium-demo-network"),
    *,
    port: Annotated[
        int | None, typer.Option(help="The server's port; without it one that is free.")
    ] = None,
) -> None:
    """Run a server and three hospitals on this machine, as processes that speak over mutual TLS."""
    _need_flare()
    from collegium.distributed.demo import run_demo

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(INTERRUPTED))
    typer.echo(run_demo(folder, lambda line: typer.echo(line, err=True), port=port))


@server_app.command("start")
@guarded
def server_start(kit: KitFolder) -> None:
    """Run FLARE's server in the foreground, until it is ended."""
    _need_flare()
    from collegium.distributed.kits import read_kit
    from collegium.distributed.processes import replace_process, server_command

    found = read_kit(kit, "server")
    replace_process(found, *server_command(found))


@site_app.command("start")
@guarded
def site_start(
    site: SiteFile,
    *,
    kit: Annotated[
        Path | None,
        typer.Option(help="The start-up kit; without it only the site process runs, no relay."),
    ] = None,
    log: Annotated[
        Literal["text", "json"],
        typer.Option(help="text, or json: lines without patients and paths, for a log collector."),
    ] = "text",
) -> None:
    """Run the site process, and beside it the relay, until it is ended."""
    from collegium.distributed.logs import start_log
    from collegium.distributed.site import SiteProcess, read_site_settings

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = read_site_settings(site)
    start_log(log, Path(settings.state))
    if kit is None:
        SiteProcess(settings).serve()
        return
    _need_flare()
    from collegium.distributed.kits import read_kit
    from collegium.distributed.processes import relay_beside
    from collegium.distributed.site import check_name

    found = read_kit(kit, "site")
    check_name(settings, found)
    settings = replace(settings, identity=settings.identity or str(found.authority.parent))
    with relay_beside(found, settings.socket):
        SiteProcess(settings).serve()


@site_app.command("relay")
@guarded
def site_relay(
    site: SiteFile, *, kit: Annotated[Path, typer.Option(help="The start-up kit.")]
) -> None:
    """Run the relay alone, such as by another user who may not read the images."""
    _need_flare()
    from collegium.distributed.kits import read_kit
    from collegium.distributed.processes import relay_command, replace_process
    from collegium.distributed.site import check_name, read_site_settings

    settings, found = read_site_settings(site), read_kit(kit, "site")
    check_name(settings, found)
    replace_process(found, *relay_command(found, settings.socket))


@site_app.command("experiments")
@guarded
def site_experiments(site: SiteFile, *, as_json: AsJson = False) -> None:
    """List the experiments that the server asked for, and whether they are accepted."""
    from collegium.distributed.acceptance import Acceptance
    from collegium.distributed.site import read_site_settings

    found = Acceptance(Path(read_site_settings(site).state)).listed()
    if as_json:
        typer.echo(
            json.dumps(
                {d: {"accepted": yes, **about} for d, (yes, about) in found.items()}, indent=1
            )
        )
        return
    rows = []
    for digest, (accepted, about) in found.items():
        settings = about["settings"]
        methods = ", ".join(algorithm["label"] for algorithm in settings["algorithms"])
        rows.append((digest, "accepted" if accepted else "waits", settings["name"], methods))
    print_table(rows, ("digest", "state", "experiment", "algorithms"))


@site_app.command("accept")
@guarded
def site_accept(
    site: SiteFile, digest: Annotated[str, typer.Argument(help="The digest, or its first digits.")]
) -> None:
    """Accept an experiment that the server asked for."""
    from collegium.distributed.acceptance import Acceptance
    from collegium.distributed.site import read_site_settings

    Acceptance(Path(read_site_settings(site).state)).accept(digest)


def progress_text(run: dict[str, Any] | None) -> str:
    """Return in a line where a run stands.

    Args:
        run: as `federation_status` returns it.
    """
    if run is None:
        return "no experiment runs"
    text = f"experiment {run['experiment']}: {run.get('algorithm', '')}, seed {run.get('seed', 0)}"
    if run.get("round"):
        text += f", round {run['round']} of {run['rounds']}"
    if run.get("bytes_up"):
        up, down = format_bytes(run["bytes_up"]), format_bytes(run.get("bytes_down", 0))
        text += f", {up} up and {down} down in it"
    return text


@site_app.command("ledger")
@guarded
def site_ledger(site: SiteFile, *, as_json: AsJson = False) -> None:
    """Show what left this site, and check that nobody changed the record of it."""
    from collegium.distributed.ledgers import check_ledgers, read_ledgers
    from collegium.distributed.site import read_site_settings

    state = Path(read_site_settings(site).state)
    found = read_ledgers(state)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    elif found:
        rows = [
            (one["ledger"], str(one["messages"]), str(one["rounds"]), ", ".join(one["parts"]),
             format_bytes(one["bytes"]), one["last"])
            for one in found
        ]  # fmt: skip
        print_table(rows, ("ledger", "messages", "rounds", "parts", "bytes", "last hash"))
    check_ledgers(found, state)


@app.command("status")
@guarded
def status(
    folder: Annotated[Path, typer.Argument(help="The folder that 'federation init' made.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the server of a federation, its sites, when they were seen, and certificates."""
    _need_flare()
    from collegium.distributed.status import federation_status

    found = federation_status(folder)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    days = found["certificate_days"]
    typer.echo(f"server {found['server']}: {found['state']}, certificate {days} days")
    typer.echo(progress_text(found["run"]))
    rows = [
        (s["name"], s["state"], "" if s["seen"] is None else f"{s['seen']:.0f} s ago",
         "" if s["certificate_days"] is None else f"{s['certificate_days']} days")
        for s in found["sites"]
    ]  # fmt: skip
    print_table(rows, ("site", "state", "last seen", "certificate"))
