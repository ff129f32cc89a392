"""The sites' ledgers of what left each hospital, summed up for the report."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collegium.evaluation.scores import method_name
from collegium.runtime import ledger

LedgerSummary = Mapping[str, Any]
"""The result of `collegium.runtime.ledger.summarise`: missing, parts, messages, bytes, intact."""


def ledger_summaries(output: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Sum up the ledgers of a run: what left each site, over all seeds, folds and settings.

    Args:
        output: The output folder of an experiment.

    Returns:
        Label of the algorithm -> site -> parts, messages, bytes, intact, missing (whether a
        seed left no ledger, as when nothing was sent).
    """
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for client in sorted(output.rglob("seed-*/clients/*/")):
        label = client.parents[2].name
        empty = {"parts": {}, "messages": 0, "bytes": 0, "intact": True, "missing": False}
        total = found[label].setdefault(client.name, empty)
        path = client / "ledger.jsonl"
        if not path.is_file():
            total["missing"] = True
            continue
        summary = ledger.summarise(path)
        for name, part in summary["parts"].items():
            sums = total["parts"].setdefault(name, {"messages": 0, "bytes": 0})
            for key in sums:
                sums[key] += part[key]
        total["messages"] += summary["messages"]
        total["bytes"] += summary["bytes"]
        total["intact"] = total["intact"] and summary["intact"]
    return dict(found)


def ledger_rows(
    ledgers: Mapping[str, Mapping[str, LedgerSummary]], order: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of every site, one per algorithm.

    Args:
        ledgers: Label of the algorithm -> site -> summary, see `ledger_summaries`.
        order: Labels of the algorithms in the order wanted.

    Returns:
        Site -> name of the algorithm with the summary, sites by name.
    """
    labels = sorted(ledgers, key=lambda k: (order.index(k) if k in order else len(order), k))
    sites: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for label in labels:
        for site, summary in ledgers[label].items():
            sites[site].append({"name": method_name(label), **summary})
    return dict(sorted(sites.items()))
