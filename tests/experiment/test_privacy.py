"""Private training on the road of an experiment file: what is refused, sent and recorded."""

import math
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from opacus.accountants import RDPAccountant
from safetensors.torch import load_file

from collegium.errors import CollegiumError, ConfigError
from collegium.experiment.config.experiment import load_config, parse_config, to_dict, to_yaml
from collegium.experiment.runner import run_experiment
from collegium.runtime.ledger import first_break, read_ledger

TRAINED = {"north": 24, "south": 12}
THREE = {**TRAINED, "west": 18}
BATCH, ROUNDS, EPOCHS = 8, 3, 2
NOISY = {"noise_multiplier": 1.3, "max_grad_norm": 0.8, "noise_seed": "run"}


def settings(folder: Path, privacy: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Tables of two numbers at two sites, or those given, of ten rows six to train on."""
    sites = changes.pop("sites", TRAINED)
    for name, count in sites.items():
        random = np.random.default_rng(count)
        table = pd.DataFrame(random.normal(size=(count * 10 // 6, 2)), columns=["age", "crea"])
        table["ill"] = (table.age + table.crea > 0).astype(int)
        table["fold"] = [("train", "train", "train", "val", "test")[i % 5] for i in table.index]
        table.to_csv(folder / f"{name}.csv", index=False)
    training = {
        "optimizer": "sgd", "lr": 0.1, "batch_size": BATCH, "local_epochs": EPOCHS,
        "privacy": privacy, **changes.pop("training", {}),
    }  # fmt: skip
    return {
        "name": "private",
        "federation": {
            "name": "two",
            "root": str(folder),
            "sites": {name: {"table": f"{name}.csv"} for name in sites},
            "task": {"name": "classification", "classes": ["0", "1"]},
            "table": {
                "label": "ill",
                "split": "fold",
                "numeric": ["age", "crea"],
                "scale": changes.pop("scale", "none"),
            },
        },
        "model": {"name": "mlp", "hidden": [4], "norm": changes.pop("norm", "none")},
        "training": training,
        "rounds": ROUNDS,
        "algorithms": ["fedavg"],
        "output": str(folder / changes.pop("output", "run")),
        **changes,
    }


def run(folder: Path, privacy: dict[str, Any] | None, **changes: Any) -> Path:
    config = parse_config(settings(folder, privacy, **changes))
    run_experiment(config)
    return Path(config.output)


def rows(output: Path, metric: str) -> pd.DataFrame:
    results = pd.read_csv(output / "results.csv")
    found: pd.DataFrame = results[(results.metric == metric) & (results.split == "train")]
    return found


def spent(noise: float, rate: float, steps: int, delta: float = 1e-5) -> float:
    """Epsilon by Opacus' accountant, stepped one by one."""
    accountant = RDPAccountant()
    for _ in range(steps):
        accountant.step(noise_multiplier=noise, sample_rate=rate)
    return float(accountant.get_epsilon(delta))


def test_epsilon_is_recorded_in_every_round_and_written_to_the_ledger(tmp_path):
    output = run(tmp_path, NOISY, home_rounds=1)
    found = rows(output, "epsilon").set_index(["site", "round"]).value
    for site, count in TRAINED.items():
        steps = EPOCHS * math.ceil(count / BATCH)
        for number in range(1, ROUNDS + 1):
            wanted = spent(1.3, BATCH / count, number * steps)
            assert found[site, number] == pytest.approx(wanted, rel=1e-12)
        ledger = read_ledger(output / f"fedavg/seed-0/clients/{site}/ledger.jsonl")
        assert first_break(ledger) is None
        lines = [line["privacy"] for line in ledger if line["stage"] == "train"]
        assert [line["epsilon"] for line in lines] == [found[site, n] for n in (1, 2, 3)]
        assert {(line["unit"], line["delta"]) for line in lines} == {("case", 1e-5)}


def test_the_report_shows_epsilon_on_the_page_of_each_site(tmp_path):
    output = run(tmp_path, NOISY, algorithms=["fedavg", "local"], rounds=1)
    text = (output / "report.html").read_text()
    steps = EPOCHS * TRAINED["north"] // BATCH
    assert f"<td>{spent(1.3, 1 / 3, steps):.2f}</td>" in text
    assert text.count("<h3>Privacy</h3>") == 2


def test_no_training_loss_leaves_a_site(tmp_path):
    output = run(tmp_path, NOISY)
    assert rows(output, "loss").value.isna().all()


def test_both_models_of_ditto_cost_epsilon(tmp_path):
    found = rows(run(tmp_path, NOISY, algorithms=["ditto"], rounds=1), "epsilon")
    steps = 2 * EPOCHS * TRAINED["north"] // BATCH
    assert found[found.site == "north"].value.item() == pytest.approx(spent(1.3, 1 / 3, steps))


def test_a_target_is_reached_in_the_last_round_and_not_passed(tmp_path):
    privacy = {"target_epsilon": 4.0, "max_grad_norm": 1.0, "noise_seed": "run"}
    found = rows(run(tmp_path, privacy), "epsilon")
    last = found[found["round"] == ROUNDS].value
    assert len(last) == 2
    assert ((last > 3.9) & (last <= 4.0)).all()


def test_epsilon_of_whole_sites_counts_a_release_a_round(tmp_path):
    privacy = {"unit": "site", "noise_multiplier": 5.0, "max_grad_norm": 0.5, "noise_seed": "run"}
    found = rows(run(tmp_path, privacy), "epsilon")
    for number in range(1, ROUNDS + 1):
        values = found[found["round"] == number].value.to_list()
        assert values == pytest.approx([spent(5.0, 1.0, number)] * 2)


@pytest.mark.parametrize("unit", ["case", "site"])
def test_without_noise_and_clipping_the_bits_are_those_of_the_plain_run(tmp_path, unit):
    plain = run(tmp_path, None, output="plain")
    neither = run(tmp_path, {"unit": unit, "noise_multiplier": 0}, output="neither")
    for file in ("server/global.safetensors", "server/test.json"):
        wanted = (plain / "fedavg/seed-0" / file).read_bytes()
        assert (neither / "fedavg/seed-0" / file).read_bytes() == wanted
    assert rows(neither, "epsilon").empty
    assert rows(neither, "loss").value.notna().all()


def test_a_whole_site_without_noise_whose_update_is_short_is_trained_plainly(tmp_path):
    plain = run(tmp_path, None, output="plain")
    huge = {"unit": "site", "noise_multiplier": 0, "max_grad_norm": 1e9}
    clipped = run(tmp_path, huge, output="clipped")
    one, other = (
        load_file(folder / "fedavg/seed-0/server/global.safetensors") for folder in (plain, clipped)
    )
    assert all((one[name] - other[name]).abs().max() < 1e-6 for name in one)
    assert rows(clipped, "epsilon").empty  # there is none


def test_noise_from_the_seed_of_the_run_is_repeatable_and_that_from_a_secret_is_not(tmp_path):
    def model(privacy: dict[str, Any], output: str) -> bytes:
        folder = run(tmp_path, privacy, output=output, rounds=1) / "fedavg/seed-0"
        keys = [*folder.glob("clients/*/privacy.key")]
        assert len(keys) == (2 if privacy["noise_seed"] == "secret" else 0)
        for key in keys:
            assert len(key.read_bytes()) == 32
            assert sys.platform == "win32" or stat.S_IMODE(key.stat().st_mode) == 0o600
        assert len({key.read_bytes() for key in keys}) == len(keys)
        return (folder / "server/global.safetensors").read_bytes()

    secret = {**NOISY, "noise_seed": "secret"}
    assert model(NOISY, "a") == model(NOISY, "b")
    assert model(secret, "c") != model(secret, "d")


def test_a_run_goes_on_with_its_key_and_its_epsilon(tmp_path):
    secret = {**NOISY, "noise_seed": "secret"}
    config = parse_config(settings(tmp_path, secret))

    class StoppedError(Exception):
        pass

    def stop(event: Any) -> None:
        if getattr(event, "round", 0) == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        run_experiment(config, observe=stop)
    run_experiment(config)
    steps = EPOCHS * TRAINED["north"] // BATCH
    found = rows(Path(config.output), "epsilon")
    last = found[(found.site == "north") & (found["round"] == ROUNDS)].value.item()
    assert last == pytest.approx(spent(1.3, 1 / 3, ROUNDS * steps))


@pytest.mark.parametrize(
    "algorithm",
    [
        "scaffold", "moon", "grace", "silobn", "resfim", "fednova", "fedrep", "ifca",
        "fedavg+distance", "fedavgm+distance", "scaffold+fedavgm", "moon+robust",
    ],
)  # fmt: skip
def test_methods_that_send_what_noise_does_not_cover_are_refused(tmp_path, algorithm):
    words = r"training.privacy: .* is not known to send nothing .* leave training.privacy out"
    with pytest.raises(CollegiumError, match=words):
        run(tmp_path, NOISY, algorithms=[algorithm])
    assert not [*tmp_path.rglob("*.state")]


def network(folder: Path) -> dict[str, Any]:
    """A network with a normalisation that does not couple cases."""
    file = folder / "network.py"
    file.write_text(
        "from torch import nn\n\n\ndef network():\n    return nn.Sequential(\n"
        "        nn.Linear(2, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Linear(4, 2)\n    )\n"
    )
    return {"name": f"{file}:network"}


def test_what_wrappers_do_at_the_server_costs_no_epsilon(tmp_path):
    """A round makes the steps of FedAvg's; what the server makes of noised models is free."""
    methods: list[Any] = [
        "local", "fedbn", "robust", "fedprox+fedavgm", "fedavg+fedadam", "fedbn+robust",
        "fedavgm+robust", {"name": "fedper+robust", "rule": "norm_bound"},
    ]  # fmt: skip
    output = run(
        tmp_path, NOISY, sites=THREE, model=network(tmp_path), algorithms=methods, rounds=2
    )
    found = rows(output, "epsilon")
    last = found[found["round"] == 2].set_index(["algorithm", "site"]).value
    assert last.to_dict() == pytest.approx({
        (label, site): spent(1.3, BATCH / count, 2 * EPOCHS * math.ceil(count / BATCH))
        for label in (m if isinstance(m, str) else m["name"] for m in methods)
        for site, count in THREE.items()
    })  # fmt: skip


LORA = {"name": "mlp", "hidden": [4], "norm": "none", "lora": {"rank": 2}}


@pytest.mark.parametrize("changes", [{"training": {"freeze": ["head"]}}, {"model": LORA}])
def test_frozen_parts_and_low_rank_adapters_cost_as_much(tmp_path, changes):
    found = rows(run(tmp_path, NOISY, rounds=1, **changes), "epsilon").set_index("site").value
    assert found.to_dict() == pytest.approx({
        site: spent(1.3, BATCH / count, EPOCHS * math.ceil(count / BATCH))
        for site, count in TRAINED.items()
    })  # fmt: skip


@pytest.mark.parametrize("codec", ["half", "stc", "dadaquant"])
def test_codecs_transform_what_is_protected_already(tmp_path, codec):
    plain = run(tmp_path, NOISY, output="plain", rounds=2)
    coded = run(tmp_path, NOISY, output="coded", rounds=2, codec=codec)
    wanted = rows(plain, "epsilon").value.to_list()
    assert rows(coded, "epsilon").value.to_list() == wanted
    for site in TRAINED:
        ledger = read_ledger(coded / f"fedavg/seed-0/clients/{site}/ledger.jsonl")
        found = [line["privacy"]["epsilon"] for line in ledger if line["stage"] == "train"]
        assert {*found} <= {*wanted}


@pytest.mark.parametrize("unit", ["case", "site"])
def test_masked_replies_add_up_to_the_mean_of_the_noised_models(tmp_path, unit):
    """Of three sites each number is off by half a step at most, times its weight's share."""
    privacy = {**NOISY, "unit": unit}
    plain = run(tmp_path, privacy, output="plain", sites=THREE, rounds=1)
    masked = run(tmp_path, privacy, output="masked", sites=THREE, rounds=1, secure_mean={})
    one, other = (
        load_file(folder / "fedavg/seed-0/server/global.safetensors") for folder in (plain, masked)
    )
    step = 2.0**-24
    for name, tensor in one.items():
        allowed = len(THREE) * step / 2 / sum(THREE.values()) + 2.0**-23 * tensor.abs()
        assert ((other[name] - tensor).abs() <= allowed).all(), name
    costs = [rows(folder, "epsilon").value.to_list() for folder in (plain, masked)]
    assert costs[0] == costs[1]
    (line,) = (
        line
        for line in read_ledger(masked / "fedavg/seed-0/clients/west/ledger.jsonl")
        if "privacy" in line
    )
    assert line["privacy"]["epsilon"] in costs[1]
    assert "model" not in line["parts"]


@pytest.mark.parametrize(
    ("algorithm", "steps"), [("finetune", None), ("fedbabu", 4), ("finetune+fedavgm", None)]
)
def test_fine_tuning_is_counted_and_a_target_holds_with_it(tmp_path, algorithm, steps):
    own = {"name": algorithm, "epochs": 3}
    training = {} if steps is None else {"local_steps": steps}
    found = rows(run(tmp_path, NOISY, algorithms=[own], training=training), "epsilon")
    each = math.ceil(TRAINED["south"] / BATCH) if steps is None else steps
    total = ROUNDS * (EPOCHS * each if steps is None else steps) + 3 * each
    last = found[(found.site == "south") & (found["round"] == ROUNDS + 1)].value.item()
    assert last == pytest.approx(spent(1.3, BATCH / TRAINED["south"], total))
    privacy = {"target_epsilon": 4.0, "max_grad_norm": 1.0, "noise_seed": "run"}
    target = run(tmp_path, privacy, algorithms=[own], training=training, output="target")
    reached = rows(target, "epsilon")
    values = reached[reached["round"] == ROUNDS + 1].value
    assert len(values) == 2
    assert ((values > 3.9) & (values <= 4.0)).all()


def test_fine_tuning_is_one_release_more_of_a_whole_site(tmp_path):
    privacy = {"unit": "site", "target_epsilon": 9.0, "max_grad_norm": 1.0, "noise_seed": "run"}
    found = rows(run(tmp_path, privacy, algorithms=["finetune"], rounds=2), "epsilon")
    values = found[found["round"] == 3].value
    assert len(values) == 2
    assert ((values > 8.9) & (values <= 9.0)).all()


def test_pooled_data_are_refused_with_the_reason_and_run_with_the_remedy(tmp_path):
    words = r"Pooled trains on the data of all sites in one place, .*: training: \{privacy: null\}"
    with pytest.raises(CollegiumError, match=words):
        run(tmp_path, NOISY, algorithms=["pooled"])
    assert not [*tmp_path.rglob("*.state")]
    plain = {"name": "pooled", "training": {"privacy": None}}
    output = run(tmp_path, NOISY, algorithms=["fedavg", plain], rounds=1)
    assert {*rows(output, "epsilon").algorithm} == {"fedavg"}


def test_a_method_may_go_without_privacy_beside_one_that_has_it(tmp_path):
    plain = {"name": "scaffold", "training": {"privacy": None, "local_epochs": 1}}
    output = run(tmp_path, NOISY, algorithms=["fedavg", plain], rounds=1)
    assert {*rows(output, "epsilon").algorithm} == {"fedavg"}


def test_a_method_may_have_privacy_of_its_own(tmp_path):
    private = {"name": "fedavg", "label": "private", "training": {"privacy": NOISY}}
    config = parse_config(settings(tmp_path, None, algorithms=["fedavg", private], rounds=1))
    assert parse_config(to_dict(config)) == config
    file = tmp_path / "again.yaml"
    file.write_text(to_yaml(config))
    assert load_config(file) == config
    run_experiment(config)
    assert {*rows(Path(config.output), "epsilon").algorithm} == {"private"}


@pytest.mark.parametrize(
    ("privacy", "changes", "words"),
    [
        (
            NOISY,
            {"norm": "batch"},
            r"GhostBatchNorm, a batch normalisation, .* use group or instance normalisation",
        ),
        ({**NOISY, "unit": "site"}, {"norm": "batch"}, "GhostBatchNorm"),
        (NOISY, {"training": {"clip_norm": 1.0}}, r"leave out training.clip_norm"),
        (NOISY, {"training": {"precision": "bf16"}}, "set it to fp32"),
        (NOISY, {"engine": {"together": True}}, "train apart; set it to false"),
        (NOISY, {"scale": "federation"}, r"set table.scale to site or none"),
        ({"noise_multiplier": 1.0}, {}, "privacy: give max_grad_norm"),
        ({**NOISY, "target_epsilon": 1.0}, {}, "either noise_multiplier or target_epsilon"),
        ({**NOISY, "sigma": 1.0}, {}, "sigma"),
    ],
)
def test_what_private_training_cannot_do_is_refused_in_one_sentence(
    tmp_path, privacy, changes, words
):
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, privacy, **changes)
    assert not [*tmp_path.rglob("*.state")]


def test_scaling_by_the_site_is_told_not_to_be_covered(tmp_path, caplog):
    run(tmp_path, NOISY, scale="site", rounds=1)
    assert "epsilon of training.privacy does not count that" in caplog.text


def test_a_delta_that_shows_a_case_openly_is_warned_of(tmp_path, caplog):
    run(tmp_path, {**NOISY, "delta": 0.05}, rounds=1)
    assert "lower it below 1 / cases" in caplog.text


def test_opacus_is_asked_for_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(ConfigError, match=r"training.privacy: opacus is not installed; run: pip"):
        run(tmp_path, NOISY)
