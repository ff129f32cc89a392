"""Every family of figures, and the figures of a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from collegium.evaluation.figures.adapting import step_figures, time_figures
from collegium.evaluation.figures.calibration import reliability_figures
from collegium.evaluation.figures.cases import case_boxes, joined_against_alone
from collegium.evaluation.figures.curves import learning_curves
from collegium.evaluation.figures.data import Figure
from collegium.evaluation.figures.layers import layer_figures
from collegium.evaluation.figures.server import server_figures
from collegium.evaluation.figures.source import FigureSource
from collegium.evaluation.figures.sweeps import sweep_figures
from collegium.evaluation.figures.traffic import traffic_figures

FAMILIES: tuple[Callable[[FigureSource], Iterator[Figure]], ...] = (
    sweep_figures,
    learning_curves,
    case_boxes,
    joined_against_alone,
    reliability_figures,
    time_figures,
    step_figures,
    traffic_figures,
    layer_figures,
    server_figures,
)
"""Each yields the figures that a run holds data for, and none where it holds none."""

_UNSAFE = re.compile(r"[^\w.=+-]+")


def list_figures(source: FigureSource) -> list[Figure]:
    """Return all figures of a run; their names are unique and can be names of files.

    Args:
        source: The results of a run.
    """
    found: dict[str, Figure] = {}
    for family in FAMILIES:
        for figure in family(source):
            stem = _UNSAFE.sub("_", figure.name)
            number, name = 2, stem
            while name in found:
                number, name = number + 1, f"{stem}_{number}"
            found[name] = replace(figure, name=name)
    return [*found.values()]
