"""Processes that run jobs, and the GPUs that they see."""

import multiprocessing
import os
from typing import Any

import pytest

from collegium.experiment import execution
from collegium.experiment.config.experiment import parse_config, to_dict
from collegium.runtime.process import VISIBLE

EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "federation": {"name": "tiny", "sites": {"a": {"folder": "a"}}},
    "model": {"name": "unet", "in_channels": 1, "channels": [4, 8]},
    "algorithms": ["fedavg"],
    "rounds": 1,
}


@pytest.mark.parametrize(("share", "seen"), [(["2", "6"], "2,6"), ([], "4")])
def test_a_process_that_runs_jobs_takes_its_share_of_the_gpus(monkeypatch, share, seen):
    monkeypatch.setenv(VISIBLE, "4")
    monkeypatch.setattr(execution, "_worker", None, raising=False)
    shares = multiprocessing.get_context("spawn").SimpleQueue()
    shares.put(share)
    execution._start_worker(to_dict(parse_config(EXPERIMENT)), None, shares)
    assert os.environ[VISIBLE] == seen
    assert shares.empty()
