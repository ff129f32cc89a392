"""What all commands share: the application, its options, errors as sentences, tables."""

import errno
import functools
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from collegium import __version__
from collegium.errors import CollegiumError, StorageError

P = ParamSpec("P")
logger = logging.getLogger("collegium")

INTERRUPTED = 130
WIDEST = 10_000
FULL = {errno.ENOSPC, errno.EDQUOT}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
EPILOG = (
    "Exit codes: 0 done; 1 a bug in collegium, or an algorithm that breaks a rule; 2 the command "
    "line or the configuration; 3 data; 4 a client; 5 the disk or a checkpoint; 130 interrupted."
)

app = typer.Typer(
    name="collegium",
    help="Personalised federated learning on medical images between hospitals.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The experiment's YAML file.")]
Output = Annotated[Path, typer.Argument(metavar="OUTPUT", help="The folder of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Values to replace, e.g. training.lr=0.01 algorithm=fedbn."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn exceptions into one paragraph and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except CollegiumError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            fail("stopped", INTERRUPTED)
        except typer.Exit:
            raise
        except BrokenPipeError:  # the reader of our output has seen enough
            raise
        except Exception as error:  # the last stop for whatever else there is
            explain(error)

    return run


def fail(text: str, code: int) -> NoReturn:
    """End with a sentence on standard error, and with the traceback under `--debug`."""
    if logger.isEnabledFor(logging.DEBUG):
        typer.echo(traceback.format_exc(), err=True)
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(code)


def explain(error: Exception) -> NoReturn:
    """End with what the disk refused or, for a bug, with the traceback that a report needs."""
    number = error.errno if isinstance(error, OSError) else None
    path = getattr(error, "filename", None) or "the output folder"
    if number in FULL:
        fail(f"the disk that holds {path} is full; free some space", StorageError.exit_code)
    if number in FORBIDDEN:
        fail(f"{path} may not be read or written; change its permissions", StorageError.exit_code)
    typer.echo("".join(traceback.format_exception(error)), err=True)
    typer.echo("This is a bug in collegium; please report it with these lines.", err=True)
    raise typer.Exit(1)


def show_version(wanted: bool) -> None:
    """Write the version and end."""
    if wanted:
        typer.echo(f"collegium {__version__}")
        raise typer.Exit


@app.callback()
def start(
    *,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show log messages, and tracebacks of errors.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Set up logging for every command."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)


def cell(value: Any) -> str:
    """Write a value as the content of a table's cell."""
    return ", ".join(value) if isinstance(value, list) else str(value)


def table(rows: list[list[str]], columns: list[str]) -> None:
    """Write a table to standard output, as wide as it needs where there is no terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = WIDEST
    grid = Table(box=None, pad_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    console.print(grid)
