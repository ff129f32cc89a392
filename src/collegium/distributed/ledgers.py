"""What has left a site, as its own ledgers say, and whether anybody changed them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collegium.errors import DataError
from collegium.runtime.ledger import START, first_break, read_ledger, summarise

LEDGER = "ledger.jsonl"


def read_ledgers(state: Path) -> list[dict[str, Any]]:
    """Return for each ledger below a site's folder of state what left, and whether it is intact.

    Args:
        state: the folder of state.

    Returns:
        A mapping each: `ledger` (its folder below `state`), `messages`, `rounds`, `bytes`, `parts`,
        `last` (the hash of its last line) and `broken` (the first line that was changed or whose
        predecessor is missing, counted from 1; None: none is).
    """
    return [_summary(path, state) for path in sorted(state.rglob(LEDGER))]


def _summary(path: Path, state: Path) -> dict[str, Any]:
    lines, about = read_ledger(path), summarise(path)
    broken = first_break(lines)
    return {
        "ledger": str(path.parent.relative_to(state)),
        "messages": about["messages"],
        "rounds": len({str(line.get("round")) for line in lines if line.get("stage") == "train"}),
        "bytes": about["bytes"],
        "parts": about["parts"],
        "last": lines[-1].get("hash", "") if lines else START,
        "broken": None if broken is None else broken + 1,
    }


def check_ledgers(found: Sequence[dict[str, Any]], state: Path) -> None:
    """Check that no ledger was changed.

    Args:
        found: what `read_ledgers` returned.
        state: the folder of state.

    Raises:
        DataError: one was, or there is none.
    """
    if not found:
        raise DataError(f"there is no ledger below {state} yet: nothing has left this site")
    broken = [f"{one['ledger']}, line {one['broken']}" for one in found if one["broken"]]
    if broken:
        raise DataError(
            f"the chain of hashes is broken in {'; '.join(broken)}: a line was changed, or one "
            f"before it removed; compare with a backup"
        )
