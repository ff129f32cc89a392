"""Learning curves: what models score on validation, and the loss of training, over rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from collegium.evaluation.figures.data import Axis, Figure, Look, Panel, Series
from collegium.evaluation.figures.source import FigureSource, suffix
from collegium.evaluation.scores import METHOD, group_means, method_name, position
from collegium.evaluation.wording import title

WARM_UP = 0.15
"""Share of the rounds that do not decide what a frame holds, if there are ten or more."""

MOST_POINTS = 150
"""A line has no more points, of which the last round is one."""

BAND = (
    "Lines are means over seeds{sites}; bands are one sample standard deviation over seeds to "
    "either side, and absent with one seed. A line has the rounds that all of its seeds have, and "
    "of many at most 150."
)
"""The caption of lines and bands over rounds; ``sites`` names what else they are means over."""


@dataclass(frozen=True)
class _Kind:
    """A quantity of rounds.

    Attributes:
        name: The name of its figures.
        metric: What was measured.
        split: On which cases.
        title: What it is, for a reader.
    """

    name: str
    metric: str
    split: str
    title: str


def learning_curves(source: FigureSource) -> Iterator[Figure]:
    """Yield the curves of validation and training: of a sweep one with a panel for each setting.

    ``learning-curves`` and ``loss-curves``: by site, or of a sweep, by setting, the mean over
    sites; then ``learning-curves-<setting>`` is that setting by site.

    Args:
        source: The results of a run.
    """
    for kind in (
        _Kind("learning-curves", source.metric, "val", f"{title(source.metric)} on validation"),
        _Kind("loss-curves", "loss", "train", "Training loss"),
    ):
        rows = _rows(source, kind)
        if rows.empty:
            continue
        if source.swept:
            yield _figure(source, kind, _over_sites(rows), "variation", kind.name)
        for setting in source.settings:
            own = rows[rows["variation"] == setting]
            if not own.empty:
                yield _figure(source, kind, own, "site", kind.name + suffix(setting))


def _rows(source: FigureSource, kind: _Kind) -> pd.DataFrame:
    """Return the values of rounds by training: the mean over folds, at every site."""
    found = source.used
    wanted = (found["case"] == "") & (found["split"] == kind.split)
    rows = found[wanted & (found["metric"] == kind.metric)].dropna(subset="value")
    return group_means(rows, ["variation", "site", *METHOD, "seed", "round"])


def _over_sites(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the means over sites, of the rounds in which all sites of the method have a value."""
    training = ["variation", *METHOD, "seed"]
    means = group_means(rows, [*training, "round"])
    counts = rows.groupby([*training, "round"]).size().to_numpy()  # sorted as the means are
    most = pd.Series(counts).groupby([means["variation"], means["algorithm"], means["model"]])
    complete: pd.DataFrame = means[counts == most.transform("max").to_numpy()]
    return complete


def _figure(source: FigureSource, kind: _Kind, rows: pd.DataFrame, panel: str, name: str) -> Figure:
    """Return a figure with a panel for each value of a column, all of one scale."""
    names = rows[panel].unique().tolist()
    wanted = [n for n in source.settings if n in names] if panel == "variation" else sorted(names)
    drawn = {n: _lines(source, rows[rows[panel] == n]) for n in wanted}
    limits = frame_of([line for lines in drawn.values() for line in lines])
    over, setting = Axis("round", whole=True), name.removeprefix(kind.name).lstrip("-")
    about = f", {setting}" if setting else ""
    return Figure(
        name,
        f"{kind.title} over rounds, by {'setting' if panel == 'variation' else 'site'}{about}",
        BAND.format(sites=" of the mean over sites" if panel == "variation" else ""),
        tuple(
            Panel(n if len(drawn) > 1 else "", over, Axis(kind.title, limits=limits), tuple(lines))
            for n, lines in drawn.items()
        ),
    )


def _lines(source: FigureSource, rows: pd.DataFrame) -> list[Series]:
    """Return a line with its band for each method."""
    groups = {(str(key[0]), str(key[1])): own for key, own in rows.groupby(METHOD)}
    found = [
        line_of(method_name(*key), source.look(key), groups[key])
        for key in sorted(groups, key=lambda key: position(key, source.order))
    ]
    return [line for line in found if line is not None]


def line_of(name: str, look: Look, rows: pd.DataFrame) -> Series | None:
    """Return a line over rounds: the mean over seeds, and a band of one sample sd.

    Args:
        name: What it is, for a reader.
        look: How it is drawn.
        rows: Columns seed, round and value; a row for each.

    Returns:
        The line, over the rounds that all seeds have; None if there is none.
    """
    by_seed = rows.pivot(index="round", columns="seed", values="value").dropna()
    if by_seed.empty:
        return None
    if (step := -(-len(by_seed) // MOST_POINTS)) > 1:
        by_seed = by_seed.iloc[::-1].iloc[::step].iloc[::-1]
    means, spread = by_seed.mean(axis=1), by_seed.std(axis=1, ddof=1)
    return with_band(name, look, by_seed.index, means, spread)


def with_band(
    name: str, look: Look, x: Iterable[Any], y: Iterable[Any], spread: Iterable[Any]
) -> Series:
    """Return a line with a band to either side, or none where it is not known everywhere.

    Args:
        name: What it is, for a reader.
        look: How it is drawn.
        x: (n,) the values on the horizontal axis.
        y: (n,) the values on the vertical axis.
        spread: (n,) half the width of the band; NaN if unknown.
    """
    across, up, half = (np.array([*numbers], np.float64) for numbers in (x, y, spread))
    ends = (up - half, up + half) if np.isfinite(half).all() else ()
    return Series(name, look, "line", *(tuple(part.tolist()) for part in (across, up, *ends)))


def frame_of(lines: Sequence[Series]) -> tuple[float, float] | None:
    """Return lowest and highest value of a frame, with some air; the first rounds do not count.

    Args:
        lines: The lines of all panels.
    """
    last = max((x for line in lines for x in line.x), default=0.0)
    first = WARM_UP * last if last >= 10 else 0.0
    ends = [
        value
        for line in lines
        for numbers in (line.y, line.low, line.high)
        for x, value in zip(line.x, numbers, strict=False)
        if x >= first
    ]
    if not ends:
        return None
    low, high = min(ends), max(ends)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - air, high + air
