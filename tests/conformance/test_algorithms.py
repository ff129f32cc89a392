"""Every algorithm keeps every rule, and every rule can be broken."""

import re
from pathlib import Path

import pytest

from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.engines.inprocess import InProcess
from collegium.testing.conformance import (
    Conformance,
    ConformanceError,
    check_algorithm,
    conformance_checks,
)

BROKEN = Path(__file__).with_name("broken.py")

FAULTS = {
    "Diverges": ("it_learns", "holds NaN or infinite"),
    "StandsStill": ("it_learns", "no stored model moved"),
    "Undeclared": ("it_learns", "part 'age' is not among what Undeclared declares to send"),
    "TorchGlobal": ("order_does_not_matter", "the clients' order"),
    "PythonGlobal": ("order_does_not_matter", "the clients' order"),
    "NumpyGlobal": ("order_does_not_matter", "the clients' order"),
    "CountsOnItself": ("order_does_not_matter", "the clients' order"),
    "Forgetful": ("order_does_not_matter", "the clients' order"),
    "Accumulates": ("interrupted_requests", "a stop before request"),
    "LearnsInEvaluation": ("evaluation_changes_nothing", "changes client.state of A"),
    "ServerLearnsInEvaluation": ("interrupted_requests", "a stop before request"),
    "RemembersOnItself": ("hyperparameters", "keeps seen on itself"),
    "Undescribed": ("hyperparameters", "describes strength"),
    "Gullible": ("settings", "weighting may be <object object at"),
    "NotWritable": ("hyperparameters", "does not survive being written down"),
    "DeclaresTooMuch": ("what_is_sent", "declares ghost, which is never sent"),
    "TalksFromHome": ("rounds_at_home", "model is sent in a round at home"),
    "AveragesAtHome": ("rounds_at_home", "rounds at home change the server's state"),
    "NotNeutral": ("neutral_setting", "is not FedAvg's"),
    "HidesItsLayer": ("added_layers", "what it adds changes predictions"),
    "OrderDependent": ("names_do_not_matter", "which client has which name"),
    "NeedsEverybody": ("absent_client", "an error that does not name it"),
    "CallsItselfAnother": ("same_as", "says that it is fedavg, and its scores are others"),
    "Terse": ("documentation", "no docstring that says what it is"),
}
"""What the suite must say of each class in broken.py: the rule, and some of the words."""

ALONE = (
    ("workers_do_not_matter", "CountsOnItself", "a second worker process changes the result"),
    ("interrupted_saves", "Accumulates", "a stop after write . changes the result"),
    ("repeated_requests", "Accumulates", "a repeated request changes the result"),
    ("evaluation_changes_nothing", "ServerLearnsInEvaluation", "changes the server's state"),
)
"""Rules whose fault an earlier rule of the suite finds too: the rule, the class, the words."""


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_algorithm_keeps_every_rule(name, workers):
    passed: list[str] = []
    check_algorithm(ALGORITHMS.load(name)(), passed.append, workers=workers)
    assert passed == list(conformance_checks())


@pytest.mark.parametrize("name", FAULTS)
def test_suite_finds_the_broken_rule(name, workers):
    algorithm = ALGORITHMS.load(f"{BROKEN}:{name}")()
    rule, words = FAULTS[name]
    with pytest.raises(ConformanceError, match=rf"^{rule}: .*{re.escape(words)}"):
        check_algorithm(algorithm, workers=workers)


@pytest.mark.parametrize(("rule", "name", "words"), ALONE)
def test_rule_finds_the_fault_on_its_own(rule, name, words, workers, tmp_path):
    suite = Conformance(ALGORITHMS.load(f"{BROKEN}:{name}")(), tmp_path, workers)
    with pytest.raises(ConformanceError, match=words):
        getattr(suite, f"check_{rule}")()


def test_every_rule_is_broken_by_something():
    found = {rule for rule, _ in FAULTS.values()} | {rule for rule, _, _ in ALONE}
    assert found == set(conformance_checks())


def test_every_broken_algorithm_has_its_fault_named():
    classes = re.findall(r"^class (\w+)\(", BROKEN.read_text("utf-8"), re.MULTILINE)
    assert set(classes) == set(FAULTS)


def test_suite_starts_and_ends_workers_of_its_own(monkeypatch):
    closed: list[InProcess] = []
    original = InProcess.close

    def close(engine: InProcess) -> None:
        closed.append(engine)
        original(engine)

    monkeypatch.setattr(InProcess, "close", close)
    with pytest.raises(ConformanceError, match="it_learns"):
        check_algorithm(ALGORITHMS.load(f"{BROKEN}:StandsStill")())
    assert any(engine._size == 2 for engine in closed)
