"""Tables divided into those of other sites: no cell changes, no row is lost, no patient cut."""

import csv
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from collegium.data.federation import open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.repartition import PartitionRule, repartition
from collegium.data.settings import TaskConfig
from collegium.data.tables import TableConfig
from collegium.errors import ConfigError, DataError

NAMES = ("pat", "age", "note, free, as, it, is", "scanner", "ill")
TASK = TaskConfig("classification", ("well", "ill"), coding={"0": "well", "1": "ill"})


def rows_of(site: str, patients: int, ill: int) -> list[tuple[str, ...]]:
    """Two rows for each patient; the first patients are ill, in the second of their rows only."""
    return [
        (f"0{site}{p}", f"{p},{k}", f'{site}; "{p}"', "AB"[p % 2], str(int(p < ill and k)))
        for p in range(patients)
        for k in (0, 1)
    ]


def write(path: Path, rows: list[tuple[str, ...]], names: tuple[str, ...] = NAMES) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=";", quoting=csv.QUOTE_ALL)
        writer.writerows([names, *rows])


def read(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="") as file:
        names, *rows = csv.reader(file, delimiter=";")
    assert tuple(names) == NAMES
    return [tuple(row) for row in rows]


@pytest.fixture
def pooled(tmp_path: Path) -> tuple[FederationConfig, list[tuple[str, ...]]]:
    """Two sites of 7 and 11 patients, of whom 3 and 1 are ill."""
    parts = {"a": rows_of("a", 7, 3), "b": rows_of("b", 11, 1)}
    for name, rows in parts.items():
        write(tmp_path / f"{name}.csv", rows)
    config = FederationConfig(
        "pool", {name: SiteConfig(table=f"{name}.csv") for name in parts}, str(tmp_path),
        task=TASK, table=TableConfig("ill", ("age",), patient="pat"),
    )  # fmt: skip
    return config, parts["a"] + parts["b"]


@pytest.mark.parametrize(
    ("division", "kept"),
    [
        (PartitionRule("dirichlet", 3, alpha=0.7, seed=2), 36),
        (PartitionRule("column", column="scanner"), 36),
        (PartitionRule("ratio", ratios=(2, 5)), 36),
        (PartitionRule("ratio", ratios=(1, 5)), 2 * (2 + 2 + 2 + 10)),
    ],
)
def test_every_row_is_kept_as_it_was_and_no_patient_is_cut(
    pooled: tuple[FederationConfig, list[tuple[str, ...]]],
    tmp_path: Path,
    division: PartitionRule,
    kept: int,
) -> None:
    config, before = pooled
    counts = repartition(config, division, tmp_path / "sites")
    files = {path.stem: read(path) for path in sorted((tmp_path / "sites").iterdir())}
    assert {site: len(rows) for site, rows in files.items()} == counts
    after = [row for rows in files.values() for row in rows]
    assert len(after) == kept
    assert not Counter(after) - Counter(before)
    there = defaultdict(set)
    for site, rows in files.items():
        for row in rows:
            there[row[0]].add(site)
    assert {len(sites) for sites in there.values()} == {1}


def test_sites_have_the_ratio_of_patients_without_the_class(
    pooled: tuple[FederationConfig, list[tuple[str, ...]]], tmp_path: Path
) -> None:
    repartition(pooled[0], PartitionRule("ratio", ratios=(2, 5)), tmp_path / "sites")
    for site, expected in (("site_1", (2, 4)), ("site_2", (2, 10))):  # 4 ill, 14 well: all of them
        rows = read(tmp_path / "sites" / f"{site}.csv")
        ill = {row[0] for row in rows if row[-1] == "1"}
        assert (len(ill), len({row[0] for row in rows} - ill)) == expected


def test_the_new_tables_are_a_federation_with_the_same_numbers(
    pooled: tuple[FederationConfig, list[tuple[str, ...]]], tmp_path: Path
) -> None:
    config, before = pooled
    repartition(config, PartitionRule("column", column="scanner"), tmp_path / "sites")
    sites = {name: SiteConfig(table=f"sites/{name}.csv") for name in "AB"}
    table = TableConfig("ill", ("age",), patient="pat", scale="none")
    opened = open_federation(replace(config, sites=sites, table=table), tmp_path, 0, None)
    found = Counter(
        (example.patient, round(example.batch["image"].item(), 4), int(example.batch["label"]))
        for site in opened.values()
        for part in (site.train, site.val, site.test)
        for example in map(part.example, range(len(part)))
    )
    assert found == Counter(
        (row[0], float(row[1].replace(",", ".")), int(row[-1])) for row in before
    )


def test_a_row_is_a_patient_where_none_is_stated(
    pooled: tuple[FederationConfig, list[tuple[str, ...]]], tmp_path: Path
) -> None:
    config = replace(pooled[0], table=TableConfig("ill", ("age",)))
    repartition(
        config, PartitionRule("ratio", ratios=(1, 7)), tmp_path / "sites"
    )  # 4 ill rows, 32 others
    for number, count in ((1, 4), (2, 16)):
        rows = read(tmp_path / "sites" / f"site_{number}.csv")
        assert (len(rows), sum(row[-1] == "1" for row in rows)) == (count, 2)


def test_tables_that_cannot_be_divided_are_refused_and_kept(
    pooled: tuple[FederationConfig, list[tuple[str, ...]]], tmp_path: Path
) -> None:
    config, before = pooled
    by = PartitionRule("column", column="scanner")
    with pytest.raises(ConfigError, match=r"name a folder as --output, not .*sites\.csv"):
        repartition(config, by, tmp_path / "sites.csv")
    with pytest.raises(ConfigError, match="no column 'vendor'; choose one of pat, age, note, fr"):
        repartition(config, PartitionRule("column", column="vendor"), tmp_path / "sites")
    with pytest.raises(DataError, match=r"site a, row 1: the word in the column cannot name a"):
        repartition(
            config, PartitionRule("column", column="note, free, as, it, is"), tmp_path / "sites"
        )
    with pytest.raises(DataError, match="4 of the patients have cases with different words"):
        repartition(config, PartitionRule("column", column="ill"), tmp_path / "sites")
    named = replace(config, table=TableConfig("ill", ("age",), case="age"))
    with pytest.raises(DataError, match="site b, row 1: another site has a case of the same id"):
        repartition(named, by, tmp_path / "sites")
    write(tmp_path / "a.csv", [(*row[:3], "b", row[-1]) for row in before[:14]])
    write(tmp_path / "b.csv", [(*row[:3], "b", row[-1]) for row in before[14:]])
    bytes_before = (tmp_path / "b.csv").read_bytes()
    with pytest.raises(ConfigError, match="holds the table of site b, which is kept"):
        repartition(config, by, tmp_path)
    assert (tmp_path / "b.csv").read_bytes() == bytes_before
    (tmp_path / "a.csv").write_text("pat,age,ill\np,1,0\n")
    with pytest.raises(DataError, match="sites a and b separate cells by ',' and ';'; save them"):
        repartition(config, by, tmp_path / "sites")
    assert not (tmp_path / "sites").exists()
