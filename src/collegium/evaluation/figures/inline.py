"""Figures within a page of the report: SVG in the colours and the type of the page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from collegium.evaluation.figures.data import Figure
from collegium.evaluation.figures.drawing import GRID, INK, LINES, PAPER, SHADE, SOFT, draw

VARIABLES = {
    **{colour: f"var(--line-{place})" for place, colour in enumerate(LINES)},
    PAPER: "var(--paper)", INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--line)",
    SHADE: "var(--first)",
}  # fmt: skip
"""Colour of a drawing -> the variable of the style sheet that takes its place."""

_COLOUR = re.compile("|".join(VARIABLES))
_FONT = re.compile(r"font: (?:(\d+) )?([\d.]+px) [^;]+")
_FAMILY = re.compile(r"font-family: [^;]+;? ?")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_ROUND = "stroke-linejoin:round;stroke-linecap:butt"  # as matplotlib's own style sheet says
_POINTS = 96 / 72  # of a screen


def inline_svg(figure: Figure) -> str:
    """Draw a figure as an ``<svg>`` element that takes its colours from the page around it.

    Ids begin with "figure-" and its name, so that several stand in one page.

    Args:
        figure: What it shows.
    """
    root, start = ElementTree.fromstring(draw(figure, "svg")), f"figure-{figure.name}"
    _drop(root, f"{_SVG}metadata", f"{_SVG}title", f"{_SVG}style")
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        link = element.attrib.pop(_LINK, None)
        if link:
            element.set("href", f"#{start}-{link.removeprefix('#')}")
        if "id" in element.attrib:
            element.set("id", f"{start}-{element.get('id')}")
        for key, value in element.items():
            if "url(#" in value:
                element.set(key, _REFERENCE.sub(rf"url(#{start}-\1)", value))
        if style := element.get("style"):
            plain = _FAMILY.sub("", _FONT.sub(_type, style))
            element.set("style", _COLOUR.sub(_variable, plain))
    width = float(root.attrib["viewBox"].split()[2]) * _POINTS
    root.attrib = {
        "class": "drawn",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": figure.description,
        "style": f"{_ROUND};min-width:{width:.0f}px;max-width:{1.3 * width:.0f}px",
    }
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _drop(element: ElementTree.Element, *tags: str) -> None:
    """Remove elements, however deep."""
    for child in list(element):
        if child.tag in tags:
            element.remove(child)
        else:
            _drop(child, *tags)


def _variable(found: re.Match[str]) -> str:
    return VARIABLES[found[0]]


def _type(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1]}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}"
