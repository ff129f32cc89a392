"""YAML from strangers is read within bounds, or refused in one sentence."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from collegium import cli
from collegium.errors import ConfigError
from collegium.experiment.config import yaml_file
from collegium.experiment.config.yaml_file import read_yaml

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{!!merge <<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
KEYS = (
    "a0: &a0 [x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 5))
    + "? [*a4, *a4]\n: 1\n"
)
REFUSED = {
    "aliases": (LAUGHS, "holds more than 200000 values"),
    "merges": (MERGES, "holds more than 200000 values"),
    "aliases in a key": (KEYS, "line 6: a key should be a word"),
    "lists": ("a: " + "[" * 50_000, "is nested more than 40 levels deep"),
    "mappings": ("{a: " * 41 + "1" + "}" * 41, "is nested more than 40 levels deep"),
    "digits": ("a: " + "9" * 5_000, "a number of 5000 digits, where 20 are the most"),
    "few digits": ("a: -" + "9" * 21, "a number of 21 digits, where 20 are the most"),
    "a tag": ("a: !!int many", "not valid YAML"),
    "a time": ("a: !!timestamp soon", "not valid YAML"),
    "a truth": ("a: !!bool perhaps", "not valid YAML"),
    "code": ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "bytes": ("a: " + "x" * 4_000_001, "has 4000004 bytes, and at most 4000000 are read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_exceeds_a_bound_is_one_sentence_of_the_command(tmp_path: Path, name: str):
    text, said = REFUSED[name]
    path = tmp_path / "x.yaml"
    path.write_text(text)
    start = time.monotonic()
    result = CliRunner().invoke(cli.app, ["config", "show", str(path)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 600
    assert time.monotonic() - start < 30


def test_what_is_within_the_bounds_is_read():
    assert read_yaml("{a: " * 40 + "1" + "}" * 40, "x", Path())[0]["a"]["a"]["a"]
    assert read_yaml(f"a: {2**64}", "x", Path())[0] == {"a": 2**64}
    sites = "".join(f"s{n}: *site\n" for n in range(1_000))
    data, _ = read_yaml(f"site: &site {{folder: f, channels: [0, 1]}}\n{sites}", "x", Path())
    assert data["s999"] == {"folder": "f", "channels": [0, 1]}


def test_a_bound_is_on_values_as_aliases_repeat_them(monkeypatch):
    monkeypatch.setattr(yaml_file, "MOST_VALUES", 8)
    assert read_yaml("{a: &x [1, 2], b: *x}", "x", Path())[0]["b"] == [1, 2]  # 6 values
    with pytest.raises(ConfigError, match="more than 8 values"):
        read_yaml("{a: &x [1, 2], b: *x, c: *x, d: *x}", "x", Path())


PIECES = st.sampled_from([
    "a", "b: ", "- ", "[", "]", "{", "}", ", ", ": ", "&x ", "*x", "!!int ", "!!float ", "!!set ",
    "!!omap ", "!!pairs ", "!!binary ", "!!merge <<", "? ", "|", ">", "\n", "\n  ", "'", '"', "#",
    "---\n", "%YAML 1.1\n", "1e999", "0x1f", "12:30:45", "\t", "\0", "\u2028", "\ufeff", "=", "~",
])  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join) | st.text(max_size=40))
def test_any_text_is_read_or_refused_in_one_sentence(text: str):
    sentence = ""
    try:
        read_yaml(text, "x.yaml", Path())
    except ConfigError as error:
        sentence = str(error)
    assert "\n" not in sentence
