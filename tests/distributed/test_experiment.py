"""Runs over NVIDIA FLARE, with real processes, against runs of the same files in this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from collegium.core.seals import read_json
from collegium.diagnostics.assessment.writing import assess
from collegium.experiment.config.experiment import load_config
from collegium.runtime.secure.parts import MASKED

PLAIN = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.01, "batch_size": 2, "local_steps": 2}


def run_both(real: Any, name: str, **settings: Any) -> dict[str, bytes]:
    """Run an experiment in both ways; check that they have the same bits, and return those."""
    found: dict[str, bytes] = real.check_equal(name, run_in_two_ways(real, name, **settings))
    return found


def run_in_two_ways(real: Any, name: str, **settings: Any) -> Path:
    """Run an experiment in one process and over FLARE; return the folder of the former."""
    file = real.write(name, **settings)
    reference: Path = real.reference(file)
    real.wait()
    code, text = real.run(file)
    assert code == 0, text
    return reference


def test_iopfl_has_the_bits_of_a_run_in_one_process(federation):
    found = run_both(federation, "paths", algorithms=["iopfl"])
    folder = "iopfl/seed-0"
    assert {f"{folder}/server/global.safetensors", f"{folder}/server/test.json"} <= {*found}
    for site in federation.names:
        mine = f"{folder}/clients/{site}"
        wanted = {
            "personal.safetensors",
            "kept/000002.state",
            "ledger.jsonl",
            "states/000002-0000.state",
        }
        assert {f"{mine}/{name}" for name in wanted} <= {*found}


def test_coded_messages_have_the_bits_of_a_run_in_one_process(federation):
    codec = {"up": {"name": "stc", "p": 0.1}, "down": "half"}
    found = run_both(federation, "coded", algorithms=["fedavg"], codec=codec)
    for site in federation.names:
        assert b'"codec": "STC"' in found[f"fedavg/seed-0/clients/{site}/ledger.jsonl"]


@pytest.mark.slow
def test_means_of_masked_replies_have_the_bits_of_a_run_in_one_process(federation):
    """Keys are signed between hospitals, and in one process they are not."""
    methods = ["fedavg", "fedbn", {"name": "scaffold", "training": PLAIN}]
    reference = run_in_two_ways(federation, "masked", algorithms=methods, secure_mean={})
    federation.check_equal("masked", reference, disturbed=True)
    found = federation.bits("masked")
    for site in federation.names:
        ledger = json.loads(found[f"fedavg/seed-0/clients/{site}/ledger.jsonl"])
        masked = [line["parts"][MASKED] for line in ledger if line["method"] == MASKED]
        assert [part["sites"] for part in masked] == [[*federation.names]] * 2
        assert not any("model" in line["parts"] for line in ledger)


@pytest.mark.slow
def test_robust_means_have_the_bits_of_a_run_in_one_process(federation):
    """With codecs in both directions too, of which the server knows what each site received."""
    coded = {"up": "half", "down": "half"}
    methods = [
        {"name": "fedavg+robust", "label": "median"},
        {"name": "ditto+robust", "label": "trimmed", "rule": "trimmed_mean", "trim": 0.34},
        {"name": "fedavg+robust", "label": "bounded", "rule": "norm_bound", "factor": 0.9},
        {"name": "fedbn+robust", "label": "krum", "rule": "krum", "hostile": 0, "codec": coded},
    ]
    found = run_both(federation, "robust", algorithms=methods)
    models = {
        name: found[f"{name}/seed-0/server/global.safetensors"] for name in ("median", "bounded")
    }
    assert models["median"] != models["bounded"]
    records = found["bounded/seed-0/server/records.jsonl"]
    assert all(f"norm_bound/{site}".encode() in records for site in federation.names)
    assert b"krum/alder" in found["krum/seed-0/server/records.jsonl"]


@pytest.mark.slow
def test_frozen_parts_that_no_message_holds_have_the_bits_of_a_run_in_one_process(federation):
    training = {**PLAIN, "freeze": ["encoder"]}
    found = run_both(federation, "frozen", algorithms=["fedavg"], training=training)
    for site in federation.names:
        ledger = found[f"fedavg/seed-0/clients/{site}/ledger.jsonl"]
        assert b'["model.2.' in ledger
        assert b'["model.0.' not in ledger  # the outermost way down


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["case", "site"])
def test_private_training_has_the_bits_of_a_run_in_one_process(federation, unit):
    privacy = {"unit": unit, "noise_multiplier": 1.0, "max_grad_norm": 1.0, "noise_seed": "run"}
    model = {"name": "unet", "channels": [2, 4], "norm": "instance", "in_channels": 1}
    training = {**PLAIN, "privacy": privacy}
    found = run_both(
        federation, f"private-{unit}", algorithms=["fedavg"], model=model, training=training
    )
    for site in federation.names:
        ledger = found[f"fedavg/seed-0/clients/{site}/ledger.jsonl"]
        assert b'"epsilon": ' in ledger


@pytest.mark.slow
def test_methods_with_several_exchanges_have_the_bits_of_a_run_in_one_process(federation):
    methods = [
        "fedbn",
        {"name": "ifca", "num_clusters": 2},
        "scaffold",
        "grace",
        "resfim",
        "pfednet",
    ]
    found = run_both(federation, "methods", algorithms=methods, training=PLAIN)
    for name in ("fedbn", "ifca", "scaffold", "grace", "resfim", "pfednet"):
        assert f"{name}/seed-0/server/test.json" in found


@pytest.mark.slow
def test_a_server_that_trains_and_sites_with_networks_of_their_own(federation):
    """The public images are on the server's machine; alder's private network is a smaller one."""
    words = yaml.safe_load((federation.folder / "phantom/federation.yaml").read_text())
    held = {"root": str(federation.folder / "phantom"), "public": {"images": "alder/images"}}
    small = {"name": "unet", "channels": [2, 4]}
    found = run_both(
        federation,
        "public",
        federation={**words, **held},
        algorithms=[{"name": "feddf", "steps": 2}, {"name": "fml", "networks": {"alder": small}}],
    )
    for name in ("feddf", "fml"):
        assert f"{name}/seed-0/server/test.json" in found


@pytest.mark.slow
def test_a_method_with_its_own_training_is_stopped_where_it_would_in_one_process(federation):
    """No score improves by a Dice of 2: the second evaluation ends the rounds together."""
    settings = {
        "rounds": 6,
        "home_rounds": 1,
        "early_stopping": {"patience": 1, "min_delta": 2.0},
        "algorithms": ["fedavg", {"name": "scaffold", "training": PLAIN}],
    }
    found = run_both(federation, "stopped", **settings)
    for name in ("fedavg", "scaffold"):
        lines = json.loads(found[f"{name}/seed-0/server/records.jsonl"])
        assert [line["round"] for line in lines if line.get("stopped")] == [2]
        assert max(line.get("round", 0) for line in lines) == 3


@pytest.mark.slow
def test_every_fold_of_a_cross_validation_has_the_bits_of_a_run_in_one_process(federation):
    words = yaml.safe_load((federation.folder / "phantom/federation.yaml").read_text())
    settings = {
        "protocol": "cross-validation",
        "federation": {
            **words,
            "root": str(federation.folder / "phantom"),
            "splits": {"folds": 2},
        },
        "algorithms": ["local", "fedavg"],
        "training": PLAIN,
    }
    found = run_both(federation, "folds", **settings)
    tested = {
        path: data
        for path, data in found.items()
        if path.endswith("fedavg/seed-0/server/test.json")
    }
    assert [*sorted(tested)] == [f"fold-{n}/fedavg/seed-0/server/test.json" for n in (1, 2)]
    assert len({*tested.values()}) == 2


@pytest.mark.slow
def test_who_takes_part_in_a_round_is_who_would_in_one_process(federation):
    who = {"clients_per_round": 2, "absent": {"birch": [1, 2], "cedar": [3]}}
    settings = {
        "rounds": 5,
        "home_rounds": 1,
        "participation": who,
        "algorithms": ["fedavg", "scaffold"],
        "training": PLAIN,
    }
    found = run_both(federation, "some", **settings)
    lines = json.loads(found["fedavg/seed-0/server/records.jsonl"])
    work = [line for line in lines if "losses" in line]
    rounds = [[line for line in work if line["round"] == n] for n in (1, 2, 3)]
    assert "birch" not in str(rounds[0] + rounds[1])
    assert "cedar" not in str(rounds[2])


@pytest.mark.slow
def test_sites_outside_get_the_models_that_they_get_in_one_process(federation):
    routing = {"name": "routing", "epochs": 1, "radius": 2, "record_steps": True}
    found = run_both(
        federation, "outside", protocol="leave-one-site-out",
        adapters=["none", "ensemble", routing], algorithms=["iopfl"],
        diagnostics=["layer_distance"],
    )  # fmt: skip
    for site in federation.names:
        scores = [path for path in found if path.endswith("scores.json") and site in path]
        assert len(scores) >= 3, site
    records = [text for path, text in found.items() if path.endswith("records.jsonl")]
    assert all(b"layer_distance/" in text for text in records)


@pytest.fixture(scope="module")
def tables(make_federation):
    """A federation whose sites have tables on different scales, with values missing."""
    real = make_federation()
    (real.folder / "tables").mkdir()
    for number, name in enumerate(real.names):
        rng = np.random.default_rng(number)
        values = rng.normal([50 + 9 * number, 900 - 300 * number], [9, 200], (40, 2)).round(2)
        values[number::7, 0] = np.nan
        lines = [
            f"{age},{crea},{('train', 'val', 'test', 'train')[row % 4]},{row % 2}"
            for row, (age, crea) in enumerate(values)
        ]
        text = "\n".join(["age,crea,fold,ill", *lines, ""]).replace("nan", "")
        (real.folder / "tables" / f"{name}.csv").write_text(text)
        real.describe_site(name, {"table": f"{name}.csv"}, root="tables")
    words = {
        "name": "hearts",
        "sites": {name: {"table": f"{name}.csv"} for name in real.names},
        "task": {"name": "classification", "classes": ["0", "1"]},
        "table": {
            "label": "ill", "split": "fold", "numeric": ["age", "crea"], "indicators": True,
            "scale": "federation",
        },
    }  # fmt: skip
    (real.folder / "tables" / "federation.yaml").write_text(yaml.safe_dump(words))
    real.start()
    yield real
    real.stop()


@pytest.mark.slow
def test_tables_that_all_sites_scale_together_have_the_bits_of_one_process(tables):
    run_both(
        tables, "hearts", federation="tables/federation.yaml", algorithms=["fedavg", "ditto"],
        model={"name": "mlp", "hidden": [4]}, training={"batch_size": 8, "local_steps": 3},
    )  # fmt: skip
    agreed = read_json(tables.folder / "reference/hearts/scaling.json")
    places = [tables.folder / "r", *(tables.state(site) / "runs" for site in tables.names)]
    for place in places:
        assert read_json(place / "hearts" / "scaling.json") == agreed


@pytest.mark.slow
def test_an_experiment_runs_once_every_operator_has_accepted_it(make_federation):
    real = make_federation()
    words = {"manifest": "birch/manifest.csv", "share": ["personal"]}
    real.describe_site("birch", words, root="phantom", accept="listed")
    try:
        real.start()
        real.wait()
        file = real.write("asked", algorithms=["fedavg"])
        code, text = real.run(file)
        assert code == 2
        (asked,) = (real.state("birch") / "asked").glob("*.json")
        assert f"'collegium site accept SITE {asked.stem}'" in text
        assert not (real.state("birch") / "runs").exists()
        assert real.accept("birch", asked.stem[:6]) == (0, "")
        code, text = real.run(file)
        assert code == 0, text
        assert (real.state("birch") / "runs" / "asked").exists()
    finally:
        real.stop()


@pytest.mark.slow
def test_verdicts_are_those_of_one_process_where_scores_stay_at_their_sites(make_federation):
    real = make_federation(cases=40)
    for name in real.names:
        real.describe_site(name, {"manifest": f"{name}/manifest.csv"}, root="phantom", release=[])
    try:
        real.start()
        steps = {"optimizer": "adam", "lr": 1e-2, "batch_size": 4, "local_steps": 12}
        file = real.write("kept", algorithms=["local", "fedavg", "fedbn"], training=steps)
        reference = real.reference(file)
        real.wait()
        code, text = real.run(file)
        assert code == 0, text
        wanted = json.loads((reference / "tables" / "verdicts.json").read_text())
        found = json.loads((real.folder / "r/kept/tables/verdicts.json").read_text())
        assert {one["verdict"]["site"] for one in wanted} == {*real.names, "average"}
        dice = [one["verdict"] for one in wanted if one["verdict"]["metric"] == "dice"]
        assert all(verdict["low"] is not None for verdict in dice)
        assert found == wanted
        assert "case" not in (real.folder / "r/kept/estimates/birch.json").read_text()
        for name in real.names:
            own = json.loads((real.state(name) / "runs/kept/tables/verdicts.json").read_text())
            assert own == [one for one in wanted if one["verdict"]["site"] == name]
            text = (real.state(name) / "runs/kept/ledger.jsonl").read_text()
            sent = [json.loads(line) for line in text.splitlines()]
            assert [(line["method"], [*line["parts"]]) for line in sent] == [
                ("open", ["share", "cases"]),
                ("report", ["estimates"]),
            ]
    finally:
        real.stop()


@pytest.mark.slow
def test_an_assessment_has_the_numbers_of_one_process(federation):
    file = federation.write("assessed", algorithms=["fedavg"])
    output = federation.folder / "reference/assessed"
    here = assess(load_config(federation.folder / file, [f"output={output}"]))
    federation.wait()
    code, text = federation.assess(file)
    assert code == 0, text
    found, wanted = (
        json.loads((folder / "assessment.json").read_text())
        for folder in (federation.folder / "r/assessed/assessment", here)
    )
    assert found == wanted
