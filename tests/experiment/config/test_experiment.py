import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from collegium.compression.half import Half
from collegium.compression.session.config import CodecConfig, CodecsConfig
from collegium.compression.session.groups import Codecs
from collegium.compression.stc import STC
from collegium.errors import ConfigError
from collegium.experiment.config.building import build_algorithm, build_codecs, task_of
from collegium.experiment.config.experiment import (
    AlgorithmConfig,
    ExperimentConfig,
    TrackingConfig,
    difference,
    digest,
    load_config,
    load_federation,
    parse_config,
    to_dict,
    to_yaml,
    with_own_training,
)

FILE = """\
name: two-sites
federation:
  name: vessel
  root: data
  sites: {a: {folder: a}, b: {manifest: b/list.csv}}
  task: {classes: [background, vessel], label_map: {0: 0, 255: 1}}
  image: {size: [64, 48]}
model: {name: unet, channels: [8, 16]}
algorithm:
  name: mine.py:Mine
  tau: 0.5
rounds: 3
training: {lr: 1e-3, batch_size: 4}
"""

ALGORITHM = '''
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from collegium.core.algorithm import Algorithm, Server


@dataclass(frozen=True)
class Mine(Algorithm):
    """An algorithm of a user."""

    tau: float = 0.9
    steps: tuple[int, ...] = (1, 2)
    kind: Literal["hard", "soft"] = "soft"
    width: Annotated[float, Gt(0)] = 1.0

    def __post_init__(self) -> None:
        if self.tau > 1:
            raise ValueError("tau must be at most 1")

    def round(self, server: Server) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Needy(Algorithm):
    """An algorithm with a hyper-parameter that has no default."""

    lam: float

    def round(self, server: Server) -> None:
        """Do nothing."""
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder configs/ with an experiment and a user's algorithm, one above the current one."""
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "x.yaml").write_text(FILE)
    (configs / "mine.py").write_text(ALGORITHM)
    monkeypatch.chdir(tmp_path)
    return configs


def load(*overrides: str) -> ExperimentConfig:
    return load_config(Path("configs/x.yaml"), overrides)


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "x.yaml").read_text()
    assert old in text
    (folder / "x.yaml").write_text(text.replace(old, new))


def test_a_file_gives_its_values_and_every_default(folder: Path):
    config = load()
    assert config.name == "two-sites"
    assert config.model.params == {"channels": [8, 16]}
    assert config.federation.image.size == (64, 48)
    assert config.federation.task.label_map == {0: 0, 255: 1}
    assert config.training.lr == 0.001
    assert config.seeds == (0,)
    assert config.output == "runs/two-sites"
    assert config.algorithms[0].params == {
        "tau": 0.5, "steps": [1, 2], "kind": "soft", "width": 1.0,
    }  # fmt: skip


def test_paths_are_relative_to_the_file_and_those_of_overrides_to_the_current_folder(folder: Path):
    assert load().federation.root == str(folder / "data")
    assert load("federation.root=data").federation.root == str(folder.parent / "data")
    assert load().algorithms[0].name == f"{folder / 'mine.py'}:Mine"
    config = load("algorithm=configs/mine.py:Mine")
    assert config.algorithms[0].name == f"{folder / 'mine.py'}:Mine"
    assert load("engine.folder=kits").engine.folder == str(folder.parent / "kits")
    file = folder / "e.yaml"
    file.write_text(FILE + "engine: {folder: ../kits}\n")
    assert load_config(file).engine.folder == str(folder.parent / "kits")


def test_as_many_windows_enter_the_network_at_once_as_configured(folder: Path):
    settings = ("inference.window=[8, 8]", "inference.overlap=0", "inference.batch_size=3")
    windows = task_of(load(*settings)).windows(nn.Identity(), torch.zeros(1, 1, 16, 32))
    assert [len(batch) for batch in windows] == [3, 3, 2]


def test_a_label_is_the_class_of_an_algorithm_from_a_file(folder: Path):
    assert load().algorithms[0].label == "Mine"
    assert AlgorithmConfig("fedavg").label == "fedavg"
    assert load("algorithm.label=half").algorithms[0].label == "half"


@pytest.mark.parametrize(
    ("override", "get", "expected"),
    [
        ("training.lr=1e-2", lambda c: c.training.lr, 0.01),
        ("training.lr=1", lambda c: c.training.lr, 1.0),
        ("training.clip_norm=null", lambda c: c.training.clip_norm, None),
        ("seeds=[3, 1]", lambda c: c.seeds, (3, 1)),
        ("algorithm.tau=0.25", lambda c: c.algorithms[0].params["tau"], 0.25),
        ("algorithms.0.tau=0.25", lambda c: c.algorithms[0].params["tau"], 0.25),
        ("inference.window=[32, 32]", lambda c: c.inference.window, (32, 32)),
        ("inference.batch_size=16", lambda c: c.inference.batch_size, 16),
        ("federation.sites.b.manifest=c.csv", lambda c: c.federation.sites["b"].manifest, "c.csv"),
        ("federation.sites.no={folder: d}", lambda c: sorted(c.federation.sites), ["a", "b", "no"]),
        ("name=0x1F", lambda c: c.name, "0x1F"),
        ("name=2026-01-31", lambda c: c.name, "2026-01-31"),
        ("rounds=010", lambda c: c.rounds, 10),
        ("model=iop_unet", lambda c: (c.model.name, c.model.params), ("iop_unet", {})),
    ],
)
def test_an_override_sets_one_value(folder: Path, override, get, expected):
    assert get(load(override)) == expected


def test_overrides_replace_one_algorithm_by_several(folder: Path):
    two = "algorithms=[configs/mine.py:Mine, {name: configs/mine.py:Mine, label: low, tau: 0.1}]"
    config = load(two, "algorithms.0.tau=0.2")
    assert [(a.label, a.params["tau"]) for a in config.algorithms] == [("Mine", 0.2), ("low", 0.1)]
    assert len(load(two, "algorithm=configs/mine.py:Mine").algorithms) == 1
    assert "say which: algorithms.0.tau" in problem(two, "algorithm.tau=1")


def test_an_override_reaches_into_a_federation_file(folder: Path):
    body = FILE.partition("federation:\n")[2].partition("model:")[0]
    (folder / "sites").mkdir()
    (folder / "sites" / "f.yaml").write_text(re.sub(r"(?m)^  ", "", body))
    edit(folder, body, "")
    edit(folder, "federation:\n", "federation: sites/f.yaml\n")
    config = load("federation.outside=[b]")
    assert config.federation.root == str(folder / "sites" / "data")
    assert config.federation.outside == ("b",)
    (folder / "sites" / "f.yaml").write_text(re.sub(r"(?m)^  ", "", body).replace("task", "tusk"))
    assert problem() == (
        "federation.tusk: unknown field; did you mean 'task'? "
        f"({folder / 'sites' / 'f.yaml'}, line 4)"
    )


def test_the_root_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    edit(folder, "root: data", "root: $SCANS/vessel")
    monkeypatch.setenv("SCANS", str(tmp_path / "scans"))
    assert load().federation.root == str(tmp_path / "scans" / "vessel")
    monkeypatch.delenv("SCANS")
    text = problem()
    assert "SCANS is not set" in text
    assert "federation.root=" in text
    assert "(configs/x.yaml, line 4)" in text
    assert load("federation.root=.").federation.root == str(tmp_path)


def test_an_unknown_hyperparameter_is_named_with_its_line_and_the_closest_one(folder: Path):
    edit(folder, "tau:", "ta:")
    assert problem() == (
        "algorithm.ta: unknown field for Mine; did you mean 'tau'? (configs/x.yaml, line 11)"
    )


def test_a_list_of_algorithms_is_told_apart_by_number(folder: Path):
    edit(
        folder,
        "algorithm:\n  name: mine.py:Mine\n  tau",
        "algorithms:\n  - name: mine.py:Mine\n    ta",
    )
    assert problem().startswith("algorithms.0.ta: unknown field for Mine; did you mean 'tau'?")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rounds=0", "rounds: should be at least 1, not 0"),
        ("rounds=2.0", "rounds: should be a whole number, not 2.0"),
        ("rounds=true", "rounds: should be a whole number, not True"),
        ("rounds='3'", "rounds: should be a whole number, not '3'"),
        ("training.lr=0", "training.lr: should be above 0, not 0"),
        ("training.lr=.nan", "training.lr: should be finite and above 0, not nan"),
        ("training.lr=.inf", "training.lr: should be finite and above 0, not inf"),
        ("training.momentum=1", "training.momentum: should be at least 0 and below 1, not 1"),
        ("training.amsgrad=yes", "training.amsgrad: should be true or false, not 'yes'"),
        ("training=3", "training: should hold keys and values, not 3"),
        (
            "training.optimizer=adm",
            "training.optimizer: should be 'sgd', 'adam' or 'adamw', not 'adm'; "
            "did you mean 'adam'?",
        ),
        ("inference.overlap=1", "inference.overlap: should be at least 0 and below 1, not 1"),
        ("inference.batch_size=0", "inference.batch_size: should be at least 1, not 0"),
        ("inference.window=[0]", "inference.window: each should be at least 1, not [0]"),
        (
            "federation.image.size=[1.5]",
            "federation.image.size: should be a list of whole numbers or a whole number or null, "
            "not [1.5]",
        ),
        ("seeds=[]", "seeds: should be one or more different whole numbers from 0 on, not []"),
        (
            "seeds=[1, 1]",
            "seeds: should be one or more different whole numbers from 0 on, not [1, 1]",
        ),
        ("seeds=[-1]", "seeds: should be one or more different whole numbers from 0 on, not [-1]"),
        ("engine.jobs=0", "engine.jobs: should be at least 1, not 0"),
        ("evaluation.every=0", "evaluation.every: should be at least 1, not 0"),
        ("algorithm.kind=softt", "did you mean 'soft'?"),
        ("algorithm.width=0", "algorithm.width: should be above 0, not 0"),
        ("algorithm.steps=3", "algorithm.steps: should be a list of whole numbers, not 3"),
        ("algorithm=configs/mine.py:Needy", "algorithm.lam: missing; add a number"),
        ("algorithm=fedavgg", "did you mean 'fedavg'?"),
        ("algorithms=[]", "algorithms: should be one or more algorithms, not []"),
        ("algorithms=fedavg", "algorithms: should be a list, not 'fedavg'"),
        ("algorithm={tau: 1}", "algorithm: needs a name, but is {'tau': 1}"),
        ("algorithm.label=a/b", "algorithm.label: 'a/b' cannot name a folder"),
        ("name=..", "name: '..' cannot name a folder"),
        (
            "federation.sites={Average: {folder: a}, b: {folder: b}}",
            "federation.sites.Average: 'Average' is a word of tables or models",
        ),
        (
            "home_rounds=3",
            "home_rounds: home_rounds is 3, of 3 rounds in all; give a number from 0",
        ),
        (
            "training={warm_up: 3}",
            "training.warm_up: warm_up is 3, of 3 rounds in all; give a number from 0 to 2",
        ),
        (
            "algorithm={name: fedavg, training: {warm_up: 4}}",
            "algorithm.training.warm_up: warm_up is 4, of 3 rounds in all; give",
        ),
        ("model=unett", "model.name: unknown model 'unett'; did you mean 'unet'?"),
        ("model=", "model: needs a name, but is nothing"),
        ("sedes=[1]", "sedes: unknown field; did you mean 'seeds'?"),
    ],
)
def test_a_wrong_value_is_one_sentence(folder: Path, override: str, expected: str):
    text = problem(override)
    assert expected in text
    assert f"(override {override})" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.tau=2", "algorithm: tau must be at most 1"),
        ("federation.outside=[a, b]", "federation.sites: no site is left to train on; add one"),
        ("federation.outside=[c]", "is not among the sites a, b"),
        ("federation.sites.a.table=x", "federation.sites.a: a site has folder 'a', manifest"),
        ("federation.splits.test=0.9", "splits.validation 0.2 and splits.test 0.9 leave nobody"),
    ],
)
def test_values_that_do_not_fit_together_are_one_sentence(
    folder: Path, override: str, expected: str
):
    text = problem(override)
    assert expected in text
    assert re.search(r" \(configs/x.yaml, line \d+\)$", text)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rounds", "'rounds' is no override; write key=value"),
        ("=3", "'=3' is no override"),
        ("a..b=3", "'a..b=3' is no override"),
        ("rounds=[", "override rounds=[, line 1: not valid YAML"),
        ("rounds.x=3", "rounds.x: rounds is 3 and has no 'x' to set"),
        ("algorithms.1.tau=3", "algorithms.1.tau: algorithms is a list of 1 and has no '1' to set"),
    ],
)
def test_an_override_that_cannot_be_applied_says_why(folder: Path, override: str, expected: str):
    assert expected in problem(override)


def test_all_problems_are_shown_at_once(folder: Path):
    edit(folder, "rounds: 3", "rounds: -3\nlos: dice")
    text = problem("training.lr=fast")
    assert text.splitlines() == [
        "3 problems in the configuration:",
        "  rounds: should be at least 1, not -3 (configs/x.yaml, line 12)",
        "  los: unknown field; did you mean 'loss'? (configs/x.yaml, line 13)",
        "  training.lr: should be a number, not 'fast' (override training.lr=fast)",
    ]


def test_a_missing_key_is_named(folder: Path):
    edit(folder, "rounds: 3\n", "")
    assert problem() == "rounds: missing; add a whole number (configs/x.yaml)"


def test_labels_that_are_equal_are_refused(folder: Path):
    text = problem("algorithms=[configs/mine.py:Mine, configs/mine.py:Mine]")
    assert text.startswith("algorithms.1.label: 'Mine' is there twice; give each a label of its")


def test_algorithm_and_algorithms_exclude_each_other(folder: Path):
    edit(folder, "rounds: 3", "rounds: 3\nalgorithms: [fedavg]")
    assert "give either algorithm or algorithms, not both" in problem()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\nrounds: 1\nname: b\n", "name: written twice; keep one of them"),
        ("name: a\nmodel: {n: 1, n: 2}\n", "model.n: written twice; keep one of them"),
        ("name: [a\n", "not valid YAML"),
        ("a: &x [*x]\n", "a.0: an alias that holds itself"),
        ("- a\n", "should hold keys and values, not ['a']"),
        ("", "should hold keys and values, not nothing"),
        ("name: !!python/object:os.system {}\n", "line 1: not valid YAML: could not determine"),
        ("? [a]\n: 1\n", "line 1: a key should be a word"),
        ("a: \x01\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, expected: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_lines_of_a_key_written_twice_are_both_named(tmp_path: Path):
    (tmp_path / "bad.yaml").write_text("name: a\nrounds: 1\nname: b\n")
    with pytest.raises(ConfigError, match="lines 1 and 3"):
        load_config(tmp_path / "bad.yaml")


def test_a_missing_or_binary_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_config(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_config(tmp_path / "b.yaml")


def test_a_configuration_survives_dict_json_and_yaml(folder: Path, tmp_path: Path):
    config = load("inference.window=[32, 32]", "federation.sites.a.allow=[model]", "name='1e3'")
    assert parse_config(to_dict(config)) == config
    assert parse_config(json.loads(json.dumps(to_dict(config)))) == config
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_parsing_leaves_its_input_as_it_was(folder: Path):
    data = to_dict(load()) | {"model": "iop_unet"}
    before = json.dumps(data)
    assert parse_config(data).model.name == "iop_unet"
    assert json.dumps(data) == before


def test_parsed_problems_name_where_the_mapping_is_from(folder: Path):
    with pytest.raises(ConfigError, match=r"rounds: .* \(runs/x/run\.json\)"):
        parse_config(to_dict(load()) | {"rounds": None}, "runs/x/run.json")


def test_the_digest_is_of_what_determines_the_numbers(folder: Path):
    config = load()
    same = load("output=elsewhere", "engine.workers=4", "engine.jobs=2")
    assert digest(same) == digest(config)
    written_out = load("algorithm.steps=[1, 2]", "seeds=[0]", "training.lr=0.0010")
    assert digest(written_out) == digest(config)
    others = [
        load("engine.threads=2"), load("algorithm.tau=0.4"), load("rounds=4"), load("seeds=[1]"),
        load("federation.image.size=[48, 64]"), replace(config, loss="dice"),
    ]  # fmt: skip
    assert len({digest(other) for other in [config, *others]}) == 7
    assert re.fullmatch("[0-9a-f]{32}", digest(config))


def test_the_difference_names_key_and_both_values(folder: Path):
    old, new = load(), load("algorithm.tau=0.4", "output=o", "engine.jobs=3", "seeds=[0, 1]")
    expected = ["algorithms.0.tau=0.5, now 0.4", "seeds=[0], now [0, 1]"]
    assert difference(old, new) == expected
    assert difference(old, load("output=o")) == []
    assert difference(old, load("federation.sites.c={folder: c}"))[0] == (
        'federation.sites.c.folder=nothing, now "c"'
    )


def test_an_algorithm_is_built_from_its_configuration(folder: Path):
    algorithm = build_algorithm(load().algorithms[0])
    assert algorithm.hyperparameters() == {
        "tau": 0.5, "steps": (1, 2), "kind": "soft", "width": 1.0,
    }  # fmt: skip
    name = f"{folder / 'mine.py'}:Mine"
    with pytest.raises(ConfigError, match="unknown field for Mine; did you mean 'tau'"):
        build_algorithm(AlgorithmConfig(name, {"ta": 1}))


def test_a_federation_is_read_from_its_own_file_or_an_experiments(folder: Path):
    inline = load_federation(folder / "x.yaml")
    assert inline == load().federation
    body = FILE.partition("federation:\n")[2].partition("model:")[0]
    (folder / "f.yaml").write_text(re.sub(r"(?m)^  ", "", body))
    assert load_federation(folder / "f.yaml") == inline
    outside = load_federation(folder / "f.yaml", ["federation.outside=[a]"])
    assert outside.outside == ("a",)
    with pytest.raises(ConfigError, match=r"federation\.nam: .*'name'.*override"):
        load_federation(folder / "f.yaml", ["federation.nam=x"])


def test_an_override_of_a_federation_file_may_leave_out_its_first_word(folder: Path):
    body = FILE.partition("federation:\n")[2].partition("model:")[0]
    (folder / "f.yaml").write_text(re.sub(r"(?m)^  ", "", body))
    assert load_federation(folder / "f.yaml").image.inputs is None
    for words in ("image.inputs=2", "federation.image.inputs=2"):
        assert load_federation(folder / "f.yaml", [words]).image.inputs == 2
    assert load_federation(folder / "f.yaml", ["name=other", "outside=[b]"]).outside == ("b",)
    with pytest.raises(ConfigError, match=r"^federation\.imag: unknown field; did you mean 'image"):
        load_federation(folder / "f.yaml", ["imag.inputs=2"])


def test_what_a_federation_would_not_use_of_an_experiment_is_refused(folder: Path):
    path = folder / "x.yaml"
    assert load_federation(path, ["federation.image.inputs=2"]).image.inputs == 2
    for words in ("image.inputs=2", "rounds=9", "training.lr=1"):
        key = words.partition("=")[0]
        with pytest.raises(ConfigError) as caught:
            load_federation(path, [words])
        assert str(caught.value).startswith(f"{key}: unknown field; there is federation.name, ")
        assert str(caught.value).endswith(f" (override {words})")
    edit(folder, "rounds: 3", "round: 3")
    with pytest.raises(ConfigError, match=r"^round: unknown field; did you mean 'rounds'\? .*e 12"):
        load_federation(path)


def test_a_federation_is_read_with_what_its_experiments_recipe_says(folder: Path):
    edit(folder, "rounds: 3", "recipe: iop-fl")
    assert load_federation(folder / "x.yaml") == load().federation
    assert load_federation(folder / "x.yaml").sampling.crop == (384, 384)


HALF = {"name": "half", "format": "float16"}


def stc(**params) -> dict:
    return {"name": "stc", "p": 0.0025, "scope": "model", "coding": "range"} | params


def test_without_codecs_nothing_is_coded(folder: Path):
    config = load()
    assert config.codec == CodecsConfig()
    assert not build_codecs(config, config.algorithms[0])
    assert to_dict(config)["codec"] == {"up": None, "down": None}
    assert "codec" not in to_dict(config)["algorithms"][0]


@pytest.mark.parametrize(
    ("written", "up", "down"),
    [
        ("stc", stc(), None),
        ("{up: stc}", stc(), None),
        ("{down: half}", None, HALF),
        ("{up: {name: stc, p: 0.5}, down: half}", stc(p=0.5), HALF),
        ("null", None, None),
        ("{}", None, None),
    ],
)
def test_a_codec_is_a_name_or_one_for_each_direction(folder: Path, written, up, down):
    config = load(f"codec={written}")
    assert to_dict(config)["codec"] == {"up": up, "down": down}
    assert parse_config(to_dict(config)) == config
    assert load(f"algorithm.codec={written}").codec == CodecsConfig()
    own = load("codec=half", f"algorithm.codec={written}")
    assert to_dict(own)["algorithms"][0]["codec"] == {"up": up, "down": down}
    assert parse_config(to_dict(own)) == own


def test_a_codec_in_a_file_keeps_its_line(folder: Path):
    edit(folder, "rounds: 3\n", "rounds: 3\ncodec:\n  up:\n    name: stc\n    q: 0.1\n")
    assert (
        problem()
        == "codec.up.q: unknown field for stc; there is p, scope, coding (configs/x.yaml, line 16)"
    )
    edit(folder, "    q: 0.1\n", "    p: 1.5\n")
    assert problem() == (
        "codec.up.p: should be above 0 and at most 1, not 1.5 (configs/x.yaml, line 16)"
    )
    assert to_dict(load("codec.up.p=0.5"))["codec"]["up"] == stc(p=0.5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("codec=stcc", "codec.up.name: unknown codec 'stcc'; did you mean 'stc'"),
        ("codec={upp: stc}", "codec.upp: unknown field; did you mean 'up'?"),
        ("codec={up: {p: 0.1}}", "codec.up: needs a name, but is {'p': 0.1}"),
        ("codec=3", "codec: should hold keys and values, not 3"),
        ("codec={up: [stc]}", r"codec.up: needs a name, but is ['stc']"),
        ("codec={up: {name: stc, p: x}}", "codec.up.p: should be a number, not 'x'"),
        ("algorithm.codec=stcc", "algorithm.codec.up.name: unknown codec 'stcc'"),
        (
            "algorithm.codec={down: {name: half, format: x}}",
            "algorithm.codec.down.format: should be",
        ),
    ],
)
def test_a_mistake_in_a_codec_is_named(folder: Path, override, words):
    text = problem(override)
    assert text.startswith(words)
    assert f"override {override}" in text or "configs/x.yaml" in text


def test_an_algorithms_codec_replaces_the_experiments(folder: Path):
    three = (
        "algorithms=[fedavg, {name: fedavg, label: b, codec: {up: {name: stc, p: 0.5}}},"
        " {name: fedavg, label: c, codec: null}]"
    )
    config = load("codec={down: half}", three)
    a, b, c = (build_codecs(config, algorithm) for algorithm in config.algorithms)
    assert (a, b, c) == (Codecs(down=Half()), Codecs(up=STC(p=0.5)), Codecs())
    assert len({digest(load(three)), digest(config), digest(load("codec=half", three))}) == 3
    assert difference(config, load("codec={up: half}", three)) == [
        'codec.up=null, now nothing', 'codec.down.name="half", now nothing',
        'codec.down.format="float16", now nothing', 'codec.up.name=nothing, now "half"',
        'codec.up.format=nothing, now "float16"', 'codec.down=nothing, now null',
    ]  # fmt: skip


def test_a_codec_from_a_file_is_found_beside_the_configuration(folder: Path):
    (folder / "codec.py").write_text(
        "from dataclasses import dataclass\nfrom collegium.compression.half import Half\n\n\n"
        '@dataclass(frozen=True)\nclass Mine(Half):\n    """A codec of a user."""\n'
    )
    edit(folder, "rounds: 3\n", "rounds: 3\ncodec: {up: codec.py:Mine}\n")
    config = load()
    expected = CodecConfig(f"{folder / 'codec.py'}:Mine", {"format": "float16"})
    assert config.codec.up == expected
    assert type(build_codecs(config, config.algorithms[0]).up).__name__ == "Mine"


def test_a_codec_that_went_away_is_named_by_the_algorithm(folder: Path):
    config = replace(load(), codec=CodecsConfig(up=CodecConfig("gone.py:Mine")))
    with pytest.raises(ConfigError, match=r"codec\.up\.name: .*gone\.py cannot be read .*'Mine'"):
        build_codecs(config, config.algorithms[0])


def test_tracking_is_part_of_the_file_and_not_of_what_determines_the_numbers(folder: Path):
    plain = load_config(folder / "x.yaml")
    tracked = load_config(folder / "x.yaml", ["tracking={name: mlflow, uri: null}"])
    assert plain.tracking is None
    assert tracked.tracking == TrackingConfig("mlflow", None, None)
    assert digest(tracked) == digest(plain)
    assert parse_config(to_dict(tracked)) == tracked
    with pytest.raises(ConfigError, match=r"tracking\.name: should be 'mlflow', not 'wandb'"):
        load_config(folder / "x.yaml", ["tracking={name: wandb}"])


def test_relevant_differences_are_a_setting_that_determines_no_numbers(folder: Path):
    plain = load_config(folder / "x.yaml")
    assert plain.report.relevant == {"dice": 0.01}
    other = load_config(folder / "x.yaml", ["report.relevant={dice: 0.02, hd95: 1}"])
    assert other.report.relevant == {"dice": 0.02, "hd95": 1.0}
    assert digest(other) == digest(plain)
    assert parse_config(to_dict(other)).report == other.report
    with pytest.raises(ConfigError, match=r"report\.relevant: each should be above 0"):
        load_config(folder / "x.yaml", ["report.relevant={dice: 0}"])


TWO = """\
algorithms:
  - fedavg
  - name: scaffold
    training:
      optimizer: sgd
      lr: 5e-2
"""


def one_algorithm_more(folder: Path) -> None:
    edit(folder, "algorithm:\n  name: mine.py:Mine\n  tau: 0.5\n", TWO)


def test_an_algorithms_training_replaces_single_keys_of_the_experiments(folder: Path):
    one_algorithm_more(folder)
    config = load("training.weight_decay=0.5", "algorithms.1.training.local_steps=7")
    assert [a.training for a in config.algorithms] == [
        {}, {"optimizer": "sgd", "lr": 0.05, "local_steps": 7},
    ]  # fmt: skip
    common, own = [with_own_training(config, a).training for a in config.algorithms]
    assert common == config.training
    assert own == replace(common, optimizer="sgd", lr=0.05, local_steps=7)
    assert own.weight_decay == 0.5
    assert parse_config(to_dict(config)) == config
    shown = yaml.safe_load(to_yaml(config))["algorithms"]
    assert "training" not in shown[0]
    assert shown[1]["training"] == {"optimizer": "sgd", "lr": 0.05, "local_steps": 7}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "lr: 5e-2",
            "rate: 5e-2",
            "algorithms.1.training.rate: unknown field for training; there is optimizer, lr,",
        ),
        (
            "lr: 5e-2",
            "lr: -1",
            "algorithms.1.training.lr: should be above 0, not -1 (configs/x.yaml, line 14)",
        ),
        (
            "optimizer: sgd",
            "optimizer: rmsprop",
            "algorithms.1.training.optimizer: should be 'sgd', 'adam' or 'adamw', not 'rmsprop' "
            "(configs/x.yaml, line 13)",
        ),
        ("training: {lr: 1e-3", "training: {lr: 0", "training.lr: should be above 0, not 0 ("),
    ],
)
def test_a_wrong_key_of_an_algorithms_training_is_named_with_its_line(
    folder: Path, old: str, new: str, says: str
):
    one_algorithm_more(folder)
    edit(folder, old, new)
    assert problem().startswith(says)


def test_a_training_of_an_algorithm_that_is_no_mapping_is_refused(folder: Path):
    one_algorithm_more(folder)
    assert problem("algorithms.1.training=sgd").startswith(
        "algorithms.1.training: should hold keys"
    )


def test_a_change_of_an_algorithms_training_is_a_difference(folder: Path):
    one_algorithm_more(folder)
    changed = difference(load(), load("algorithms.1.training.lr=0.1"))
    assert changed == ["algorithms.1.training.lr=0.05, now 0.1"]
