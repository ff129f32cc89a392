"""The figure of a vector before and after smoothing by CER (pFedNet, Fig. 4 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from collegium.evaluation.figures.data import Axis, Figure, Look, Panel, Series
from collegium.evaluation.figures.recorded import smoothed


def smoothing_figure(
    vector: NDArray[Any] | Sequence[float], strengths: Sequence[float], *, name: str = "cer"
) -> Figure:
    """Return the figure of what CER makes of a vector, a line for each strength.

    Args:
        vector: (d,) the numbers of an update, in the order in which they are sent.
        strengths: The values of gamma, in units of the mean of |vector|.
        name: Its name, of a file.

    Raises:
        ConfigError: The vector has no numbers, or several axes.
    """
    lines = []
    table = smoothed(vector, strengths)
    for place, strength in enumerate(dict.fromkeys(table["strength"])):
        rows = table[table["strength"] == strength]
        label = f"gamma {strength:g}" if strength else "as it is"
        look = Look(place, place, dashed=not strength)
        x, y = (tuple(map(float, rows[column])) for column in ("position", "value"))
        lines.append(Series(f"{label}, {rows['bytes'].iloc[0]} bytes", look, "line", x, y))
    return Figure(
        name,
        "A vector as it is and smoothed by CER",
        "Each line is the vector that a receiver decodes, with the bytes that are sent of it; "
        "gamma is in units of the mean of the vector's absolute values.",
        (Panel("", Axis("position", whole=True), Axis("value"), tuple(lines)),),
    )
