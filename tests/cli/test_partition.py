"""What `collegium partition` writes is a federation that `collegium inspect` accepts."""

import csv
import json
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.data.phantoms import make_federation


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


def test_sizes_are_the_patients_of_each_site(pooled: Path) -> None:
    output = pooled.parent / "sites.csv"
    result = call("partition", str(pooled), "--sizes", "9,4,3", "--output", str(output))
    assert result.exit_code == 0, result.output
    patients = defaultdict(set)
    for row in read(output):
        patients[row["site"]].add(row["patient"])
    assert {site: len(names) for site, names in patients.items()} == {
        "site_1": 9, "site_2": 4, "site_3": 3,
    }  # fmt: skip


def test_tables_are_divided_into_a_folder_of_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{number},{'well' if number % 3 else 'ill'}" for number in range(12)]  # 4 are ill
    (tmp_path / "all.csv").write_text("\n".join(["age,y", *rows]))
    data = {
        "name": "pool",
        "sites": {"all": {"table": "all.csv"}},
        "task": {"name": "classification", "classes": ["well", "ill"]},
        "table": {"label": "y", "numeric": ["age"]},
    }
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(data))
    result = call("partition", "f.yaml", "--by", "ratio", "--ratios", "1,3")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "sites"
    counts = {}
    for path in (tmp_path / "sites").iterdir():
        header, *lines = path.read_text().splitlines()
        assert header == "age,y"
        assert set(lines) <= set(rows)
        counts[path.name] = (len(lines), sum(line.endswith("ill") for line in lines))
    assert counts == {"site_1.csv": (4, 2), "site_2.csv": (8, 2)}
    data["sites"] = {f"site_{n}": {"table": f"sites/site_{n}.csv"} for n in (1, 2)}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(data))
    assert call("inspect", "new.yaml").exit_code == 0
    refused = call("partition", "f.yaml")
    assert refused.exit_code == 2
    assert "divide them by ratio, dirichlet or column" in refused.stderr


def test_keys_of_a_federation_file_need_no_first_word(pooled: Path) -> None:
    output = pooled.parent / "sites.csv"
    words = ("partition", str(pooled), "image.inputs=1", "--lack-channel", "--output", str(output))
    result = call(*words)
    assert result.exit_code == 2
    assert "a site with 1 channel can lack none" in result.stderr
    result = call("inspect", str(pooled), "image.inputs=3")
    assert result.exit_code == 3
    assert "image.inputs says 3" in result.output


def test_what_cannot_be_done_ends_with_2_and_writes_nothing(pooled: Path) -> None:
    output = pooled.parent / "sites.csv"
    for rule, words in (
        (("--by", "ratio"), "give a number above 0 for each site"),
        (("--by", "ratio", "--ratios", "a"), "the ratios are 'a'"),
        (("--by", "ratio", "--ratios", "1,2"), "16 positive and 0 negative patients are too few"),
        (("--sites", "17"), "16 patients do not make 17 sites"),
        (("--sizes", "9,9"), "the sites' sizes 9, 9 do not add up to 16 patients"),
        (("--by", "ratio", "--sizes", "9,7"), "sizes are for a division by volume, not by ratio"),
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
