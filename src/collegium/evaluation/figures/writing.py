"""Write the figures of a run into files, for papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from collegium.core.files import write_atomically
from collegium.core.text import unknown_word
from collegium.errors import ConfigError, DataError
from collegium.evaluation.figures.data import Figure
from collegium.evaluation.figures.drawing import Format, draw
from collegium.evaluation.figures.registry import list_figures
from collegium.evaluation.figures.source import FigureSource

FOLDER = "figures"
"""The folder of the figures in the output folder of a run."""

CAPTIONS = "captions.md"
"""The file of all titles and captions in that folder."""

FORMATS: tuple[Format, ...] = get_args(Format)


def write_figures(
    output: Path,
    *,
    formats: Sequence[str] = FORMATS,
    folder: Path | None = None,
    only: Sequence[str] = (),
) -> tuple[Path, ...]:
    """Write every figure of a run, and ``captions.md`` with what each shows.

    Args:
        output: The output folder of an experiment, finished or not.
        formats: Which of `FORMATS`; a file of each.
        folder: Where to write; None: the folder ``figures`` of the run.
        only: The names of the figures wanted; none: all.

    Returns:
        The paths, in the order written, ``captions.md`` last.

    Raises:
        ConfigError: A format or the name of a figure is unknown.
        DataError: There are no results, nothing to draw, or a file cannot be read.
        StorageError: A file cannot be written.
    """
    if not formats:
        raise ConfigError(f"--format: no format is given; choose from {', '.join(FORMATS)}")
    known: dict[str, Format] = {form: form for form in FORMATS}
    for form in formats:
        if form not in known:
            raise ConfigError(f"--format: {unknown_word('format', form, FORMATS)}")
    figures = _chosen(list_figures(FigureSource.read(output)), only, output)
    place, written = folder or output / FOLDER, []
    for figure in figures:
        for form in dict.fromkeys(formats):
            written.append(place / f"{figure.name}.{form}")
            write_atomically(written[-1], draw(figure, known[form]))
    captions = "\n".join(f"## {f.name}\n\n{f.title}. {f.caption}\n" for f in figures)
    write_atomically(place / CAPTIONS, captions.encode())
    return (*written, place / CAPTIONS)


def _chosen(figures: Sequence[Figure], only: Sequence[str], output: Path) -> list[Figure]:
    """Return the figures that are wanted, in their order."""
    if not figures:
        raise DataError(
            f"{output}: the results hold nothing to draw yet; run the experiment until a round is "
            "finished."
        )
    names = [figure.name for figure in figures]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only: {unknown_word('figure', name, names)}")
    return [figure for figure in figures if not only or figure.name in only]
