import re
from html.parser import HTMLParser
from typing import Any

import pytest

from collegium.evaluation.report.drift import lines, map_svg, render, row

SITES = ["Basel", "Kyoto", "<b>Quito"]
ALGORITHMS = ["fedavg", "grace & <i>co"]


def moment(algorithm: str, number: int, **changes: Any) -> dict[str, Any]:
    points = [
        {"site": site, "kind": kind, "x": float(3 * k + j), "y": float(k)}
        for k, site in enumerate(SITES)
        for kind in ("global", "local")
        for j in range(2)
    ]
    return {
        "algorithm": algorithm,
        "round": number,
        "windows": dict.fromkeys(SITES, 2),
        "patients": dict.fromkeys(SITES, 2),
        "drift": {"Basel": 0.25, "Kyoto": 1.5, "<b>Quito": 2.0},
        "between": [[0.0, 1.0, 2.0], [1.0, 0.0, 1.5], [2.0, 1.5, 0.0]],
        "points": points,
        **changes,
    }


def content(**changes: Any) -> dict[str, Any]:
    return {
        "collegium": "0",
        "experiment": "<u>try",
        "federation": "<s>abdomen",
        "seed": 7,
        "split": "val",
        "limit": 64,
        "sites": SITES,
        "rounds": [1, 5],
        "algorithms": ALGORITHMS,
        "moments": [moment(label, number) for label in ALGORITHMS for number in (1, 5)],
        "notes": ["site <x> is coarse."],
        **changes,
    }


class Page(HTMLParser):
    """Counts elements, and keeps words, identifiers and what is referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.references: list[str] = []
        self.ids: list[str] = []
        self.pointers: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        found = dict(attrs)
        self.references += [str(v) for k, v in attrs if k in ("src", "href") and v]
        self.ids += [str(found["id"])] if "id" in found else []
        self.pointers += str(found.get("aria-labelledby") or "").split()

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_names_every_site_and_algorithm() -> None:
    words = " ".join(Page(render(content())).words.split())
    for name in [*SITES, *ALGORITHMS]:
        assert name in words
    assert "<u>try: how far do features drift?" in words
    assert "2 algorithms at 3 sites of <s>abdomen, 2 rounds looked at, seed 7." in words
    assert "site <x> is coarse." in words


def test_names_are_never_markup() -> None:
    count = Page(render(content())).count
    assert not {"b", "i", "s", "u", "x"} & count.keys()


def test_the_page_refers_to_nothing_outside_and_runs_nothing() -> None:
    text = render(content())
    page = Page(text)
    assert "script" not in page.count
    assert "://" not in text
    assert "default-src 'none'" in text
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert all(reference.startswith("#") for reference in page.references)


def test_identifiers_are_unique_and_pointed_at() -> None:
    page = Page(render(content()))
    assert len(page.ids) == len(set(page.ids))
    assert set(page.pointers) <= set(page.ids)
    assert page.count["desc"] == 4


def test_the_tables_hold_the_distances() -> None:
    text = render(content())
    row_of_quito = r'<th scope="row">&lt;b&gt;Quito</th><td>2.00</td><td>2.00</td>'
    assert len(re.findall(row_of_quito, text)) == 2
    assert '<td class="deep" style="--v:88%">2</td>' in text
    assert '<td class="" style="--v:44%">1</td>' in text  # half of the largest that there is
    mean = r"<td>1</td><td>1.25</td><td>0.25</td><td>2.00</td><td>1.50</td>"
    assert len(re.findall(mean, text)) == 2


def test_a_row_is_made_of_means_over_sites_and_pairs() -> None:
    found = row(moment("fedavg", 5))
    assert found == {
        "algorithm": "fedavg",
        "round": 5,
        "mean": (0.25 + 1.5 + 2.0) / 3,
        "smallest": 0.25,
        "largest": 2.0,
        "between": (1.0 + 2.0 + 1.5) / 3,
    }
    alone = row(moment("fedavg", 5, drift={"Basel": 1.0}, between=[[0.0]]))
    assert alone["between"] is None


def test_a_site_has_its_place_even_where_another_is_missing() -> None:
    moments = [moment("x", 1), moment("x", 2, drift={"<b>Quito": 0.5})]
    found = lines(moments, [*SITES, "Rome"])
    assert [(line.name, line.place, dict(line.points)) for line in found] == [
        ("Basel", 0, {1: 0.25}),
        ("Kyoto", 1, {1: 1.5}),
        ("<b>Quito", 2, {1: 2.0, 2: 0.5}),
    ]


def test_a_map_draws_a_mark_per_point_filled_and_hollow() -> None:
    drawing = map_svg(moment("fedavg", 5), SITES, "m")
    marks = {
        (kind, number): path.count("M")
        for kind, number, path in re.findall(r'class="(\w+) c(\d)" d="([^"]*)"', drawing)
    }
    assert marks == {(kind, str(k)): 2 for kind in ("global", "local") for k in range(3)}
    assert "Windows by site: Basel 2, Kyoto 2, &lt;b&gt;Quito 2;" in drawing
    assert "Drift: Basel 0.25, Kyoto 1.5, &lt;b&gt;Quito 2." in drawing


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_points_stay_in_the_drawing_and_keep_their_shape(scale: float) -> None:
    corners = [(0.0, 0.0), (scale, 0.0), (scale, 2 * scale), (0.0, 2 * scale)]
    points = [{"site": "Basel", "kind": "global", "x": x, "y": y} for x, y in corners]
    drawing = map_svg(moment("fedavg", 5, points=points), SITES, "m")
    found = [tuple(map(float, pair)) for pair in re.findall(r"M([\d.]+) ([\d.]+)", drawing)]
    assert all(10 < x < 450 and 10 < y < 390 for x, y in found)
    width, height = found[1][0] - found[0][0], found[0][1] - found[2][1]
    assert height == pytest.approx(2 * width, abs=0.2)
    assert (height > 300) == (scale > 0)


def test_missing_sites_maps_and_neighbours_are_said_to_be() -> None:
    only = {"windows": {"Basel": 2}, "patients": {"Basel": 2}, "drift": {"Basel": 1.0}}
    alone = moment("fedavg", 1, **only, between=[[0.0]], points=[])
    page = render(
        content(sites=["Basel"], rounds=[1], algorithms=["fedavg"], moments=[alone], notes=[])
    )
    words = " ".join(Page(page).words.split())
    assert "There is one site, and no other to compare it with." in words
    assert "Round 1: too few windows or features for a map." in words
    assert "What to know of the data" not in words
    some = render(content(moments=[moment(label, n, **only, between=[[0.0]], points=[])
                                   for label in ALGORITHMS for n in (1, 5)]))  # fmt: skip
    assert '<th scope="row">Kyoto</th><td>&ndash;</td><td>&ndash;</td>' in some


def test_images_that_were_learnt_from_are_said_to_be() -> None:
    warning = "The trained model has learnt from these images"
    assert warning in render(content(split="train"))
    assert warning not in render(content())


def test_zero_has_no_sign() -> None:
    assert ">0.0<" in render(content())
    assert ">\u22120.0<" not in render(content())
