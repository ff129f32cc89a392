import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collegium.errors import DataError
from collegium.ledger import Ledger
from collegium.report.html import (
    read_run,
    select_on_validation,
    undefined_scores,
    write_report,
)
from collegium.report.ledgers import ledger_summaries
from collegium.report.overlays import draw_overlay
from collegium.results import Row, append_rows, write_table
from collegium.tensors import Tensors

SITES = ("Basel", "Kyoto", "Leeds", "<b>Quito")
METHODS = {
    "local": ("personal",),
    "fedavg": ("global",),
    "fedbn": ("personal",),
    "ditto": ("global", "personal"),
    "my own": ("global",),
}
SEEDS = (0, 1)
ROUNDS = 12
PATIENTS = (9, 8, 7, 4)


def make_output(folder: Path, *, overlays: bool = True) -> Path:
    """A run of 5 algorithms on 4 sites with 2 seeds, as an experiment leaves it."""
    rng = np.random.default_rng(7)
    gain = {"local": 0.0, "fedavg": 0.03, "fedbn": 0.05, "ditto": 0.04, "my own": -0.06}
    rows: list[Row] = []
    for algorithm, models in METHODS.items():
        for seed in SEEDS:
            for place, site in enumerate(SITES):
                base = 0.80 - 0.05 * place + (gain[algorithm] if place != 2 else 0.0)
                about = {
                    "experiment": "vessels",
                    "algorithm": algorithm,
                    "seed": seed,
                    "site": site,
                }
                rows += _rounds(about, models, base, rng)
                rows += _cases(about, models, base, PATIENTS[place], rng)
    write_table(rows, folder)
    config = {
        "name": "vessels",
        "algorithms": [{"name": name, "label": name} for name in METHODS],
        "seeds": list(SEEDS),
        "rounds": ROUNDS,
        "model": {"name": "unet", "channels": [16, 32, 64]},
    }
    versions = {"python": "3.11.9", "torch": "2.9.1", "collegium": "0.1.0"}
    (folder / "run.json").write_text(json.dumps({"config": config, "versions": versions}))
    if overlays:
        _overlays(folder, rng)
    _ledgers(folder)
    return folder


def _ledgers(folder):
    """Two messages a seed and site; from one ledger the first line was removed."""
    for algorithm in METHODS:
        for seed in SEEDS:
            for site in SITES:
                path = folder / algorithm / f"seed-{seed}" / "clients" / site / "ledger.jsonl"
                path.parent.mkdir(parents=True)
                ledger = Ledger(path)
                for number in (1, 2) if algorithm != "local" else ():
                    parts = {"model": Tensors({"weight": torch.zeros(2500)}), "num_examples": 12}
                    ledger.append(parts, bytes(10_100), round=number, exchange=0, method="train")
    broken = folder / "ditto" / "seed-1" / "clients" / "Leeds" / "ledger.jsonl"
    broken.write_text(broken.read_text().splitlines(keepends=True)[1])


def _rounds(about, models, base, rng):
    sent = 0 if about["algorithm"] == "local" else 1_900_000
    for number in range(1, ROUNDS + 1):
        loss = 0.9 * np.exp(-number / 5) + 0.12 + rng.normal(0, 0.01)
        yield Row(**about, round=number, split="train", metric="loss", value=loss,
                  bytes_up=sent, bytes_down=sent, seconds=3.2)  # fmt: skip
        for model in models:
            value = base * (1 - np.exp(-number / 3)) + rng.normal(0, 0.008)
            yield Row(**about, round=number, split="val", model=model, metric="dice", value=value)


def _cases(about, models, base, patients, rng):
    for model in models:
        for patient in range(1, patients + 1):
            hard = 0.02 * np.sin(patient) + rng.normal(0, 0.012)
            names = {"case": f"c{patient:03}", "patient": f"p{patient:03}"}
            about_case = {**about, **names, "round": ROUNDS, "split": "test", "model": model}
            yield Row(**about_case, metric="dice", value=base + hard)
            undefined = patient == 2 and about["site"] == "Kyoto"
            distance = None if undefined else 4.0 - 2 * base + rng.normal(0, 0.2)
            yield Row(**about_case, metric="hd95", value=distance, unit="mm")


