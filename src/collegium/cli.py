"""The command line. Every command imports what it needs when it runs, so that `--help` is quick."""

import errno
import functools
import json
import logging
import shlex
import traceback
from collections.abc import Callable, Iterable
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer

from collegium import __version__
from collegium.errors import CollegiumError, StorageError

if TYPE_CHECKING:
    from collegium.cell import Event
    from collegium.data.inspection import Inspection

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


def main() -> None:
    """Run the command line."""
    app()


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


def follow(
    output: Path, cells: int | None, run: "Callable[[Callable[[Event], None]], Path]"
) -> Path:
    """Run something under the eyes of the progress display, and say how to go on if stopped."""
    from rich.console import Console

    from collegium.progress import show_progress

    try:
        with show_progress(Console(stderr=True), cells) as observe:
            return run(observe)
    except KeyboardInterrupt:
        again = f"collegium resume {shlex.quote(str(output))}"
        fail(f"stopped; finished rounds are kept, go on with: {again}", INTERRUPTED)


def run_and_report(config_path: Path, overrides: Iterable[str]) -> None:
    """Run an experiment file to its end and write where the report is."""
    from collegium.config import load_config
    from collegium.experiment import run_experiment
    from collegium.grid import cells_of

    config = load_config(config_path, list(overrides))
    cells = len(cells_of(config))
    output = follow(Path(config.output), cells, lambda observe: run_experiment(config, observe))
    typer.echo(output / "report.html")


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


