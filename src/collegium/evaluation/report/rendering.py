"""How pages are rendered from templates: everything escaped, nothing undefined, no network."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from math import isnan
from typing import TYPE_CHECKING, Any

from collegium.core.text import format_bytes, format_duration
from collegium.evaluation.entries import distinct
from collegium.evaluation.report import assessment, plots, routing
from collegium.evaluation.wording import PLUS_MINUS, number, title

if TYPE_CHECKING:
    from jinja2 import Environment

Filters = Mapping[str, Callable[..., Any]]
"""Name in the templates -> a function that returns text, which is escaped."""

Drawings = Mapping[str, Callable[..., str]]
"""Name in the templates -> a function that returns markup, in which it has escaped everything."""


def render_page(
    template: str,
    content: Mapping[str, Any],
    *,
    filters: Filters | None = None,
    drawings: Drawings | None = None,
) -> str:
    """Return a page: HTML that refers to nothing outside itself.

    Args:
        template: File name of the template.
        content: The variables of the template.
        filters: Functions of this page alone.
        drawings: Drawings of this page alone.
    """
    environment = make_environment(filters or {}, drawings or {})
    return environment.get_template(template).render(**content)


def make_environment(filters: Filters, drawings: Drawings) -> Environment:
    """Return the environment that renders the templates of this package.

    Args:
        filters: Functions beside those that every page has, or in their place.
        drawings: Drawings beside those that every page has.
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

    environment.filters |= {**_FILTERS, **filters}
    environment.filters |= {name: marked(draw) for name, draw in {**_DRAWINGS, **drawings}.items()}
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


_FILTERS: Filters = {
    "number": number,
    "short": assessment.short,
    "size": format_bytes,
    "duration": format_duration,
    "title": title,
    "percent": lambda share: f"{share:.0%}",
    "heat": assessment.heat,
    "shades": routing.shades,
    "distinct": distinct,
}
_DRAWINGS: Drawings = {
    "cell": cell_html,
    "chart": plots.line_chart,
    "sample": plots.legend_svg,
    "network": assessment.network_svg,
    "strips": assessment.strips_svg,
    "variation": routing.variation_svg,
    "markup": str,
}
