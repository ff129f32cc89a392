"""No reference value is left unused."""

import json
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_golden_case_is_named_by_a_test(reference: Path) -> None:
    cases = json.loads((reference / "golden.json").read_text("utf-8"))["cases"]
    tests = "".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))
    unused = [case["name"] for case in cases if f'"{case["name"]}"' not in tests]
    assert not unused
