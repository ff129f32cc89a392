"""The command `assess`."""

import json
from typing import Annotated

import typer

from collegium.cli.base import ConfigPath, Overrides, app, guarded, print_table


@app.command()
@guarded
def assess(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    summary: Annotated[
        str,
        typer.Option(
            help="How a site summarises its cases' values: cases, histogram or quantiles."
        ),
    ] = "cases",
    encoder: Annotated[
        str, typer.Option(help="The network that embeds images, as file.py:factory.")
    ] = "",
) -> None:
    """Measure how different the sites' data are, before any training, and report it."""
    from collegium.diagnostics.assessment.survey import Assessment
    from collegium.diagnostics.assessment.writing import assess as assess_federation
    from collegium.diagnostics.assessment.writing import overview
    from collegium.experiment.config.experiment import load_config

    settings = load_config(config, overrides or ())
    survey = Assessment(summary=summary, encoder=encoder)  # type: ignore[arg-type]
    if settings.engine.name == "inprocess":
        folder = assess_federation(settings, survey)
    else:
        from collegium.distributed.experiment import RemoteExperiment

        with RemoteExperiment(settings, survey) as remote:
            folder = assess_federation(settings, survey, remote)
    data = json.loads((folder / "assessment.json").read_text(encoding="utf-8"))
    rows, sentences = overview(data)
    print_table((row.values() for row in rows), rows[0])
    for sentence in sentences:
        typer.echo(sentence)
    typer.echo(folder / "assessment.html")
