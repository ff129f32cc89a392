"""The command `init`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from collegium.cli.base import app, guarded, print_table


@app.command()
@guarded
def init(
    federation: Annotated[
        Path,
        typer.Argument(
            metavar="FEDERATION",
            help="A federation's YAML file, or a folder with a folder for each site.",
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="The experiment's file to write.")
    ] = Path("experiment.yaml"),
) -> None:
    """Write an experiment to start with, its settings chosen from the data by fixed rules."""
    from collegium.experiment.config.yaml_file import write_entry
    from collegium.experiment.starting_file import write_experiment

    start = write_experiment(federation, output)
    task, sites = start.federation.task, start.federation.sites
    typer.echo(f"{task.name} of {', '.join(task.classes)} at {len(sites)} sites")
    rows = ((write_entry(choice.key, choice.value), choice.why) for choice in start.choices)
    print_table(rows, ["chosen", "because"])
    for note in start.notes:
        typer.echo(f"note: {note}")
    typer.echo(output)
    file = shlex.quote(str(output))
    typer.echo(f"next: collegium config show {file} shows all of it, collegium run {file} runs it")
