"""The account of an adaptation: one page that says what was done with which models."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from collegium.state import write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, HEIGHT, MARGIN = 640, 180, 46
"""Of the curve of the losses, in pixels."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Of the curves; they differ for every kind of colour vision."""


@dataclass(frozen=True)
class Picture:
    """A predicted case to show."""

    caption: str
    image: "Image"

    @property
    def source(self) -> str:
        """The picture inside the page."""
        data = io.BytesIO()
        self.image.save(data, "WEBP", quality=85)
        return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


def write_account(
    path: Path,
    account: Mapping[str, Any],
    pictures: Sequence[Picture],
    scores: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the page; it refers to nothing outside itself.

    Args:
        path: the page.
        account: what `collegium adapt` writes as ``account.json``.
        pictures: cases with their predictions.
        scores: by case, where there were labels.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = files("collegium.report").joinpath("account.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        account=account,
        adapter=account["adapter"],
        settings={k: v for k, v in account["adapter"].items() if k not in ("name", "label")},
        curve=Markup(loss_svg(account["losses"], account["chosen"])),
        colours=dict(zip(_terms(account["losses"]), COLOURS, strict=False)),
        shades=_shades(account["coefficients"]),
        pictures=pictures,
        means=mean_scores(scores),
    )
    write_atomically(path, page.encode())


def mean_scores(scores: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float | None, int]]:
    """Return the mean of every metric over the cases where it is defined, and their number."""
    metrics = [key for key in (scores[0] if scores else {}) if key not in _ABOUT]
    found = {name: [row[name] for row in scores if row[name] is not None] for name in metrics}
    return {name: (fmean(v) if v else None, len(v)) for name, v in found.items()}


_ABOUT = ("case", "patient", "model")


def loss_svg(losses: Sequence[Mapping[str, float]], chosen: int | None) -> str:
    """Return the curves of the losses over the steps as SVG; nothing for fewer than two rows."""
    if len(losses) < 2:
        return ""
    steps = [row["step"] for row in losses]
    values = {name: [row[name] for row in losses] for name in _terms(losses)}
    top = max(max(v) for v in values.values()) or 1.0
    low = min(0.0, *(min(v) for v in values.values()))

    def place(step: float, value: float) -> str:
        x = MARGIN + (step - steps[0]) / (steps[-1] - steps[0]) * (WIDTH - 2 * MARGIN)
        y = HEIGHT - 30 - (value - low) / (top - low) * (HEIGHT - 50)
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<polyline fill="none" stroke="{colour}" stroke-width="2" '
        f'points="{" ".join(map(place, steps, v))}"/>'
        for colour, v in zip(COLOURS, values.values(), strict=False)
    ]
    if chosen is not None and chosen in steps:
        x = place(chosen, low).partition(",")[0]
        lines.append(
            f'<line x1="{x}" x2="{x}" y1="16" y2="{HEIGHT - 30}" stroke="currentColor" '
            f'stroke-dasharray="4 3"/><text x="{x}" y="12" text-anchor="middle">chosen</text>'
        )
    axis = (
        f'<text x="4" y="24">{top:.3g}</text><text x="4" y="{HEIGHT - 30}">{low:.3g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 8}">step {steps[0]:g}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 8}" text-anchor="end">step {steps[-1]:g}</text>'
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="losses by step">'
        f"{axis}{''.join(lines)}</svg>"
    )


def _terms(losses: Sequence[Mapping[str, float]]) -> list[str]:
    """The losses to draw: all but a term that is the total itself."""
    names = [name for name in (losses[0] if losses else {}) if name != "step"]
    same = {n for n in names if n != "total" and all(row[n] == row["total"] for row in losses)}
    return [name for name in names if name not in same][: len(COLOURS)]


def _shades(coefficients: Mapping[str, Any] | None) -> list[list[int]]:
    """Return for each layer and source how strongly to tint its cell, from 0 to 70 percent."""
    if not coefficients:
        return []
    largest = max((v for row in coefficients["values"] for v in row), default=1.0) or 1.0
    return [[round(70 * value / largest) for value in row] for row in coefficients["values"]]
