"""The command `certificate`."""

from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import app, guarded, print_table


@app.command()
@guarded
def certificate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A root certificate, as PEM.")],
) -> None:
    """Show the subject of a root certificate, and check that it is valid today."""
    from collegium.runtime.engines.certificates import check_certificates

    found = check_certificates(file)
    rows = [[one.subject, f"{one.begins:%Y-%m-%d}", f"{one.ends:%Y-%m-%d}"] for one in found]
    print_table(rows, ["subject", "valid from", "until"])