def _overlays(folder, rng):
    down, right = np.mgrid[:160, :160]
    for algorithm, models in METHODS.items():
        cell = folder / algorithm / "seed-0" / "overlays"
        cell.mkdir(parents=True)
        index = []
        for site in SITES:
            for model in models:
                for shift, rank in enumerate(("best", "median", "worst")):
                    truth = (down - 80) ** 2 + (right - 80) ** 2 < 40**2
                    guess = (down - 80) ** 2 + (right - 80 - 6 * shift) ** 2 < (38 - 4 * shift) ** 2
                    image = truth * 1.0 + rng.normal(0, 0.4, truth.shape)
                    mask = (down - 80) ** 2 + (right - 80) ** 2 < 76**2
                    picture = draw_overlay(image[None], truth * 1, guess * 1, mask)
                    name = f"{SITES.index(site)}-{model}-{rank}.png"
                    picture.save(cell / name)
                    index.append({
                        "site": site, "model": model, "rank": rank, "case": f"c00{shift + 1}",
                        "metric": "dice", "value": 0.9 - 0.1 * shift, "file": name,
                    })  # fmt: skip
        (cell / "index.json").write_text(json.dumps(index))


class Page(HTMLParser):
    """What a browser would see: text, attributes, and whether every element is closed."""

    VOID = frozenset({"meta", "img", "line", "circle", "br", "link"})

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.attributes, self.tags = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.text.append(data)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return make_output(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(output):
    return Page(write_report(output).read_text(encoding="utf-8"))


def words(page):
    return " ".join(" ".join(page.text).split())


def test_the_page_is_well_formed_and_refers_to_nothing_outside(output, page):
    assert page.open == []
    for tag, name, value in page.attributes:
        if name in ("src", "href", "srcset", "data", "action", "poster"):
            assert value.startswith(("#", "data:")), f"<{tag} {name}={value[:60]}>"
    assert not {"link", "iframe", "object", "embed"}.intersection(page.tags)
    assert "@import" not in (output / "report.html").read_text(encoding="utf-8")
    policies = [v for _, name, v in page.attributes if name == "content" and "default-src" in v]
    assert policies[0].startswith("default-src 'none';")


def test_plotly_is_inlined_once(output):
    assert (output / "report.html").read_text(encoding="utf-8").count("* plotly.js v") == 1


def test_every_site_and_method_is_named(page):
    text = words(page)
    for name in (*SITES, "Local personal", "FedAvg global", "FedBN personal", "Ditto global",
                 "Ditto personal", "my own global"):  # fmt: skip
        assert name in text


def test_names_are_escaped_everywhere(output, page):
    assert "b" not in page.tags
    assert "<b>Quito" not in (output / "report.html").read_text(encoding="utf-8")


def test_a_configuration_cannot_break_out_of_the_page(tmp_path):
    make_output(tmp_path, overlays=False)
    path = tmp_path / "run.json"
    info = json.loads(path.read_text())
    info["config"]["name"] = "</title></script><script>alert(1)</script>"
    path.write_text(json.dumps(info))
    assert "alert(1)</script>" not in write_report(tmp_path).read_text(encoding="utf-8")


def test_the_answer_comes_first_and_is_what_the_data_were_made_to_say(page):
    text = words(page)
    assert text.index("Does joining help this site?") < text.index("All methods at all sites")
    # Basel and Kyoto gain with every good method; Leeds gains nothing; Quito has 4 patients
    assert "Of 4 sites, joining helps 2 and hurts 0; for 2 this run cannot tell." in text
    assert "Cannot tell: 4 patients, and fewer than 6" in text


def test_undefined_scores_are_counted_and_shown(output, page):
    found = undefined_scores(read_run(output).rows)
    # one patient of Kyoto, under 6 methods and 2 seeds
    assert [(e["metric"], e["site"], e["undefined"], e["scores"]) for e in found] == [
        ("hd95", "Kyoto", 2, 16)
    ] * 6
    assert "12 of 672 scores are undefined" in words(page)


def test_each_picture_is_embedded_with_a_text_that_says_what_it_is(page):
    sources = [v for tag, name, v in page.attributes if (tag, name) == ("img", "src")]
    texts = [v for tag, name, v in page.attributes if (tag, name) == ("img", "alt")]
    assert len(sources) == 4 * 6 * 3
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert any(t.startswith("Basel, FedBN personal, worst case c003") for t in texts)


def test_table_headers_have_a_scope(page):
    headers = page.tags.count("th")
    assert headers > 50
    assert sum((tag, name) == ("th", "scope") for tag, name, _ in page.attributes) == headers


def test_pictures_can_be_left_out(tmp_path):
    make_output(tmp_path)
    text = write_report(tmp_path, lambda _: ()).read_text(encoding="utf-8")
    assert "<img" not in text
    assert "This run stored no pictures." in text


def test_a_report_made_twice_has_the_same_bytes(output):
    first = write_report(output).read_bytes()
    assert write_report(output).read_bytes() == first


def test_the_method_of_an_answer_is_chosen_on_validation_alone(tmp_path):
    about: dict[str, Any] = {"experiment": "e", "seed": 0, "site": "A"}
    rows = [
        Row(**about, algorithm=algorithm, round=number, split="val", model="global",
            metric="dice", value=value)
        for algorithm, values in (("local", (0.9, 0.9)), ("a", (0.5, 0.7)), ("b", (0.8, 0.1)))
        for number, value in enumerate(values, start=1)
    ]  # fmt: skip
    rows += [
        Row(**about, algorithm=algorithm, round=2, case="c001", patient="p001", split="test",
            model="global", metric="dice", value=value)
        for algorithm, value in (("local", 0.5), ("a", 0.9), ("b", 0.2))
    ]  # fmt: skip
    write_table(rows, tmp_path)
    assert select_on_validation(read_run(tmp_path)) == {"A": ("b", "global")}


def test_without_training_alone_the_page_says_so(tmp_path):
    row = Row(experiment="e", algorithm="fedavg", seed=0, round=1, site="A", case="c001",
              patient="p001", split="test", model="global", metric="dice", value=0.5)  # fmt: skip
    write_table([row], tmp_path)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Nobody trained alone in this run" in words(page)
    assert page.open == []


def test_an_unfinished_run_is_reported_from_the_rows_of_its_cells(tmp_path):
    row = Row(experiment="e", algorithm="fedavg", seed=3, round=1, site="A", split="train",
              metric="loss", value=0.5, bytes_up=7)  # fmt: skip
    append_rows(tmp_path / "fedavg" / "seed-3" / "rows.jsonl", [row])
    text = words(Page(write_report(tmp_path).read_text(encoding="utf-8")))
    assert "No test scores yet of: FedAvg, seed 3." in text
    assert "No test case has been scored yet." in text


def test_the_one_that_trains_alone_is_known_by_its_name_in_the_configuration(tmp_path):
    make_output(tmp_path, overlays=False)
    path = tmp_path / "run.json"
    info = json.loads(path.read_text())
    info["config"]["algorithms"] = [{"name": "fedavg"}, {"name": "local", "label": "ditto"}]
    path.write_text(json.dumps(info))
    run = read_run(tmp_path)
    assert run.local == "ditto"
    assert run.order == ("ditto", "fedavg", "fedbn", "local", "my own")


def test_ledgers_are_summed_over_seeds_and_one_broken_chain_breaks_the_sum(output, page):
    found = ledger_summaries(output)
    # 2 seeds x 2 messages; 2500 floats of 4 bytes and the two digits of 12
    assert found["ditto"]["Basel"] == {
        "parts": {
            "model": {"messages": 4, "bytes": 40_000},
            "num_examples": {"messages": 4, "bytes": 8},
        },
        "messages": 4, "bytes": 40_400, "intact": True, "missing": False,
    }  # fmt: skip
    assert found["ditto"]["Leeds"]["intact"] is False
    assert words(page).count("Broken") == 1
    assert found["local"]["Basel"]["missing"] is True
    assert words(page).count("nothing 0 0 B none kept") == len(SITES)


def test_no_results_and_a_damaged_description_are_named(tmp_path):
    with pytest.raises(DataError, match="no results to report yet"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"run\.json: the description of the run cannot be read"):
        write_report(tmp_path)
