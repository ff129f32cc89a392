"""Names of labels and channels that mean other things at other sites."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from collegium.data.federation import open_federation, open_site
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.importers.common import DatasetDescription
from collegium.data.inspection import inspect_federation
from collegium.data.name_consistency import SiteNames, channel_names, name_problems
from collegium.data.repartition import PartitionRule, repartition
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.errors import ConfigError, DataError

LIVER = ("background", "liver", "tumour")
TASK = TaskConfig(classes=LIVER)


def message(
    site: str,
    labels: Mapping[str, int | tuple[int, ...]] | None = None,
    channels: tuple[str, ...] = (),
    *,
    label_map: dict[int, int] | None = None,
    places: tuple[int, ...] | None = None,
) -> SiteNames:
    values = {k: v if isinstance(v, tuple) else (v,) for k, v in (labels or {}).items()}
    return SiteNames(
        site, DatasetDescription("dataset.json", values, channels), label_map or {}, places
    )


def nnunet(folder: Path, about: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Write one case and give its volumes."""
    random, written = np.random.default_rng(seed), {}
    count = len(about["channel_names"])
    for kind in (*range(count), "label"):
        values = random.normal(size=(4, 5, 6)).astype(np.float32)
        if kind == "label":
            values = (np.arange(120).reshape(4, 5, 6) % 12).clip(0, 2).astype(np.uint8)
        place = "labelsTr/a" if kind == "label" else f"imagesTr/a_{kind:04d}"
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(values, np.eye(4)), folder / f"{place}.nii.gz")
        written[str(kind)] = values
    (folder / "dataset.json").write_text(json.dumps({"numTraining": 1, **about}), "utf-8")
    return written


def two_sites(root: Path, **north: Any) -> tuple[FederationConfig, dict[str, np.ndarray]]:
    """Two folders as nnU-Net has them; in those of north what is named differs."""
    about = {
        "channel_names": {"0": "T1", "1": "FLAIR"},
        "labels": {"background": 0, "liver": 1, "tumour": 2},
    }
    written = nnunet(root / "north", {**about, **north}, 1)
    nnunet(root / "south", about, 2)
    sites = {name: SiteConfig(folder=name) for name in ("north", "south")}
    return FederationConfig("f", sites, str(root), task=TASK), written


def test_swapped_labels_are_refused_with_the_label_map_that_mends_them(tmp_path: Path) -> None:
    config, written = two_sites(tmp_path, labels={"Background": 0, "Tumour": 1, "LIVER": 2})
    text = "sites south and north: Tumour is class 2 at south and class 1 at north: set label_map: "
    text += "{1: 2, 2: 1} at site north, or correct dataset.json there"
    (problem,) = inspect_federation(config).problems
    assert problem.startswith(text)
    with pytest.raises(DataError, match="sites south and north: Tumour") as error:
        open_federation(config, tmp_path / "cache", 0, None)
    assert str(tmp_path) not in str(error.value)
    with pytest.raises(DataError, match=r"site north: Tumour is class 2 in task\.classes and "):
        open_site(config, "north", tmp_path / "cache", 0, None)
    with pytest.raises(DataError, match="sites south and north"):
        repartition(config, PartitionRule("volume", 1), tmp_path / "new.csv")
    mended = {**config.sites, "north": SiteConfig(folder="north", label_map={1: 2, 2: 1})}
    config = replace(config, sites=mended)
    sites = inspect_federation(config).sites
    assert [(site.problems, site.sizes[0].middle) for site in sites] == [
        ((), np.sum(written["label"] == 2) / 1000), ((), np.sum(written["label"] == 1) / 1000),
    ]  # fmt: skip
    site = open_federation(config, tmp_path / "cache", 0, None)["north"]
    label = np.asarray(site.train.cases[0].arrays().label)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(label, np.array([0, 2, 1])[written["label"]])
    with pytest.raises(ConfigError, match="site north has a label_map, which a manifest cannot"):
        repartition(config, PartitionRule("volume", 1), tmp_path / "new.csv")


