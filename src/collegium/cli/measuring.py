"""Commands that train in order to measure, and that write a page of it."""

from typing import Annotated

import typer

from collegium.cli.base import ConfigPath, Overrides, app, guarded
from collegium.errors import ConfigError


@app.command()
@guarded
def drift(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    rounds: Annotated[
        str, typer.Option(help="Which rounds to look at, e.g. 1,5,20; by default four.")
    ] = "",
    windows: Annotated[int, typer.Option(help="How many windows of a site, at most.")] = 64,
    images: Annotated[str, typer.Option(help="Of which images: train, val or test.")] = "val",
) -> None:
    """Train anew and measure how far features drift at each site, and lie apart between sites."""
    from rich.console import Console

    from collegium.diagnostics.drift import write_drift
    from collegium.experiment.config.experiment import load_config
    from collegium.experiment.progress import show_progress

    settings = load_config(config, overrides or ())
    chosen = read_rounds(rounds)
    with show_progress(Console(stderr=True), len(settings.algorithms)) as observe:
        page = write_drift(settings, chosen, limit=windows, split=images, observe=observe)  # type: ignore[arg-type]
    typer.echo(page)


def read_rounds(text: str) -> list[int] | None:
    """Read numbers with commas between them; None where there are none."""
    try:
        return [int(word) for word in text.split(",")] if text.strip() else None
    except ValueError as error:
        raise ConfigError(
            f"the rounds are {text!r}; write whole numbers with commas between them, e.g. 1,5,20"
        ) from error
