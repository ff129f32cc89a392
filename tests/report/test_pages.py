from typing import Any

from collegium.report.pages import site_ids, undefined_scores
from collegium.report.reading import read_run
from collegium.results import Row, write_table


def test_pages_of_sites_have_ids_of_their_own():
    assert site_ids(["hrf", "CHASE_db1", "<b>Quito", "b quito", "\u6771\u4eac", "\u00fc"]) == {
        "hrf": "site-hrf",
        "CHASE_db1": "site-chase_db1",
        "<b>Quito": "site-b-quito",
        "b quito": "site-b-quito-2",
        "\u6771\u4eac": "site-unnamed",
        "\u00fc": "site-unnamed-2",
    }


def test_undefined_scores_are_counted_inside_and_outside(tmp_path):
    about: dict[str, Any] = {"experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 1,
             "site": "A", "metric": "hd95", "patient": "p"}  # fmt: skip
    rows = [
        Row(**about, case=f"c{number}", split=split, model=model, value=value)
        for split, model in (("test", "global"), ("outside", "tent"))
        for number, value in enumerate((None, 1.0, 2.0))
    ]
    write_table(rows, tmp_path)
    assert undefined_scores(read_run(tmp_path)) == [
        {"metric": "hd95", "name": name, "site": "A", "undefined": 1, "scores": 3}
        for name in ("FedAvg + Tent", "FedAvg global")
    ]
