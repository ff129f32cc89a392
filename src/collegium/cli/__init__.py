"""The command line. Every command imports what it needs when it runs, so that `--help` is quick."""

from collegium.cli.base import app, guarded, logger

# `collegium --help` lists the commands in the order of these imports.
# isort: off
from collegium.cli import run, assess, deploy, phantoms, list, check, inspect, init  # noqa: A004, F401
from collegium.cli import certificate, drift, attack, correlate, partition, patches, network  # noqa: F401
# isort: on

__all__ = ["app", "guarded", "logger", "main"]


def main() -> None:
    """Run the command line."""
    app()
