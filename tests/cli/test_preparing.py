"""What `collegium partition` writes is a federation that `collegium inspect` accepts."""

import csv
import json
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.cli.preparing import read_ratios
from collegium.errors import ConfigError
from collegium.phantoms import make_federation


@pytest.fixture
def pooled(tmp_path: Path) -> Path:
    """Two drawn sites of ten images; every fourth patient comes twice."""
    return make_federation(tmp_path / "data", 2, cases=10, size=32)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "rule",
    [
        ("--by", "volume", "--sites", "3"),
        ("--by", "dirichlet", "--sites", "2", "--alpha", "100"),
        ("--by", "column", "--column", "site"),
    ],
)
def test_the_manifest_makes_a_federation_that_inspect_accepts(
    pooled: Path, rule: tuple[str, ...]
) -> None:
    output = pooled.parent / "sites.csv"
    result = call("partition", str(pooled), *rule, "--output", str(output))
    assert result.exit_code == 0, result.output
    rows, patients = read(output), defaultdict(set)
    for row in rows:
        patients[row["patient"]].add(row["site"])
    assert len(rows) == 20
    assert len(patients) == 16  # cases 4 and 5, 9 and 10 of a site are of one patient
    assert {len(sites) for sites in patients.values()} == {1}
    counts = {site: sum(row["site"] == site for row in rows) for site in {r["site"] for r in rows}}
    shown = dict(line.split() for line in result.stdout.splitlines()[1:-1])
    assert shown == {site: str(count) for site, count in counts.items()}
    assert result.stdout.splitlines()[-1] == str(output)
    data = yaml.safe_load(pooled.read_text())
    data["sites"] = {site: {"manifest": "sites.csv"} for site in counts}
    new = pooled.with_name("new.yaml")
    new.write_text(yaml.safe_dump(data))
    looked = call("inspect", str(new), "--json")
    assert looked.exit_code == 0, looked.output
    found = {site["name"]: site for site in json.loads(looked.stdout)["sites"]}
    assert {name: site["cases"] for name, site in found.items()} == counts
    assert not any(site["problems"] for site in found.values())


def test_equal_words_give_equal_files_and_a_seed_other_ones(pooled: Path) -> None:
    texts: list[str] = []
    for seed in ("1", "1", "2"):
        output = pooled.parent / f"{len(texts)}.csv"
        rule = ("--by", "dirichlet", "--sites", "4", "--alpha", "0.7", "--seed", seed)
        assert call("partition", str(pooled), *rule, "--output", str(output)).exit_code == 0
        texts.append(output.read_text())
    assert texts[0] == texts[1] != texts[2]


def test_ratios_are_numbers_with_commas_between_them() -> None:
    assert read_ratios("1, 2.5,4,") == (1.0, 2.5, 4.0)
    assert read_ratios("") == ()
    with pytest.raises(ConfigError, match="the ratios are '1;2'; write numbers with commas"):
        read_ratios("1;2")


def test_what_cannot_be_done_ends_with_2_and_writes_nothing(pooled: Path) -> None:
    output = pooled.parent / "sites.csv"
    for rule, words in (
        (("--by", "ratio"), "give a number above 0 for each site"),
        (("--by", "ratio", "--ratios", "a"), "the ratios are 'a'"),
        (("--by", "ratio", "--ratios", "1,2"), "16 positive and 0 negative patients are too few"),
        (("--sites", "17"), "16 patients do not make 17 sites"),
        (("--by", "column", "--column", "scanner"), "has no column 'scanner'"),
    ):
        result = call("partition", str(pooled), *rule, "--output", str(output))
        assert result.exit_code == 2, result.output
        assert words in result.stderr
    own = pooled.parent / "alder" / "manifest.csv"
    before = own.read_text()
    assert call("partition", str(pooled), "--output", str(own)).exit_code == 2
    assert own.read_text() == before
    assert not output.exists()
