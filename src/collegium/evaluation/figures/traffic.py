"""Bytes that sites sent and received, added up over the rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from collegium.core.text import byte_unit
from collegium.evaluation.figures.curves import BAND, line_of
from collegium.evaluation.figures.data import Axis, Figure, Panel, Series
from collegium.evaluation.figures.source import FigureSource
from collegium.evaluation.scores import group_means, method_name
from collegium.evaluation.traffic import COSTS, rows_of_rounds

if TYPE_CHECKING:
    import pandas as pd

_WAYS = {"bytes_up": "Sent by the sites", "bytes_down": "Received by the sites"}

_MOST_LINES = 10
"""Methods of all settings share a panel if they are no more than these."""

ALIKE = 0.01
"""Settings whose bytes differ by no more than this share are drawn once."""


def traffic_figures(source: FigureSource) -> Iterator[Figure]:
    """Yield the bytes of all sites together up to every round: ``bytes``.

    Of a sweep the settings that differ are lines beside each other, or, if there are many, panels.

    Args:
        source: The results of a run.
    """
    added = _added_up(source)
    most = added[COSTS[:2]].to_numpy().max(initial=0)
    if not most:
        return
    unit, size = byte_unit(most)
    scaled = added.assign(**{way: added[way] / size for way in _WAYS})
    settings = _distinct(source.settings, added)
    drawn = scaled[scaled["variation"].isin(settings)]
    many = len(drawn[["variation", "algorithm"]].drop_duplicates()) > _MOST_LINES
    groups = [(name,) for name in settings] if many else [settings]
    panels = [_panel(source, drawn, way, unit, group) for group in groups for way in _WAYS]
    yield Figure(
        "bytes",
        "Bytes sent and received up to each round",
        "Bytes of all sites together as they crossed their borders, added up over the rounds of "
        f"training. {BAND.format(sites=' and folds')}"
        + " Settings with the same bytes, to 1 %, are drawn once."
        * source.swept,
        tuple(panels),
        across=2,
    )


def _distinct(settings: Sequence[str], added: pd.DataFrame) -> Sequence[str]:
    """Return the first of each group of settings with the same bytes."""
    known: dict[str, pd.DataFrame] = {}
    for name in settings:
        own = added[added["variation"] == name].drop(columns="variation")
        own = own.set_index(["algorithm", "seed", "round"])
        if not any(_alike(own, other) for other in known.values()):
            known[name] = own
    return [*known]


def _alike(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Return whether two settings have the same bytes."""
    if not one.index.equals(other.index):
        return False
    apart = (one - other).abs().to_numpy().max(initial=0)
    return bool(apart <= ALIKE * other.to_numpy().max(initial=0))


def _added_up(source: FigureSource) -> pd.DataFrame:
    """Return the bytes up to each round, by setting, algorithm and seed, mean over folds."""
    rows = rows_of_rounds(source.results)
    rows = rows[rows["algorithm"].isin(list(source.order))]
    training = ["variation", "algorithm", "seed", "fold", "part"]
    rounds = rows.groupby([*training, "round"])[COSTS[:2]].sum()
    added = rounds.groupby(level=training).cumsum().reset_index()
    each = ["variation", "algorithm", "seed", "round"]
    up, down = (group_means(added, each, way) for way in COSTS[:2])
    return up.assign(bytes_down=down["bytes_down"])


def _panel(
    source: FigureSource, rows: pd.DataFrame, way: str, unit: str, settings: Sequence[str]
) -> Panel:
    """Return the panel of one way, of one setting or of several."""
    several = rows["variation"].nunique() > 1
    lines: list[Series] = []
    for number, name in enumerate(settings):
        own = rows[rows["variation"] == name].rename(columns={way: "value"})
        drawn = _lines(source, own)
        lines += [_named(line, name, number) for line in drawn] if len(settings) > 1 else drawn
    about = f", {settings[0]}" if several and len(settings) == 1 else ""
    ends = max((max(line.y) for line in lines), default=0.0)
    limits = (-0.03 * ends, 1.05 * ends) if ends else None
    over = Axis("round", whole=True)
    return Panel(f"{_WAYS[way]}{about}", over, Axis("bytes", unit, limits=limits), tuple(lines))


def _lines(source: FigureSource, rows: pd.DataFrame) -> Sequence[Series]:
    found = []
    for label in source.order:
        own = rows[rows["algorithm"] == label]
        line = line_of(method_name(label), source.look((label, "")), own)
        found += [line] if line else []
    return found


def _named(line: Series, setting: str, number: int) -> Series:
    """Return a line with the name and marker of its setting."""
    look = replace(line.look, marker=number, dashed=bool(number % 2))
    return replace(line, name=f"{line.name}, {setting}", look=look)
