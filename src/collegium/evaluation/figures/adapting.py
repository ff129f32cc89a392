"""Adapting to sites outside: time against quality."""

from __future__ import annotations

from collections.abc import Iterator

from collegium.evaluation.figures.data import Axis, Figure, Panel, Series
from collegium.evaluation.figures.source import FigureSource, suffix
from collegium.evaluation.scores import rows_of
from collegium.evaluation.timing import time_table
from collegium.evaluation.wording import name_in_sentence, title


def time_figures(source: FigureSource) -> Iterator[Figure]:
    """Yield the time that adapting takes against quality: ``adaptation-time[-<setting>]``.

    Args:
        source: The results of a run.
    """
    for setting in source.settings:
        table = time_table(
            source.results, source.accounts[setting], source.metric, source.order,
            variation=setting,
        )  # fmt: skip
        known = table.methods[table.methods["seconds"] > 0].dropna(subset="quality")
        if known.empty:
            continue  # a logarithmic axis has no place for zero
        series = tuple(
            Series(
                row.method, source.look((row.algorithm, row.model), "outside"), "scatter",
                (row.seconds,), (row.quality,),
                (row.quality - row.quality_sd,), (row.quality + row.quality_sd,),
            )
            for row in rows_of(known)
        )  # fmt: skip
        heading, about = title(table.metric), f", {setting}" if setting else ""
        seconds = Axis("seconds per image", scale="log")
        yield Figure(
            "adaptation-time" + suffix(setting),
            f"{heading} against seconds per image at sites outside{about}",
            "Seconds that adapting and predicting take per image, mean over seeds, and "
            f"{name_in_sentence(table.metric)}, mean over sites outside and over seeds; bars are "
            "one sample standard deviation of the latter over seeds to either side.",
            (Panel("", seconds, Axis(heading, table.unit), series),),
            table.metric,
        )
