"""What all tests share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference values and cases; tests that need it are skipped without it."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("COLLEGIUM_SHARED", beside))
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}: set COLLEGIUM_SHARED to its folder")
    return folder
