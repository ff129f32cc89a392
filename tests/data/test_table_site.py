"""From a site's table to its splits, scaled by the site's own training rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collegium.data.federation import find_cases, open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.settings import TaskConfig
from collegium.data.table_inspection import inspect_tables
from collegium.data.table_site import rows_to_predict
from collegium.data.tables import TableConfig, read_table
from collegium.errors import ConfigError, DataError

ROWS = [("p1", 1.0), ("p1", 3.0), ("p2", 8.0), ("p3", None), ("p4", 100.0), ("p5", -7.0)]
SPLITS = ("train", "Training", "train", "train", "valid", "test")


def federation(folder: Path, *, rows: Any = ROWS, **settings: Any) -> FederationConfig:
    lines = [
        f"{patient},{'' if value is None else value},{split},{place % 2}"
        for place, ((patient, value), split) in enumerate(zip(rows, SPLITS, strict=False))
    ]
    (folder / "north.csv").write_text("\n".join(["pat,a,fold,y", *lines]) + "\n")
    task = TaskConfig("classification", ("no", "yes"), coding={"0": "no", "1": "yes"})
    table = TableConfig("y", ("a",), patient="pat", **{"split": "fold", **settings})
    sites = {"north": SiteConfig(table="north.csv")}
    return FederationConfig("f", sites, str(folder), task=task, table=table)


def test_a_site_scales_by_its_own_training_rows_only(tmp_path: Path) -> None:
    site = open_federation(federation(tmp_path), tmp_path, 0, None)["north"]
    known = np.array([1.0, 3.0, 8.0])
    mean, deviation = known.mean(), known.std()
    found = [site.train.example(index).batch["image"].item() for index in range(4)]
    assert found == pytest.approx([*(known - mean) / deviation, 0], rel=1e-6)
    (val, test) = (split.example(0).batch["image"].item() for split in (site.val, site.test))
    assert (val, test) == pytest.approx(((100 - mean) / deviation, (-7 - mean) / deviation))


def test_a_site_scales_by_the_range_of_its_own_training_rows(tmp_path: Path) -> None:
    site = open_federation(federation(tmp_path, scale_by="range"), tmp_path, 0, None)["north"]
    found = [site.train.example(index).batch["image"].item() for index in range(4)]
    assert found == pytest.approx([-1, (3 - 4.5) / 3.5, 1, 0], rel=1e-6)
    assert site.val.example(0).batch["image"].item() == pytest.approx((100 - 4.5) / 3.5, rel=1e-6)
    assert site.test.example(0).batch["image"].item() == pytest.approx((-7 - 4.5) / 3.5, rel=1e-6)


def test_classes_patients_and_cases_of_a_row_stay_together(tmp_path: Path) -> None:
    site = open_federation(federation(tmp_path), tmp_path, 0, None)["north"]
    examples = [site.train.example(index) for index in range(4)] + [site.test.example(0)]
    assert [(e.case, e.patient, int(e.batch["label"])) for e in examples] == [
        ("1", "p1", 0), ("2", "p1", 1), ("3", "p2", 0), ("4", "p3", 1), ("6", "p5", 1),
    ]  # fmt: skip
    assert examples[0].batch["label"].dtype == torch.int64
    assert examples[0].batch["image"].shape == (1, 1)


def test_without_a_column_splits_are_drawn_by_patient(tmp_path: Path) -> None:
    site = open_federation(federation(tmp_path, split=None), tmp_path, 0, None)["north"]
    parts = [site.train, site.val, site.test]
    patients = [{part.example(i).patient for i in range(len(part))} for part in parts]
    assert sorted(len(names) for names in patients) == [1, 1, 3]
    assert len(set.union(*patients)) == 5


@pytest.mark.parametrize(("scale", "expected"), [("none", [1, 3, 8, 0]), ("federation", None)])
def test_numbers_stay_as_written_where_the_site_does_not_scale(
    tmp_path: Path, scale: str, expected: list[float] | None
) -> None:
    site = open_federation(federation(tmp_path, scale=scale), tmp_path, 0, None)["north"]
    found = [site.train.example(index).batch["image"].item() for index in range(4)]
    np.testing.assert_array_equal(found, [1, 3, 8, np.nan] if expected is None else expected)


def test_an_unknown_split_or_class_is_named_by_site_and_row(tmp_path: Path) -> None:
    config = federation(tmp_path)
    path = tmp_path / "north.csv"
    good = path.read_text()
    path.write_text(good.replace("valid", "fold3"))
    with pytest.raises(DataError, match=r"site north, row 5: the split is unknown: write train"):
        find_cases(config, "north")
    path.write_text(good.replace("train,0", "train,2", 1))
    with pytest.raises(DataError, match=r"site north, row 1: the class is unknown: write one"):
        open_federation(config, tmp_path, 0, None)


def test_whole_numbers_with_a_point_are_the_classes_they_stand_for(tmp_path: Path) -> None:
    config = federation(tmp_path)
    before = open_federation(config, tmp_path, 0, None)["north"].train
    path = tmp_path / "north.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(f"{line}.0" for line in lines[1:])]))
    after = open_federation(config, tmp_path, 0, None)["north"].train
    labels = [[int(part.example(i).batch["label"]) for i in range(4)] for part in (before, after)]
    assert labels == [[0, 1, 0, 1]] * 2
    (site,) = inspect_tables(config).sites
    assert site.targets == {"no": 3, "yes": 3}


@pytest.mark.parametrize("word", ["", "NA", "?"])
def test_a_row_without_a_class_is_said_to_have_none(tmp_path: Path, word: str) -> None:
    config = federation(tmp_path)
    text = (tmp_path / "north.csv").read_text()
    (tmp_path / "north.csv").write_text(text.replace("train,0", f"train,{word}", 1))
    expected = "site north, row 1 has no class: fill it in or leave the row out"
    with pytest.raises(DataError) as caught:
        open_federation(config, tmp_path, 0, None)
    assert str(caught.value) == expected
    assert inspect_tables(config).sites[0].problems == (expected,)


@pytest.mark.parametrize("word", ["", "NA", "?"])
def test_rows_without_a_class_are_kept_apart_where_a_site_may_have_them(
    tmp_path: Path, word: str
) -> None:
    config = federation(tmp_path)
    config = replace(config, sites={"north": SiteConfig(table="north.csv", unlabelled=True)})
    lines = (tmp_path / "north.csv").read_text().splitlines()
    lines[1] = f"p1,1,train,{word}"
    lines[6] = f"p5,-7,test,{word}"
    (tmp_path / "north.csv").write_text("\n".join(lines))
    site = open_federation(config, tmp_path, 0, None)["north"]
    assert [site.train.example(index).case for index in range(len(site.train))] == ["2", "3", "4"]
    assert len(site.test) == 0
    apart = [site.unlabelled.example(index) for index in range(len(site.unlabelled))]
    assert [(example.case, "label" in example.batch) for example in apart] == [("1", False)]
    known = np.array([3.0, 8.0])  # the fourth is missing; rows apart have no say in the scaling
    assert apart[0].batch["image"].item() == pytest.approx((1 - known.mean()) / known.std())
    (found,) = inspect_tables(config).sites
    assert found.unlabelled == {"train": 1, "test": 1}
    assert found.cases == sum(found.targets.values()) == sum(found.splits.values()) == 4
    assert found.problems == ()
    assert found.notes[-1].startswith("2 cases have no label (train 1, test 1): they are kept ap")


def test_no_message_repeats_what_stands_in_the_column_of_the_class(tmp_path: Path) -> None:
    config = federation(tmp_path)
    text = (tmp_path / "north.csv").read_text()
    (tmp_path / "north.csv").write_text(text.replace("train,0", "train,Jane Doe", 1))
    expected = (
        "site north, row 1: the class is unknown: write one of no, yes, or add it to task.coding"
    )
    with pytest.raises(DataError) as caught:
        open_federation(config, tmp_path, 0, None)
    assert str(caught.value) == expected
    found = inspect_tables(config)
    assert found.sites[0].problems == (expected,)
    assert "Jane" not in str(found.to_dict())


def test_an_absent_column_names_the_site(tmp_path: Path) -> None:
    config = federation(tmp_path)
    (tmp_path / "north.csv").write_text("pat,fold,y\np1,train,0\n")
    with pytest.raises(DataError, match=r"^site north: north\.csv has no column a "):
        find_cases(config, "north")


def test_a_site_without_training_rows_cannot_scale(tmp_path: Path) -> None:
    config = federation(tmp_path)
    text = (tmp_path / "north.csv").read_text()
    (tmp_path / "north.csv").write_text(text.replace("train", "test").replace("Training", "test"))
    with pytest.raises(DataError, match=r"^site north has no training cases to scale"):
        open_federation(config, tmp_path, 0, None)


def test_rows_to_predict_are_scaled_among_themselves(tmp_path: Path) -> None:
    whole = federation(tmp_path)
    config = whole.table
    assert config is not None
    table = read_table(tmp_path / "north.csv", config, labelled=False)
    data = rows_to_predict(replace(table, targets=("",) * 6), config, whole.task)
    values = np.array([1.0, 3.0, 8.0, 100.0, -7.0])
    expected = (values - values.mean()) / values.std()
    found = [data.example(index).batch["image"].item() for index in range(6)]
    assert found == pytest.approx([*expected[:3], 0, *expected[3:]], rel=1e-6)
    assert "label" not in data.inputs
    classes = rows_to_predict(table, config, whole.task).inputs["label"]
    assert classes.tolist() == [whole.task.class_of(word, "", row=True) for word in table.targets]
    some = replace(table, targets=("?", *table.targets[1:]))
    assert "label" not in rows_to_predict(some, config, whole.task).inputs
    with pytest.raises(DataError, match=r"^row 6: the class is unknown"):
        rows_to_predict(replace(table, targets=(*table.targets[:5], "9")), config, whole.task)


def test_tables_and_images_are_not_mixed(tmp_path: Path) -> None:
    table, task = TableConfig("y", ("a",)), TaskConfig("classification")
    with pytest.raises(ConfigError, match=r"site b has no table and federation\.table is given"):
        FederationConfig("f", {"b": SiteConfig("b")}, task=task, table=table)
    with pytest.raises(ConfigError, match=r"site a has a table and federation\.table is not given"):
        FederationConfig("f", {"a": SiteConfig(table="t.csv")}, task=task)
    with pytest.raises(ConfigError, match=r"task\.name classification"):
        FederationConfig("f", {"a": SiteConfig(table="t.csv")}, table=table)
