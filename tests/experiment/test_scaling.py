"""Scaling by all sites together: what leaves, what comes of it, and that models carry it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from collegium.core.message import Message
from collegium.errors import EgressError, ProtocolError
from collegium.evaluation.report.ledgers import ledger_summaries
from collegium.evaluation.scores import rows_of
from collegium.experiment.config.experiment import ExperimentConfig, parse_config
from collegium.experiment.federation import OpenedExperiment, open_configured
from collegium.experiment.grid import jobs_of
from collegium.experiment.runner import collect_rows, read_run_config, run_experiment
from collegium.experiment.scaling import (
    EXCHANGE,
    FILE,
    FeatureRanges,
    FeatureSums,
    agree_on_scaling,
    read_scaling,
)
from collegium.models.standardised import Standardised
from collegium.runtime.ledger import read_ledger, summarise

Values = NDArray[np.float64]


def draw(seed: int, count: int, shift: float) -> Values:
    """Rows of two numbers on different scales, some of them missing."""
    rng = np.random.default_rng(seed)
    values = np.round(rng.normal([shift, 1000 * shift], [2, 500], (count, 2)), 3)
    values[rng.random((count, 2)) < 0.2] = np.nan
    return values


def write(path: Path, values: Values) -> None:
    """Split the rows in three: of ten, six to train on, two each to validate and test."""
    splits = ["train"] * 6 + ["val"] * 2 + ["test"] * 2
    lines = ["age,crea,ward,stage,fold,ill"]
    for place, row in enumerate(values):
        jobs = ["" if np.isnan(value) else str(value) for value in row]
        stage = ("I", "II", "x")[place % 3]
        lines.append(",".join([*jobs, "4", stage, splits[place % 10], str(place // 2 % 2)]))
    path.write_text("\n".join(lines) + "\n")


TABLES = {"north": draw(0, 40, 3.0), "south": draw(1, 20, -5.0)}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    for name, values in TABLES.items():
        write(folder / f"{name}.csv", values)
    return {
        "name": "tiny",
        "federation": {
            "name": "two",
            "root": str(folder),
            "sites": {name: {"table": f"{name}.csv"} for name in TABLES},
            "task": {"name": "classification", "classes": ["0", "1"]},
            "table": {
                "label": "ill",
                "split": "fold",
                "numeric": ["age", "crea", "ward"],
                "categorical": {"stage": ["I", "II"]},
                "indicators": True,
                "scale": "federation",
            },
        },
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"batch_size": 8, "local_epochs": 1, "lr": 0.05},
        "rounds": 2,
        "algorithms": ["fedavg", "fedbn", "ditto"],
        "output": str(folder / "run"),
        **changes,
    }


def pooled() -> tuple[Values, Values]:
    """Mean and population standard deviation of all training rows, by numpy."""
    train = [values[[i for i in range(len(values)) if i % 10 < 6]] for values in TABLES.values()]
    rows = np.float32(np.concatenate(train)).astype(np.float64)
    return np.nanmean(rows, 0), np.nanstd(rows, 0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    config = parse_config(settings(tmp_path_factory.mktemp("scaling")))
    run_experiment(config)
    return config


def ask(config: ExperimentConfig, folder: Path) -> Any:
    table = config.federation.table
    assert table is not None
    agree_on_scaling(open_configured(config, splits=folder / "splits"), table, folder)
    return read_scaling(folder / FILE)


def test_the_scaling_is_that_of_all_training_rows_pooled(tmp_path: Path) -> None:
    scaling = ask(parse_config(settings(tmp_path)), tmp_path)
    mean, deviation = pooled()
    assert scaling.shift == pytest.approx([*mean, 4])
    assert scaling.factor == pytest.approx([*(1 / deviation), 0])


def test_the_exchange_is_declared_and_every_site_keeps_a_line_of_it(tmp_path: Path) -> None:
    assert {*FeatureSums.sends} == {"feature_sums"}
    ask(parse_config(settings(tmp_path)), tmp_path)
    for name in TABLES:
        path = tmp_path / EXCHANGE / "clients" / name / "ledger.jsonl"
        (line,) = read_ledger(path)
        assert (line["method"], [*line["parts"]]) == ("describe_columns", ["feature_sums"])
        assert summarise(path)["intact"]


@pytest.mark.parametrize(
    "policy",
    [{"forbid": ["feature_sums"]}, {"allow": ["model", "num_examples", "progress", "scores"]}],
)
def test_a_site_that_keeps_its_sums_is_said_before_anything_leaves(
    tmp_path: Path, policy: dict[str, Any]
) -> None:
    plain = settings(tmp_path, algorithms=["fedavg"])
    plain["federation"]["sites"]["south"] |= policy
    with pytest.raises(EgressError, match=r"'feature_sums' .* policy of site 'south' forbids"):
        run_experiment(parse_config(plain))
    assert not [*(tmp_path / "run").rglob("ledger.jsonl")]


def ranged(folder: Path, **changes: Any) -> dict[str, Any]:
    plain = settings(folder, **changes)
    plain["federation"]["table"]["scale_by"] = "range"
    return plain


def test_the_range_is_that_of_all_training_rows_and_leaves_as_a_part_of_its_own(
    tmp_path: Path,
) -> None:
    scaling = ask(parse_config(ranged(tmp_path)), tmp_path)
    train = [values[[i for i in range(len(values)) if i % 10 < 6]] for values in TABLES.values()]
    rows = np.float32(np.concatenate(train)).astype(np.float64)
    low, high = np.nanmin(rows, 0), np.nanmax(rows, 0)
    assert scaling.shift == pytest.approx([*((low + high) / 2), 4])
    assert scaling.factor == pytest.approx([*(2 / (high - low)), 0])
    for name in TABLES:
        path = tmp_path / EXCHANGE / "clients" / name / "ledger.jsonl"
        (line,) = read_ledger(path)
        assert [*line["parts"]] == ["feature_ranges"]


def test_a_site_without_a_value_leaves_the_range_to_the_others(tmp_path: Path) -> None:
    plain = ranged(tmp_path)
    text = (tmp_path / "south.csv").read_text().splitlines()
    cut = [text[0], *(",".join(["", *line.split(",")[1:]]) for line in text[1:])]
    (tmp_path / "south.csv").write_text("\n".join(cut) + "\n")
    scaling = ask(parse_config(plain), tmp_path)
    ages = TABLES["north"][[i for i in range(40) if i % 10 < 6], 0].astype(np.float32)
    assert scaling.factor[0] == pytest.approx(2 / (np.nanmax(ages) - np.nanmin(ages)), rel=1e-6)


@pytest.mark.parametrize("where", ["site", "federation"])
def test_a_run_trains_on_numbers_scaled_by_their_range(tmp_path: Path, where: str) -> None:
    plain = ranged(tmp_path, algorithms=["fedavg"])
    plain["federation"]["table"]["scale"] = where
    config = parse_config(plain)
    output = run_experiment(config)
    assert {r.site for r in rows_of(collect_rows(config)) if r.split == "test"} == {*TABLES}
    federation = OpenedExperiment(config).federation(jobs_of(config)[0])
    rows = [
        torch.cat([d.example(i).batch["image"] for i in range(len(d))])
        for d in (site.train for site in federation.sites.values())
    ]
    if where == "federation":
        stored = load_file(output / "fedavg/seed-0/server/global.safetensors")
        rows = [torch.cat([(r - stored["shift"]) * stored["factor"] for r in rows])]
    for values in rows:
        known = values[:, :3].nan_to_num(0)
        assert known.amin(0).tolist() == pytest.approx([-1, -1, 0], abs=1e-6)
        assert known.amax(0).tolist() == pytest.approx([1, 1, 0], abs=1e-6)


def test_a_site_that_keeps_its_ranges_is_said_before_anything_leaves(tmp_path: Path) -> None:
    plain = ranged(tmp_path, algorithms=["fedavg"])
    plain["federation"]["sites"]["south"] |= {"forbid": ["feature_ranges"]}
    with pytest.raises(EgressError, match=r"'feature_ranges' .* policy of site 'south' forbids"):
        run_experiment(parse_config(plain))
    assert not [*(tmp_path / "run").rglob("ledger.jsonl")]


@pytest.mark.parametrize("column", [[1.0], {}, {"smallest": [], "largest": [1.0, 2.0]}])
def test_an_answer_of_another_form_is_refused_by_site_and_column(column: Any) -> None:
    reply = Message({"feature_ranges": {"unit": "", "cases": 1, "columns": {"age": column}}})
    with pytest.raises(
        ProtocolError, match=r"site 'north' did not send one number as .* of column"
    ):
        FeatureRanges(("age",)).described("north", reply)


def test_a_second_call_does_not_ask_again(tmp_path: Path) -> None:
    config = parse_config(settings(tmp_path))
    first, second = ask(config, tmp_path), ask(config, tmp_path)
    assert first.shift.tolist() == second.shift.tolist()
    assert first.factor.tolist() == second.factor.tolist()
    assert len([*read_ledger(tmp_path / EXCHANGE / "clients/north/ledger.jsonl")]) == 1


def test_the_network_scales_numbers_and_nothing_else(finished: ExperimentConfig) -> None:
    network = OpenedExperiment(finished).federation(jobs_of(finished)[0]).network()
    assert isinstance(network, Standardised)
    mean, deviation = pooled()
    assert network.shift.numpy() == pytest.approx([*mean, 4, *[0] * 6], rel=1e-6)
    assert network.factor.numpy() == pytest.approx([*(1 / deviation), 0, *[1] * 6], rel=1e-6)
    seen = []
    network.network.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network.eval()(torch.tensor([[mean[0], np.nan, 9.0, 0, 1, 0, 0, 1, 0]], dtype=torch.float32))
    assert seen[0].tolist()[0] == pytest.approx([0, 0, 0, 0, 1, 0, 0, 1, 0], abs=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        "fedavg/seed-0/server/global",
        "fedbn/seed-0/clients/north/personal",
        "ditto/seed-0/clients/south/personal",
        "ditto/seed-0/server/deployed/global",
    ],
)
def test_every_model_carries_the_scaling(finished: ExperimentConfig, model: str) -> None:
    stored = load_file(Path(finished.output) / f"{model}.safetensors")
    mean, deviation = pooled()
    assert stored["shift"].numpy() == pytest.approx([*mean, 4, *[0] * 6], rel=1e-6)
    assert stored["factor"].numpy() == pytest.approx([*(1 / deviation), 0, *[1] * 6], rel=1e-6)


def test_all_algorithms_train_from_one_exchange(finished: ExperimentConfig) -> None:
    output = Path(finished.output)
    assert (output / FILE).is_file()
    for name in TABLES:
        assert len([*read_ledger(output / EXCHANGE / "clients" / name / "ledger.jsonl")]) == 1
    rows = rows_of(collect_rows(finished))
    tested = [r for r in rows if r.split == "test" and r.metric == "accuracy"]
    for site, values in TABLES.items():
        here = [r for r in tested if (r.site, r.algorithm, r.model) == (site, "fedavg", "global")]
        assert len(here) == len(values) // 5
    assert {row.algorithm for row in tested} == {"fedavg", "fedbn", "ditto"}
    assert ledger_summaries(output)["scaling"]["north"]["parts"]["feature_sums"]["messages"] == 1
    assert (output / "report.html").is_file()


def test_a_resumed_run_does_not_ask_again(tmp_path: Path) -> None:
    config = parse_config(settings(tmp_path, algorithms=["fedavg"]))
    output = run_experiment(config)
    before = (output / FILE).read_bytes()
    rows = output / "fedavg/seed-0/rows.jsonl"
    kept = rows.read_bytes()
    rows.unlink()
    run_experiment(read_run_config(output))
    assert rows.read_bytes() == kept
    assert (output / FILE).read_bytes() == before
    assert len([*read_ledger(output / EXCHANGE / "clients/north/ledger.jsonl")]) == 1
