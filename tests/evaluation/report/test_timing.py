import math
import re
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from collegium.evaluation.report.html import write_report
from collegium.evaluation.report.timing import log_ticks, place_labels, time_chart
from collegium.evaluation.scores import ADAPTERS, method_name
from collegium.evaluation.timing import TIMED, TimeTable


def timed(algorithm: str, adapter: str, seconds: float | None, score: float | None) -> list[Any]:
    name = method_name(algorithm, adapter, "outside")
    return [algorithm, adapter, name, seconds, None, None, None, score, None, 0]


def table(*methods: list[Any], metric: str = "dice", unit: str = "") -> TimeTable:
    return TimeTable(metric, unit, True, pd.DataFrame(methods, columns=TIMED))


def drawn(svg: str) -> dict[str, tuple[float, float, str]]:
    """Name -> x, y and colour of each point."""
    found = {}
    for group in ElementTree.fromstring(svg).iter("g"):
        if group.get("class", "").startswith("line "):
            (path,), (text,) = group.findall("path"), group.findall("text")
            x, y = path.attrib["d"][1:].split("m")[0].split(" ")
            found[str(text.text)] = float(x), float(y), group.attrib["class"].split(" ")[1]
    return found


def test_seconds_are_on_a_logarithmic_axis_and_scores_on_a_plain_one() -> None:
    points = drawn(
        time_chart(
            table(
                timed("fedavg", "none", 0.1, 0.4),
                timed("fedavg", "tent", 1.0, 0.5),
                timed("iopfl", "routing", 10.0, 0.8),
            ),
            ["fedavg", "iopfl"],
        )
    )
    (x0, y0, first), (x1, y1, same), (x2, y2, other) = points.values()
    assert list(points) == ["FedAvg", "FedAvg + Tent", "IOP-FL + routing"]
    # the axis runs from 0.05 to 20 seconds
    wide = (508 - 66) / math.log10(20 / 0.05)
    assert (x0, x1, x2) == pytest.approx(
        [66 + wide * math.log10(s / 0.05) for s in (0.1, 1, 10)], abs=0.06
    )
    assert (y0 - y1) / (y0 - y2) == pytest.approx(0.25, abs=0.01)
    assert (first, same, other) == ("c0", "c0", "c1")


def test_the_drawing_says_what_it_shows_and_escapes_names() -> None:
    svg = time_chart(table(timed('<i>"x', "none", 2.0, 0.5), metric="hd95", unit="mm"), [])
    label = ElementTree.fromstring(svg).attrib["aria-label"]
    assert label == ('HD95 (mm) against seconds per image at sites outside: <i>"x 2 s, 0.5.')
    assert "<i>" not in svg


def test_every_adapter_has_a_marker_of_its_own() -> None:
    adapters = [*ADAPTERS, "my own"]
    svg = time_chart(table(*(timed("fedavg", name, 1.0, 0.5) for name in adapters)), [])
    shapes = re.findall(r'<path d="M[\d.]+ [\d.]+(m[^"]*)"', svg)
    assert len(set(shapes)) == len(adapters) == 8


def test_what_has_no_time_or_score_is_not_drawn() -> None:
    some = timed("fedavg", "none", 0.5, 0.5)
    svg = time_chart(
        table(some, timed("fedavg", "tent", None, 0.5), timed("fedavg", "ttt", 1.0, None)), []
    )
    assert list(drawn(svg)) == ["FedAvg"]
    assert time_chart(table(timed("fedavg", "tent", 0.0, 0.5)), []) == ""


def test_ticks_are_round_and_enclose_the_times() -> None:
    assert log_ticks(0.3, 0.3) == pytest.approx([0.2, 0.5])
    assert log_ticks(0.1, 10) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
    assert log_ticks(0.01, 300) == pytest.approx([0.001, 0.01, 0.1, 1, 10, 100, 1000])
    for low in (1.0, 1.2, 1.24, 1.26, 2.4, 2.6, 6.2, 6.3, 9.9):
        ends = log_ticks(low, low)
        assert ends[0] <= 0.8 * low < 1.25 * low <= ends[-1]


def test_labels_of_points_that_nearly_coincide_do_not_overlap() -> None:
    points = [(200.0 + place, 150.0 + place) for place in range(8)]
    boxes = [box for box in place_labels(["IOP-FL + routing"] * 8, points) if box]
    assert len(boxes) == 8
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart
    for x, y in points:
        assert not [b for b in boxes if b[0] < x < b[2] and b[1] < y < b[3]]


def test_a_label_at_the_right_edge_stands_left_of_its_point() -> None:
    (box,) = place_labels(["IOP-FL + routing"], [(500.0, 100.0)])
    assert box is not None
    assert box[2] < 500


def test_the_report_shows_chart_and_table_of_a_run_with_sites_outside(
    tmp_path: Any, make_run: Any
) -> None:
    text = write_report(make_run(tmp_path, overlays=False, outside=True)).read_text()
    part = text[text.index("Time against quality") : text.index("What adapting took")]
    # 30 and 40 seconds in two seeds, for 8 images: 4.375 and its standard deviation 0.884
    assert part.count('<td>4.375 <span class="sd">\u00b1 0.884</span></td>') == 6
    assert "Dice against seconds per image at sites outside: Ditto 4.38 s" in part


def test_the_report_of_a_run_without_accounts_says_so(tmp_path: Any, make_run: Any) -> None:
    folder = make_run(tmp_path, overlays=False, outside=True)
    for file in folder.rglob("account.json"):
        file.unlink()
    text = write_report(folder).read_text()
    assert "This run holds no accounts of the time that adapting took" in text
    assert "against seconds per image" not in text


def test_a_label_without_room_is_left_out_and_its_point_keeps_the_name() -> None:
    svg = time_chart(table(*(timed(f"m{k:02}", "tent", 1.0, 0.5) for k in range(60))), [])
    texts = re.findall(r"<text[^>]*>m\d\d \+ Tent</text>", svg)
    # a label on either side in each of the rows that lie 3/4 of a line apart, half of them clear
    assert 8 <= len(texts) <= 2 * (296 - 12) / 13
    assert len(re.findall(r"<title>m\d\d \+ Tent</title>", svg)) == 60
