import re
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from collegium.evaluation.report.html import render
from collegium.evaluation.report.overlays import draw_layers, prepare_case
from collegium.evaluation.report.pages import site_ids, undefined_scores
from collegium.evaluation.report.pictures import BUDGET, Overlay
from collegium.evaluation.report.reading import RunOutput
from collegium.evaluation.results import AlgorithmLabels, ResultRow, results_frame
from collegium.evaluation.scores import Where
from collegium.evaluation.traffic import count_traffic


def test_pages_of_sites_have_ids_of_their_own():
    assert site_ids(["hrf", "CHASE_db1", "<b>Quito", "b quito", "\u6771\u4eac", "\u00fc"]) == {
        "hrf": "site-hrf",
        "CHASE_db1": "site-chase_db1",
        "<b>Quito": "site-b-quito",
        "b quito": "site-b-quito-2",
        "\u6771\u4eac": "site-unnamed",
        "\u00fc": "site-unnamed-2",
    }


def test_undefined_scores_are_counted_inside_and_outside():
    about: dict[str, Any] = {"experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 1,
             "site": "A", "metric": "hd95", "patient": "p"}  # fmt: skip
    rows = [
        dict(**about, case=f"c{number}", split=split, model=model, value=value)
        for split, model in (("test", "global"), ("outside", "tent"))
        for number, value in enumerate((None, 1.0, 2.0))
    ]
    assert undefined_scores(results_frame(rows)) == [
        {"metric": "hd95", "name": name, "site": "A", "undefined": 1, "scores": 3}
        for name in ("FedAvg + Tent", "FedAvg global")
    ]


def run_of(rows: Iterable[ResultRow], order: tuple[str, ...]) -> RunOutput:
    labels = AlgorithmLabels((), order, "local", frozenset())
    return RunOutput({}, results_frame(rows), labels, "dice")


SITES = ("Aachen", "Basel", "Chennai", "Dublin", "Essen", "Fukuoka")
METHODS = ("local", *(f"method-{number:02}" for number in range(19)))


def invented_rows() -> Iterator[ResultRow]:
    """Six sites and 20 methods: 60 rounds, and 12 cases inside and, with two adapters, outside."""
    rng = np.random.default_rng(0)
    for algorithm, site in product(METHODS, SITES):
        about: dict[str, Any] = {"experiment": "e", "algorithm": algorithm, "seed": 0, "site": site}
        for number in range(1, 61):
            loss, score = 1 / number + 0.01 * rng.random(2)
            yield dict(**about, round=number, split="train", metric="loss", value=loss)
            yield dict(**about, round=number, split="val", model="global", metric="dice",
                      value=1 - score)  # fmt: skip
        for split, model in (("test", "global"), ("outside", "none"), ("outside", "tent")):
            for case in range(12):
                yield dict(**about, round=60, split=split, model=model, metric="dice",
                          value=0.8 + 0.01 * rng.standard_normal(), case=f"{split}-c{case:03}",
                          patient=f"{split}-p{case:03}")  # fmt: skip


def invented_overlays(folder: Path) -> Iterator[Overlay]:
    """Layers of 512 pixels as thin vessels fill them, 10 kB or so each, none like another.

    Whatever follows the end of a PNG is no part of the picture, but makes it another file.
    """
    rng = np.random.default_rng(0)
    truth, guess = (np.kron(rng.random((256, 256)) > 0.9, np.ones((2, 2), int)) for _ in range(2))
    contents = {}
    for name, picture in draw_layers(prepare_case(truth[None] * 1.0, truth, guess)).items():
        picture.save(buffer := BytesIO(), "PNG")
        contents[name] = buffer.getvalue()
        (folder / name).write_bytes(contents[name])
    for site, algorithm, (where, model), (number, rank) in product(
        SITES, METHODS, PLACES, enumerate(("best", "median", "worst", "common"))
    ):
        layers = {"image": folder / "image", "truth": folder / "truth"}
        for name in ("prediction", "errors"):
            layers[name] = folder / f"{site}-{algorithm}-{model}-{rank}-{name}"
            layers[name].write_bytes(contents[name] + layers[name].name.encode())
        yield Overlay(site, algorithm, 0, model, rank, f"c{number}", "dice", 0.5, folder / "image",
                      layers, (), where)  # fmt: skip


PLACES: tuple[tuple[Where, str], ...] = (
    ("inside", "global"), ("outside", "tent"),
)  # fmt: skip


def test_a_large_report_stays_under_25_megabytes_and_says_what_found_no_room(tmp_path):
    overlays = list(invented_overlays(tmp_path))
    assert len(overlays) == 6 * 20 * 2 * 4
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 1.05 * BUDGET
    run = run_of(invented_rows(), METHODS)
    page = render(run, overlays, {})
    assert 15e6 < len(page.encode()) < 25e6
    (left_out,) = map(int, re.findall(r"<strong>(\d+) pictures found no room</strong>", page))
    pages = page.split('<section class="page')
    shown = [part.count('class="case"') for part in pages if 'id="site-' in part]
    assert sum(shown) == len(overlays) - left_out
    assert 0 < left_out < 0.5 * len(overlays)
    # the first method of every site has its pictures, inside and outside
    (cases,) = (part for part in pages if 'id="cases"' in part)
    for site in SITES:
        assert cases.count(f'data-site="{site}"') == 4
        assert cases.count(f'data-site="{site}, outside"') >= 4
    assert max(shown) - min(shown) <= 2 * 4  # a turn inside, and one outside


def drawn_cases(page: str) -> str:
    (cases,) = (part for part in page.split('<section class="page') if 'id="cases"' in part)
    return " ".join(cases.split())


