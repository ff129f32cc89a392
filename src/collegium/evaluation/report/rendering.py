"""How pages are rendered from templates: everything escaped, nothing undefined, no network."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from math import isnan
from typing import TYPE_CHECKING, Any

from collegium.core.text import format_bytes, format_duration
from collegium.evaluation.formats import PLUS_MINUS, number
from collegium.evaluation.report import plots

if TYPE_CHECKING:
    from jinja2 import Environment


def make_environment(
    filters: Mapping[str, Callable[..., Any]], drawings: Mapping[str, Callable[..., str]]
) -> Environment:
    """Return the environment that renders the templates of this package.

    Args:
        filters: Functions that return text, which is escaped.
        drawings: Functions that return markup, in which they have escaped everything themselves.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("collegium.evaluation.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def marked(draw: Callable[..., str]) -> Callable[..., Markup]:
        return lambda *given, **named: Markup(draw(*given, **named))

    environment.filters.update(
        number=number,
        size=format_bytes,
        duration=format_duration,
        title=plots.title,
        percent=lambda share: f"{share:.0%}",
        **filters,
        **{name: marked(draw) for name, draw in drawings.items()},
    )
    return environment


def cell_html(
    mean: float | None, sd: float | None = None, rank: int = 0, note: str = "", unit: str = ""
) -> str:
    """Return a ``<td>`` with everything escaped: the best in bold, the second underlined.

    Args:
        mean: The number; None and NaN are undefined.
        sd: Its standard deviation.
        rank: 1 for the best, 2 for the second.
        note: What else belongs in the cell.
        unit: The unit of both numbers.
    """
    text = html.escape(number(mean, unit))
    text = ("{}", "<strong>{}</strong>", "<u>{}</u>")[rank].format(text)
    if sd is not None and not isnan(sd):
        text += f' <span class="sd">{PLUS_MINUS} {number(sd, unit)}</span>'
    if note:
        text += f'<br><span class="note">{html.escape(note)}</span>'
    return f"<td>{text}</td>"
