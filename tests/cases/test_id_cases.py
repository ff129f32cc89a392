"""The field case of ids of patients that are written in several ways."""

from pathlib import Path

from typer.testing import CliRunner

from collegium import cli


def test_spl05_ids_that_differ_in_case_or_a_zero_and_rounded_ones(folder: Path) -> None:
    done = CliRunner().invoke(cli.app, ["inspect", str(folder / "ids.yaml")])
    words = " ".join(done.output.split())
    assert done.exit_code == 0
    assert (
        "to check: 3 ids of patients at a (P01, P1, p01) differ in upper and lower case and "
        "leading zeros alone: splits take them for as many patients"
    ) in words
    assert "to check: 2 cases at a have ids of patients such as 1.23E+15 that a spreadshee" in words


def test_spl05_sibling_ids_with_and_without_zeros_at_two_sites(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("pid,x,label\n0007,1,0\n0008,2,1\n")
    (tmp_path / "b.csv").write_text("pid,x,label\n7,1,0\n19,2,1\n")
    (tmp_path / "f.yaml").write_text(
        "name: f\nsites: {a: {table: a.csv}, b: {table: b.csv}}\n"
        'task: {name: classification, classes: ["0", "1"]}\n'
        "table: {label: label, numeric: [x], patient: pid}\n"
    )
    done = CliRunner().invoke(cli.app, ["inspect", str(tmp_path / "f.yaml")])
    assert "2 ids of patients at a and b (0007, 7) differ in leading zeros alone" in done.output
