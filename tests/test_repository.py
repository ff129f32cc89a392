"""Facts about the source itself: what no module may contain, import or leave out."""

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

import collegium

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "collegium"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 400
"""Lines of statements; docstrings and comments do not count."""

ALLOWED_LONGER: dict[str, int] = {}
"""Modules that may be longer, the lines each may have, and in a comment the reason."""

MAY_SEED = {"randomness.py", "process.py"}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
HEAVY = {
    "PIL", "jinja2", "mlflow", "monai", "nibabel", "pandas", "pyarrow", "pydantic",
    "rich", "scipy", "sklearn", "sqlalchemy", "typer",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


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
    allowed = {"Generator", "PCG64", "SeedSequence", "default_rng"}
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
