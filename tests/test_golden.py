"""No reference value is left unused."""

import json
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("file", ["golden.json", "statistics_golden.json"])
def test_every_golden_case_is_named_by_a_test(reference: Path, file: str) -> None:
    cases = json.loads((reference / file).read_text("utf-8"))["cases"]
    tests = "".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))
    unused = [case["name"] for case in cases if f'"{case["name"]}"' not in tests]
    assert not unused
