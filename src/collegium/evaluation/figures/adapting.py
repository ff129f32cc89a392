"""Adapting to sites outside: time against quality, scores and losses step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from collegium.evaluation.figures.curves import with_band
from collegium.evaluation.figures.data import Axis, Figure, Look, Panel, Series
from collegium.evaluation.figures.recorded import adaptation_losses, adaptation_steps
from collegium.evaluation.figures.source import FigureSource, suffix
from collegium.evaluation.scores import method_name, rows_of
from collegium.evaluation.timing import time_table
from collegium.evaluation.wording import name_in_sentence, title

if TYPE_CHECKING:
    import pandas as pd

_METHOD = ["algorithm", "adapter"]


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
        )


def step_figures(source: FigureSource) -> Iterator[Figure]:
    """Yield scores and losses after each step of an adaptation, where they were recorded.

    ``adaptation-steps[-<setting>]``, the metric over seconds, a panel for each site;
    ``test-time-loss[-<setting>]``, a panel for each loss, of several methods for each with its
    method.

    Args:
        source: The results of a run.
    """
    for setting in source.settings:
        accounts, about = source.accounts[setting], f", {setting}" if setting else ""
        steps = adaptation_steps(accounts).dropna(subset="mean")
        if not steps.empty:
            metric, unit = str(steps["metric"].iloc[0]), str(steps["unit"].iloc[0])
            steps = steps[steps["metric"] == metric]
            yield Figure(
                "adaptation-steps" + suffix(setting),
                f"{title(metric)} at sites outside over the time of adapting{about}",
                "A marker is a step of adapting, the first before any: the mean over a site's "
                "cases and then over seeds, over the mean seconds per case up to it. Bands are one "
                "sample standard deviation over seeds to either side, and absent with one seed.",
                tuple(
                    Panel(
                        str(site), Axis("seconds per case"), Axis(title(metric), unit),
                        tuple(_over_steps(source, own)),
                    )
                    for site, own in steps.groupby("site")
                ),
            )  # fmt: skip
        losses = adaptation_losses(accounts).dropna(subset="mean")
        if not losses.empty:
            yield Figure(
                "test-time-loss" + suffix(setting),
                f"Losses of adapting to sites outside, pass by pass{about}",
                "Lines are means over the samples of a site and over seeds; bands are one standard "
                "deviation over samples, mean over seeds, to either side. The loss that was "
                'minimised is "total".',
                tuple(_loss_panels(losses)),
            )


def _over_steps(source: FigureSource, rows: pd.DataFrame) -> Iterator[Series]:
    """Yield the metric over seconds per case, a line for each method."""
    for (algorithm, adapter), own in rows.groupby(_METHOD, sort=False):
        key = str(algorithm), str(adapter)
        each = own.assign(seconds=own["seconds"] / own["cases"]).groupby("step")
        means, spread = each[["seconds", "mean"]].mean(), each["mean"].std(ddof=1)
        name, look = method_name(*key, "outside"), source.look(key, "outside")
        yield with_band(name, look, means["seconds"], means["mean"], spread)


def _loss_panels(rows: pd.DataFrame) -> Iterator[Panel]:
    """Yield a panel for each loss of each method, with a line for each site."""
    sites = sorted(rows["site"].unique().tolist())
    several = len(rows[_METHOD].drop_duplicates()) > 1
    for (algorithm, adapter, loss), own in rows.groupby([*_METHOD, "loss"], sort=False):
        lines = []
        for site, found in own.groupby("site"):
            means = found.groupby("step")[["mean", "deviation"]].mean()
            look = Look(sites.index(site), sites.index(site))
            lines.append(with_band(str(site), look, means.index, means["mean"], means["deviation"]))
        method = f"{method_name(str(algorithm), str(adapter), 'outside')}, " if several else ""
        over, up = Axis("pass", whole=True), Axis("loss")
        yield Panel(f"{method}{loss}", over, up, tuple(lines))
