"""JSON from strangers is read within bounds, or refused with the reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from collegium import cli
from collegium.core import foreign_json
from collegium.core.foreign_json import read_foreign_json

FEDERATION = """\
name: f
sites: {a: {folder: a, layout: datalist}}
task: {name: segmentation, classes: [background, x]}
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a":' * 100_000, "it is nested too deeply"),
        (f'{{"training": [], "numTraining": {"9" * 5_000}}}', "a number of 5000 digits"),
        ("9" * 21, "a number of 21 digits, where 20 are the most"),
    ],
)
def test_what_exceeds_a_bound_is_one_sentence_of_the_command(tmp_path: Path, text, said):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "dataset.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_foreign_json(path)
    file = FEDERATION.replace("folder: a", "folder: a/dataset.json")
    (tmp_path / "federation.yaml").write_text(file)
    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "federation.yaml")])
    assert result.exit_code == 3, result.output
    assert "Traceback" not in result.output
    assert said in "".join(result.output.split("\n"))


def test_a_file_is_read_up_to_its_bound(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text(f"\ufeff[{2**64}, -1, 0.5]", encoding="utf-8")
    assert read_foreign_json(path) == [2**64, -1, 0.5]
    monkeypatch.setattr(foreign_json, "MOST_BYTES", 20)
    with pytest.raises(ValueError, match="and at most 20 are read"):
        read_foreign_json(path)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text('[]{}:,"0123456789eE+-.truefalsn ', max_size=60).map(str.encode)
)
def test_any_file_is_read_as_json_does_or_refused(tmp_path_factory, data: bytes):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    try:
        found = read_foreign_json(path)
    except ValueError:
        return
    assert repr(found) == repr(json.loads(data.decode("utf-8-sig")))
