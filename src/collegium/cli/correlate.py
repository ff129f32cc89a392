"""The command `correlate`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from collegium.cli.base import AsJson, app, guarded, print_table


@app.command()
@guarded
def correlate(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, each with its assessment."),
    ],
    *,
    metric: Annotated[str, typer.Option(help="The score; by default the first run's.")] = "",
    by: Annotated[
        Literal["metadata", "normalised", "embeddings"],
        typer.Option(help="The distances: in their own units, over their spread, of embeddings."),
    ] = "metadata",
    output: Annotated[Path | None, typer.Option(help="A CSV file to write the table to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Correlate how far apart sites are with the scores of methods, over several federations."""
    from collegium.core.files import write_atomically
    from collegium.evaluation.correlations import correlate_runs
    from collegium.evaluation.results import frame_to_csv

    found = correlate_runs(runs, metric, by)
    if output is not None:
        write_atomically(output, frame_to_csv(found.rows).encode())
    if as_json:
        rows = json.loads(found.rows.to_json(orient="records", double_precision=15))
        parts = {"metric": found.metric, "distance": found.distance, "federations": rows}
        more = {"correlations": [vars(c) for c in found.correlations], "notes": found.notes}
        typer.echo(json.dumps(parts | more, indent=1))
        return
    cells = [
        [str(v) if isinstance(v, str | int) else "" if v != v else f"{v:.4g}" for v in row]
        for row in found.rows.astype(object).itertuples(index=False)
    ]
    names = [f"{name} {found.metric}" for name in found.methods]
    print_table(cells, ["federation", "sites", found.distance, *names])
    for sentence in (*map(str, found.correlations), *found.notes):
        typer.echo(sentence)
