"""The application, and what commands share: options, errors as sentences, tables."""

import errno
import functools
import getpass
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec, TypeVar

import typer

from collegium import __version__
from collegium.core.files import TOO_LARGE
from collegium.core.memory import out_of_memory
from collegium.core.userfile import describe_mistake
from collegium.errors import CollegiumError, ConfigError, StorageError

P = ParamSpec("P")
Number = TypeVar("Number", int, float)
logger = logging.getLogger("collegium")

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""

UNLIMITED = 10_000
"""The width of tables in characters if standard output is no terminal."""

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}
EPILOG = (
    "Exit codes: 0 success; 1 a bug in collegium, or an algorithm that breaks a rule; 2 the "
    "command line or the configuration, or a mistake in code of your own; 3 data; 4 a client; 5 "
    "the disk or a checkpoint; 130 interrupted."
)

app = typer.Typer(
    name="collegium",
    help="Personalised federated learning on medical images between hospitals.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The experiment's YAML file.")]
RunFolder = Annotated[Path, typer.Argument(metavar="OUTPUT", help="The folder of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Values to override, e.g. training.lr=0.01 algorithm=fedbn."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command so that exceptions end it with one paragraph and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except CollegiumError as error:
            error = out_of_memory(error) or error
            fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            fail("stopped", INTERRUPTED)
        except (typer.Exit, BrokenPipeError):  # the latter: the reader of our output has closed it
            raise
        except Exception as error:
            fail_unexpectedly(error)

    return run


def fail(text: str, code: int) -> NoReturn:
    """Exit with a sentence on standard error, and with the traceback under `--debug`.

    Args:
        text: the sentence.
        code: the exit code.
    """
    if logger.isEnabledFor(logging.DEBUG):
        typer.echo(traceback.format_exc(), err=True)
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(code)


def fail_unexpectedly(error: Exception) -> NoReturn:
    """Exit with a sentence on memory, the disk or a user's code or, for a bug, the traceback."""
    if lack := out_of_memory(error):
        fail(str(lack), lack.exit_code)
    number = error.errno if isinstance(error, OSError) else None
    path = getattr(error, "filename", None) or "the output folder"
    if number in DISK_FULL:
        fail(f"the disk that holds {path} is full; free some space", StorageError.exit_code)
    if number == errno.EFBIG:
        fail(f"{path}: {TOO_LARGE}", StorageError.exit_code)
    if number in NO_PERMISSION:
        fail(f"{path} may not be read or written; change its permissions", StorageError.exit_code)
    if mistake := describe_mistake(error):
        fail(mistake, ConfigError.exit_code)
    typer.echo("".join(traceback.format_exception(error)), err=True)
    typer.echo("This is a bug in collegium; please report it with these lines.", err=True)
    raise typer.Exit(1)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
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
    """Set up logging for every command.

    Args:
        debug: whether all log messages and tracebacks are shown.
        version: whether only the version is printed.
    """
    _name_user()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)


def _name_user() -> None:
    """Set a name for the user where the system has none, as for numbers that containers run as.

    MONAI asks for it when it is imported, and fails without.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"user-{os.getuid()}"


def read_numbers(text: str, kind: type[Number], name: str, example: str) -> tuple[Number, ...]:
    """Parse numbers separated by commas.

    Args:
        text: the numbers.
        kind: int or float.
        name: what the numbers are, for the message.
        example: the same in a right form.

    Raises:
        ConfigError: one of them is no number of this kind.
    """
    try:
        return tuple(kind(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        expected = "whole numbers" if kind is int else "numbers"
        raise ConfigError(
            f"the {name} are {text!r}; write {expected} with commas between them, as in {example}"
        ) from error


def print_table(rows: Iterable[Iterable[str]], columns: Iterable[str]) -> None:
    """Print a table, without wrapping if standard output is no terminal.

    Args:
        rows: the cells of each row.
        columns: the headings.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = UNLIMITED
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