@pytest.mark.parametrize(
    ("drawn", "first", "caption"),
    [
        (["personal"], "Ditto personal",
         "Of Ditto personal; none were drawn of Ditto global, the method of Basel's answer."),
        (["personal", "global"], "Ditto global", ""),
        ([], "Alpha global",
         "Of Alpha global; none were drawn of Ditto global, the method of Basel's answer."),
    ],
)  # fmt: skip
def test_cases_of_an_answer_without_pictures_are_those_of_its_algorithms_other_model(
    tmp_path: Path, drawn: list[str], first: str, caption: str
) -> None:
    """Ditto's global model did best on validation."""
    values = {("local", "personal"): 0.5, ("Alpha", "global"): 0.6, ("ditto", "global"): 0.9,
              ("ditto", "personal"): 0.7}  # fmt: skip
    rows = [
        {
            "experiment": "e",
            "algorithm": algorithm,
            "seed": 0,
            "round": 1,
            "site": "Basel",
            "split": split,
            "model": model,
            "metric": "dice",
            "value": value,
            "case": case,
            "patient": case,
        }
        for (algorithm, model), value in values.items()
        for split, case in (("val", ""), *(("test", f"c{number}") for number in range(6)))
    ]
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    overlays = [
        Overlay("Basel", algorithm, 0, model, "best", "c1", "dice", 0.5, tmp_path / "a.png")
        for algorithm, model in (("Alpha", "global"), *(("ditto", model) for model in drawn))
    ]
    cases = drawn_cases(render(run_of(rows, ("local", "Alpha", "ditto")), overlays, {}))
    assert re.findall(r"<h4>([^<]*)</h4>", cases) == [first]
    assert set(re.findall(r'data-method="([^"]*)"', cases)) == {first}
    found = re.findall(r'<p class="soft">([^<]*)</p>', cases.replace("&#39;", "'"))
    assert found == ([caption] if caption else [])
    assert "test case under the method of its answer" in cases


def test_without_an_answer_cases_are_those_of_the_first_method(tmp_path: Path) -> None:
    row = {
        "experiment": "e",
        "algorithm": "ditto",
        "seed": 0,
        "round": 1,
        "site": "Basel",
        "split": "test",
        "model": "personal",
        "metric": "dice",
        "value": 0.5,
        "case": "c1",
        "patient": "c1",
    }
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    overlay = Overlay(
        "Basel", "ditto", 0, "personal", "best", "c1", "dice", 0.5, tmp_path / "a.png"
    )
    cases = drawn_cases(render(run_of([row], ("ditto",)), [overlay], {}))
    assert "test case under the first method, and common ones" in cases
    assert "none were drawn" not in cases


def round_row(algorithm="fedavg", seed=0, site="A", number=1, **changes):
    return dict(experiment="e", algorithm=algorithm, seed=seed, site=site, round=number,
               split="train", metric="loss", value=1.0, **changes)  # fmt: skip


def test_traffic_is_summed_over_sites_and_rounds_and_averaged_over_seeds():
    rows = [
        round_row(seed=seed, site=site, number=number, bytes_up=up, bytes_down=10, seconds=0.5)
        for seed, up in ((0, 100), (1, 300))
        for site in ("A", "B")
        for number in (1, 2)
    ]
    (found,) = count_traffic(results_frame(rows), ["fedavg", "never ran"]).itertuples()
    # seed 0: 2 sites x 2 rounds x 100 = 400; seed 1: 1200; mean 800, per round half of it
    assert (found.algorithm, found.name) == ("fedavg", "FedAvg")
    assert (found.up, found.down, found.seconds) == (800, 40, 2.0)
    assert (found.up_round, found.down_round) == (400, 20)


def test_folds_are_averaged_like_seeds():
    rows = [round_row(fold=fold, site=site, bytes_up=100) for fold, site in ((0, "A"), (1, "B"))]
    (found,) = count_traffic(results_frame(rows), ["fedavg"]).itertuples()
    assert (found.up, found.up_round) == (100, 100)


def test_traffic_by_site_is_that_of_each_site_alone():
    rows = [
        round_row(algorithm, seed=seed, site=site, number=number, bytes_up=up + seed)
        for algorithm, up in (("ditto", 7), ("fedavg", 100))
        for seed in (0, 1)
        for site, last in (("B", 2), ("A", 3))
        for number in range(1, last + 1)
    ]
    results, order = results_frame(rows), ["fedavg", "ditto"]
    found = count_traffic(results, order, by=("site",))
    own = {site: found[found["site"] == site] for site in ("A", "B")}
    assert own["A"]["up"].tolist() == [301.5, 22.5]  # in the order of the algorithms
    for site, rows_of_site in own.items():
        alone = count_traffic(results[results["site"] == site], order)
        assert rows_of_site.drop(columns="site").reset_index(drop=True).equals(alone)


def test_totals_of_the_case_rows_count_what_went_before_and_after_the_rounds():
    rows = [round_row(bytes_up=100), round_row(bytes_up=100, number=2)]
    about: dict[str, Any] = {"experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 2,
             "site": "A", "case": "c001", "patient": "p001", "metric": "dice",
             "value": 0.5}  # fmt: skip
    rows.append(dict(**about, split="test", model="global", bytes_up=260))
    rows.append(dict(**about, split="outside", model="tent", seconds=99.0))  # no training
    (found,) = count_traffic(results_frame(rows), ["fedavg"]).itertuples()
    assert (found.up, found.up_round, found.seconds) == (260, 100, 0)
