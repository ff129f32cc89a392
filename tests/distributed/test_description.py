"""What a site is told of an experiment, and what it checks before anything is imported."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from collegium import __version__
from collegium.data.federation_config import PublicConfig
from collegium.distributed.description import check_versions, describe, digest
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import parse_config

MARKER = "zanzibar"

SITE = {"folder": f"{MARKER}/images", "manifest": f"{MARKER}.csv", "allow": ["model"]}


def config(**changes):
    data = {
        "name": "tiny",
        "federation": {
            "name": "two",
            "root": f"/data/{MARKER}",
            "sites": {"alder": SITE, "birch": {"manifest": f"sub/{MARKER}-2.csv"}},
        },
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8]},
        "algorithms": ["fedavg"],
        "rounds": 1,
        "output": f"runs/{MARKER}",
        "engine": {"name": "flare", "folder": f"con/{MARKER}", "deadline": 5.0},
        **changes,
    }
    return parse_config(data)


@pytest.fixture
def told():
    found = describe(config(codec={"up": {"name": "cer", "then": "stc"}}))
    assert set(found["sources"]) == {"algorithm fedavg", "codec cer", "codec stc"}
    return found


def test_no_path_and_no_file_of_any_site_is_told():
    text = json.dumps(describe(config()))
    assert MARKER not in text
    assert json.loads(text)["settings"]["federation"]["sites"] == {
        "alder": {"remote": True},
        "birch": {"remote": True},
    }


def test_of_the_servers_own_data_a_site_is_told_that_they_exist():
    settings = config()
    public = PublicConfig(images=f"{MARKER}/public")
    told = describe(replace(settings, federation=replace(settings.federation, public=public)))
    assert MARKER not in json.dumps(told)
    assert told["settings"]["federation"]["public"] == {"remote": True}
    assert parse_config(told["settings"]).federation.public == PublicConfig(remote=True)


def test_what_is_told_is_an_experiment_again(told):
    again = parse_config(json.loads(json.dumps(told["settings"])))
    assert [algorithm.name for algorithm in again.algorithms] == ["fedavg"]
    assert describe(again) == told


def test_a_digest_is_that_of_what_decides(told):
    assert re.fullmatch("[0-9a-f]{32}", digest(told))
    assert digest(json.loads(json.dumps(told))) == digest(told)
    plain = digest(describe(config()))
    same = {"output": "elsewhere", "participation": {"on_failure": "skip"}}
    assert digest(describe(config(**same))) == plain
    for other in ({"rounds": 2}, {"algorithms": ["fedbn"]}, {"name": "other"}, {"seeds": [1]}):
        assert digest(describe(config(**other))) != plain


def test_the_same_code_is_accepted(told):
    check_versions(told, ())


@pytest.mark.parametrize(
    ("key", "own"), [("collegium", __version__), ("torch", torch.__version__.partition("+")[0])]
)
def test_another_version_is_refused_with_both(told, key, own):
    with pytest.raises(
        ConfigError, match=rf"0\.0\.1 and this site {re.escape(own)}.*same version$"
    ):
        check_versions({**told, key: "0.0.1"}, ())


def test_other_sources_are_refused(told):
    sources = {**told["sources"], "algorithm fedavg": "0" * 16}
    with pytest.raises(ConfigError, match="the code of the algorithm fedavg differs"):
        check_versions({**told, "sources": sources}, ())


@pytest.mark.parametrize(
    "told_of",
    [
        {"model": {"name": "NAME"}},
        {"model": "NAME"},
        {"model.name": "NAME"},
        {"algorithms": [{"name": "NAME", "label": "fedavg"}]},
        {"algorithms": [{"name": "fedavg", "codec": {"up": {"name": "cer", "then": "NAME"}}}]},
        {"adapters": ["NAME"]},
        {"codec": {"NAME": {"p": 0.1}}},
        {"variations": {"a": {"model.name": "NAME"}}},
        {"variations": {"a": {"model": {"name": "NAME"}}}},
    ],
)
@pytest.mark.parametrize("name", ["PACKAGE:Own", "PACKAGE:Own+distance", "FOLDER/PACKAGE.py:Own"])
def test_settings_name_no_code_beside_what_the_operator_has_listed(told, package, told_of, name):
    module, folder = package
    name = name.replace("PACKAGE", module).replace("FOLDER", str(folder))
    own = json.loads(json.dumps(told_of).replace("NAME", name))
    with pytest.raises(
        ConfigError, match=f"names '{re.escape(name)}', .*under methods in the site"
    ):
        check_versions({**told, "settings": {**told["settings"], **own}}, ())
    assert module not in sys.modules
    assert not (folder / "imported").exists()


def test_a_survey_names_no_code_either(told, package):
    module, folder = package
    with pytest.raises(ConfigError, match=f"names '{module}:net'"):
        check_versions({**told, "survey": {"encoder": f"{module}:net"}}, ())
    assert not (folder / "imported").exists()


def test_a_network_of_another_package_needs_its_operators_word_too(told):
    about = {**told, "settings": {**told["settings"], "model": {"name": "os:system"}}}
    with pytest.raises(ConfigError, match="names 'os:system'"):
        check_versions(about, ("os:path",))
    check_versions(about, ("os:system",))


def test_words_of_a_federation_may_hold_a_colon(told):
    settings = json.loads(json.dumps(told["settings"]))
    settings["federation"]["task"]["classes"] = ["grade:low", "grade:high"]
    settings["variations"] = {"two": {"federation.task.classes": ["a:b", "c:d"]}}
    check_versions({**told, "settings": settings}, ())


@pytest.mark.parametrize("key", ["model unet", "os system", "algorithm nonsense", "fedavg", ""])
def test_what_is_not_installed_is_refused(told, key):
    with pytest.raises(ConfigError, match=f"the {key} is not installed here"):
        check_versions({**told, "sources": {key: "0" * 16}}, ())


def test_a_class_in_a_file_cannot_travel(tmp_path):
    (tmp_path / "own.py").write_text(
        "from collegium import settings\nfrom collegium.algorithms.fedavg import FedAvg\n"
        "@settings\nclass Own(FedAvg):\n    '''Own.'''\n"
    )
    experiment = config(algorithms=[f"{tmp_path}/own.py:Own"])
    with pytest.raises(ConfigError, match=r"own.py:Own' stands in a file, and no code travels"):
        describe(experiment)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with an algorithm; importing it has an effect."""
    name = f"package_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "from pathlib import Path\nfrom collegium import settings\n"
        "from collegium.algorithms.fedavg import FedAvg\n"
        f"Path({str(tmp_path / 'imported')!r}).touch()\n"
        "@settings\nclass Own(FedAvg):\n    '''Own.'''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield name, tmp_path
    sys.modules.pop(name, None)


