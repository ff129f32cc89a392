"""The field case of patients whose visits and eyes are told by file names alone, and siblings."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from collegium import cli
from collegium.data.federation import open_federation
from collegium.data.patient_names import patients_by_name
from collegium.data.site import Case
from collegium.experiment.config.experiment import load_federation


def inspected(file: str, *overrides: str) -> dict[str, Any]:
    """Return the one site of a federation as `inspect --json` has it."""
    found = CliRunner().invoke(cli.app, ["inspect", file, *overrides, "--json"])
    assert found.exit_code == 0, found.output
    (site,) = json.loads(found.stdout)["sites"]
    return dict(site)


def note_on_patients(site: dict[str, Any]) -> str:
    (note,) = [note for note in site["notes"] if "look like" in note]
    return str(note)


def as_cases(names: Sequence[str]) -> list[Case]:
    return [Case("a", name, name, (Path(f"{name}.png"),), None) for name in names]


def draw(place: Path, names: Sequence[str]) -> str:
    """Draw images and masks of these names, and return the federation's file."""
    for number, name in enumerate(names):
        for kind in ("images", "masks"):
            (place / "a" / kind).mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 200, (8, 8)).astype(np.uint8)
            pixels = pixels if kind == "images" else (pixels > 100).astype(np.uint8)
            Image.fromarray(pixels).save(place / "a" / kind / f"{name}.png")
    text = f"name: f\nroot: {place}\nsites: {{a: {{folder: a}}}}\n"
    (place / "f.yaml").write_text(text, "utf-8")
    return str(place / "f.yaml")


def split_of(file: Path, overrides: Sequence[str], cache: Path) -> dict[str, str]:
    """Return the split of each case as a run draws it."""
    site = open_federation(load_federation(file, overrides), cache, 0, None)["a"]
    splits = {"train": site.train, "val": site.val, "test": site.test}
    return {s.example(k).case: name for name, s in splits.items() for k in range(len(s))}


def test_spl05_visits_and_eyes_are_counted_before_splits_are_drawn(
    place: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    visits, eyes = inspected("visits.yaml"), inspected("eyes.yaml")
    assert (visits["cases"], visits["patients_by_name"]) == (
        values["cases"],
        values["patients_by_name"],
    )
    assert [eyes["cases"], eyes["patients_by_name"]] == values["eyes"]
    note = note_on_patients(visits)
    assert note.startswith("15 cases look like 5 patients by their names (PAT00_t1, PAT00_t2, PAT")
    assert "splits treat them as 15" in note
    assert "by patient: '(.+)_[^_]+' at the site or by a manifest with the columns case" in note
    with caplog.at_level(logging.WARNING):
        split_of(Path("visits.yaml"), (), place / "cache")
    assert f"site a: {note}" in caplog.text


@pytest.mark.parametrize("file", ["visits.yaml", "eyes.yaml"])
def test_spl05_the_expression_of_the_note_keeps_a_patient_in_one_split(
    place: Path, file: str
) -> None:
    override = "federation.sites.a.patient='(.+)_[^_]+'"
    site = inspected(file, override)
    assert (site["patients"], site["patients_by_name"]) == (5, None)
    assert not any("look like" in note for note in site["notes"])
    splits = split_of(Path(file), [override], place / "cache")
    by_patient: dict[str, set[str]] = {}
    for case, split in splits.items():
        by_patient.setdefault(case.rpartition("_")[0], set()).add(split)
    assert [len(found) for found in by_patient.values()] == [1] * 5


def test_spl05_that_each_case_is_a_patient_can_be_said(place: Path) -> None:
    site = inspected("eyes.yaml", "federation.sites.a.patient='(.+)'")
    assert (site["patients"], site["patients_by_name"]) == (10, None)


@pytest.mark.parametrize(
    ("expression", "code", "words"),
    [
        ("'(.+'", 2, "patient is '(.+', which is no regular expression"),
        ("'.+'", 2, "put the part of a name that is the patient into brackets"),
        ("'([0-9]+)_OD'", 3, "case 000_OS: the site's patient ([0-9]+)_OD does not match its name"),
    ],
)
def test_spl05_an_expression_that_cannot_be_meant_is_refused(
    place: Path, expression: str, code: int, words: str
) -> None:
    arguments = ["inspect", "eyes.yaml", f"federation.sites.a.patient={expression}"]
    found = CliRunner().invoke(cli.app, arguments)
    assert found.exit_code == code
    assert words in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("names", "patients", "expression"),
    [
        ([f"Image_{n:02}{side}" for n in range(1, 5) for side in "LR"], 4, r"(.+\d)[A-Za-z]+"),
        ([f"sub-{n:02}_ses-{s:02}" for n in range(3) for s in (1, 2)], 3, "(.+)_[^_]+"),
        ([f"P{n}_{visit}" for n in range(3) for visit in ("baseline", "followup")], 3, "_[^_]+"),
    ],
)
def test_spl05_siblings_chase_db1_sessions_and_follow_ups(
    tmp_path: Path, names: list[str], patients: int, expression: str
) -> None:
    site = inspected(draw(tmp_path, names))
    assert (site["patients"], site["patients_by_name"]) == (len(names), patients)
    assert f"{expression}' at the site" in note_on_patients(site)


@pytest.mark.parametrize(
    "names",
    [
        [f"patient{n:03}_frame{f:02}" for n in range(4) for f in range(1, 9)],
        [f"BraTS-GLI-{n:05}-{v:03}" for n in range(4) for v in (0, 1)],
        [f"{n}_20{y}0301" for n in range(4) for y in (18, 19)],
        [f"{n:03}-left" for n in range(4)] + [f"{n:03}-right" for n in range(4)],
    ],
)
def test_spl05_siblings_other_forms_of_names(names: list[str]) -> None:
    assert len(patients_by_name(as_cases(names))) == 4


@pytest.mark.parametrize(
    "names",
    [
        [f"case_{n:03}" for n in range(30)],
        [f"BraTS2021_{n:05}" for n in range(30)],
        [f"ISIC_{n:07}" for n in range(30)],
        [f"hippocampus_{n:03}" for n in range(30)],
        [f"{n:02}_{kind}" for n in range(5) for kind in ("dr", "g", "h")],
        [f"scan_{n}" for n in range(30)],
        [f"t{n}" for n in range(30)],
        [f"{year}_{n:03}" for year in (2020, 2021) for n in range(30)],
        [f"hospital_{site}_d{n}" for site in "AB" for n in range(30)],
        [f"TCGA-{n % 7:02}-{n:04}" for n in range(30)],
        [f"case_{n:02}_L" for n in range(30)],
    ],
)
def test_spl05_names_that_number_cases_are_no_visits(names: list[str]) -> None:
    assert patients_by_name(as_cases(names)) == []


def test_spl05_stated_patients_are_believed() -> None:
    named = [
        Case("a", f"P{n}_t{v}", f"P{n}_t{v}", (), None, stated=True) for n in "12" for v in "12"
    ]
    assert patients_by_name(named) == []
    assert len(patients_by_name(as_cases([case.case for case in named]))) == 2
