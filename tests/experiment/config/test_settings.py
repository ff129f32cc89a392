"""No settings are made of nonsense: neither by any class of the package, nor by a file."""

import importlib
import math
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

import collegium
from collegium.compression.session.config import CodecConfig, CodecsConfig
from collegium.core.setting_problems import fields_of, leaf_types, literal_words
from collegium.data.candidates import PatchConfig
from collegium.data.federation_config import FederationConfig, PublicConfig, SiteConfig
from collegium.data.repartition import PartitionRule
from collegium.data.sampling import SamplingConfig
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.splits import SplitConfig
from collegium.data.tables import TableConfig
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import (
    AdapterConfig,
    AlgorithmConfig,
    EvaluationConfig,
    ExperimentConfig,
    InferenceConfig,
    ModelConfig,
    ReportConfig,
    TrackingConfig,
    load_config,
)
from collegium.experiment.config.registry import ADAPTERS, ALGORITHMS, CODECS
from collegium.models.factory import MODELS, build_model, parameter_problems
from collegium.runtime.engines import EngineConfig
from collegium.runtime.participation import Participation
from collegium.training.loop import TrainingConfig
from collegium.training.privacy import PrivacyConfig

FEDERATION = FederationConfig("f", {"a": SiteConfig(folder="a")})

NAMED = {
    **{f"algorithm {name}": ALGORITHMS.load(name)() for name in ALGORITHMS.names()},
    "algorithm fedprox+distance": ALGORITHMS.load("fedprox+distance")(),
    **{f"adapter {name}": ADAPTERS.load(name)() for name in ADAPTERS.names()},
    **{f"codec {name}": CODECS.load(name)() for name in CODECS.names()},
}

CONFIGS = {
    type(made).__name__: made
    for made in (
        AdapterConfig("tent"), AlgorithmConfig("fedavg"), CodecConfig("stc"), CodecsConfig(),
        EngineConfig(), EvaluationConfig(), FEDERATION, ImageConfig(), InferenceConfig(),
        PatchConfig(), ReportConfig(), PublicConfig(images="public"),
        ExperimentConfig("x", FEDERATION, ModelConfig("unet"), (AlgorithmConfig("fedavg"),), 1),
        ModelConfig("unet"), Participation(), PartitionRule("ratio"), SamplingConfig(),
        SiteConfig(folder="a"), SplitConfig(), TableConfig("ill", ("age",)), TaskConfig(),
        TrackingConfig(), TrainingConfig(), PrivacyConfig(noise_multiplier=0.0),
    )
}  # fmt: skip

MADE: dict[str, Any] = NAMED | CONFIGS


def outside(hint: Any) -> list[float]:
    """Numbers just beyond each bound of an annotation, also of its entries' if it is a list."""
    found: list[float] = []
    for item in getattr(hint, "__metadata__", ()):
        step = 1 if get_args(hint)[0] is int else 1e-9
        for bound, shift in (("ge", -step), ("gt", 0), ("le", step), ("lt", 0)):
            found += [getattr(item, bound) + shift] if hasattr(item, bound) else []
    for part in get_args(hint) if get_origin(hint) is not Literal else ():
        found += outside(part)
    return found


def takes_fraction(hint: Any) -> bool:
    """Whether a single number may stand there, as one of several kinds of values."""
    kinds = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else ()
    return any(float in (kind, *get_args(kind)[:1]) for kind in kinds)


def nonsense(hint: Any) -> list[Any]:
    """Values that a field with this annotation cannot mean."""
    types = {*leaf_types(hint)}
    if Any in types:
        return [object()]
    values: list[Any] = [b"bytes", object()]
    values += ["nothing like this"] if literal_words(hint) else []
    values += ["3", True] if types & {int, float} and str not in types else []
    values += [math.nan, math.inf] if types & {int, float} else []
    values += [3] if str in types and int not in types and not takes_fraction(hint) else []
    values += [1] if types == {bool} else []
    return values + outside(hint) + [[number] for number in outside(hint)]


FIELDS = [(name, field) for name, made in MADE.items() for field in fields_of(type(made))]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_the_constructor_refuses_nonsense(name: str, field: str) -> None:
    made = MADE[name]
    hint = fields_of(type(made))[field]
    for value in nonsense(hint):
        with pytest.raises(ConfigError, match=rf"\b{type(made).__name__}\.{field}: ") as caught:
            replace(made, **{field: value})
        assert "\n" not in str(caught.value), value


