from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from collegium.errors import ConfigError
from collegium.evaluation.figures import recorded
from collegium.evaluation.results import results_frame


def row(metric: str, value: float, **more: Any) -> dict[str, Any]:
    about = {"experiment": "e", "algorithm": "iopfl", "seed": 0, "round": 1, "site": ""}
    return {**about, "split": "train", "metric": metric, "value": value, **more}


def records(frame: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(found) for found in frame[list(columns)].to_numpy().tolist()]


def test_a_layer_moved_as_far_as_its_tensors_together_in_the_order_of_the_model() -> None:
    results = results_frame(
        [
            row("layer_distance/up.conv.weight", 3.0, site="A"),
            row("layer_distance/up.conv.bias", 4.0, site="A"),
            row("layer_distance/down.weight", 2.0, site="A"),
            row("layer_distance/scale", 0.5, site="A"),
            row("layer_distance/up.conv.weight", 6.0, site="A", round=2),
            row("layer_distance/up.conv.bias", 8.0, site="A", round=2),
            row("layer_distance/down.weight", 1.0, site="B", seed=1),
            row("loss", 9.0, site="A"),
        ]
    )
    found = recorded.layer_distances(results)
    assert list(found) == [*recorded.RUN, "site", "round", "layer", "value"]
    assert records(found, "seed", "site", "round", "layer", "value") == [
        (0, "A", 1, "up.conv", 5.0),
        (0, "A", 1, "down", 2.0),
        (0, "A", 1, "scale", 0.5),
        (0, "A", 2, "up.conv", 10.0),
        (1, "B", 1, "down", 1.0),
    ]


def test_both_sides_of_a_round_stand_beside_each_other() -> None:
    results = results_frame(
        [
            row("consistency/after", 0.5, algorithm="grace", round=2),
            row("consistency/before", 0.25, algorithm="grace", round=2),
            row("consistency/before", -0.5, algorithm="grace", seed=3),
            row("consistency/after", 0.0, algorithm="grace", seed=3),
            row("consistency/before/A", 9.0, algorithm="grace+distance"),
            row("consistency/before", 0.1, algorithm="grace", round=3),
        ]
    )
    found = recorded.consistencies(results)
    assert list(found) == [*recorded.RUN, "round", "before", "after"]
    assert records(found, "algorithm", "seed", "round", "before", "after") == [
        ("grace", 0, 2, 0.25, 0.5),
        ("grace", 3, 1, -0.5, 0.0),
    ]


def test_a_box_has_its_numbers_in_order() -> None:
    box = {"max": 6.0, "min": 1.0, "q1": 2.0, "q3": 5.0, "median": 3.0, "mean": 4.0}
    results = results_frame([row(f"sdwd/{name}", value) for name, value in box.items()])
    found = recorded.weight_deviations(results)
    assert records(found, "round", *recorded.BOX) == [(1, 1.0, 2.0, 3.0, 5.0, 6.0, 4.0)]


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        (recorded.layer_distances, [*recorded.RUN, "site", "round", "layer", "value"]),
        (recorded.consistencies, [*recorded.RUN, "round", "before", "after"]),
        (recorded.weight_deviations, [*recorded.RUN, "round", *recorded.BOX]),
    ],
)
def test_a_run_without_them_has_an_empty_table(
    table: Callable[[pd.DataFrame], pd.DataFrame], columns: list[str]
) -> None:
    found = table(results_frame([row("loss", 1.0, site="A")]))
    assert (len(found), list(found)) == (0, columns)


ACCOUNT = {"adapter": {"name": "routing", "label": "ours"}, "algorithm": "iopfl", "seed": 2,
           "site": "elm", "over": "pass"}  # fmt: skip


