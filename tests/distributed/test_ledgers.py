"""A site's operator sees what left, and whether the record of it was changed."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from collegium import cli
from collegium.core.tensors import Tensors
from collegium.distributed.ledgers import check_ledgers, read_ledgers
from collegium.errors import DataError
from collegium.runtime.ledger import Ledger


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's file; its ledger holds the messages of two rounds."""
    (tmp_path / "site.yaml").write_text("name: north\ndata: {folder: images}\nstate: state\n")
    ledger = Ledger(tmp_path / "state" / "runs" / "trial" / "ledger.jsonl")
    for number in (1, 2):
        model = Tensors({"weight": torch.zeros(5 * number)})
        ledger.append(
            {"model": model, "num_examples": 12}, b"x" * 100 * number, round=number, stage="train"
        )
    return tmp_path / "site.yaml"


def test_parts_rounds_and_bytes_are_summed(site: Path):
    (found,) = read_ledgers(site.parent / "state")
    assert (found["ledger"], found["messages"], found["rounds"]) == ("runs/trial", 2, 2)
    assert found["bytes"] == 300
    assert found["parts"]["model"] == {"messages": 2, "bytes": 4 * (5 + 10)}
    text = (site.parent / "state" / "runs" / "trial" / "ledger.jsonl").read_text()
    assert found["last"] == json.loads(text.splitlines()[-1])["hash"]
    check_ledgers([found], site.parent)


def test_a_changed_line_is_named_and_ends_the_command_with_the_code_of_data(site: Path):
    path = site.parent / "state" / "runs" / "trial" / "ledger.jsonl"
    assert CliRunner().invoke(cli.app, ["site", "ledger", str(site)]).exit_code == 0
    path.write_text(path.read_text().replace('"bytes": 100', '"bytes": 10'))
    done = CliRunner().invoke(cli.app, ["site", "ledger", str(site)])
    assert done.exit_code == 3
    assert "broken in runs/trial, line 1" in done.stderr
    assert "model, num_examples" in done.stdout


@pytest.mark.parametrize("change", [('"bytes"', '"byte"'), ('"parts": {', '"parts": 3, "x": {')])
def test_a_line_that_lacks_what_lines_have_is_named_too(site: Path, change: tuple[str, str]):
    path = site.parent / "state" / "runs" / "trial" / "ledger.jsonl"
    path.write_text(path.read_text().replace(*change))
    found = read_ledgers(site.parent / "state")
    assert [one["broken"] for one in found] == [1]


def test_a_site_from_which_nothing_has_left_says_so(tmp_path: Path):
    with pytest.raises(DataError, match="nothing has left this site"):
        check_ledgers(read_ledgers(tmp_path), tmp_path)
