from pathlib import Path

from collegium.evaluation.report.ledgers import ledger_rows, ledger_summaries
from collegium.runtime.ledger import Ledger


def test_ledgers_are_summed_over_seeds_and_one_broken_chain_breaks_the_sum(tmp_path, make_run):
    found = ledger_summaries(make_run(tmp_path, overlays=False))
    # 2 seeds x 2 messages; 2500 floats of 4 bytes and the two digits of 12
    assert found["ditto"]["Basel"] == {
        "parts": {
            "model": {"messages": 4, "bytes": 40_000},
            "num_examples": {"messages": 4, "bytes": 8},
        },
        "messages": 4, "bytes": 40_400, "intact": True, "missing": False,
    }  # fmt: skip
    assert found["ditto"]["Leeds"]["intact"] is False
    assert found["local"]["Basel"]["missing"] is True
    rows = ledger_rows(found, ["ditto", "local"])
    assert list(rows) == ["<b>Quito", "Basel", "Kyoto", "Leeds"]
    assert [row["name"] for row in rows["Basel"]][:3] == ["Ditto", "Local", "FedAvg"]


def test_folds_and_settings_count_too(tmp_path: Path) -> None:
    for place in ("without-B/fedavg", "tau/without-C/fedavg", "fedavg"):
        Ledger(tmp_path / place / "seed-0" / "clients" / "A" / "ledger.jsonl").append({}, bytes(7))
    assert ledger_summaries(tmp_path)["fedavg"]["A"]["bytes"] == 21