@pytest.mark.parametrize("name", MADE)
def test_the_constructor_refuses_an_unknown_field(name: str) -> None:
    kind = type(MADE[name])
    with pytest.raises(ConfigError, match=rf"\b{kind.__name__}\.no_such_field: unknown field"):
        kind(no_such_field=1)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: collegium.FedAvg(weighting="exampels"),  # type: ignore[arg-type]
            "FedAvg.weighting: should be 'examples' or 'uniform', not 'exampels'; "
            "did you mean 'examples'?",
        ),
        (
            lambda: TrainingConfig(optimizer="rmsprop"),  # type: ignore[arg-type]
            "TrainingConfig.optimizer: should be 'sgd', 'adam' or 'adamw', not 'rmsprop'",
        ),
        (
            lambda: collegium.ResFIM(normaliser="maximum"),  # type: ignore[arg-type]
            "ResFIM.normaliser: should be 'max', 'source' or 'absolute', not 'maximum'",
        ),
        (lambda: collegium.Ditto(lam=-5), "Ditto.lam: should be at least 0, not -5"),
        (
            lambda: collegium.IOPFL(tau=7),
            "IOPFL.tau: should be at least 0 and at most 1, not 7",
        ),
        (
            lambda: collegium.IFCA(num_clusters=0),
            "IFCA.num_clusters: should be at least 1, not 0",
        ),
        (
            lambda: collegium.FedRep(head_epochs=-4),
            "FedRep.head_epochs: should be at least 0, not -4",
        ),
        (
            lambda: collegium.FedRep(body_epochs=0),
            "FedRep.body_epochs: should be at least 1, not 0",
        ),
        (
            lambda: build_model("unet", channels=[0]),
            "unet.channels: each should be at least 1, not [0]",
        ),
        (
            lambda: build_model("unet", channels=[8]),
            "unet.channels: should be at least 2 long, not [8]",
        ),
        (
            lambda: replace(collegium.TrainingConfig(), lr=math.nan),
            "TrainingConfig.lr: should be finite and above 0, not nan",
        ),
    ],
)
def test_what_used_to_train_something_else_is_one_sentence(
    make: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    expected = re.escape(sentence)
    assert re.fullmatch(rf"{expected}(; did you mean '\w+'\?)?", str(caught.value))


def test_every_class_of_settings_of_the_package_is_among_those_above() -> None:
    kinds = {type(made) for made in MADE.values()}
    for module in pkgutil.walk_packages(collegium.__path__, "collegium."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and value.__name__.endswith("Config"):
                assert value in kinds or not value.__module__.startswith("collegium"), value
    assert all("__pydantic_validator__" in vars(kind) for kind in kinds)


START = """\
name: x
federation: {name: f, sites: {a: {folder: a}, b: {folder: b}}}
rounds: 1
"""


def problem(folder: Path, text: str) -> str:
    (folder / "x.yaml").write_text(START + text)
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "x.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, field in FIELDS if name in NAMED]
)
def test_a_file_with_nonsense_for_a_hyper_parameter_names_it_and_its_line(
    name: str, field: str, tmp_path: Path
) -> None:
    part, _, written = name.partition(" ")
    entry = f"    - name: {written}\n      {field}: !!binary ''\n"
    path = f"{part}s.0.{field}"
    if part == "codec":
        entry = f"      name: {written}\n      {field}: !!binary ''\n"
        path = f"codec.up.{field}"
    above = {
        "algorithm": "model: unet\n\n\n\nalgorithms:\n",
        "adapter": "model: unet\nalgorithm: fedavg\n\n\nadapters:\n",
        "codec": "model: unet\nalgorithm: fedavg\n\ncodec:\n    up:\n",
    }[part]
    value = "'no such word'"
    types = {*leaf_types(fields_of(type(NAMED[name]))[field])}
    if types == {str}:
        value = "3"
    text = problem(tmp_path, above + entry.replace("!!binary ''", value))
    assert text.startswith((f"{path}: should be ", f"{path}: should hold keys and values"))
    assert text.endswith(f" ({tmp_path / 'x.yaml'}, line 10)")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "algorithm: fedavg\nmodel: {name: unet, channels: [0]}",
            "model.channels: each should be a",
        ),
        ("algorithm: fedavg\nmodel: {name: mlp, hidden: [0]}", "model.hidden: each should be at l"),
        ("algorithm: fedavg\nmodel: {name: unet, chanels: [4]}", "model.chanels: unknown field fo"),
        ("model: unet\nalgorithm: {name: ditto, lam: -5}", "algorithm.lam: should be at least 0,"),
        ("model: unet\nalgorithm: {name: ditto, lam: .nan}", "algorithm.lam: should be finite and"),
        ("model: unet\nalgorithm: {name: grace, order: true}", "algorithm.order: should be 1 or 2"),
    ],
)
def test_the_same_mistake_in_a_file_names_file_and_line(
    text: str, sentence: str, tmp_path: Path
) -> None:
    found = problem(tmp_path, text)
    assert found.startswith(sentence)
    assert found.endswith(f" ({tmp_path / 'x.yaml'}, line 5)")


def test_all_mistakes_of_a_file_are_shown_in_its_order(tmp_path: Path) -> None:
    text = problem(
        tmp_path,
        "training: {lr: 0}\n"
        "algorithms:\n"
        "  - {name: ditto, lam: -5}\n"
        "  - fedavgg\n"
        "adapters: [{name: tent, beta: 1}]\n"
        "model: {name: unet, channels: [0]}\n"
        "seeds: [1, 1]\n",
    )
    assert [line.partition(":")[0].strip() for line in text.splitlines()] == [
        "6 problems in the configuration", "training.lr", "algorithms.0.lam", "algorithms.1.name",
        "adapters.0.beta", "model.channels", "seeds",
    ]  # fmt: skip
    lines = re.findall(r"line (\d+)\)$", text, re.MULTILINE)
    assert [*map(int, lines)] == [4, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_of_every_network_are_checked(name: str) -> None:
    assert parameter_problems(name, {"no_such_parameter": 1})[0].text.startswith(
        f"unknown field for {name}; "
    )
    assert not parameter_problems(name, {})
    for size in ("in_channels", "in_features"):
        for wrong in (0, "3", True, math.nan, 1.5):
            problems = parameter_problems(name, {size: wrong})
            assert [problem.path for problem in problems] == [(size,)]
