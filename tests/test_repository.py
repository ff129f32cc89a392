"""Facts about the source itself: what no module may contain, import or leave out."""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

import collegium

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "collegium"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 400
"""Lines of statements; docstrings and comments do not count."""

ALLOWED_LONGER: dict[str, int] = {}
"""Modules that may be longer, the lines each may have, and in a comment the reason."""

MOST_PACKAGES = 20
"""Packages on the top level, so that one page can show them all."""

BAD_FIRST_WORDS = {
    "What", "Which", "Who", "Whom", "How", "When", "Where", "Give", "Gives", "Tell", "Tells",
    "Say", "Says", "Let", "Lets",
}  # fmt: skip
"""A docstring's first line says what a thing does or is, in a sentence that stands alone."""

MAY_SEED = {"randomness.py", "process.py"}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
HEAVY = {
    "PIL", "jinja2", "mlflow", "monai", "nibabel", "numpy", "pandas", "pyarrow", "pydantic",
    "rich", "scipy", "sklearn", "sqlalchemy", "torch", "typer",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.Module) -> set[str]:
    """The top-level names of everything that a module imports, inside functions too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def dotted(node: ast.expr) -> str:
    """The text of a chain of names such as `torch.manual_seed`; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses(tree: ast.Module) -> list[tuple[str, int]]:
    """Every dotted name in a module and its line."""
    return [
        (dotted(node), node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
    ]


def statement_lines(path: Path) -> set[int]:
    """The numbers of the lines that hold statements: no docstring, comment or blank line."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    with path.open(encoding="utf-8") as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in blank]
    lines = {line for t in tokens for line in range(t.start[0], t.end[0] + 1) if t.string}
    texts = [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return lines - {line for n in texts for line in range(n.lineno, (n.end_lineno or 0) + 1)}


def lines_that_match(pattern: str) -> list[str]:
    found = re.compile(pattern)
    return [
        f"{name_of(path)}:{number}"
        for path in MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if found.search(line)
    ]


def test_there_are_modules_to_look_at():
    assert "errors.py" in {name_of(path) for path in MODULES}


def test_no_module_is_longer_than_a_reader_can_hold():
    lengths = {name_of(path): len(statement_lines(path)) for path in MODULES}
    too_long = {
        name: lines for name, lines in lengths.items() if lines > ALLOWED_LONGER.get(name, LONGEST)
    }
    assert not too_long


def test_every_module_has_a_docstring():
    assert not [name_of(path) for path in MODULES if not ast.get_docstring(tree_of(path))]


def test_nothing_prints():
    calls = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and dotted(node.func) == "print"
    ]
    assert not calls


def test_no_random_state_is_global():
    allowed = {"Generator", "PCG64", "RandomState", "SeedSequence", "default_rng"}
    offences = []
    for path in MODULES:
        tree = tree_of(path)
        if "random" in imported(tree):
            offences.append(f"{name_of(path)}: import random")
        for name, line in uses(tree):
            module, _, attribute = name.rpartition(".")
            drawn = module in {"np.random", "numpy.random"} and attribute not in allowed
            seeded = name.endswith(("torch.manual_seed", "cuda.manual_seed", "manual_seed_all"))
            if drawn or (seeded and path.name not in MAY_SEED):
                offences.append(f"{name_of(path)}:{line}: {name}")
    assert not offences


def test_nothing_is_unpickled():
    offences = [
        f"{name_of(path)}: {name}" for path in MODULES for name in PICKLES & imported(tree_of(path))
    ]
    offences += [
        f"{name_of(path)}:{node.lineno}: {dotted(node.func)}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and dotted(node.func) in {"torch.load", "torch.save"}
        and not loads_weights_only(node)
    ]
    assert not offences


def loads_weights_only(call: ast.Call) -> bool:
    """Whether torch's own restricted reader is used, which knows tensors and plain values only."""
    options = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
    return dotted(call.func) == "torch.load" and options.get("weights_only") is True


def test_no_path_of_one_machine_is_written_down():
    assert not lines_that_match(r"""(^|[\s"'`(=])/(work|home|root|tmp|Users)/""")


def test_no_work_is_left_for_later_in_a_comment():
    assert not lines_that_match(r"\b(TODO|FIXME|XXX|HACK)\b")


def test_no_exception_is_swallowed_whole():
    bare = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare


def test_suppressed_checks_name_their_code():
    assert not lines_that_match(r"#\s*(noqa(?!:)|type:\s*ignore(?!\[))")


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert collegium.__version__ == project["version"]
    assert f"\nversion: {project['version']}\n" in citation


def test_every_public_name_exists_and_is_listed_once():
    assert len(collegium.__all__) == len(set(collegium.__all__))
    assert not [name for name in collegium.__all__ if not hasattr(collegium, name)]


def test_the_types_are_shipped():
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("module", ["collegium", "collegium.cli"])
def test_starting_up_imports_nothing_heavy(module):
    allowed = {"typer", "rich"} if module == "collegium.cli" else set()
    code = f"import {module}, sys; sys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & (HEAVY - allowed)


def test_the_top_level_holds_packages_only():
    modules = {path.name for path in PACKAGE.glob("*.py")}
    assert modules == {"__init__.py", "errors.py"}
    packages = [path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    assert len(packages) <= MOST_PACKAGES


# --- docstrings


def definitions(
    tree: ast.AST, owner: ast.ClassDef | None = None
) -> Iterator[tuple[ast.ClassDef | None, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the classes, functions and methods of a module, each with the class it stands in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield owner, node
            yield from definitions(node, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, node


def decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the last word of every decorator, such as `overload` or `command`."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return {dotted(call).rpartition(".")[2] for call in calls}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool) -> list[str]:
    """Return the names of a function's parameters, without `self` and `cls`."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    if method and "staticmethod" not in decorators(function):
        positional = positional[1:]
    extra = [arg for arg in (args.vararg, args.kwarg) if arg]
    return [arg.arg for arg in (*positional, *args.kwonlyargs, *extra)]


def undocumented(names: list[str], docstring: str) -> list[str]:
    """Return the parameters that no line of the section `Args:` describes."""
    section = docstring.partition("Args:")[2]
    lines = re.findall(r"^\s*((?:\*{0,2}\w+, )*\*{0,2}\w+):", section, re.M)
    described = {name.strip("* ") for line in lines for name in line.split(",")}
    return [name for name in names if name not in described]


def without_args(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every public function of two or more parameters that does not describe them all.

    One that implements what is documented elsewhere may say so: "See `Codec.encode`." Commands of
    the command line describe their options to the user instead.
    """
    for owner, node in definitions(tree):
        if isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        if owner is not None and owner.name.startswith("_"):
            continue
        names = parameters(node, method=owner is not None)
        docstring = ast.get_docstring(node) or ""
        exempt = decorators(node) & {"overload", "setter", "command"}
        if len(names) < 2 or exempt or "See `" in docstring:
            continue
        if missing := undocumented(names, docstring):
            yield node.lineno, f"{node.name} lacks {', '.join(missing)}"


def test_public_functions_describe_every_parameter():
    lacking = [
        f"{name_of(path)}:{line}: {what}"
        for path in MODULES
        for line, what in without_args(tree_of(path))
    ]
    assert not lacking, "\n".join(lacking)


def test_docstrings_begin_with_what_a_thing_does_or_is():
    offences = [
        f"{name_of(path)}:{node.lineno}: {first}"
        for path in MODULES
        for _, node in definitions(tree_of(path))
        if (first := (ast.get_docstring(node) or "").partition("\n")[0])
        and first.split()[0] in BAD_FIRST_WORDS
    ]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("code", "lacking"),
    [
        ("def f(a, b):\n '''Do.\n\n Args:\n  a: x\n  b: y\n '''", []),
        ("def f(a, *b, **c):\n '''Do.\n\n Args:\n  a, *b: x\n  **c: y\n '''", []),
        ("def f(a, *, b):\n '''Do.\n\n Args:\n  a: x\n '''", ["f lacks b"]),
        ("def f(a, b):\n '''Do: b: c.'''", ["f lacks a, b"]),
        ("def f(a, b): pass", ["f lacks a, b"]),
        ("def f(a): pass", []),
        ("def _f(a, b): pass", []),
        ("def f(a, b):\n '''See `g`.'''", []),
        ("class A:\n def f(self, a): pass\n def g(self, a, b): pass", ["g lacks a, b"]),
        ("class A:\n @staticmethod\n def f(a, b): pass", ["f lacks a, b"]),
        ("class _A:\n def f(self, a, b): pass", []),
        ("@app.command()\ndef f(a, b): pass", []),
        ("def f():\n def g(a, b): pass", []),
    ],
)
def test_the_search_for_undescribed_parameters_finds_them(code, lacking):
    assert [what for _, what in without_args(ast.parse(code))] == lacking


# --- documentation


def shown_on(page: str) -> set[str]:
    """Return the names that a page shows: by mkdocstrings, or by a link to where it does."""
    names = set(re.findall(r"\[`(\w+)`\]\[collegium\.[\w.]+\.\1\]", page))
    blocks = re.findall(r"^::: ([\w.]+)(?:\n    options:\n      members: \[(.*)\])?", page, re.M)
    for path, members in blocks:
        there = vars(resolve_name(path))
        listed = members.split(", ") if members else [path.rpartition(".")[2], *there]
        assert not members or set(listed) <= there.keys(), path
        names |= set(listed)
    return names


def test_the_api_page_shows_every_public_name():
    page = (DOCS / "api.md").read_text("utf-8")
    assert not sorted(set(collegium.__all__) - shown_on(page))


def test_the_picture_of_the_packages_is_current():
    done = subprocess.run(
        [sys.executable, str(DOCS / "draw_architecture.py"), "--check"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_page_on_architecture_names_every_package_and_only_files_that_exist():
    page = (DOCS / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.M)
    packages = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    assert sorted(rows) == sorted([*packages, "errors"])
    files = re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?|\w+\.py)`", page.replace("src/collegium", ""))
    assert len(files) > 30
    assert not [file for file in files if not (PACKAGE / file).exists()]


# --- continuous integration


def workflows() -> dict[str, Any]:
    """Return the workflows by file name."""
    folder = ROOT / ".github" / "workflows"
    return {path.name: yaml.safe_load(path.read_text("utf-8")) for path in folder.glob("*.yml")}


def test_every_step_of_the_workflows_uses_an_action_or_runs_a_target_of_make():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    called = set()
    for name, workflow in workflows().items():
        assert workflow[True], f"{name} is never started"  # YAML 1.1 reads the key "on" as true
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 180
            for step in job["steps"]:
                command = re.fullmatch(r"make ([a-z-]+)", step.get("run", "make help"))
                assert command, f"{name}: {step['run']}"
                called.add(command[1])
    assert called - {"help"} <= targets
    assert {"lint", "test", "test-slow", "test-lowest", "coverage", "docs"} <= called


def test_every_supported_python_is_tested():
    versions = workflows()["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["requires-python"] == f">={versions[0]}"
    stated = [c.rpartition(" ")[2] for c in project["classifiers"] if ":: Python :: 3." in c]
    assert stated == versions


def test_forms_for_issues_ask_in_fields_that_have_ids_of_their_own():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text("utf-8"))
        if path.name == "config.yml":
            continue
        assert form["name"]
        assert form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert all(field["attributes"]["label"] for field in fields)
        ids = [field["id"] for field in fields]
        assert len(ids) == len(set(ids))
