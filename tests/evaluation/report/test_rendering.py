import pytest
from jinja2 import UndefinedError

from collegium.evaluation.report.rendering import cell_html, make_environment


def test_html_cells_mark_and_escape():
    assert cell_html(0.8125, 0.0104, 1) == (
        '<td><strong>0.812</strong> <span class="sd">\u00b1 0.010</span></td>'
    )
    assert "<u>2.50</u>" in cell_html(2.5, None, 2, unit="mm")
    assert "&lt;b&gt;x" in cell_html(0.5, note="<b>x")
    assert cell_html(None) == cell_html(float("nan"), float("nan")) == "<td>\u2013</td>"


def test_templates_escape_what_filters_return_and_not_what_drawings_do():
    environment = make_environment({"shout": str.upper}, {"draw": lambda text: f"<g>{text}</g>"})
    template = environment.from_string("{{ '<b>'|shout }} {{ 'x'|draw }} {{ 0.5|number }}")
    assert template.render() == "&lt;B&gt; <g>x</g> 0.500"
    with pytest.raises(UndefinedError, match="'absent' is undefined"):
        environment.from_string("{{ absent }}").render()
