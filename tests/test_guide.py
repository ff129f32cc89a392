"""Checks that the examples in the guide to algorithms keep the rules, as they stand there."""

import re
from pathlib import Path

import pytest

from collegium.core.algorithm import Algorithm
from collegium.core.payloads import PartSchema
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.engines.inprocess import InProcess
from collegium.testing.conformance import ON_EVERY_KIND, Conformance, conformance_checks
from collegium.testing.kinds import KINDS
from collegium.testing.statements import Statements, kinds_of

GUIDE = (Path(__file__).resolve().parents[1] / "docs" / "write-an-algorithm.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
EXAMPLES = {
    name: block
    for block in BLOCKS
    for name in re.findall(r"^class (\w+)\(\w*(?:Algorithm|FedAvg)\)", block, re.M)
}
"""The blocks of the page by the algorithm that each defines."""


def load(name: str, folder: Path) -> Algorithm:
    file = folder / "example.py"
    file.write_text(EXAMPLES[name])
    return ALGORITHMS.load(f"{file}:{name}")()


def test_every_block_defines_an_algorithm_or_shows_a_built_in_one():
    others = [block for block in BLOCKS if block not in EXAMPLES.values()]
    assert len(EXAMPLES) == 11
    assert others == ['--8<-- "src/collegium/algorithms/fedavg.py"\n']


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_keeps_the_rules(tmp_path, name):
    algorithm = load(name, tmp_path)
    kind = next(kind for kind, why in kinds_of(algorithm).items() if not why)
    rules = conformance_checks(Statements) if EXAMPLES[name].startswith('"""') else {}
    suite = Conformance(algorithm, tmp_path, InProcess(dict), kind=KINDS[kind])
    for rule in (*rules, *ON_EVERY_KIND, "names_do_not_matter", "rounds_at_home"):
        getattr(suite, f"check_{rule}")()


@pytest.mark.parametrize("name", ["Clusters", "OwnHead", "OwnScale", "Variates"])
def test_example_runs_on_the_default_network(tmp_path, name):
    algorithm = load(name, tmp_path)
    suite = Conformance(algorithm, tmp_path, InProcess(dict), kind=KINDS["images with masks"])
    for rule in ("it_runs", "it_learns", "what_is_sent"):
        getattr(suite, f"check_{rule}")()


def test_example_sends_every_kind_of_part(tmp_path):
    import collegium.core.payloads as payloads

    kinds = {
        value
        for value in vars(payloads).values()
        if isinstance(value, type)
        and hasattr(value, "check")
        and not value.__name__.startswith("_")
    } - {PartSchema}
    assert {type(part) for part in load("EveryPart", tmp_path).all_sends().values()} == kinds
    shown = set(re.findall(r"^\| `(\w+)\(.*?\)` \|", GUIDE, re.MULTILINE))
    assert {kind.__name__ for kind in kinds} <= shown
