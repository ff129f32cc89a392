"""The account of an adaptation: one page about what was done with which models."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from collegium.core.files import write_atomically
from collegium.evaluation.report.plots import limits
from collegium.evaluation.report.rendering import render_page
from collegium.evaluation.report.routing import loss_lines, mean_routes
from collegium.tasks import NON_SCORE_KEYS

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class CasePicture:
    """A predicted case to show."""

    caption: str
    image: Image

    @property
    def source(self) -> str:
        """The picture inside the page."""
        data = io.BytesIO()
        self.image.save(data, "WEBP", quality=85)
        return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


def write_account(
    path: Path,
    account: Mapping[str, Any],
    pictures: Sequence[CasePicture],
    scores: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the page; it refers to nothing outside itself.

    Args:
        path: The page.
        account: The content of ``account.json``, as `collegium adapt` writes it.
        pictures: Cases with their predictions.
        scores: By case, if there were labels.
    """
    losses = loss_lines(account["losses"])
    adapter = account["adapter"]
    content = {
        "account": account,
        "adapter": adapter,
        "settings": {k: _words(v) for k, v in adapter.items() if k not in ("name", "label")},
        "losses": losses,
        "frame": limits(losses, warm_up=0.0),
        "routes": mean_routes([account["coefficients"]]),
        "pictures": pictures,
        "means": mean_scores(scores),
    }
    write_atomically(path, render_page("account.html.j2", content).encode())


def _words(value: Any) -> str:
    """Return a setting as a reader writes it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def mean_scores(scores: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float | None, int]]:
    """Return the mean of every metric over the patients of whom it is defined, and their number.

    A patient counts by the mean of the cases where it is.
    """
    means: dict[str, tuple[float | None, int]] = {}
    columns = scores[0].keys() if scores else ()
    for name in (key for key in columns if key not in ("model", *NON_SCORE_KEYS)):
        found: dict[str, list[float]] = {}
        for row in scores:
            if row[name] is not None:
                found.setdefault(row["patient"], []).append(row[name])
        whole = fmean(map(fmean, found.values())) if found else None
        means[name] = whole, len(found)
    return means
