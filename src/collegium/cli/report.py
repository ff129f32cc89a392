"""The commands that write the results of a run again: `report` and `tables`."""

import typer

from collegium.cli.base import RunFolder, app, guarded


@app.command()
@guarded
def report(output: RunFolder) -> None:
    """Write the report of a run again, finished or not."""
    from collegium.evaluation.report.html import write_report

    typer.echo(write_report(output))


@app.command()
@guarded
def tables(output: RunFolder) -> None:
    """Write the tables of a run as text, Markdown, LaTeX and CSV, and print the text."""
    from collegium.evaluation.writing import write_tables

    files = write_tables(output)
    for file in files:
        if file.suffix == ".txt":
            typer.echo(file.read_text(encoding="utf-8"))
    typer.echo(files[0].parent)
