"""What a run left in its output folder, read for its report."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collegium.errors import DataError
from collegium.evaluation.report.relations import Related, read_relations
from collegium.evaluation.results import Row, read_table
from collegium.evaluation.sweeps import variations
from collegium.evaluation.timing import headline_metric, read_accounts

ASSESSMENTS = (Path("assessment") / "assessment.json", Path("assessment.json"))
"""Where an assessment of the federation may lie."""


@dataclass(frozen=True)
class Run:
    """All that a report is made from, but for pictures and ledgers.

    Attributes:
        info: The content of ``run.json``.
        rows: The rows of results; of a sweep, those of the setting that the report is about.
        order: Labels of the algorithms: the one that trains alone first, then as configured.
        local: Label of the algorithm that trains each site alone.
        metric: The headline metric, the one that selects models on validation.
        pooled: Labels of algorithms that put all data in one place, a bound that nobody can join.
        setting: The setting of the sweep that the report is about; empty outside a sweep.
        settings: All settings of the sweep.
        sweep: The rows of all settings.
        accounts: The content of every ``account.json`` of the setting.
        assessment: The content of ``assessment.json``, or None.
        relations: Name of a method -> how far sites are apart to it.
    """

    info: Mapping[str, Any]
    rows: Sequence[Row]
    order: tuple[str, ...]
    local: str
    metric: str
    pooled: frozenset[str] = frozenset()
    setting: str = ""
    settings: tuple[str, ...] = ()
    sweep: Sequence[Row] = ()
    accounts: Sequence[Mapping[str, Any]] = ()
    assessment: Mapping[str, Any] | None = field(default=None)
    relations: Mapping[str, Sequence[Related]] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the experiment, empty where unknown."""
        config = self.info.get("config", {})
        return config if isinstance(config, dict) else {}

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return str(self.config.get("name") or self.rows[0].experiment)

    @property
    def sites(self) -> list[str]:
        """The sites with results, inside or outside, by name."""
        return sorted({row.site for row in self.rows})

    @property
    def seeds(self) -> list[int]:
        """The seeds with results."""
        return sorted({row.seed for row in self.rows})

    @property
    def folds(self) -> int:
        """The number of folds with results."""
        return len({row.fold for row in self.rows})

    @property
    def algorithms(self) -> list[Mapping[str, Any]]:
        """The algorithms as configured."""
        return [entry for entry in self.config.get("algorithms", ()) if isinstance(entry, dict)]

    @property
    def labels(self) -> list[str]:
        """Their labels."""
        return [str(entry.get("label") or entry.get("name")) for entry in self.algorithms]


def read_run(output: Path) -> Run:
    """Read what a run left in its output folder.

    Args:
        output: The folder.

    Returns:
        The run.

    Raises:
        DataError: There are no results, or a file cannot be read.
        CheckpointError: The state of a server is damaged.
    """
    info = _read_info(output / "run.json")
    sweep = read_table(output)
    if not sweep:
        raise DataError(f"{output}: no results to report yet; run the experiment first.")
    settings = _settings(info.get("config", {}), sweep)
    setting = settings[0] if settings else ""
    rows = [row for row in sweep if row.variation == setting]
    draft = Run(info, rows, (), "", "")
    named = list(zip(draft.algorithms, draft.labels, strict=True))
    local = next((label for entry, label in named if entry.get("name") == "local"), "local")
    order = _order([local, *draft.labels], rows)
    return Run(
        info,
        rows,
        order,
        local,
        headline_metric(rows),
        frozenset(label for entry, label in named if entry.get("name") == "pooled"),
        setting,
        settings,
        sweep if settings else (),
        read_accounts(output, setting),
        read_assessment(output),
        read_relations(output, setting, order),
    )


def _read_info(path: Path) -> dict[str, Any]:
    """Return the description of the run, empty where there is none."""
    what, remedy = "the description of the run", "restore the file, or remove it to report without"
    info = _read_json(path, what, remedy) or {}
    if not isinstance(info.get("config", {}), dict):
        raise DataError(f"{path}: {what} cannot be read (config is no mapping); {remedy}.")
    return info


def read_assessment(output: Path) -> dict[str, Any] | None:
    """Read the assessment of the federation, where one lies in the output folder.

    Raises:
        DataError: It cannot be read.
    """
    for place in ASSESSMENTS:
        remedy = "assess again, or remove the file to make a report without it"
        content = _read_json(output / place, "the assessment of the federation", remedy)
        if content is not None:
            if not {"findings", "verdict", "sites"} <= content.keys():
                raise DataError(f"{output / place}: this is no assessment; {remedy}.")
            return content
    return None


def _read_json(path: Path, what: str, remedy: str) -> dict[str, Any] | None:
    """Return the content of a file; None where there is no file."""
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))} if path.is_file() else None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {what} cannot be read ({error}); {remedy}.") from error


def _settings(config: Mapping[str, Any], rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the settings of a sweep that have results, as configured, the others by name."""
    present = [name for name in variations(rows) if name]
    wanted = [name for name in config.get("variations") or () if name in present]
    return tuple(dict.fromkeys([*wanted, *present]))


def _order(wanted: Sequence[str], rows: Iterable[Row]) -> tuple[str, ...]:
    present = {row.algorithm for row in rows}
    known = [label for label in dict.fromkeys(wanted) if label in present]
    return (*known, *sorted(present.difference(known)))
