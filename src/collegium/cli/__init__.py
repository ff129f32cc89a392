"""The command line. Every command imports what it needs when it runs, so that `--help` is quick."""

from collegium.cli.base import app, guarded, logger

# `collegium --help` lists the commands in the order of these imports.
# isort: off
from collegium.cli import run, report, assess, adapt, predict, export, demo, phantoms
from collegium.cli import list as list_
from collegium.cli import check, inspect, certificate, drift, partition, config
# isort: on

__all__ = [
    "adapt",
    "app",
    "assess",
    "certificate",
    "check",
    "config",
    "demo",
    "drift",
    "export",
    "guarded",
    "inspect",
    "list_",
    "logger",
    "main",
    "partition",
    "phantoms",
    "predict",
    "report",
    "run",
]


def main() -> None:
    """Run the command line."""
    app()
