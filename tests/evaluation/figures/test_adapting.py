import json
from statistics import fmean, stdev

import numpy as np
import pytest
from tests.evaluation.figures.conftest import write_run

from collegium.core.seals import seal_json
from collegium.evaluation.figures.adapting import step_figures, time_figures
from collegium.evaluation.figures.source import FigureSource
from collegium.evaluation.figures.vectors import smoothing_figure

SECONDS = {"none": 2.0, "routing": 40.0}
SITES = ("oslo", "turin")


def account(adapter, seed, site):
    about = {
        "adapter": {"name": adapter}, "algorithm": "iopfl", "seed": seed, "site": site, "cases": 4,
        "steps": 2, "seconds": SECONDS[adapter] + seed, "sources": [],
    }  # fmt: skip
    if adapter == "none":
        return {**about, "losses": []}
    shift = SITES.index(site)
    return {
        **about,
        "over": "pass",
        "losses": [{"step": k, "total": 3.0 - k + seed + shift} for k in (0, 1)],
        "loss_deviations": [{"step": k, "total": 0.25 * (k + 1)} for k in (0, 1)],
        "by_step": {
            "metric": "dice", "unit": "", "steps": [0, 1, 2], "mean": [0.5, 0.6, 0.7 + 0.1 * seed],
            "deviation": [0.1] * 3, "cases": [4] * 3, "seconds": [0.0, 8.0, 16.0 + 4 * seed],
        },
    }  # fmt: skip


@pytest.fixture
def source(tmp_path):
    rows = []
    for seed in (0, 1):
        for adapter in SECONDS:
            for site in SITES:
                folder = tmp_path / "iopfl" / f"seed-{seed}" / "outside" / site / adapter
                folder.mkdir(parents=True)
                text = json.dumps(account(adapter, seed, site))
                (folder / "account.json").write_bytes(seal_json(text))
                shift = 0.1 * seed + 0.2 * (adapter != "none")
                rows += [
                    {"experiment": "e", "algorithm": "iopfl", "seed": seed, "round": 3,
                     "site": site, "case": f"c{k}", "patient": f"p{k}", "split": "outside",
                     "model": adapter, "metric": "dice", "value": 0.5 + 0.01 * k + shift}
                    for k in range(4)
                ]  # fmt: skip
    config = {"name": "e", "algorithms": [{"name": "iopfl"}]}
    return FigureSource.read(write_run(tmp_path, rows, config))


def test_a_method_stands_at_its_seconds_per_image_and_its_score(source, by_name):
    (panel,) = by_name(time_figures, source)["adaptation-time"].panels
    plain, routed = panel.series
    assert [plain.name, routed.name] == ["IOP-FL", "IOP-FL + routing"]
    assert routed.x[0] == pytest.approx(fmean([40, 41]) / 4)
    seeds = [0.715 + 0.1 * seed for seed in (0, 1)]
    assert routed.y[0] == pytest.approx(fmean(seeds))
    assert routed.high[0] - routed.y[0] == pytest.approx(stdev(seeds))
    assert panel.x.scale == "log"
    assert plain.look != routed.look


def test_steps_are_over_the_seconds_that_a_case_took(source, by_name):
    figure = by_name(step_figures, source)["adaptation-steps"]
    assert [panel.title for panel in figure.panels] == [*SITES]
    (line,) = figure.panels[0].series
    assert line.name == "IOP-FL + routing"
    assert line.x == pytest.approx((0.0, 2.0, 4.5))
    assert line.y == pytest.approx((0.5, 0.6, 0.75))
    spread = stdev([0.7, 0.8])
    assert line.high == pytest.approx((0.5, 0.6, 0.75 + spread))


def test_losses_have_the_deviation_over_samples(source, by_name):
    (panel,) = by_name(step_figures, source)["test-time-loss"].panels
    assert panel.title == "total"
    oslo, turin = panel.series
    assert [oslo.name, turin.name] == [*SITES]
    assert oslo.y == pytest.approx((3.5, 2.5))
    assert turin.y == pytest.approx((4.5, 3.5))
    assert oslo.high == pytest.approx((3.75, 3.0))
    assert oslo.low == pytest.approx((3.25, 2.0))


def test_a_vector_is_drawn_as_it_is_and_smoothed():
    vector = np.array([1.0, 1.0, 3.0, 3.0])
    plain, strong = smoothing_figure(vector, [100.0]).panels[0].series
    assert plain.x == (0, 1, 2, 3)
    assert plain.y == pytest.approx(vector)
    assert plain.name.startswith("as it is, ")
    # a penalty this large leaves nothing: differences are pulled to zero, the end too
    assert strong.y == pytest.approx((0, 0, 0, 0))
    assert strong.name.startswith("gamma 100, ")
