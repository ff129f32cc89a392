from collegium.algorithms.fedavg import FedAvg
from collegium.testing.stops import Stops, after_writes
from collegium.testing.toy import ToyFederation


def test_writes_of_every_kind_are_counted_until_the_block_ends(tmp_path):
    count: list[int] = []
    with after_writes(count.append):
        ToyFederation(FedAvg(), tmp_path / "a").run(1)
    assert count == [*range(1, len(count) + 1)]
    files = [p for p in (tmp_path / "a").rglob("*") if p.is_file() and p.name != "ledger.jsonl"]
    kinds = {p.suffix for p in files}
    assert kinds == {".state", ".json", ".jsonl", ".csv"}
    assert len(count) >= len(files)
    seen = len(count)
    ToyFederation(FedAvg(), tmp_path / "b").run(1)
    assert len(count) == seen


def test_stop_is_kept_once_for_each_state_of_the_files(tmp_path):
    root, stops = tmp_path / "run", Stops(tmp_path / "stops")
    stops.keep(root, "before request", 0)
    root.mkdir()
    (root / "ledger.jsonl").write_text("a line")
    stops.keep(root, "before request", 1)
    (root / "a.state").write_text("a")
    stops.keep(root, "after write", 1)
    stops.keep(root, "before request", 2)
    (root / "a.state").rename(root / "b.state")
    stops.keep(root, "after write", 2)
    (root / "b.state").write_text("b")
    stops.keep(root, "before request", 3)
    assert [*stops.found] == [
        "before request 0", "after write 1", "after write 2", "before request 3",
    ]  # fmt: skip
    assert (stops.found["after write 1"] / "a.state").read_text() == "a"
    assert (stops.found["before request 3"] / "b.state").read_text() == "b"
