from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from collegium.evaluation.report.assessment import (
    heat,
    layout,
    network_svg,
    short,
    strips_svg,
)
from collegium.evaluation.report.rendering import render_page

SITES = ["Basel", "Kyoto", "Leeds", "<b>Quito"]
MATRIX = [[0.0, 1.0, 4.0, 9.0], [1.0, 0.0, 3.0, 8.0], [4.0, 3.0, 0.0, 5.0], [9.0, 8.0, 5.0, 0.0]]


def column(**changes: Any) -> dict[str, Any]:
    told = {site: [float(i), i + 1.0, i + 4.0] for i, site in enumerate(SITES)}
    return {"name": "channel 1", "unit": "intensity", "told": told, "matrix": MATRIX, **changes}


def geometry(**changes: Any) -> dict[str, Any]:
    return {
        "key": "metadata",
        "made_of": "channel 1 and gland",
        "sites": SITES,
        "matrix": MATRIX,
        "most_distant": "<b>Quito",
        "stability": {"Basel": 0.1, "Kyoto": 0.0, "Leeds": 0.0, "<b>Quito": 0.9},
        "edges": [["Basel", "Kyoto"], ["Kyoto", "Leeds"], ["Leeds", "<b>Quito"]],
        "neighbours": 1,
        "clusters": {
            "recommended": [["Basel", "Kyoto"], ["Leeds", "<b>Quito"]],
            "printed": [["Basel", "Kyoto"], ["Leeds", "<b>Quito"]],
        },
        **changes,
    }


def content(**changes: Any) -> dict[str, Any]:
    evidence = {"p": 0.001, "effect": 0.4, "smallest_p": 0.001, "cases": 12}
    test = {
        "kind": "label",
        "what": "the amount of gland",
        "evidence": evidence,
        "p_adjusted": 0.002,
        "fewest": 3,
    }
    findings = {
        "cases": dict.fromkeys(SITES, 3),
        "intensity": [column()],
        "labels": [column(name="gland", unit="mL")],
        "shares": {site: {"background": 0.9, "gland": 0.1} for site in SITES},
        "geometries": [geometry()],
        "angles": {"sites": SITES, "matrix": MATRIX, "within": dict.fromkeys(SITES, 12.34)},
        "proxy": {"sites": SITES, "matrix": MATRIX},
        "tests": [test],
        "notes": ["site <x> told nothing"],
        **changes,
    }
    parts = {"label_volumes": "how much of each label", "embeddings": "embeddings of images"}
    entry = {
        "parts": {"label_volumes": 1500},
        "withheld": ["embeddings"],
        "bytes_up": 2000,
        "failed": "",
    }
    advice = {"text": "Try Ditto.", "sure": "a guess", "why": "No reason."}
    return {
        "collegium": "0",
        "federation": "<i>abdomen",
        "seed": 0,
        "asked": {"summary": "cases", "bins": 32, "encoder": "", "grid": 64, "parts": parts},
        "sites": SITES,
        "exchanged": dict.fromkeys(SITES, entry),
        "findings": findings,
        "verdict": {"level": "differ", "headline": "They do.", "why": "p.", "advice": [advice]},
    }


def render(data: dict[str, Any]) -> str:
    return render_page("assessment.html.j2", data)


