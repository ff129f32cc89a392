"""Whether text and lines can be read on light and on dark, computed from the style sheets."""

import re
from importlib.resources import files

import pytest

TEXT, LINE = 4.5, 3.0
"""Contrast that WCAG 2.2 asks of text (1.4.3) and of what drawings are made of (1.4.11)."""


def sheet(name):
    return (files("collegium.evaluation.report") / "templates" / name).read_text(encoding="utf-8")


def variables(block):
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))


def themes():
    text = sheet("style.css")
    light, asked, chosen = (
        variables(re.search(rf"{start} \{{(.*?)\}}", text, re.S | re.M)[1])  # type: ignore[index]
        for start in (
            r"^:root",
            r':root:not\(\[data-theme="light"\]\)',
            r':root\[data-theme="dark"\]',
        )
    )
    return light, asked, chosen


LIGHT, DARK, CHOSEN = themes()
THEMES = [pytest.param(LIGHT, id="light"), pytest.param(DARK, id="dark")]


def rgb(colour):
    return [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]


def luminance(parts):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard():
    assert contrast(rgb("#000000"), rgb("#ffffff")) == pytest.approx(21)
    assert contrast(rgb("#777777"), rgb("#ffffff")) == pytest.approx(4.48, abs=0.005)


def test_both_ways_to_the_dark_theme_have_the_same_colours():
    assert DARK == CHOSEN
    assert LIGHT.keys() == DARK.keys()


@pytest.mark.parametrize("theme", THEMES)
def test_text_can_be_read_on_whatever_it_stands(theme):
    pairs = [(ink, on) for ink in ("ink", "soft", "accent") for on in ("paper", "raised")]
    pairs += [(word, f"{word}-tint") for word in ("helps", "hurts", "unsure")]
    pairs += [("ink", "unsure-tint")]  # the page that is open, in the list of pages
    poor = {
        (ink, on): round(value, 2)
        for ink, on in pairs
        if (value := contrast(rgb(theme[ink]), rgb(theme[on]))) < TEXT
    }
    assert not poor


@pytest.mark.parametrize("theme", THEMES)
def test_numbers_in_a_heat_map_can_be_read_on_every_shade(theme):
    for share in range(89):  # color-mix() in sRGB, see --v
        mixed = [
            (share * deep + (100 - share) * pale) / 100
            for deep, pale in zip(rgb(theme["shade"]), rgb(theme["raised"]), strict=True)
        ]
        assert contrast(rgb(theme["ink"]), mixed) >= TEXT, share


@pytest.mark.parametrize("theme", THEMES)
def test_lines_and_marks_stand_out(theme):
    names = [name for name in theme if name.startswith("line-")]
    assert len(names) == 10
    for name in [*names, "first", "second", "helps", "hurts", "unsure", "soft"]:
        assert contrast(rgb(theme[name]), rgb(theme["paper"])) >= LINE, name


def test_the_case_browser_can_be_read():
    rules = re.findall(r"^\.viewer[^{]*\{([^}]*)\}", sheet("report.css"), re.M)
    inks = {ink for rule in rules for ink in re.findall(r"[; ]color: (#[0-9a-f]{6})", rule)}
    grounds = {on for rule in rules for on in re.findall(r"background: (#[0-9a-f]{6})", rule)}
    assert len(inks) == 2
    assert len(grounds) == 2
    for ink in inks:
        for ground in grounds:
            assert contrast(rgb(ink), rgb(ground)) >= TEXT


def test_the_style_refers_to_no_colour_that_is_missing():
    used = set(re.findall(r"var\(--([\w-]+)\)", sheet("style.css") + sheet("report.css")))
    assert used - LIGHT.keys() == {"v"}
