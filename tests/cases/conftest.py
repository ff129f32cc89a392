"""A test of a field case, `test_geo01_...`, gets the case's folder and the values it states."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(cases: Path, new_cases: Path, request: pytest.FixtureRequest) -> Path:
    """The folder of the field case that the test is named after."""
    number = request.node.name.removeprefix("test_").partition("_")[0]
    (found,) = (path for place in (cases, new_cases) for path in place.glob(f"{number}_*"))
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The current folder: a copy of the field case that the test is named after."""
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    links = folder / "links.tsv"
    for line in links.read_text("utf-8").splitlines() if links.is_file() else ():
        name, target = line.split("\t")
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).symlink_to(target)
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def values(folder: Path) -> dict[str, Any]:
    """The right outcome of the field case in numbers and names, from its description."""
    description = json.loads((folder / "case.json").read_text("utf-8"))
    stated: dict[str, Any] = description["right_outcome"]["values"]
    return stated
