"""Every field case has a test that runs and asserts something."""

import ast
import json
from pathlib import Path

import pytest

NUMBERS = {
    "dcm": (1, 2, 3, 4, 5, 7, 8),
    "geo": (1, 2, 4, 5, 6, 7, 8, 10, 11),
    "lab": (1, 2, 3, 4, 5, 6, 7, 8, 10, 11),
    "mod": (1, 3, 4, 5, 6, 7, 8),
    "run": (1, 2, 3),
    "spl": (1, 2, 3),
    "tab": (1, 2, 3, 4, 5, 7, 9),
}
CASES = [f"{theme}{number:02}" for theme, numbers in NUMBERS.items() for number in numbers]
"""The field cases, as their folders begin."""

NEW_CASES = [
    "bids01",
    "dcm09",
    "geo12",
    "lab12",
    "lab14",
    "met01",
    "nam02",
    "res01",
    "spl05",
    "tab10",
    "tab11",
]
"""The field cases that were collected later and have a test named after them."""


def asserting_tests(text: str) -> list[str]:
    """Name the tests of a module that assert something and are not skipped whatever happens."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    named = [function for function in functions if function.name.startswith("test_")]
    return [function.name for function in named if asserts(function) and not skipped(function)]


def asserts(function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises":
            return True
    return False


def skipped(function: ast.FunctionDef) -> bool:
    first = [ast.unparse(mark).partition("(")[0] for mark in function.decorator_list]
    calls = [node.value for node in function.body if isinstance(node, ast.Expr)]
    first += [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
    return bool({"pytest.mark.skip", "pytest.skip"} & set(first))


def test_every_field_case_has_a_test_that_asserts() -> None:
    modules = [path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    tests = [name for path in modules for name in asserting_tests(path.read_text("utf-8"))]
    every = [*CASES, *NEW_CASES]
    lacking = [c for c in every if not any(name.startswith(f"test_{c}_") for name in tests)]
    assert (len(every), lacking) == (57, [])


def test_the_cases_listed_are_those_of_the_folders(cases: Path, new_cases: Path) -> None:
    for place, listed in ((cases, CASES), (new_cases, NEW_CASES)):
        folders = [path.name for path in place.iterdir() if path.is_dir()]
        assert sorted(name.partition("_")[0] for name in folders) == sorted(listed)


@pytest.mark.parametrize(("collection", "number"), [("cases", 46), ("new_cases", 11)])
def test_every_case_holds_the_files_that_it_lists(
    request: pytest.FixtureRequest, collection: str, number: int
) -> None:
    """Neither a copy of the repository nor `.gitignore` may have lost one."""
    folders = [path for path in request.getfixturevalue(collection).iterdir() if path.is_dir()]
    assert len(folders) == number
    for folder in folders:
        listed = json.loads((folder / "case.json").read_text("utf-8"))["files"]
        table = folder / "links.tsv"  # dangling links, which a test makes in a copy of its own
        links = table.read_text("utf-8").splitlines() if table.is_file() else []
        there = {link.partition("\t")[0] for link in links}
        there |= {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        assert set(listed) <= there, folder.name


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("def test_a():\n    assert f() == 3", True),
        ("def test_a():\n    if b:\n        pytest.skip('')\n    with pytest.raises(E): f()", True),
        ("@pytest.mark.skipif(b, reason='')\ndef test_a():\n    assert f()", True),
        ("@pytest.mark.skip(reason='')\ndef test_a():\n    assert f()", False),
        ("def test_a():\n    pytest.skip('later')\n    assert f()", False),
        ("def test_a():\n    assert True", False),
        ("def test_a():\n    f()  # assert", False),
        ("class A:\n    def test_a(self):\n        assert f()", False),
        ("TEXT = 'def test_a(): assert f()'", False),
    ],
)
def test_only_functions_that_run_and_assert_count(text: str, counts: bool) -> None:
    assert asserting_tests(text) == (["test_a"] if counts else [])
