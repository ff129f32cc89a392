"""How pages are made of templates: everything escaped, nothing undefined, no network."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collegium.core.text import format_bytes, format_duration
from collegium.evaluation import tables
from collegium.evaluation.report import plots

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(
    filters: dict[str, Callable[..., Any]], drawings: dict[str, Callable[..., str]]
) -> "Environment":
    """Return what renders the templates of this package.

    Args:
        filters: Functions that give text, which is escaped.
        drawings: Functions that give markup, in which they have escaped everything themselves.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("collegium.evaluation.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def marked(draw: Callable[..., str]) -> Callable[..., Markup]:
        return lambda *given, **named: Markup(draw(*given, **named))

    made.filters.update(
        number=tables.number,
        interval=tables.interval_text,
        size=format_bytes,
        duration=format_duration,
        title=plots.title,
        percent=lambda share: f"{share:.0%}",
        **filters,
        **{name: marked(draw) for name, draw in drawings.items()},
    )
    return made
