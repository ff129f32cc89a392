"""What all tests share."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared cases go to a folder of the test session, never to the user's cache."""
    os.environ["COLLEGIUM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference values and cases; tests that need it are skipped without it."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("COLLEGIUM_SHARED", beside))
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}: set COLLEGIUM_SHARED to its folder")
    return folder


@pytest.fixture(scope="session")
def golden(shared: Path) -> Callable[[str], dict[str, Any]]:
    """Cases of `golden.json` by name: inputs, params, expected values and their tolerance."""
    cases = json.loads((shared / "specs" / "golden.json").read_text())["cases"]
    by_name: dict[str, dict[str, Any]] = {case["name"]: case for case in cases}
    return by_name.__getitem__