@pytest.mark.parametrize("suffix", ["", "+distance"])
def test_a_class_that_the_operator_has_not_listed_is_not_imported(told, package, suffix):
    name, folder = package
    sources = {f"algorithm {name}:Own{suffix}": "0" * 16}
    for methods in ((), ("other:Own",), (name,)):
        with pytest.raises(ConfigError, match="name it under methods in the site's file"):
            check_versions({**told, "sources": sources}, methods)
    assert name not in sys.modules
    assert not (folder / "imported").exists()


def test_a_class_that_the_operator_has_listed_is_held_against_the_servers(package):
    name, folder = package
    theirs = describe(config(algorithms=[f"{name}:Own"]))
    check_versions(theirs, (f"{name}:Own",))
    file = folder / f"{name}.py"
    file.write_text(file.read_text() + "# another version\n")
    with pytest.raises(ConfigError, match="differs from the one that is installed here"):
        check_versions(theirs, (f"{name}:Own",))


def test_a_version_is_held_against_ours_before_a_listed_class_is_imported(told, package):
    name, folder = package
    about = {**told, "collegium": "0.0.1", "sources": {f"algorithm {name}:Own": "0" * 16}}
    with pytest.raises(ConfigError, match=r"runs Collegium 0\.0\.1"):
        check_versions(about, (f"{name}:Own",))
    assert not (folder / "imported").exists()
