"""Tables and comparisons of 200,000 scores compared with the same work in pandas and SciPy.

Eleven methods, six sites, three seeds, and 1010 cases of 253 patients at each site.

- The table of methods by sites, mean and standard deviation over seeds, compared with pandas'
  grouping of the same frame; the means are the same. Ours has summaries and ranks besides, and sums
  exactly, so that no digit depends on the order of the rows.
- "Does joining help this site?" at each site and over all, compared with the means by patient of
  pandas and a paired t-test of SciPy; the differences are the same. Ours has the trainings' bar,
  smallest detectable differences, and how many patients or trainings would be needed besides.

One thread, processor seconds measured in turns, the minimum of each.

    python benchmarks/tables.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from common.measuring import in_turns, verdict

from collegium.evaluation.comparisons import ComparisonTable, joining_table
from collegium.evaluation.results import results_frame
from collegium.evaluation.tables import MethodTable, method_table

MAX_TABLE, MAX_JOINING = 6.0, 7.0
"""Limits of the time by that of the reference."""

ALL = "average"


def make_results(cases: int) -> pd.DataFrame:
    """Return scores of a large experiment, four cases of a patient."""
    rng = np.random.default_rng(0)
    return results_frame(
        {
            "experiment": "e", "algorithm": algorithm, "seed": seed, "round": 5, "site": site,
            "case": f"c{case}", "patient": f"p{case // 4}", "split": "test", "model": "personal",
            "metric": "dice", "value": float(value),
        }
        for seed in range(3)
        for algorithm in ("local", *(f"method {number}" for number in range(10)))
        for site in "ABCDEF"
        for case, value in enumerate(rng.random(cases))
    )  # fmt: skip


def pandas_table(results: pd.DataFrame) -> pd.DataFrame:
    """Return mean and standard deviation over seeds of the mean over patients."""
    patients = results.groupby(["algorithm", "site", "seed", "patient"])["value"].mean()
    seeds = patients.groupby(["algorithm", "site", "seed"]).mean()
    return seeds.groupby(["algorithm", "site"]).agg(["mean", "std"])


def scipy_joining(results: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Return the difference from training alone, by method and site and over all sites."""
    keys = ["algorithm", "site", "patient"]
    patients = results.groupby([*keys, "seed"])["value"].mean().groupby(keys).mean()
    alone = {site: values.droplevel(0) for site, values in patients.loc["local"].groupby("site")}
    differences: dict[str, dict[str, np.ndarray]] = {}
    for (algorithm, site), values in patients.groupby(["algorithm", "site"]):
        if algorithm != "local":
            own = values.droplevel([0, 1]) - alone[site]
            differences.setdefault(str(algorithm), {})[str(site)] = own.to_numpy()
    found = {}
    for algorithm, by_site in differences.items():
        for site, own in by_site.items():
            scipy.stats.ttest_1samp(own, 0.0).confidence_interval()
            found[algorithm, site] = float(own.mean())
        found[algorithm, ALL] = float(np.mean([own.mean() for own in by_site.values()]))
    return found


def same_table(table: MethodTable, reference: pd.DataFrame) -> bool:
    """Return whether a table holds the means and deviations of the reference."""
    cells = table.cells.set_index(["algorithm", "column"])[["mean", "sd"]]
    return bool(np.allclose(cells.loc[reference.index], reference.to_numpy(), rtol=1e-12))


def same_joining(table: ComparisonTable, reference: dict[tuple[str, str], float]) -> bool:
    """Return whether the differences are those of the reference."""
    ours = {(c.algorithm, c.verdict.site): c.verdict.difference for c in table.comparisons}
    return ours.keys() == reference.keys() and all(
        np.allclose(np.array(ours[key], float), reference[key], rtol=1e-9) for key in reference
    )


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    results = make_results(1010)
    works: dict[str, Callable[[], Any]] = {
        "table": partial(method_table, results, "dice"),
        "table by pandas": partial(pandas_table, results),
        "joining": partial(joining_table, results, "dice"),
        "joining by SciPy": partial(scipy_joining, results),
    }
    assert same_table(works["table"](), works["table by pandas"]()), "other numbers"
    assert same_joining(works["joining"](), works["joining by SciPy"]()), "other numbers"
    times = in_turns(works, 2 if options.quick else 7, time.process_time)
    least = {name: min(found) for name, found in times.items()}
    shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in least.items())
    print(f"{len(results)} scores: {shown}")
    table = least["table"] / least["table by pandas"]
    joining = least["joining"] / least["joining by SciPy"]
    good = [
        verdict("tables, methods by sites", table, MAX_TABLE, "times pandas"),
        verdict("tables, joining", joining, MAX_JOINING, "times pandas and SciPy"),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
