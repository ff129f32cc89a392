"""Drawings against the data of their figures, read back from the SVG."""

import re
from importlib.resources import files
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from collegium.evaluation.figures import drawing
from collegium.evaluation.figures.data import (
    Axis,
    Boxes,
    Figure,
    Heat,
    Look,
    Panel,
    Series,
    box_of,
)
from collegium.evaluation.figures.drawing import draw
from collegium.evaluation.figures.inline import inline_svg
from collegium.evaluation.report import plots

SVG = "{http://www.w3.org/2000/svg}"
X, Y = Axis("round", limits=(0.0, 8.0)), Axis("Dice", limits=(0.0, 1.0))
NAN = float("nan")
LINE = Series("Ditto <b> $x_1$", Look(2, 2, dashed=True), "line", (1.0, 2.0, 4.0, 8.0),
              (0.25, 0.5, 0.75, 0.625), (0.1, 0.4, 0.7, 0.6), (0.4, 0.6, 0.8, 0.65))  # fmt: skip
POINTS = Series("FedAvg", Look(1, 1), "points", (1.0, 4.0), (0.5, 0.25), (0.25, NAN), (0.75, NAN))
CLOUD = Series("Local", Look(0, 0), "scatter", (2.0, 6.0), (0.125, 0.875))
BARS = Series("GRACE", Look(6, 6), "bars", (1.0, 2.0), (0.25, 0.5))
SCORES = (0.0, 4.0, 5.0, 6.0, 7.0, 1.5)
BOXES = Boxes("IOP-FL", Look(4, 4), (box_of(0.0, SCORES), box_of(1.0, (1.0, 2.0, 3.0))))


def figure(*panels: Panel) -> Figure:
    return Figure("some", "Some & figure", "A caption.", panels)


