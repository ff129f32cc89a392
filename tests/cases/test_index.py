"""Every field case has a test."""

from pathlib import Path


def test_every_field_case_is_named_by_a_test(shared: Path) -> None:
    here = Path(__file__)
    modules = [path for path in here.parent.glob("test_*.py") if path != here]
    tests = "\n".join(path.read_text("utf-8") for path in modules)
    cases = {path.name for path in (shared / "cases").iterdir() if path.is_dir()}
    assert len(cases) >= 46
    named = {case for case in cases if f"test_{case.partition('_')[0]}_" in tests or case in tests}
    assert named == cases