def test_swapped_channels_are_refused_with_the_channels_that_mend_them(tmp_path: Path) -> None:
    config, written = two_sites(tmp_path, channel_names={"0": "flair", "1": "t1"})
    (problem,) = inspect_federation(config).problems
    assert problem.startswith(
        "sites north and south: channel 0 is flair at north and T1 at south, whose channels have "
        "another order: set channels: [1, 0] at site south and image.inputs: 2, or correct"
    )
    with pytest.raises(DataError, match="channel 0 is flair at north and T1 at south"):
        open_federation(config, tmp_path / "cache", 0, None)
    mended = {**config.sites, "north": SiteConfig(folder="north", channels=(1, 0))}
    config = replace(config, sites=mended, image=ImageConfig(inputs=2, normalise="none"))
    assert inspect_federation(config).good
    site = open_federation(config, tmp_path / "cache", 0, None)["north"]
    image = np.asarray(site.train.cases[0].arrays().image)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(image, np.stack([written["1"], written["0"]]))


def test_names_that_agree_or_are_nowhere_else_are_no_problem() -> None:
    sites = [
        message("a", {"Back-Ground": 0, "LIVER": 1, "tu_mour": 2}, ("CT",)),
        message("b", {"background": 0, "foreground": 1, "spot": 2}, ("PET",)),
        message("c", {"bg": 0, "lesion": 2, "organ": 1}, ("noNorm", "CT", "CT")),
        message("d"),
    ]
    assert name_problems(sites, TASK, None) == []


@pytest.mark.parametrize(
    ("labels", "task", "remedy"),
    [
        ({"tumour": 1, "liver": 2}, TASK, "set label_map: {1: 2, 2: 1} at site a"),
        ({"liver": 5, "tumour": 4}, TASK, "set label_map: {4: 2, 5: 1} at site a"),
        ({"tumour": 1, "cyst": 2}, TASK, "set label_map at site a to the class of each stored"),
        (
            {"liver": 1, "tumour": 2},
            TaskConfig(classes=LIVER, label_map={1: 2, 2: 1}),
            "site a: liver is class 1 in task.classes and class 2 at a: set label_map: {} at",
        ),
    ],
)
def test_the_classes_of_the_task_decide_about_one_site(
    labels: dict[str, int], task: TaskConfig, remedy: str
) -> None:
    (problem,) = name_problems([message("a", labels, label_map=task.label_map)], task, None)
    assert remedy in problem


def test_a_map_that_leaves_a_structure_out_and_black_and_white_agree_with_the_task() -> None:
    two = TaskConfig(classes=("background", "tumour"))
    mapped = message("a", {"background": 0, "liver": 1, "tumour": 2}, label_map={1: 0, 2: 1})
    assert name_problems([mapped, message("b", {"tumour": 255})], two, None) == []
    assert name_problems([message("a", {"tumour": 255})], TASK, None) != []


def test_names_that_the_task_lacks_are_compared_between_sites() -> None:
    sites = [message("a", {"x": 1, "y": 2}), message("b", {"Y": 1, "x": 2})]
    sites.append(message("c", {"y": 2, "z": 1}))
    (problem,) = name_problems(sites, TASK, None)
    assert problem.startswith("sites a and b: Y is class 2 at a and class 1 at b: set label_map: ")
    assert "{1: 2, 2: 1} at site b" in problem


def test_structures_that_a_description_names_in_part_only_ask_for_a_decision() -> None:
    b = message("b", {"background": 0, "liver": 1})
    (problem,) = name_problems([message("a", {"liver": 1, "tumour": 2}), b], TASK, None)
    assert problem.startswith("site b: dataset.json there does not name tumour, so that ")
    assert name_problems([replace(b, labelled=("liver",))], TASK, None) == []
    assert name_problems([message("b", {"liver": 1, "organ": (1, 2)})], TASK, None) == []
    (problem,) = name_problems([message("b", {"organ": (1, 2)})], TASK, None)
    assert "does not name liver, tumour, so that" in problem
    (problem,) = name_problems([message("b", {"cyst": 5})], TASK, None)
    assert "set label_map there to the class of each stored value; or" in problem
    held = frozenset({frozenset({0}), frozenset({2})})
    segments = SiteNames("c", DatasetDescription(), segments=held)
    (problem,) = name_problems([segments], TASK, None)
    assert "site c: its DICOM segments do not name liver, so that" in problem


