"""The command `list`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collegium.cli.base import AsJson, app, fail, guarded, print_table

if TYPE_CHECKING:
    from collegium.experiment.config.registry import Entry


@app.command("list")
@guarded
def list_(
    kind: Annotated[
        str, typer.Argument(metavar="[adapters|algorithms|codecs|models]", help="What to list.")
    ] = "algorithms",
    *,
    as_json: AsJson = False,
) -> None:
    """List the adapters, algorithms, codecs or models."""
    from collegium.experiment.config.registry import ADAPTERS, ALGORITHMS, CODECS

    if kind == "algorithms":
        rows = [
            {**_description(entry), "sends": sorted(entry.kind.all_sends()) if entry.kind else []}
            for entry in ALGORITHMS.list()
        ]
    elif kind in ("adapters", "codecs"):
        entries = ADAPTERS.list() if kind == "adapters" else CODECS.list()
        rows = [_description(entry) for entry in entries]
    elif kind == "models":
        from collegium.models.factory import MODELS

        rows = [{"name": name, "summary": summary} for name, summary in MODELS.items()]
    else:
        fail(f"there is no list of {kind!r}; choose adapters, algorithms, codecs or models", 2)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        print_table((map(_text, row.values()) for row in rows), rows[0])


def _description(entry: "Entry") -> dict[str, Any]:
    return {"name": entry.name, "summary": entry.summary, "paper": entry.paper}


def _text(value: Any) -> str:
    """Return the text of a table's cell."""
    return ", ".join(value) if isinstance(value, list) else str(value)
