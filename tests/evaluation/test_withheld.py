"""A site that keeps the scores of single cases: means in tables, and the verdict that it made."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from collegium.errors import DataError, ProtocolError
from collegium.evaluation.comparisons import joining_table
from collegium.evaluation.estimates import Estimate
from collegium.evaluation.results import results_frame
from collegium.evaluation.scores import rows_of
from collegium.evaluation.sent_estimates import (
    Sent,
    SentEstimates,
    list_estimates,
    read_estimates,
    store,
)
from collegium.evaluation.tables import method_table
from collegium.evaluation.verdicts import from_record


def rows(
    site: str, algorithm: str, values: list[float], *, withheld: bool, seed: int = 0
) -> Iterator[dict[str, Any]]:
    about = {
        "experiment": "x", "algorithm": algorithm, "seed": seed, "round": 2, "site": site,
        "split": "test", "model": "personal" if algorithm == "local" else "global",
    }  # fmt: skip
    if withheld:
        mean = sum(values) / len(values)
        yield {**about, "case": "mean", "patient": "mean", "metric": "dice", "value": mean}
        yield {**about, "metric": "cases", "value": len(values), "unit": "cases"}
        return
    for number, value in enumerate(values):
        named = {"case": f"c{number}", "patient": f"p{number}"}
        yield {**about, **named, "metric": "dice", "value": value}


def results() -> pd.DataFrame:
    alone, joined = [0.5, 0.52, 0.48, 0.5, 0.51, 0.49, 0.5, 0.53], [0.7] * 8
    return results_frame(
        [
            row
            for site, withheld in (("open", False), ("closed", True))
            for algorithm, values in (("local", alone), ("fedavg", joined))
            for row in rows(site, algorithm, values, withheld=withheld)
        ]
    )


def test_means_stand_in_the_table_and_equal_those_of_the_cases() -> None:
    cells = method_table(results(), "dice").cells
    means = {(cell.algorithm, cell.column): cell.mean for cell in rows_of(cells)}
    assert means["fedavg", "closed"] == pytest.approx(0.7, rel=1e-12)
    assert means["local", "closed"] == pytest.approx(means["local", "open"], rel=1e-12)


def test_the_verdict_of_a_site_with_cases_stands_and_that_of_the_other_is_its_own() -> None:
    found = {c.verdict.site: c.verdict for c in joining_table(results(), "dice").comparisons}
    assert found["open"].outcome == "better"
    for site in ("closed", "average"):
        assert (found[site].outcome, found[site].reason) == ("cannot tell", "withheld")
        assert found[site].sentence == (
            "Cannot tell here: the scores of single patients stay at the site, whose own report "
            "says how sure the difference is."
        )
        assert (found[site].low, found[site].p, found[site].patients) == (None, None, 0)
        assert found[site].joined == pytest.approx(0.7, rel=1e-12)
        assert found[site].difference == pytest.approx(0.7 - 4.03 / 8, rel=1e-12)


def scores_of_two_sites(*withheld: str, sites: str = "ab", seeds: int = 3) -> pd.DataFrame:
    """Return scores of two sites, of three methods and some trainings, that differ a little."""
    draw = np.random.default_rng(5)
    level = {"local": 0.5, "fedavg": 0.6, "ditto": 0.62}
    made = [
        (site, method, (mean + draw.normal(0, 0.05, 9)).tolist(), seed)
        for site in "ab"
        for method, mean in level.items()
        for seed in range(seeds)
    ]
    return results_frame(
        row
        for site, method, values, seed in made
        if site in sites
        for row in rows(site, method, values, withheld=site in withheld, seed=seed)
    )


def sent_by(site: str, output: Path, **options: Any) -> SentEstimates:
    """Send a site's own estimates as the commands do: through JSON and a file."""
    table = joining_table(scores_of_two_sites(sites=site, **options), "dice")
    store(json.loads(json.dumps(list_estimates([table]))), site, output)
    return read_estimates(output)


def test_a_site_that_sends_estimates_has_the_verdicts_of_one_that_sends_scores(
    tmp_path: Path,
) -> None:
    open_ = joining_table(scores_of_two_sites(), "dice")
    closed = joining_table(scores_of_two_sites("b"), "dice", sent=sent_by("b", tmp_path))
    assert {c.verdict.outcome for c in open_.comparisons} == {"better"}
    assert {c.verdict.site for c in open_.comparisons} == {"a", "b", "average"}
    assert closed.comparisons == open_.comparisons


def test_what_a_site_sent_counts_for_this_site_question_and_metric_alone(tmp_path: Path) -> None:
    sent = sent_by("b", tmp_path)
    assert not sent.of("", "adapting", "dice")
    assert not sent.of("mu=1", "joining", "dice")
    assert not sent.of("", "joining", "hd95")
    assert {site for _, site in sent.of("", "joining", "dice")} == {"b"}


def test_sites_with_other_trainings_have_no_common_verdict_if_one_keeps_its_scores(
    tmp_path: Path,
) -> None:
    sent = sent_by("b", tmp_path)
    both = scores_of_two_sites("b")
    table = joining_table(both[(both["site"] == "b") | (both["seed"] < 2)], "dice", sent=sent)
    found = {c.verdict.site: c.verdict.reason for c in table.comparisons}
    assert found == {"a": "", "b": "", "average": "withheld"}


GOOD = {
    "difference": 0.1, "centre": 0.1, "variance": 1e-4, "df": 8.0, "joined": 0.6, "reference": 0.5,
    "arms": [{"scores": [0.6], "residual": 0.0}, {"scores": [0.5], "residual": 0.0}],
    "trainings": [1, 1], "patients": 9, "undefined": 0, "fewest": 9, "fewest_of": "",
    "few_decide": False,
}  # fmt: skip


def entry(**changes: Any) -> dict[str, Any]:
    about = {"variation": "", "question": "joining", "metric": "dice", "algorithm": "fedavg"}
    return {**about, "model": "global", "collapsed": "", "estimate": {**GOOD, **changes}}


def test_an_estimate_is_stored_and_read_again(tmp_path: Path) -> None:
    store([entry()], "b", tmp_path)
    found = read_estimates(tmp_path).of("", "joining", "dice")
    assert found == {(("fedavg", "global"), "b"): Sent(from_record(Estimate, GOOD), "")}


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "text",
        [3],
        [{"estimate": GOOD}],
        [{**entry(), "collapsed": "maybe"}],
        [{**entry(), "collapsed": []}],
        [entry(variance=-1e-4)],
        [entry(variance=None)],
        [entry(df=0.0)],
        [entry(joined=1e999)],
        [entry(difference="much")],
        [entry(difference=None)],
        [entry(patients=-1)],
        [entry(trainings=[0, 1])],
        [entry(arms=[])],
        [entry(arms=[{"scores": [], "residual": 0.0}])],
        [entry(arms=[{"scores": [float("nan")], "residual": 0.0}])],
        [entry(cases=["p1"])],
    ],
)
def test_what_cannot_be_an_estimate_names_its_site_and_is_not_stored(
    sent: Any, tmp_path: Path
) -> None:
    with pytest.raises(ProtocolError, match=r"^site b: "):
        store(sent, "b", tmp_path)
    assert not (tmp_path / "estimates").exists()


def test_a_damaged_file_of_estimates_is_named_with_what_to_do(tmp_path: Path) -> None:
    store([entry()], "b", tmp_path)
    (tmp_path / "estimates" / "b.json").write_text("[")
    with pytest.raises(DataError, match=r"b\.json: .*; remove the file and resume the run$"):
        read_estimates(tmp_path)
