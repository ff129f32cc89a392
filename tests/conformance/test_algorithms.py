"""Every algorithm keeps every rule, and every rule can be broken."""

import re
from pathlib import Path

import pytest

from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.engines.inprocess import InProcess
from collegium.testing.conformance import (
    ON_EVERY_KIND,
    Conformance,
    check_algorithm,
    conformance_checks,
)
from collegium.testing.statements import ConformanceError, kinds_of

BROKEN = Path(__file__).with_name("broken.py")

FAULTS = {
    "InheritsNeutral": ("declarations", "InheritsNeutral changes train and inherits neutral = {}"),
    "Misspelt": ("declarations", "tasks names segmentaton; there is segmentation, classification"),
    "ForNothing": ("kinds_of_data", "it refuses all kinds of data; the last one: it wants another"),
    "WantsOneLayer": ("kinds_of_data", "with images with masks: AttributeError"),
    "OneModelEach": ("it_runs", "server.state['model'] is reserved for the whole global model"),
    "ManyNotModels": ("it_runs", "server.state['models'] is reserved for several models"),
    "TakesHome": ("it_runs", "client.state['home'] of A is reserved"),
    "Diverges": ("it_learns", "holds NaN or infinite"),
    "StandsStill": ("it_learns", "no stored model moved"),
    "Undeclared": ("it_runs", "part 'age' is not among what Undeclared declares to send"),
    "TorchGlobal": ("order_does_not_matter", "the clients' order"),
    "PythonGlobal": ("order_does_not_matter", "the clients' order"),
    "NumpyGlobal": ("order_does_not_matter", "the clients' order"),
    "CountsOnItself": ("order_does_not_matter", "the clients' order"),
    "Forgetful": ("order_does_not_matter", "the clients' order"),
    "Accumulates": ("interrupted_requests", "a stop before request"),
    "LearnsInEvaluation": ("evaluation_changes_nothing", "changes client.state of A"),
    "ServerLearnsInEvaluation": ("interrupted_saves", "a stop after write"),
    "RemembersOnItself": ("it_keeps_nothing", "keeps seen on itself"),
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
    rules = list(conformance_checks())
    assert passed[: len(rules)] == rules
    kinds = [kind for kind, why in kinds_of(ALGORITHMS.load(name)()).items() if not why]
    assert passed[len(rules) :] == [f"{rule} on {k}" for k in kinds[1:] for rule in ON_EVERY_KIND]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ditto+robust", {"rule": "norm_bound", "factor": 0.5}),
        ("fedbn+robust", {"rule": "krum", "hostile": 0}),
        ("fedprox+fedavgm", {}),
    ],
)
def test_combined_algorithm_keeps_every_rule(name, settings, workers):
    check_algorithm(ALGORITHMS.load(name)(**settings), workers=workers)


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


def test_models_may_be_kept_by_client(workers, tmp_path):
    algorithm = ALGORITHMS.load(f"{BROKEN.with_name('kept.py')}:ModelsByClient")()
    suite = Conformance(algorithm, tmp_path, workers)
    for rule in ("declarations", "it_runs", "it_learns", "names_do_not_matter"):
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