def parse(drawn: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(draw(drawn, "svg"))


def group(root: ElementTree.Element, gid: str) -> ElementTree.Element:
    return next(element for element in root.iter() if element.get("id") == gid)


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def frame(root: ElementTree.Element, number: int = 0) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of a panel, from its background."""
    path = next(group(root, f"panel-{number}").iter(f"{SVG}path"))
    across, down = zip(*corners(path), strict=True)
    return min(across), max(across), max(down), min(down)


def read_back(root, gid, panel: Panel, kind="path"):
    """The points of a drawing in the units of the axes of its panel."""
    left, right, bottom, top = frame(root)
    assert panel.x.limits
    assert panel.y.limits
    (x0, x1), (y0, y1) = panel.x.limits, panel.y.limits
    if kind == "use":
        places = [
            (float(u.get("x", 0)), float(u.get("y", 0))) for u in group(root, gid).iter(f"{SVG}use")
        ]
    else:
        places = corners(next(group(root, gid).iter(f"{SVG}path")))
    across, up = (x1 - x0) / (right - left), (y1 - y0) / (bottom - top)
    return [(x0 + across * (x - left), y0 + up * (bottom - y)) for x, y in places]


def close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=2e-3)


def test_a_line_and_its_band_pass_through_their_data():
    panel = Panel("", X, Y, (LINE,))
    root = parse(figure(panel))
    close(read_back(root, "series-0-0", panel), list(zip(LINE.x, LINE.y, strict=True)))
    band = {(round(x, 2), round(y, 2)) for x, y in read_back(root, "series-0-0-band", panel)}
    ends = {*zip(LINE.x, LINE.low, strict=True), *zip(LINE.x, LINE.high, strict=True)}
    assert band == {(round(x, 2), round(y, 2)) for x, y in ends}


def test_points_stand_at_their_data_with_bars_where_there_is_an_interval():
    panel = Panel("", X, Y, (POINTS, CLOUD))
    root = parse(figure(panel))
    close(read_back(root, "series-0-0", panel), [(1.0, 0.5), (4.0, 0.25)])
    close(read_back(root, "series-0-0-bar-0", panel), [(1.0, 0.25), (1.0, 0.75)])
    assert not [e for e in root.iter() if e.get("id") == "series-0-0-bar-1"]
    close(read_back(root, "series-0-1", panel, "use"), [(2.0, 0.125), (6.0, 0.875)])


def test_points_of_several_methods_stand_beside_each_other_at_their_heights():
    other = Series("Local", Look(0, 0), "points", POINTS.x, POINTS.y, POINTS.low, POINTS.high)
    panel = Panel("", X, Y, (POINTS, other))
    root = parse(figure(panel))
    first, second = (read_back(root, f"series-0-{k}", panel) for k in (0, 1))
    for (x, y), (u, v), value in zip(first, second, POINTS.y, strict=True):
        assert x < u
        assert (x + u) / 2 == pytest.approx(POINTS.x[POINTS.y.index(value)], abs=5e-3)
        assert (y, v) == pytest.approx((value, value), abs=2e-3)


def test_on_an_axis_of_names_points_are_not_joined():
    named = Panel("", Axis("setting", names=("a", "b"), limits=(-0.5, 1.5)), Y,
                  (Series("FedAvg", Look(1, 1), "points", (0.0, 1.0), (0.5, 0.25)),))  # fmt: skip
    root = parse(figure(named))
    close(read_back(root, "series-0-0", named, "use"), [(0.0, 0.5), (1.0, 0.25)])
    assert {text.text for text in root.iter(f"{SVG}text")} >= {"a", "b", "setting"}


def test_bars_reach_from_zero_to_their_data():
    panel = Panel("", X, Y, (BARS,))
    root = parse(figure(panel))
    for number, (x, y) in enumerate(zip(BARS.x, BARS.y, strict=True)):
        across, up = zip(*read_back(root, f"series-0-0-bar-{number}", panel), strict=True)
        assert (min(across), max(across)) == pytest.approx((x - 0.35, x + 0.35), abs=2e-3)
        assert (min(up), max(up)) == pytest.approx((0.0, y), abs=2e-3)


def test_boxes_are_drawn_at_their_quartiles_and_whiskers():
    names = Axis("setting", names=("a", "b"), limits=(1.4, -0.4))  # the first on top
    panel = Panel("", Axis("Dice", limits=(-1.0, 8.0)), names, boxes=(BOXES,))
    drawn = figure(
        Panel("", panel.x, Axis("setting", names=("a", "b"), limits=(-0.4, 1.4)), boxes=(BOXES,))
    )
    root = parse(drawn)
    for number, box in enumerate(BOXES.boxes):
        across, up = zip(*read_back(root, f"boxes-0-0-boxes-{number}", panel), strict=True)
        assert (min(across), max(across)) == pytest.approx((box.first, box.third), abs=5e-3)
        assert (min(up), max(up)) == pytest.approx((box.place - 0.3, box.place + 0.3), abs=5e-3)
        median = read_back(root, f"boxes-0-0-medians-{number}", panel)
        assert {round(x, 2) for x, _ in median} == {round(box.median, 2)}
        low, high = (
            read_back(root, f"boxes-0-0-whiskers-{2 * number + k}", panel)[1][0] for k in (0, 1)
        )
        assert (low, high) == pytest.approx((box.low, box.high), abs=5e-3)
    assert BOXES.boxes[0].beyond == ()


def test_a_heat_map_is_the_deeper_the_larger_and_empty_where_there_is_nothing():
    heat = Heat(("a", "b"), (1.0, 2.0), ((0.0, 0.5), (1.0, NAN)), "rate", (0.0, 1.0))
    root = parse(figure(Panel("", Axis("round"), Axis(""), heat=heat)))
    left, right, bottom, top = frame(root)
    middle, level = (left + right) / 2, (bottom + top) / 2
    expected = {0: (left, top), 10: (middle, top), 20: (left, level)}
    opacities = []
    for shade, corner in expected.items():
        path = next(group(root, f"heat-0-{shade}").iter(f"{SVG}path"))
        across, down = zip(*corners(path), strict=True)
        assert (min(across), min(down)) == pytest.approx(corner, abs=0.01)
        opacity = re.search(r"(?<!-)opacity: ([\d.]+)", path.get("style", ""))
        opacities.append(float(opacity[1]) if opacity else 1.0)
    assert all(pale < deep for pale, deep in pairwise(opacities))
    assert len([e for e in root.iter() if (e.get("id") or "").startswith("heat-0-")]) == 3
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert texts >= {"a", "b", "1", "2", "rate 0", "0.5"}


def every_kind() -> Figure:
    heat = Heat(("a", "b"), (1.0, 2.0), ((0.0, 0.5), (1.0, NAN)), "rate", (0.0, 1.0))
    log = Axis("lam", scale="log", ticks=(1.0, 4.0))
    return figure(
        Panel("lines", X, Y, (LINE,), guide="zero"),
        Panel("points", log, Y, (POINTS,)),
        Panel("equal", Axis("a", "mm"), Axis("b", "mm"), (CLOUD,), guide="diagonal"),
        Panel("boxes", Axis("Dice"), Axis("setting", names=("a", "b")), boxes=(BOXES,)),
        Panel("heat", Axis("round"), Axis(""), heat=heat),
        Panel("bars", X, Y, (BARS,)),
    )


@pytest.mark.parametrize("form", ["svg", "pdf"])
def test_equal_figures_have_equal_bytes_whatever_a_user_has_set(form):
    first = draw(every_kind(), form)
    with mpl.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.fonttype": "path"}):
        assert draw(every_kind(), form) == first
        assert mpl.rcParams["font.size"] == 30
    assert b"<dc:date>" not in first
    assert b"/CreationDate" not in first


def test_text_stays_text_and_nothing_is_read_as_mathematics():
    root = parse(every_kind())
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "Ditto <b> $x_1$" in texts
    assert {"a (mm)", "lam", "1", "4"} <= set(texts)
    assert not list(root.iter(f"{SVG}image"))
    text = draw(every_kind(), "svg").decode()
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", text)]
    assert len(sizes) > 30
    assert min(sizes) * 96 / 72 > 9  # a point of the drawing is 1/72 inch, of a screen 1/96


def test_a_pdf_holds_its_fonts():
    content = draw(every_kind(), "pdf")
    assert content.startswith(b"%PDF")
    assert b"/FontFile2" in content
    assert b"/Type3" not in content


def test_names_in_letters_that_the_font_lacks_are_drawn_without_a_warning():
    drawn = figure(Panel("北京", X, Y, (LINE,)))
    assert "北京" in draw(drawn, "svg").decode()
    assert draw(drawn, "pdf")


def test_ids_are_unique():
    ids = [element.get("id") for element in parse(every_kind()).iter() if element.get("id")]
    assert len(ids) == len(set(ids))


def test_colours_and_markers_are_those_of_the_report():
    style = (files("collegium.evaluation.report") / "templates" / "style.css").read_text("utf-8")
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", style[: style.index("@media")]))
    assert tuple(light[f"line-{k}"] for k in range(plots.COLOURS)) == drawing.LINES
    assert tuple(light[name] for name in ("paper", "ink", "soft", "line", "first")) == (
        drawing.PAPER,
        drawing.INK,
        drawing.SOFT,
        drawing.GRID,
        drawing.SHADE,
    )
    assert len(drawing.MARKERS) == len(plots.MARKERS)


def test_the_legend_names_every_series_once_and_lines_differ_without_colour():
    other = Series("FedAvg", Look(1, 1), "line", (1.0, 8.0), (0.5, 0.5))
    root = parse(figure(Panel("one", X, Y, (LINE, other)), Panel("two", X, Y, (LINE, other))))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("FedAvg") == texts.count(LINE.name) == 1
    dashed, solid = (
        next(group(root, f"series-0-{k}").iter(f"{SVG}path")).get("style", "") for k in (0, 1)
    )
    assert "stroke-dasharray" in dashed
    assert "stroke-dasharray" not in solid
    marks = [next(group(root, f"series-0-{k}").iter(f"{SVG}use")) for k in (0, 1)]
    shapes = [mark.get("{http://www.w3.org/1999/xlink}href") for mark in marks]
    assert shapes[0] != shapes[1]


def test_in_a_page_every_colour_is_a_variable_and_every_id_has_the_figures_name():
    text = inline_svg(every_kind())
    assert not re.search(r"#[0-9a-f]{6}", text)
    assert {f"var(--{name})" for name in ("ink", "soft", "line", "first", "line-1", "line-2")} <= {
        *re.findall(r"var\(--[\w-]+\)", text)
    }
    root = ElementTree.fromstring(text)
    assert (root.tag, root.get("role")) == ("svg", "img")
    assert root.get("aria-label") == every_kind().description
    ids = {name for element in root.iter() if (name := element.get("id"))}
    assert all(name.startswith("figure-some-") for name in ids)
    targets = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    assert set(targets) <= ids
    assert targets
    # the rules of matplotlib's own style sheet would be those of the whole page
    assert not {"style", "metadata", "title"} & {element.tag for element in root.iter()}
    assert "DejaVu" not in text