class Page(HTMLParser):
    """Counts elements, and keeps what is read aloud and what is referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.references: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        found = dict(attrs)
        self.references += [str(v) for k, v in attrs if k in ("src", "href") and v]
        if found.get("role") == "img":
            self.images.append(found)

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_refers_to_nothing_outside_and_runs_nothing() -> None:
    text = render(content())
    page = Page(text)
    assert all(reference.startswith("#") for reference in page.references)
    assert "script" not in page.count
    assert "://" not in text
    assert "default-src 'none'" in text
    targets = {reference[1:] for reference in page.references}
    assert all(f'id="{target}"' in text for target in targets)


def test_names_are_shown_as_they_are_and_never_as_markup() -> None:
    page = Page(render(content()))
    assert "b" not in page.count
    assert "i" not in page.count
    assert "x" not in page.count
    assert "How different are the sites of <i>abdomen?" in page.words
    assert "site <x> told nothing" in page.words


def test_drawings_say_in_words_what_they_show() -> None:
    page = Page(render(content()))
    labels = [str(image["aria-label"]) for image in page.images]
    assert labels == [
        "Network of the sites by channel 1 and gland; joined are Basel with Kyoto, Kyoto with "
        "Leeds, Leeds with <b>Quito.",
        "channel 1 in intensity; medians: Basel 1, Kyoto 2, Leeds 3, <b>Quito 4.",
        "gland in mL; medians: Basel 1, Kyoto 2, Leeds 3, <b>Quito 4.",
    ]


def test_the_page_tells_what_was_found() -> None:
    words = " ".join(Page(render(content())).words.split())
    assert "They differ They do. p." in words
    assert "A guess. No reason." in words
    assert "Most distant: <b>Quito, in 90% of 200 resampled federations." in words
    assert "Clusters: Basel, Kyoto | Leeds, <b>Quito." in words
    assert "by the paper's rule as printed" not in words
    assert "withheld" in words
    assert "1.5 kB" in words
    assert "10.00 %" in words


def test_where_nothing_was_told_the_page_says_so() -> None:
    empty = content(
        cases={}, intensity=[], labels=[], shares={}, geometries=[], proxy=None, tests=[], notes=[]
    )
    for entry in empty["exchanged"].values():
        entry["failed"] = "the disk is full"
    words = Page(render(empty)).words
    for sentence in (
        "Fewer than two sites told enough to be compared.",
        "No site told its cases' intensities or labels.",
        "Basel could not answer. the disk is full.",
    ):
        assert sentence in words


def test_other_clusters_of_the_printed_rule_are_shown_beside() -> None:
    clusters = {
        "recommended": [["Basel", "Kyoto", "Leeds"], ["<b>Quito"]],
        "printed": [["Basel", "Kyoto"], ["Leeds", "<b>Quito"]],
    }
    words = Page(render(content(geometries=[geometry(clusters=clusters)]))).words
    assert "by the paper's rule as printed Basel, Kyoto | Leeds, <b>Quito" in words


def test_two_sites_are_drawn_without_a_most_distant_one() -> None:
    two = geometry(
        sites=SITES[:2],
        matrix=[[0.0, 1.0], [1.0, 0.0]],
        most_distant="",
        stability={},
        edges=[["Basel", "Kyoto"]],
        clusters={},
    )
    drawing = network_svg(two)
    assert drawing.count("<circle") == 2
    assert "ring" not in drawing
    assert "With two sites none is more distant" in Page(render(content(geometries=[two]))).words


def test_places_keep_distances_that_a_plane_can_hold() -> None:
    corners = np.array([[0.0, 0.0], [4.0, 0.0], [4.0, 1.0], [0.0, 1.0]]) * 7
    apart = np.linalg.norm(corners[:, None] - corners[None], axis=2)
    places = layout(apart)
    drawn = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.testing.assert_allclose(drawn / drawn.max(), apart / apart.max(), atol=1e-6)


@pytest.mark.parametrize("matrix", [np.zeros((3, 3)), np.ones((5, 5)) - np.eye(5), [[0.0]]])
def test_nodes_neither_meet_nor_leave_the_drawing(matrix: Any) -> None:
    places = layout(np.array(matrix))
    gaps = np.linalg.norm(places[:, None] - places[None], axis=2) + 100 * np.eye(len(places))
    assert gaps.min() > 35
    assert (places > 0).all()


def test_shades_grow_with_the_distance() -> None:
    cells = heat(MATRIX)
    assert cells[0][3] == {"text": "9", "shade": 88, "deep": True}
    assert cells[0][1] == {"text": "1", "shade": 10, "deep": False}
    assert heat([[0.0]]) == [[{"text": "0", "shade": 0, "deep": False}]]


def test_a_summary_is_drawn_by_its_quartiles() -> None:
    summary = {"edges": [0.0, 4.0, 8.0], "counts": [2.0, 2.0]}
    drawing = strips_svg(column(told={"Basel": summary, "Kyoto": [2.0, 2.0]}))
    assert "medians: Basel 4, Kyoto 2." in drawing
    assert drawing.count("<circle") == 2
    same = strips_svg(column(told={"Basel": [3.0, 3.0]}))
    assert "NaN" not in same
    assert "nan" not in same


def test_numbers_have_about_three_digits() -> None:
    assert [short(n) for n in (0.0, 0.01234, 3.14159, 123.4, 12345.6)] == [
        "0",
        "0.0123",
        "3.14",
        "123",
        "12,346",
    ]
