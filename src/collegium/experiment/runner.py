"""An experiment: a grid of algorithms, seeds, folds and variations over one federation.

It can be stopped at any moment and resumed, and ends in tables and a report.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collegium import __version__
from collegium.core.files import lock, remove_leftovers, write_atomically
from collegium.core.seals import read_json, seal_json
from collegium.errors import CheckpointError
from collegium.evaluation.results import ROWS_FILE, read_rows, write_results
from collegium.experiment.compilation import decide_compilation
from collegium.experiment.config.building import adapters_of
from collegium.experiment.config.experiment import (
    ExperimentConfig,
    difference,
    digest,
    parse_config,
    to_dict,
)
from collegium.experiment.grid import jobs_of

if TYPE_CHECKING:
    import pandas as pd

    from collegium.experiment.federation import OpenedExperiment
    from collegium.experiment.jobs import Observer

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
"""The file of what a run was made with: configuration, versions, machine."""

EARLIER = "earlier_versions"
"""The key of the versions under which a run trained before those of today, oldest first."""

_SPLITS = ("splits", "*/splits", "*/fold-*/splits")
"""Where splits lie in the folder of a run: of the run, of a variation or fold, of its folds."""

PACKAGES = ("torch", "monai", "numpy", "safetensors")
"""The packages whose versions are recorded, as numbers depend on them in the last bits."""


def run_experiment(
    config: ExperimentConfig,
    observe: Observer = lambda event: None,
    opened: OpenedExperiment | None = None,
) -> Path:
    """Run every job that is not finished, then write the results, the tables and the report.

    Args:
        config: the experiment.
        observe: called with every event.
        opened: the experiment opened otherwise than on this machine.

    Returns:
        The output folder.

    Raises:
        CollegiumError: in one sentence, whatever cannot work; finished rounds are kept.
    """
    config, output = decided(config), Path(config.output)
    with lock(output):
        remove_leftovers(output)
        write_run_file(config, output)
        if opened is None and is_finished(config):
            write_outcome(config)
            return output
        from collegium.experiment.execution import execute

        opened = execute(config, observe, opened)
        try:
            opened.conclude()
        finally:
            write_outcome(config)
    return output


def decided(config: ExperimentConfig) -> ExperimentConfig:
    """Return an experiment with what its run has decided, or decides now; see `decide_compilation`.

    Raises:
        ConfigError: this machine cannot do what was decided.
    """
    output = Path(config.output)
    begun = read_run_config(output) if (output / RUN_FILE).exists() else None
    finished = begun is not None and is_finished(config)
    return decide_compilation(config, begun, finished=finished)


def is_finished(config: ExperimentConfig) -> bool:
    """Return whether every job of a run has written its rows."""
    return all((job.folder / ROWS_FILE).exists() for job in jobs_of(config))


def write_outcome(config: ExperimentConfig) -> None:
    """Write what a run ends with: its rows, the tables of its test cases, and the report."""
    from collegium.evaluation.report.html import write_report
    from collegium.evaluation.writing import write_tables

    results, output = collect_rows(config), Path(config.output)
    write_results(results, output)
    if is_tested(results):
        write_tables(output)
    write_report(output)


def is_tested(results: pd.DataFrame) -> bool:
    """Return whether a table of results holds scores of test cases."""
    return bool((results["case"] != "").any())


def collect_rows(config: ExperimentConfig) -> pd.DataFrame:
    """Return the rows of all finished jobs as a table of results; see `pool_folds`."""
    files = [job.folder / ROWS_FILE for job in jobs_of(config)]
    rows = read_rows([file for file in files if file.exists()])
    if not rows["part"].any():
        return rows
    from collegium.experiment.pooling import pool_folds

    return pool_folds(rows, config)


def read_run_config(output: Path) -> ExperimentConfig:
    """Return the configuration of the run in ``output``, which may have been moved since.

    It is compared with the digest beside it where the same version has written both, as another one
    may count other settings among those that determine the numbers.

    Raises:
        CheckpointError: There is no run, or its file is damaged or was changed by hand.
    """
    path = output / RUN_FILE
    if not path.exists():
        raise CheckpointError(
            f"{output} holds no run (there is no {RUN_FILE}); start one with 'collegium run'"
        )
    about = _read_run_file(path)
    config = {**about["config"], "output": str(output)}
    found = parse_config(config, where=str(path), recorded=True)
    version = about.get("versions", {}).get("collegium")
    if version == __version__ and about.get("digest", "") != digest(found):
        raise CheckpointError(
            f"the configuration in {path} is not the one that the run was made with: its digest is "
            f"another one; restore the file from a copy, or start the run again in a new output "
            f"folder"
        )
    return found


def _read_run_file(path: Path) -> dict[str, Any]:
    """Return what a run file holds, of which `config` is a mapping."""
    try:
        about = read_json(path)
        about["config"] = {**about["config"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged; remove it and continue with 'collegium run' and the same file"
        ) from error
    return about


def write_run_file(config: ExperimentConfig, output: Path) -> None:
    """Write what a run is made with.

    A run may be extended: by algorithms, seeds, variations or adapters. One that would train what
    has begun otherwise is refused. Under other versions it goes on, which is said in a sentence;
    the versions before are kept beside those of today, as `earlier_versions`.

    Args:
        config: the experiment.
        output: its folder.

    Raises:
        CheckpointError: the folder holds a run made with other settings.
    """
    path, versions, earlier = output / RUN_FILE, _versions(), list[dict[str, str]]()
    if path.exists():
        about, stored = _read_run_file(path), read_run_config(output)
        then, earlier = about.get("versions", versions), about.get(EARLIER, [])
        same = digest(stored) == digest(config) and stored.report == config.report
        if same and (then == versions or is_finished(config)):
            return
        if not same:
            _extend(stored, config, output)
        if then != versions:
            _warn_of_versions(then, versions, output)
            earlier = [*earlier, then]
    about = {
        "config": to_dict(config),
        "digest": digest(config),
        "versions": versions,
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
    }
    if earlier:
        about[EARLIER] = earlier
    write_atomically(path, seal_json(json.dumps(about, indent=2)))


def _versions() -> dict[str, str]:
    return {"collegium": __version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES
    }


def _warn_of_versions(then: Mapping[str, str], now: Mapping[str, str], output: Path) -> None:
    """Warn that a run continues under other versions than it was made with so far."""
    changes = (f"{name} {then.get(name, 'unknown')}, now {now[name]}" for name in now
               if then.get(name) != now[name])  # fmt: skip
    logger.warning(
        "the run in %s goes on under other versions than it began with (%s), so that its numbers "
        "may differ in the last bits from those of one version; both are in its %s",
        output,
        "; ".join(changes),
        RUN_FILE,
    )


def _extend(stored: ExperimentConfig, config: ExperimentConfig, output: Path) -> None:
    """Check that all jobs that have begun are still wanted, and drop the rows that are not.

    Rows are written again from what is stored; trainings and adaptations are kept.
    """
    planned = {job.key: job for job in jobs_of(config)}
    begun = [job for job in jobs_of(stored) if job.folder.exists()]
    for job in begun:
        if job.key not in planned or planned[job.key].training != job.training:
            changes = sorted(difference(stored, config), key=lambda text: "adapters." in text)
            raise CheckpointError(
                f"{output} holds a run made with other settings ({'; '.join(changes[:5])}); "
                f"choose another output folder"
            )
    for job in begun:
        now = planned[job.key]
        before = adapters_of(job.config, job.algorithm)
        if before != adapters_of(now.config, now.algorithm) or stored.name != config.name:
            (job.folder / ROWS_FILE).unlink(missing_ok=True)
    if not begun:  # so that the shares that are asked for now are those of the splits
        for splits in [folder for depth in _SPLITS for folder in output.glob(depth)]:
            shutil.rmtree(splits, ignore_errors=True)