def test_regions_are_held_to_the_regions_of_the_task_and_of_other_sites() -> None:
    task = TaskConfig(
        classes=("background", "edema", "core", "edge"), regions={"whole": (1, 2, 3), "core": (2,)}
    )
    right: dict[str, tuple[int, ...]] = {"whole": (3, 2, 1), "core": (2,), "both": (1, 2)}
    assert name_problems([message("a", right), message("b", right)], task, None) == []
    (problem,) = name_problems([message("a", right), message("b", {"BOTH": (1, 3)})], task, None)
    assert "sites a and b: BOTH is classes 1, 2 at a and classes 1, 3 at b" in problem
    assert "set label_map at site b to the class of each stored value" in problem
    (problem,) = name_problems([message("a", {"whole": (1, 2)})], task, None)
    assert "whole is classes 1, 2, 3 in task.classes and classes 1, 2 at a" in problem


def test_channels_that_a_site_lacks_or_puts_elsewhere_are_compared_by_their_place() -> None:
    full = message("a", channels=("T1", "T2", "FLAIR"))
    right = message("b", channels=("T1", "FLAIR"), places=(0, 2))
    holds_all = message("c", channels=("T1", "T2", "FLAIR"), places=(0, 2))
    turned = message("d", channels=("flair", "t1"), places=(2, 0))
    assert name_problems([full, right, holds_all, turned], TASK, 3) == []
    (problem,) = name_problems([full, replace(right, channels=(0, 1))], TASK, 3)
    assert "channel 1 is T2 at a and FLAIR at b" in problem
    assert "set channels: [0, 2] at site b, or" in problem
    (problem,) = name_problems([full, message("e", channels=("T2", "T1", "FLAIR"), places=(0, 2))],
                               TASK, 3)  # fmt: skip
    assert "give its files the order T1, T2, FLAIR" in problem
    assert channel_names([right, full], 3) == {0: "T1", 1: "T2", 2: "FLAIR"}


def test_a_task_that_classifies_heeds_no_names_of_labels() -> None:
    task = TaskConfig("classification", classes=LIVER)
    assert name_problems([message("a", {"tumour": 1})], task, None) == []
    with pytest.raises(ConfigError, match="site A has a label_map, for segmentations"):
        FederationConfig("f", {"A": SiteConfig(folder="a", label_map={1: 2})}, task=task)


@pytest.mark.parametrize(
    "name", ["Le\u0301sion", "L\u00c9SION", "L\u00e9sion ", "l\u00e9 sion", "l\u00e9\\sion"]
)
def test_names_are_the_same_in_either_form_of_unicode_and_with_backslashes(name: str) -> None:
    task = TaskConfig(classes=("background", "l\u00e9 sion", "x"))
    sites = [message("a", {"x": 2, "l\u00e9_sion": 1}), message("b", {name: 2})]
    (problem,) = name_problems(sites, task, None)
    assert "is class 1 at a and class 2 at b" in problem


def test_other_names_of_a_class_or_channel_are_noted_before_splits_are_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = two_sites(
        tmp_path, labels={"background": 0, "Liver": 1, "lesion": 2},
        channel_names={"0": "T1", "1": "T2-FLAIR"},
    )  # fmt: skip
    rest = ": if these are two things, correct label_map or channels at one of the sites"
    told = (
        f"channel 1 is called T2-FLAIR at north and FLAIR at south{rest}",
        f"class 2 is called lesion at north and tumour at south{rest}",
    )
    assert inspect_federation(config).notes == told
    for _ in range(2):  # splits that are stored are not drawn again
        open_federation(config, tmp_path / "cache", 0, tmp_path / "splits")
    assert (
        tuple(record.message for record in caplog.records if record.levelname == "WARNING") == told
    )
    same, _ = two_sites(tmp_path / "same", labels={"Background": 0, "LIVER": 1, "Tumour": 2})
    assert inspect_federation(same).notes == ()
