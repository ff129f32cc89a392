"""Methods with suffixes: the rules of all that they are made of hold, and they know their name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from collegium.core.model_parts import find_parts
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.experiment.config.registry import ALGORITHMS, WRAPPERS
from collegium.testing.toy import REGRESSION, ToyFederation, bare_network

BREAKING: dict[str, dict[str, Any]] = {
    "pfedme": {"inner_lr": 1.0, "lam": 15.0},
    "fedlws": {"tau_min": 0.9, "tau_max": 0.1},
    "fpfc": {"a": 1.5, "rho": 1.0},
    "fml": {"private": {}},
    "pfednet": {"combined": True, "inner_shared": 2},
    "distance": {"mode": "weights", "clusters": [["a"], ["b"]]},
    "robust": {"rule": "median", "trim": 0.1},
}
"""Settings of each method that has rules about several of them, which break one."""


def test_every_method_with_such_rules_is_among_them() -> None:
    kinds = {name: ALGORITHMS.load(name) for name in ALGORITHMS.names()}
    base = ALGORITHMS.load("fedavg").__post_init__  # that of `Algorithm`, which has none
    assert {name for name, kind in kinds.items() if kind.__post_init__ is not base} == {*BREAKING}


@pytest.mark.parametrize("name", BREAKING)
@pytest.mark.parametrize("suffix", ["", *sorted(WRAPPERS)])
def test_rules_of_a_method_hold_below_every_suffix(name: str, suffix: str) -> None:
    if name == suffix:
        return
    kind: Any = ALGORITHMS.load(f"{name}+{suffix}" if suffix else name)
    plain: Any = ALGORITHMS.load(name)
    with pytest.raises(ConfigError) as wanted:
        plain(**BREAKING[name])
    with pytest.raises(ConfigError) as found:
        kind(**BREAKING[name])
    rule = str(wanted.value).partition(": ")[2]
    assert rule
    assert str(found.value).endswith(rule)


def test_rules_of_two_suffixes_hold_in_either_order() -> None:
    for name in ("fedprox+distance+robust", "fedprox+robust+distance"):
        kind: Any = ALGORITHMS.load(name)
        with pytest.raises(ConfigError, match="trim belongs to the rule trimmed_mean"):
            kind(trim=0.1)
        with pytest.raises(ConfigError, match="clusters are given, but mode is 'weights'"):
            kind(clusters=[["a"], ["b"]])


LINEAR = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("name", "settings", "same"),
    [
        ("modalityencoders", {}, "fedavg"),
        ("modalityencoders+fedavgm", {}, "fedavg+fedavgm"),
        ("modalityencoders+fedavgm", {"momentum": 0.0, "server_lr": 0.5}, "fedavg+fedavgm"),
        ("modalityencoders+fedavgm", {"momentum": 0.0}, "fedavg"),
        ("modalityencoders+fedadam", {}, "fedavg+fedadam"),
        ("modalityencoders+fedyogi+distance", {}, "fedavg+fedyogi+distance"),
        ("modalityencoders+distance", {"omega": 0.3}, "fedavg+distance"),
        ("fedprox+fedavgm", {"mu": 0.0, "momentum": 0.0}, "fedavg"),
        ("fedprox+fedavgm", {"mu": 0.1, "momentum": 0.0}, None),
        ("fedavgm", {}, None),
        ("fedavgm", {"momentum": 0.0}, "fedavg"),
        ("fedadam", {}, None),
        ("fedbn+robust", {"rule": "norm_bound", "factor": 0.5}, "fedavg+robust"),
        ("silobn+robust", {}, "fedavg+robust"),
        ("robust", {}, None),
    ],
)
def test_a_method_with_a_suffix_is_another_one_with_that_suffix(
    name: str, settings: Any, same: str | None
) -> None:
    kind: Any = ALGORITHMS.load(name)
    assert kind(**settings).same_as(find_parts(LINEAR)) == same


def final_model(name: str, settings: Any, folder: Path) -> Tensors:
    kind: Any = ALGORITHMS.load(name)
    bare = replace(REGRESSION, network=bare_network)
    federation = ToyFederation(kind(**settings), folder / name, kind=bare).run(2)
    model: Tensors = federation.server.state["model"]
    return model


@pytest.mark.parametrize(
    ("name", "settings", "same"),
    [
        ("modalityencoders+fedavgm", {"momentum": 0.5}, "fedavg+fedavgm"),
        ("fedbn+robust", {"rule": "norm_bound", "factor": 0.5}, "fedavg+robust"),
        ("fedbn+distance", {"omega": 0.3, "kind": "embedding"}, "fedavg+distance"),
    ],
)
def test_it_has_the_model_of_that_one_with_the_same_settings_and_of_no_other(
    name: str, settings: Any, same: str, tmp_path: Path
) -> None:
    found = final_model(name, settings, tmp_path)
    wanted = final_model(same, settings, tmp_path)
    plain = final_model("fedavg", {}, tmp_path)
    assert all(found[key].equal(tensor) for key, tensor in wanted.items())
    assert not any(found[key].equal(tensor) for key, tensor in plain.items())