def test_losses_of_passes_have_their_deviations_where_there_are_some() -> None:
    losses = [{"step": 0, "total": 0.5, "entropy": 0.25}, {"step": 1, "total": 0.375}]
    spread = [{"step": 0, "total": 0.125, "entropy": 0.0625}, {"step": 1, "total": 0.03125}]
    plain = {**ACCOUNT, "adapter": {"name": "dsbn"}, "losses": losses[1:]}
    by_batch = {**ACCOUNT, "over": "batch", "losses": losses}
    found = recorded.adaptation_losses(
        [{**ACCOUNT, "losses": losses, "loss_deviations": spread}, plain, by_batch]
    )
    assert list(found) == recorded.LOSSES
    assert records(found[:3], "adapter", "seed", "site", "step", "loss", "mean", "deviation") == [
        ("ours", 2, "elm", 0, "total", 0.5, 0.125),
        ("ours", 2, "elm", 0, "entropy", 0.25, 0.0625),
        ("ours", 2, "elm", 1, "total", 0.375, 0.03125),
    ]
    assert records(found[3:], "adapter", "step", "mean") == [("dsbn", 1, 0.375)]
    assert np.isnan(found["deviation"][3])


def test_steps_have_a_row_each_and_what_is_undefined_is_nan() -> None:
    by_step = {
        "metric": "dice", "unit": "", "steps": [0, 1], "mean": [0.5, None],
        "deviation": [0.125, None], "cases": [3, 0], "seconds": [1.5, 4.0],
    }  # fmt: skip
    found = recorded.adaptation_steps([ACCOUNT, {**ACCOUNT, "by_step": by_step}])
    assert list(found) == recorded.STEPS
    first = ("iopfl", "ours", 2, "elm", 0, 1.5, "dice", "", 0.5, 0.125, 3)
    assert records(found[:1], *recorded.STEPS) == [first]
    assert records(found[1:], "step", "seconds", "cases") == [(1, 4.0, 0)]
    assert found.iloc[1][["mean", "deviation"]].isna().all()
    assert recorded.adaptation_steps([ACCOUNT]).empty


def test_a_smoothed_vector_is_that_of_the_reference(golden: Any) -> None:
    """Reference values of the paper's problem, by an independent solver."""
    for gamma in (0.1, 0.5, 10.0):
        case = golden(f"cer_prox_gamma{gamma}")
        found = recorded.smoothed(case["inputs"]["g"], [gamma], absolute=True)
        before, after = (rows["value"] for _, rows in found.groupby("strength"))
        np.testing.assert_allclose(before, case["inputs"]["g"], rtol=1e-6)
        np.testing.assert_allclose(after, case["expected"]["nabla"], atol=1e-6)


def test_strengths_are_in_units_of_the_mean_magnitude_and_more_smoothing_is_fewer_bytes() -> None:
    vector = np.cumsum(np.random.default_rng(0).normal(size=2000))
    found = recorded.smoothed(vector, [0.5, 5.0])
    assert list(found) == ["strength", "position", "value", "bytes"]
    assert records(found.groupby("strength", as_index=False).size(), "strength", "size") == [
        (0.0, 2000), (0.5, 2000), (5.0, 2000),
    ]  # fmt: skip
    sizes = found.groupby("strength")["bytes"].unique().map(list).tolist()
    assert all(len(each) == 1 for each in sizes)
    assert sizes[0] > sizes[1] > sizes[2]
    unit = np.abs(vector.astype(np.float32)).mean()
    same = recorded.smoothed(vector, [0.5 * unit], absolute=True)
    np.testing.assert_allclose(
        same["value"][2000:], found["value"][2000:4000], rtol=1e-5, atol=1e-6
    )
    assert found["position"][:2000].tolist() == list(range(2000))


@pytest.mark.parametrize("vector", [[], torch.ones(2, 2)])
def test_what_is_no_vector_is_refused(vector: Any) -> None:
    with pytest.raises(ConfigError, match=r"has the shape \(.*\); give one axis"):
        recorded.smoothed(vector, [1.0])