@app.command()
@guarded
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run an experiment, or go on with an unfinished run of the same configuration."""
    run_and_report(config, overrides or ())


@app.command()
@guarded
def resume(output: Output) -> None:
    """Go on with the run in a folder, as it was configured."""
    from collegium.experiment import resume_experiment

    done = follow(output, None, lambda observe: resume_experiment(output, observe))
    typer.echo(done / "report.html")


@app.command()
@guarded
def report(output: Output) -> None:
    """Write the report of a run again, finished or not."""
    from collegium.report.html import write_report

    typer.echo(write_report(output))


@app.command()
@guarded
def tables(output: Output) -> None:
    """Write the tables of a run as text, Markdown, LaTeX and CSV, and show those of text."""
    from collegium.benchmark.writing import write_tables

    files = write_tables(output)
    for file in files:
        if file.suffix == ".txt":
            typer.echo(file.read_text(encoding="utf-8"))
    typer.echo(files[0].parent)


@app.command()
@guarded
def assess(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    summary: Annotated[
        str,
        typer.Option(help="What leaves of the cases' values: cases, histogram or quantiles."),
    ] = "cases",
    encoder: Annotated[
        str, typer.Option(help="The network that embeds images, as file.py:factory.")
    ] = "",
) -> None:
    """Ask every site about its data, before any training, and report how different they are."""
    from collegium.assessment.asking import Assessment
    from collegium.assessment.writing import assess as assess_federation
    from collegium.assessment.writing import overview, read
    from collegium.config import load_config

    settings = load_config(config, overrides or ())
    folder = assess_federation(settings, Assessment(summary=summary, encoder=encoder))  # type: ignore[arg-type]
    rows, sentences = overview(read(folder))
    table([list(row.values()) for row in rows], list(rows[0]))
    for sentence in sentences:
        typer.echo(sentence)
    typer.echo(folder / "assessment.html")


@app.command()
@guarded
def demo(
    output: Annotated[
        Path, typer.Option("--output", help="Folder for the drawn scans and the run.")
    ] = Path("collegium-demo"),
) -> None:
    """Run five algorithms on drawn scans of four hospitals, and write the report."""
    from collegium.phantoms import make_federation

    federation = make_federation(output / "data", cases=24)
    places = {"federation": federation, "output": output / "run"}
    with as_file(files("collegium") / "demo.yaml") as config:
        run_and_report(config, [f"{key}={json.dumps(str(path))}" for key, path in places.items()])


@app.command()
@guarded
def phantoms(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write.")],
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 4,
    cases: Annotated[int, typer.Option(help="Number of images of each site.")] = 16,
    size: Annotated[int, typer.Option(help="Pixels along each side of an image.")] = 96,
    seed: Annotated[int, typer.Option(help="Which federation is drawn.")] = 0,
) -> None:
    """Draw a phantom federation and write its files."""
    from collegium.phantoms import make_federation

    typer.echo(make_federation(folder, sites, cases=cases, size=size, seed=seed))


@app.command("list")
@guarded
def list_(
    what: Annotated[
        str, typer.Argument(metavar="[adapters|algorithms|codecs|models]", help="What to list.")
    ] = "algorithms",
    *,
    as_json: AsJson = False,
) -> None:
    """List the adapters, the algorithms, the codecs or the models."""
    if what == "algorithms":
        from collegium.registry import list_algorithms

        rows = [{**row._asdict(), "sends": list(row.sends)} for row in list_algorithms()]
    elif what == "adapters":
        from collegium.registry import list_adapters

        rows = [row._asdict() for row in list_adapters()]
    elif what == "codecs":
        from collegium.registry import list_codecs

        rows = [row._asdict() for row in list_codecs()]
    elif what == "models":
        from collegium.models import MODELS

        rows = [{"name": name, "summary": summary} for name, summary in MODELS.items()]
    else:
        fail(f"there is no list of {what!r}; ask for adapters, algorithms, codecs or models", 2)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        table([[cell(value) for value in row.values()] for row in rows], list(rows[0]))


@app.command()
@guarded
def check(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name from the list, file.py:Class or module:Class."),
    ],
    hyperparameters: Overrides = None,
) -> None:
    """Hold an algorithm to the rules that every algorithm has to keep."""
    from collegium import process
    from collegium.building import build_algorithm
    from collegium.config import AlgorithmConfig
    from collegium.testing import ConformanceError, check_algorithm
    from collegium.yamlfile import read_yaml

    params: dict[str, Any] = {}
    for text in hyperparameters or ():
        key, equals, value = text.partition("=")
        if not equals:
            fail(f"{text!r} is no hyper-parameter; write key=value, e.g. lam=0.1", 2)
        params[key], _ = read_yaml(value, text, Path.cwd())
    algorithm = build_algorithm(AlgorithmConfig(name, params))
    process.prepare()
    try:
        check_algorithm(algorithm, lambda passed: typer.echo(f"ok  {passed}"))
    except (ConformanceError, CollegiumError) as error:
        fail(str(error), 1)
    typer.echo(f"{name} keeps every rule")


@app.command()
@guarded
def inspect(
    config: Annotated[
        Path, typer.Argument(metavar="FILE", help="A federation's or an experiment's YAML file.")
    ],
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Look at all the data of a federation; ends with 3 if something is wrong with it."""
    from collegium.config import load_federation
    from collegium.data.inspection import inspect_federation

    inspection = inspect_federation(load_federation(config, overrides or ()))
    if as_json:
        typer.echo(json.dumps(inspection.to_dict(), indent=2))
    else:
        show_inspection(inspection)
    if not inspection.good:
        raise typer.Exit(3)


@config_app.command("show")
@guarded
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Write a configuration with every default filled in."""
    from collegium.config import load_config, to_yaml

    typer.echo(to_yaml(load_config(config, overrides or ())), nl=False)


def show_inspection(inspection: "Inspection") -> None:
    """Write a table of the sites, then notes, what a person should check, and problems."""
    columns = ["site", "cases", "patients", "train", "val", "test", "shapes", "channels", "range"]
    rows = []
    for site in inspection.sites:
        shapes = list(site.shapes)[:3] + ["..."] * (len(site.shapes) > 3)
        rows.append([
            site.name if site.inside else f"{site.name} (outside)",
            *map(str, (site.cases, site.patients)),
            *(str(site.splits.get(split, 0)) for split in ("train", "val", "test")),
            ", ".join(shapes),
            ", ".join(site.channels),
            "" if site.intensity is None else "{:g} to {:g}".format(*site.intensity),
        ])  # fmt: skip
    table(rows, columns)
    for site in inspection.sites:
        for note in site.notes:
            typer.echo(f"note: site {site.name}: {note}")
    for finding in inspection.findings:
        typer.echo(f"to check: {finding.text}")
    problems = [p for site in inspection.sites for p in site.problems]
    for problem in [*problems, *inspection.problems]:
        typer.echo(f"problem: {problem}")


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
