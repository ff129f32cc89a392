"""What sites write otherwise than the federation: words, names of columns, and roles of zeros."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from collegium import cli
from collegium.data.columns import SiteWording, spelling_key
from collegium.data.federation import find_cases, open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.pooled_tables import pool_tables
from collegium.data.settings import TaskConfig
from collegium.data.table_inspection import inspect_tables
from collegium.data.table_site import rows_to_predict
from collegium.data.tables import Table, TableConfig, read_table
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.experiment import load_federation

NORTH = "id,sex,crp,ill\n1,0,3,1\n2,1,4,0\n3,1,5.5,1\n"
SOUTH = "id,sex,CRP (mg/L),ill\n1,f,3,yes\n2,m,4,no\n3,m,-9,yes\n"
TASK = TaskConfig("classification", ("0", "1"))
TABLE = TableConfig("ill", ("crp",), {"sex": ("0", "1")}, case="id")
WORDING: dict[str, Any] = {
    "columns": {"crp": "CRP (mg/L)"},
    "coding": {
        "sex": {"f": "0", "m": "1"}, "ill": {"yes": "1", "no": "0"}, "crp": {"-9": ""},
    },
}  # fmt: skip


def federation(folder: Path, texts: dict[str, str], **sites: dict[str, Any]) -> FederationConfig:
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text, "utf-8")
    configured = {n: SiteConfig(table=f"{n}.csv", **sites.get(n, {})) for n in texts}
    return FederationConfig("f", configured, str(folder), task=TASK, table=TABLE)


def read(folder: Path, text: str, label: str = "y", **settings: Any) -> Table:
    (folder / "t.csv").write_text(text, "utf-8")
    return read_table(folder / "t.csv", TableConfig(label, **settings))


def test_a_site_that_writes_other_words_is_read_as_the_others(tmp_path: Path) -> None:
    config = federation(tmp_path, {"north": NORTH, "south": SOUTH}, south=WORDING)
    north, south = inspect_tables(config).sites
    assert (north.targets, south.targets) == ({"0": 1, "1": 2}, {"0": 1, "1": 2})
    assert (south.unknown, south.missing) == ({}, {"crp": 1, "sex": 0})
    assert (south.numbers["crp"].known, south.numbers["crp"].greatest) == (2, 4)
    sites = open_federation(config, tmp_path / "cache", 0, None)
    own = sites["south"]
    rows = [d.example(i).batch for d in (own.train, own.val, own.test) for i in range(len(d))]
    known = sorted((row["image"][0, 1:].tolist(), int(row["label"][0])) for row in rows)
    assert known == [([0, 1, 0], 0), ([0, 1, 0], 1), ([1, 0, 0], 1)]


def test_pooled_rows_are_in_the_words_of_the_federation(tmp_path: Path) -> None:
    texts = {"north": NORTH, "south": SOUTH.replace("\n1,", "\n4,").replace("\n2,", "\n5,")}
    texts["south"] = texts["south"].replace("\n3,", "\n6,")
    pool = pool_tables(federation(tmp_path, texts, south=WORDING))
    assert pool.columns == ["id", "sex", "crp", "ill"]
    last = pool.rows["site south, row 3"]
    assert (last.target, dict(last.cells)) == (
        "1", {"id": "6", "sex": "1", "crp": "", "ill": "1"},
    )  # fmt: skip


def test_words_that_nobody_knows_are_told_of_by_site_before_anything_is_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    south = SOUTH.replace("CRP (mg/L)", "crp")
    config = federation(tmp_path, {"north": NORTH, "south": south, "west": NORTH})
    label, sex = inspect_tables(config).notes
    assert label.startswith(
        "ill: none of task.classes (0, 1) is 'no' (1), 'yes' (2) at south; say what they mean in "
    )
    assert sex.startswith(
        "sex: site south writes 'f' (1), 'm' (2) and no word of its vocabulary (0, 1), so that all "
    )
    (tmp_path / "west.csv").write_text(NORTH.replace(",1\n", ",Meier\n") + "4,1,3,Meier\n")
    assert "at south; 'Meier' (3) at west; " in inspect_tables(config).notes[0]
    (tmp_path / "west.csv").write_text(NORTH.replace(",1\n", ",Meier\n"))
    assert "at south; other words (2) at west; " in inspect_tables(config).notes[0]
    (tmp_path / "west.csv").write_text(NORTH)
    with pytest.raises(DataError, match="site south, row 1: the class is unknown"):
        open_federation(config, tmp_path, 0, tmp_path / "splits")
    assert [record.message for record in caplog.records][:2] == [label, sex]


@pytest.mark.parametrize(
    ("wording", "message"),
    [
        ({"coding": {"ill": {"yes": "2"}}}, r"coding\.ill leads to '2', .* not in task\.classes"),
        ({"coding": {"sex": {"f": "x"}}}, r"leads to 'x', .* not in table\.categorical\.sex"),
        ({"coding": {"age": {"f": "x"}}}, "coding of 'age', which is no column"),
        ({"columns": {"CRP": "crp"}}, "coding of 'CRP', which is no column"),
    ],
)
def test_words_that_lead_nowhere_are_refused(
    tmp_path: Path, wording: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        federation(tmp_path, {"south": SOUTH}, south=wording)


def test_images_of_a_manifest_have_a_coding_of_their_class(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "m.csv").write_text("image,class\na.png,yes\n")
    site = SiteConfig(manifest="m.csv", coding={"class": {"yes": "1"}})
    config = FederationConfig("f", {"a": site}, str(tmp_path), task=TASK)
    assert [case.target for case in find_cases(config, "a")] == ["1"]
    with pytest.raises(ConfigError, match="coding of the column class of a manifest"):
        SiteConfig(manifest="m.csv", coding={"sex": {"f": "0"}})


@pytest.mark.parametrize("absent", ["refuse", "missing"])
def test_a_column_that_is_spelt_otherwise_is_asked_about(tmp_path: Path, absent: Any) -> None:
    text = "CRP,Sex_M,y\n1,0,0\n"
    with pytest.raises(DataError, match=r"no column crp, sex-m but CRP, Sex_M, spelt otherwise"):
        read(tmp_path, text, numeric=("crp", "sex-m"), absent=absent)
    remedy = SiteWording({"crp": "CRP", "sex-m": "Sex_M"})
    config = TableConfig("y", ("crp", "sex-m"), absent=absent)
    assert read_table(tmp_path / "t.csv", config, wording=remedy).numbers.tolist() == [[1, 0]]
    both = TableConfig("y", ("CRP", "crp"), absent="missing")
    assert read_table(tmp_path / "t.csv", both).missing == {"CRP": 0, "crp": 1}


def test_own_names_of_columns_are_there_and_alone(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("crp,CRP,y\n1,2,0\n")
    config = TableConfig("y", ("crp",))
    with pytest.raises(DataError, match="has a column crp beside CRP"):
        read_table(tmp_path / "t.csv", config, wording=SiteWording({"crp": "CRP"}))
    with pytest.raises(DataError, match="has no column C-RP, which the site's columns say is crp"):
        read_table(tmp_path / "t.csv", config, wording=SiteWording({"crp": "C-RP"}))


def test_accents_are_the_same_letter_in_either_form(tmp_path: Path) -> None:
    word, column = "s\u00e4ugling", "gr\u00f6\u00dfe"
    apart = [unicodedata.normalize("NFD", text) for text in (word, column)]
    table = read(
        tmp_path, f"{apart[1]},s,y\n3,{apart[0]},{apart[0]}\n", numeric=(column,),
        categorical={"s": (word,)},
    )  # fmt: skip
    assert (table.numbers.tolist(), table.codes.tolist()) == ([[3]], [[0]])
    for classes in ((word, "x"), (apart[0], "x")):
        assert TaskConfig("classification", classes).class_of(table.targets[0], "here") == 0
    same = read(
        tmp_path, f"{column},s,y\n3,{word},0\n", numeric=(apart[1],), categorical={"s": (apart[0],)}
    )
    assert same.codes.tolist() == [[0]]


def test_categories_that_are_spelt_otherwise_are_asked_about(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("s,y\nStage II,0\nstage_ii,1\nIV,1\n")
    table = TableConfig("y", (), {"s": ("Stage II", "I")})
    site = {"a": SiteConfig(table="a.csv")}
    config = FederationConfig("f", site, str(tmp_path), task=TASK, table=table)
    (note,) = inspect_tables(config).notes
    assert note == (
        "s: site a writes 'stage_ii' for 'Stage II', which is taken as unknown; if it means the "
        "same, set coding: {s: {'stage_ii': 'Stage II'}} there"
    )
    coding = yaml.safe_load(note[note.index("{") : note.rindex("}") + 1])
    site = {"a": SiteConfig(table="a.csv", coding=coding)}
    config = FederationConfig("f", site, str(tmp_path), task=TASK, table=table)
    assert inspect_tables(config).notes == ()
    assert inspect_tables(config).sites[0].unknown == {"s": {"IV": 1}}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("T1 w", "t1_W", True), ("T1-w", "T1\\w", True), ("T\uff11", "t1", True),
        ("e\u0301", "\u00e9", True), ("-1", "1", False), ("ER-", "ER", False), ("a", "b", False),
    ],
)  # fmt: skip
def test_what_counts_as_spelt_alike(one: str, other: str, same: bool) -> None:
    assert (spelling_key(one) == spelling_key(other)) is same


def test_none_na_and_null_are_words_where_they_are_declared(tmp_path: Path) -> None:
    words = ("None", "NA", "null", "mild")
    text = "s,y\nNone,None\nNA,NA\nnull,mild\nmild,mild\n?,NA\n"
    table = read(tmp_path, text, categorical={"s": words})
    assert table.codes[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert (table.missing, table.unknown) == ({"s": 1}, {})
    task = TaskConfig("classification", ("None", "NA", "mild"))
    config = TableConfig("y", (), {"s": words}, scale="none")
    predicted = rows_to_predict(table, config, task)
    assert [int(predicted.example(i).batch["label"]) for i in range(5)] == [0, 1, 2, 2, 1]
    site = SiteConfig(table="t.csv", unlabelled=True)
    whole = FederationConfig("f", {"a": site}, str(tmp_path), task=task, table=config)
    assert len(find_cases(whole, "a")) == 5
    (found,) = inspect_tables(whole).sites
    assert found.targets == {"None": 1, "NA": 2, "mild": 2}
    assert read(tmp_path, "s,y\nnone,0\nna,1\n", categorical={"s": words}).unknown == {
        "s": {"na": 1, "none": 1}
    }


def test_zeros_of_a_code_of_several_columns_are_no_missing_values(tmp_path: Path) -> None:
    columns = ("stage_I", "stage_II", "stage_III", "chol")
    text = "stage_I,stage_II,stage_III,chol,y\n1,0,0,0,0\n0,1.0,0,0,1\n1,0,0,0,1\n"
    table = read(tmp_path, text, numeric=columns)
    assert table.missing == {"stage_I": 0, "stage_II": 0, "stage_III": 0, "chol": 3}
    assert table.numbers[:, 2].tolist() == [0, 0, 0]
    assert [note for note in table.notes if "taken as missing" in note] == [
        "t.csv: chol is 0 in every row and is taken as missing; name it in table.zero_is_real if "
        "the zeros are true"
    ]
    for wrong in (text.replace("1,0,0,0,0", "1,1,0,0,0"), text.replace("1,0,0,0,0", "2,0,0,0,0")):
        assert read(tmp_path, wrong, numeric=columns).missing["stage_III"] == 3


FILE = """
name: f
sites: {a: {table: a.csv}, b: {table: b.csv, columns: {lab_na: Sodium}}}
task: {name: classification, classes: ["0", "1"]}
table: {label: lab_out, numeric: [age, "lab_*"], patient: lab_id, zero_is_real: ["lab_c*"]}
"""


def test_columns_are_named_by_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(FILE)
    (tmp_path / "a.csv").write_text("lab_id,age,lab_na,lab_crp,x,lab_out\n1,50,140,0,9,0\n")
    (tmp_path / "b.csv").write_text("age,lab_id,lab_crp,Sodium,lab_out\n50,3,0,141,1\n")
    config = load_federation(tmp_path / "f.yaml")
    assert config.table is not None
    assert config.table.numeric == ("age", "lab_crp", "lab_na")
    assert config.table.zero_is_real == ("lab_crp",)
    done = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "f.yaml"), "--json"])
    numbers = json.loads(done.output)["sites"][1]["numbers"]
    assert {column: found["median"] for column, found in numbers.items()} == {
        "age": 50, "lab_crp": 0, "lab_na": 141,
    }  # fmt: skip


def test_a_pattern_that_means_nothing_or_more_than_a_site_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(FILE)
    with pytest.raises(ConfigError, match="no table can be read on this machine"):
        load_federation(tmp_path / "f.yaml")
    (tmp_path / "a.csv").write_text("lab_id,age,lab_crp,lab_out\n1,50,0,0\n")
    (tmp_path / "b.csv").write_text("age,lab_id,Sodium,lab_out\n50,3,141,1\n")
    done = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "f.yaml")])
    assert "site a: a.csv has no column lab_na" in done.output
    assert "site b: b.csv has no column lab_crp" in done.output
    with pytest.raises(ConfigError, match=r"numeric names 'z\*', and none of age, "):
        load_federation(tmp_path / "f.yaml", ["table.numeric=['z*']"])
