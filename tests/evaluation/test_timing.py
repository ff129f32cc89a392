import csv
import json
import logging
from io import StringIO
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from pandas.testing import assert_frame_equal

from collegium.errors import DataError
from collegium.evaluation.formats import to_csv, to_latex, to_markdown, to_text
from collegium.evaluation.results import ResultRow, results_frame, write_rows
from collegium.evaluation.scores import rows_of
from collegium.evaluation.tables import method_table
from collegium.evaluation.timing import TimeTable, read_accounts, time_against_quality, time_table
from collegium.evaluation.writing import write_tables


def account(adapter: str, site: str, seconds: float | None, cases: int = 2, seed: int = 0) -> Any:
    found = {
        "adapter": {"name": "tent", "label": adapter}, "algorithm": "fedavg", "seed": seed,
        "site": site, "cases": cases, "seconds": seconds,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


@pytest.fixture
def rows(outside: Any) -> list[ResultRow]:
    """Without adapting 0.4 at A and 0.6 at B; with Tent 0.7 and 0.8, and in seed 1 0.5 and 0.6."""
    found: list[ResultRow] = []
    for seed, tent in ((0, (0.7, 0.8)), (1, (0.5, 0.6))):
        for site, plain, adapted in zip("AB", (0.4, 0.6), tent, strict=True):
            found += outside("fedavg", "none", site, [plain], seed=seed)
            found += outside("fedavg", "tent", site, [adapted], seed=seed)
    return found


def names_in(table: TimeTable) -> list[str]:
    return table.methods["method"].tolist()


@pytest.fixture
def accounts() -> list[Any]:
    return [
        account("tent", "A", 6.0, 2, 0), account("tent", "B", 24.0, 8, 0),  # 30 / 10 = 3
        account("tent", "A", 2.0, 2, 1), account("tent", "B", 8.0, 8, 1),  # 10 / 10 = 1
        account("none", "A", 1.0, 2, 0), account("none", "B", 4.0, 8, 0),  # 0.5
        account("none", "A", 2.0, 2, 1), account("none", "B", 5.0, 8, 1),  # 0.7
    ]  # fmt: skip


def test_seconds_are_all_seconds_of_a_seed_over_all_its_images(
    rows: list[ResultRow], accounts: list[Any]
) -> None:
    table = time_table(results_frame(rows), accounts, "dice")
    assert names_in(table) == ["FedAvg", "FedAvg + Tent"]
    none, tent = rows_of(table.methods)
    assert (tent.seconds, tent.seconds_sd) == pytest.approx((2.0, 2**0.5))
    assert (none.seconds, none.seconds_sd) == pytest.approx((0.6, 0.02**0.5))
    assert tent.unadapted == none.unadapted == none.seconds
    assert tent.unadapted_sd == none.unadapted_sd == none.seconds_sd
    assert none.quality == pytest.approx(0.5)
    assert tent.quality == pytest.approx((0.75 + 0.55) / 2)
    assert table.missing == ""


def test_a_site_that_two_folds_adapt_to_counts_with_the_seconds_and_images_of_both(
    outside: Any,
) -> None:
    found = [account("tent", "A", 2.0, 2), account("tent", "A", 10.0, 2)]
    results = results_frame(outside("fedavg", "tent", "A", [0.5]))
    (one,) = rows_of(time_table(results, found, "dice").methods)
    assert one.seconds == pytest.approx(3.0)
    assert isnan(one.unadapted)


def test_the_quickest_stands_first_and_equal_times_in_the_order_of_tables(
    rows: list[ResultRow], accounts: list[Any]
) -> None:
    slow = [{**each, "seconds": 100.0} if "none" in str(each) else each for each in accounts]
    slowed = time_table(results_frame(rows), slow, "dice")
    assert names_in(slowed) == ["FedAvg + Tent", "FedAvg"]
    alike = [{**each, "seconds": 5.0} for each in accounts]
    assert names_in(time_table(results_frame(rows), alike, "dice")) == ["FedAvg", "FedAvg + Tent"]


def test_a_seed_without_an_account_of_every_scored_site_does_not_count(
    rows: list[ResultRow], accounts: list[Any]
) -> None:
    known = [a for a in accounts if (a["seed"], a["site"]) != (0, "B")]
    table = time_table(results_frame(rows), known, "dice")
    assert table.methods["seconds"].tolist() == pytest.approx([0.7, 1.0])
    assert table.methods["seconds_sd"].isna().all()


def test_accounts_of_what_was_not_scored_are_passed_over(
    rows: list[ResultRow], accounts: list[Any]
) -> None:
    more = [account("old", "A", 1.0), account("tent", "C", 99.0), account("tent", "A", 9.0, 1, 7)]
    found, expected = (
        time_table(results_frame(rows), some, "dice") for some in (accounts + more, accounts)
    )
    assert_frame_equal(found.methods, expected.methods)
    assert found.missing == expected.missing


def test_methods_without_accounts_are_named_and_left_out(
    rows: list[ResultRow], accounts: list[Any]
) -> None:
    some = [a for a in accounts if a["adapter"]["label"] == "tent"]
    table = time_table(results_frame(rows), some, "dice")
    assert names_in(table) == ["FedAvg + Tent"]
    assert table.missing.startswith("There are no whole accounts of the time of FedAvg, so")


@pytest.mark.parametrize("found", [[], [account("tent", "A", None), account("tent", "B", 3.0, 0)]])
def test_without_times_the_table_is_left_out_and_says_so(
    rows: list[ResultRow], found: list[Any]
) -> None:
    table = time_table(results_frame(rows), found, "dice")
    assert table.methods.empty
    assert "no accounts of the time that adapting took" in table.missing


def test_without_scores_outside_the_table_is_left_out_and_says_so(scores: Any) -> None:
    table = time_table(results_frame(scores("fedavg", "global", "A", [0.5])), [], "dice")
    assert table.methods.empty
    assert "no scores of a site outside" in table.missing


def test_the_writers_mark_the_shortest_time_and_the_best_score(
    rows: list[ResultRow], accounts: list[Any]
) -> None:
    table = time_against_quality(time_table(results_frame(rows), accounts, "dice"))
    assert "FedAvg 0.600 \u00b1 0.141* 0.600 \u00b1 0.141* 0.500 \u00b1 0.000+" in " ".join(
        to_text(table).split()
    )
    assert "| FedAvg + Tent | <u>2.000 \u00b1 1.414</u> |" in to_markdown(table)
    assert r"\textbf{0.650} $\pm$ 0.141 \\" in to_latex(table)
    records = list(csv.DictReader(StringIO(to_csv(table))))
    assert [(r["method"], r["column"], float(r["mean"])) for r in records[3:]] == [
        ("FedAvg + Tent", "seconds per image", 2.0),
        ("FedAvg + Tent", "seconds without adapting", pytest.approx(0.6)),
        ("FedAvg + Tent", "dice", pytest.approx(0.65)),
    ]


def test_of_a_distance_the_smallest_is_best_and_its_unit_is_named(
    outside: Any, cells_of: Any
) -> None:
    rows = [
        *outside("fedavg", "none", "A", [9.0], metric="hd95", unit="mm"),
        *outside("fedavg", "tent", "A", [7.0], metric="hd95", unit="mm"),
    ]
    found = [account("none", "A", 1.0), account("tent", "A", 2.0)]
    table = time_against_quality(time_table(results_frame(rows), found, "hd95"))
    cells = cells_of(table)
    assert [found["hd95 (mm)"].rank for found in cells.values()] == [2, 1]
    same = cells_of(method_table(results_frame(rows), "hd95", where="outside"))["FedAvg"]
    assert cells["FedAvg"]["hd95 (mm)"].mean == same["average"].mean == 9.0


def place(folder: Path, content: Any, *parts: str) -> None:
    where = folder.joinpath(*parts, "outside", content["site"], content["adapter"]["label"])
    where.mkdir(parents=True, exist_ok=True)
    (where / "account.json").write_text(json.dumps(content))


def test_accounts_are_those_of_the_setting_in_every_fold(tmp_path: Path) -> None:
    place(tmp_path, account("tent", "A", 1.0), "tau", "without-A", "fedavg", "seed-0")
    place(tmp_path, account("tent", "A", 2.0), "without-A", "fedavg", "seed-0")
    place(tmp_path, account("tent", "A", 3.0), "fedavg", "seed-0")
    assert [found["seconds"] for found in read_accounts(tmp_path)] == [3.0, 2.0]
    assert [found["seconds"] for found in read_accounts(tmp_path, "tau")] == [1.0]
    assert read_accounts(tmp_path, "tau")[0]["notes"] == []


def test_a_damaged_account_is_named(tmp_path: Path) -> None:
    place(tmp_path, account("tent", "A", 1.0), "fedavg", "seed-0")
    (tmp_path / "fedavg/seed-0/outside/A/tent/account.json").write_text("{")
    with pytest.raises(DataError, match=r"tent.account\.json: the account of an adaptation cannot"):
        read_accounts(tmp_path)


def test_a_run_and_each_setting_of_a_sweep_has_its_files_of_times(
    tmp_path: Path, rows: list[ResultRow], accounts: list[Any], outside: Any
) -> None:
    write_rows(tmp_path / "fedavg" / "seed-0" / "rows.jsonl", results_frame(rows))
    for each in accounts:
        place(tmp_path, each, f"without-{each['site']}", "fedavg", f"seed-{each['seed']}")
    names = {path.name for path in write_tables(tmp_path)}
    times = {"time.txt", "time.md", "time.tex", "time.csv"}
    assert {name for name in names if name.startswith("time")} == times
    assert "2.000 \u00b1 1.414" in (tmp_path / "tables" / "time.txt").read_text()
    sweep = tmp_path / "sweep"
    swept = outside("fedavg", "tent", "A", [0.5], variation="all")
    write_rows(sweep / "all" / "fedavg" / "seed-0" / "rows.jsonl", results_frame(swept))
    place(sweep, account("tent", "A", 3.0), "all", "fedavg", "seed-0")
    names = {path.name for path in write_tables(sweep)}
    assert {name for name in names if name.startswith("time")} == {
        f"time-all.{extension}" for extension in ("txt", "md", "tex", "csv")
    }


def test_a_run_without_accounts_has_no_file_of_times_and_the_log_says_so(
    tmp_path: Path, rows: list[ResultRow], caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(tmp_path / "fedavg" / "seed-0" / "rows.jsonl", results_frame(rows))
    with caplog.at_level(logging.WARNING):
        names = {path.name for path in write_tables(tmp_path)}
    assert not [name for name in names if name.startswith("time")]
    assert "no accounts of the time that adapting took" in caplog.text
