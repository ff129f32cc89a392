"""What `collegium inspect` finds in tables."""

import json
from pathlib import Path

from typer.testing import CliRunner

from collegium import cli
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.settings import TaskConfig
from collegium.data.table_inspection import inspect_tables
from collegium.data.tables import TableConfig

NORTH = "pat,age,crea,stage,fold,ill\na,50,?,I,train,0\na,60,1.5,V,train,1\nb,70,2.5,I,test,1\n"
SOUTH = "pat,age,crea,stage,fold,ill\nb,0,1.0,II,train,1\nc,0,,?,val,2\nd,0,1.5,V,test,2\n"


def federation(folder: Path, **texts: str) -> FederationConfig:
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)
    coding = {"0": "well", "1": "ill", "2": "ill"}
    return FederationConfig(
        "two",
        {name: SiteConfig(table=f"{name}.csv") for name in texts},
        str(folder),
        outside=("south",) if "south" in texts else (),
        task=TaskConfig("classification", ("well", "ill"), coding=coding),
        table=TableConfig(
            "ill", ("age", "crea"), {"stage": ("I", "II")}, patient="pat", split="fold"
        ),
    )


def test_rows_patients_classes_and_gaps_are_counted(tmp_path: Path) -> None:
    found = inspect_tables(federation(tmp_path, north=NORTH, south=SOUTH))
    north, south = found.sites
    assert (north.cases, north.patients, north.inside, south.inside) == (3, 2, True, False)
    assert north.splits == {"train": 2, "val": 0, "test": 1} or north.splits["val"] == 1
    assert south.splits == {"train": 1, "val": 1, "test": 1}
    assert north.targets == {"well": 1, "ill": 2}
    assert south.targets == {"well": 0, "ill": 3}
    assert north.missing == {"age": 0, "crea": 1, "stage": 0}
    assert south.missing == {"age": 3, "crea": 1, "stage": 1}
    assert (north.unknown, south.unknown) == ({"stage": {"V": 1}}, {"stage": {"V": 1}})
    assert any("age is 0 in every row and is taken as missing" in note for note in south.notes)
    assert found.good
    assert found.shared_patients == 1
    assert found.findings[0].patients == ("b",)


def test_row_numbers_are_no_patients_to_share(tmp_path: Path) -> None:
    config = federation(tmp_path, north=NORTH, south=SOUTH)
    table = TableConfig("ill", ("age",), split="fold")
    found = inspect_tables(FederationConfig(**{**vars(config), "table": table}))
    assert (found.shared_patients, found.findings) == (None, ())
    assert [site.patients for site in found.sites] == [3, 3]


def test_every_problem_is_listed_with_site_and_row(tmp_path: Path) -> None:
    bad = NORTH.replace("test,1", "test,9").replace("1.5,V", "high,V")
    found = inspect_tables(federation(tmp_path, north=bad, west=NORTH.replace(",1\n", ",7\n")))
    (north,) = found.sites[0].problems
    assert north.startswith("site north: north.csv, row 2: column crea holds no number")
    assert [problem.partition(":")[0] for problem in found.sites[1].problems] == [
        "site west, row 2", "site west, row 3",
    ]  # fmt: skip
    assert found.problems == (
        "no site that trains has a case of the class ill: take it out of task.classes, or correct "
        "task.coding",
    )
    assert not found.good


def test_a_column_that_nobody_has_filled_in_is_a_problem(tmp_path: Path) -> None:
    text = NORTH.replace("50", "").replace("60", "?").replace("70", "NA")
    (problem,) = inspect_tables(federation(tmp_path, north=text)).problems
    assert problem.startswith("no site that trains has a value in the column age: ")


def inspect(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "f.yaml").write_text(
        """
name: two
root: .
sites: {north: {table: north.csv}, south: {table: south.csv}}
outside: [south]
task: {name: classification, classes: [well, ill], coding: {"0": well, "1": ill, "2": ill}}
table: {label: ill, numeric: [age, crea], categorical: {stage: [I, II]}, patient: pat, split: fold}
""".replace("root: .", f"root: {json.dumps(str(folder))}")
    )
    done = CliRunner().invoke(cli.app, ["inspect", str(folder / "f.yaml"), *options])
    return done.exit_code, done.output


def test_the_command_writes_tables_notes_and_findings(tmp_path: Path) -> None:
    federation(tmp_path, north=NORTH, south=SOUTH)
    code, output = inspect(tmp_path)
    lines = [line.split() for line in output.splitlines()]
    assert code == 0
    assert lines[0] == ["site", "cases", "patients", "train", "val", "test", "well", "ill"]
    assert lines[2] == ["south", "(outside)", "3", "3", "1", "1", "1", "0", "3"]
    assert ["missing", "north", "south"] in lines
    assert ["crea", "1", "(33%)", "1", "(33%)"] in lines
    assert "note: site north: north.csv: stage holds V, which is not in its vocabulary" in output
    assert "to check: by identifier, 1 patient is at both sites north and south (b): keep" in output


def test_the_command_gives_all_as_json_and_ends_with_3_where_something_is_wrong(
    tmp_path: Path,
) -> None:
    federation(tmp_path, north=NORTH, south=SOUTH)
    code, output = inspect(tmp_path, "--json")
    found = json.loads(output)
    assert (code, found["good"]) == (0, True)
    assert found["sites"][0]["unknown"] == {"stage": {"V": 1}}
    assert found["findings"][0]["kind"] == "shared_patient"
    (tmp_path / "north.csv").write_text("pat\na\n")
    code, output = inspect(tmp_path)
    assert code == 3
    assert "problem: site north: north.csv has no column age, crea, stage, fold, ill" in output
