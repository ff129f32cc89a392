"""Ids of patients that look like one id written in several ways."""

import logging
from pathlib import Path

import pytest

from collegium.data.federation import open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.patient_ids import similar_ids
from collegium.data.settings import TaskConfig
from collegium.data.site import Case
from collegium.data.splits import LeakageFinding
from collegium.data.tables import TableConfig


def found(*, stated: bool = True, **sites: tuple[str, ...]) -> list[LeakageFinding]:
    cases = {
        site: [
            Case(site, f"{n}", patient, (), None, stated=stated) for n, patient in enumerate(ids)
        ]
        for site, ids in sites.items()
    }
    return similar_ids(cases)


@pytest.mark.parametrize(
    ("ids", "difference"),
    [
        (("P01", "p01", "P2"), "upper and lower case"),
        (("P-007", "P-7", "P-70"), "leading zeros"),
        (("b\u00fc1", "bu\u03081", "b"), "the form of Unicode"),
        (("P01", "p1", "q"), "upper and lower case and leading zeros"),
    ],
)
def test_ids_that_differ_in_spelling_alone_are_told_of(
    ids: tuple[str, ...], difference: str
) -> None:
    (finding,) = found(a=ids)
    assert (finding.kind, finding.sites) == ("similar_ids", ("a",))
    assert finding.patients == tuple(sorted(ids[:2]))
    assert f" differ in {difference} alone: splits take them for as many" in finding.text


def test_ids_are_compared_between_sites_too() -> None:
    (finding,) = found(a=("P01", "P2"), b=("P01", "P3"), c=("p1", "P4"))
    assert finding.sites == ("a", "b", "c")
    assert finding.patients == ("P01", "p1")


@pytest.mark.parametrize(
    "ids",
    [
        ("P1", "P10", "P100"),
        ("1.02", "1.2"),
        ("a-1", "a1"),
        ("x", "y"),
        ("10", "1", "0"),
        ("P1",) * 2,
    ],
)
def test_other_ids_are_not(ids: tuple[str, ...]) -> None:
    assert found(a=ids) == []


def test_names_of_files_are_no_ids() -> None:
    assert found(a=("P01", "p01"), stated=False) == []


def test_ids_that_a_spreadsheet_has_rounded_are_told_of() -> None:
    (finding,) = found(a=("1.23E+15", "1.23E+15", "4,5E+9", "E12"))
    assert (finding.kind, finding.patients) == ("rounded_ids", ("1.23E+15", "4,5E+9"))
    assert finding.text.startswith("3 cases at a have ids of patients such as 1.23E+15 that a ")


def test_a_run_says_so_before_it_draws_splits_and_names_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_text("p,x,y\nMeier01,1,0\nmeier1,2,1\nb,3,0\n")
    config = FederationConfig(
        "f", {"a": SiteConfig(table="a.csv")}, str(tmp_path),
        task=TaskConfig("classification", ("0", "1")), table=TableConfig("y", ("x",), patient="p"),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "collegium"):
        open_federation(config, tmp_path / "cache", 0, None)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("2 ids of patients at a differ in upper and lower case and leading ")
    assert "meier" not in message.lower()
