"""The command line. Every command imports what it needs when it runs, so that `--help` is quick."""

from collegium.cli import doing, looking, measuring, preparing
from collegium.cli.base import app, guarded, logger

__all__ = ["app", "doing", "guarded", "logger", "looking", "main", "measuring", "preparing"]


def main() -> None:
    """Run the command line."""
    app()
