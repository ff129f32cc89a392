"""A site that keeps the scores of single cases: means in tables, no verdict here, and said so."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from collegium.evaluation.comparisons import joining_table
from collegium.evaluation.results import results_frame
from collegium.evaluation.scores import rows_of
from collegium.evaluation.tables import method_table


def rows(
    site: str, algorithm: str, values: list[float], *, withheld: bool
) -> Iterator[dict[str, Any]]:
    about = {
        "experiment": "x", "algorithm": algorithm, "seed": 0, "round": 2, "site": site,
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
