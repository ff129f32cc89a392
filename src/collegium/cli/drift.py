"""The command `drift`."""

from typing import Annotated

import typer

from collegium.cli.base import ConfigPath, Overrides, app, guarded, read_numbers


@app.command()
@guarded
def drift(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    rounds: Annotated[
        str, typer.Option(help="The rounds to measure, e.g. 1,5,20; by default four.")
    ] = "",
    windows: Annotated[int, typer.Option(help="The maximum number of windows of a site.")] = 64,
    images: Annotated[
        str, typer.Option(help="The split of the images: train, val or test.")
    ] = "val",
) -> None:
    """Train again and measure how features drift at each site and differ between sites."""
    from rich.console import Console

    from collegium.diagnostics.drift.writing import write_drift
    from collegium.experiment.config.experiment import load_config
    from collegium.experiment.progress import show_progress

    settings = load_config(config, overrides or ())
    chosen = read_numbers(rounds, int, "rounds", "1,5,20") or None
    with show_progress(Console(stderr=True), len(settings.algorithms)) as observe:
        page = write_drift(settings, chosen, limit=windows, split=images, observe=observe)  # type: ignore[arg-type]
    typer.echo(page)
