import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from collegium.core.tensors import Tensors
from collegium.errors import StorageError
from collegium.runtime.ledger import Ledger, describe_part, first_break, read_ledger, summarise


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "site" / "ledger.jsonl"
    ledger = Ledger(path)
    for number in range(4):
        ledger.append({"num_examples": number}, b"x" * number, round=number, method="train")
    return path


def test_line_says_what_left_and_not_its_content(tmp_path):
    path = tmp_path / "ledger.jsonl"
    parts = {"model": Tensors({"w": torch.full((2, 3), 123.456)}), "num_examples": 98765}
    data = b"the packed message"
    Ledger(path).append(parts, data, round=3, exchange=0, stage="train", method="train")
    (line,) = read_ledger(path)
    assert line["parts"] == {
        "model": {"tensors": [["w", [2, 3], "float32"]], "bytes": 24},
        "num_examples": {"tensors": [], "bytes": 5},
    }
    assert line["bytes"] == len(data)
    assert line["sha256"] == hashlib.sha256(data).hexdigest()
    assert (line["round"], line["exchange"], line["stage"], line["method"]) == (
        3, 0, "train", "train",
    )  # fmt: skip
    assert "98765" not in path.read_text()
    assert "123.4" not in path.read_text()


def test_hash_of_a_line_covers_the_line_before(path):
    """Computed here from the words of the module's description."""
    previous = "0" * 64
    for text in path.read_text().splitlines():
        line = json.loads(text)
        found = line.pop("hash")
        assert line["previous"] == previous
        canonical = json.dumps(line, sort_keys=True, separators=(",", ":"))
        assert found == hashlib.sha256(canonical.encode()).hexdigest()
        previous = found
    assert first_break(read_ledger(path)) is None


def test_ties_are_counted_once():
    weight = torch.zeros(5, dtype=torch.float64)
    assert describe_part(Tensors({"a": weight, "b": weight})) == {
        "tensors": [["a", [5], "float64"]],
        "bytes": 40,
    }


@pytest.mark.parametrize("number", range(4))
def test_changed_line_is_found(path, number):
    lines = read_ledger(path)
    lines[number]["bytes"] += 1
    assert first_break(lines) == number


def test_removed_line_is_found(path):
    lines = read_ledger(path)
    assert first_break(lines[1:]) == 0
    assert first_break([lines[0], *lines[2:]]) == 1


def test_reordered_lines_are_found(path):
    a, b, c, d = read_ledger(path)
    assert first_break([a, c, b, d]) == 1


def test_added_line_is_found(path):
    lines = read_ledger(path)
    assert first_break([*lines, lines[-1]]) == 4


def test_line_that_is_no_longer_json_breaks_the_chain(path):
    texts = path.read_text().splitlines()
    path.write_text("\n".join([texts[0], "garbage", *texts[2:]]) + "\n")
    assert first_break(read_ledger(path)) == 1
    summary = summarise(path)
    assert (summary["messages"], summary["intact"]) == (4, False)


def test_unfinished_last_line_is_cut_and_the_chain_goes_on(path):
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"time": "2026-01-01T00:00')
    assert len(read_ledger(path)) == 4
    Ledger(path).append({}, b"", round=9)
    lines = read_ledger(path)
    assert path.read_bytes().startswith(whole)
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 9]
    assert first_break(lines) is None


def test_unfinished_only_line_is_cut(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"ti')
    Ledger(path).append({}, b"", round=1)
    assert [line["round"] for line in read_ledger(path)] == [1]
    assert first_break(read_ledger(path)) is None


def test_processes_that_take_turns_keep_one_chain(path):
    """Any worker may answer for a site, each with a ledger object of its own."""
    first, second = Ledger(path), Ledger(path)
    for number in range(4, 10):
        (first if number % 3 else second).append({}, b"", round=number)
    lines = read_ledger(path)
    assert [line["round"] for line in lines] == list(range(10))
    assert first_break(lines) is None


def test_ledger_that_was_taken_away_begins_anew(path):
    ledger = Ledger(path)
    ledger.append({}, b"", round=4)
    path.unlink()
    ledger.append({}, b"", round=5)
    assert [line["round"] for line in read_ledger(path)] == [5]
    assert first_break(read_ledger(path)) is None


def test_ledger_that_cannot_be_written_is_an_error(path, monkeypatch):
    ledger = Ledger(path)

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(StorageError, match=f"the disk that holds {path.parent} is full"):
            ledger.append({}, b"", round=4)
    ledger.append({}, b"", round=5)
    assert first_break(read_ledger(path)) is None
    assert [line["round"] for line in read_ledger(path)] == [0, 1, 2, 3, 5]


def test_summary_adds_up_messages_and_bytes(path):
    summary = summarise(path)
    assert summary["messages"] == 4
    assert summary["bytes"] == 0 + 1 + 2 + 3
    assert summary["parts"] == {"num_examples": {"messages": 4, "bytes": 4}}
    assert summary["intact"]


def test_summary_of_no_ledger_is_nothing(tmp_path):
    assert summarise(tmp_path / "absent") == {
        "messages": 0, "bytes": 0, "parts": {}, "intact": True,
    }  # fmt: skip


def test_a_part_without_tensors_has_no_bytes():
    assert describe_part(Tensors()) == {"tensors": [], "bytes": 0}
    assert describe_part([1, 22]) == {"tensors": [], "bytes": len("[1, 22]")}
