import csv
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

from collegium.diagnostics.drift.measurement import Drift, Point, RoundDrift
from collegium.diagnostics.drift.writing import to_csv, write_drift
from collegium.experiment.config.experiment import ExperimentConfig

MOMENT = RoundDrift(
    "fedavg", 3, {"A": 8, "B": 6, "C": 4}, {"A": 4, "B": 3, "C": 2},
    {"A": 0.1 + 0.2, "B": 1.5, "C": 2.0},
    [[0.0, 1.25, 0.5], [1.25, 0.0, 2.0], [0.5, 2.0, 0.0]],
    [Point("A", "global", 1.0, 2.0)],
)  # fmt: skip
DRIFT = Drift("e", "f", 4, "val", 8, ["A", "B", "C"], [3], ["fedavg"], [MOMENT], [])


def test_the_csv_has_a_line_per_site_and_per_pair_with_every_digit() -> None:
    rows = list(csv.DictReader(StringIO(to_csv(DRIFT))))
    assert [(r["what"], r["site"], r["other"], float(r["distance"])) for r in rows] == [
        ("training", "A", "", 0.30000000000000004),
        ("training", "B", "", 1.5),
        ("training", "C", "", 2.0),
        ("sites", "A", "B", 1.25),
        ("sites", "A", "C", 0.5),
        ("sites", "B", "C", 2.0),
    ]
    about = {(r["experiment"], r["algorithm"], r["seed"], r["round"]) for r in rows}
    assert about == {("e", "fedavg", "4", "3")}
    last = rows[-1]
    assert (last["windows"], last["other_windows"]) == ("6", "4")
    assert (last["patients"], last["other_patients"]) == ("3", "2")
    assert (rows[0]["other_windows"], rows[0]["other_patients"]) == ("", "")


def test_csv_json_and_page_tell_the_same(
    configure: Callable[..., ExperimentConfig], tmp_path: Path
) -> None:
    page = write_drift(configure("algorithm=fedavg"), [1, 2], split="train")
    folder = tmp_path / "run" / "drift"
    assert page == folder / "drift.html"
    data = json.loads((folder / "drift.json").read_text())
    rows = list(csv.DictReader(StringIO((folder / "drift.csv").read_text())))
    drifts = {
        (str(m["round"]), site): value
        for m in data["moments"]
        for site, value in m["drift"].items()
    }
    assert drifts == {
        (r["round"], r["site"]): float(r["distance"]) for r in rows if r["what"] == "training"
    }
    between = {str(m["round"]): m["between"][0][1] for m in data["moments"]}
    assert between == {r["round"]: float(r["distance"]) for r in rows if r["what"] == "sites"}
    text = page.read_text()
    assert all(f"<td>{value:.2f}</td>" in text for value in drifts.values())
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == ["drift"]
