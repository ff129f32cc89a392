import errno
import os
from pathlib import Path

import pytest
import torch

from collegium.core.tensors import Tensors
from collegium.errors import StorageError
from collegium.runtime.selection import BestModel, mean_defined


def model(number: float) -> Tensors:
    return Tensors({"w": torch.tensor([number])})


def kept(best: BestModel) -> tuple[int, float | None, float]:
    found = best.load()
    assert found is not None
    return found["round"], found["score"], float(found["model"]["w"])


def test_undefined_values_are_left_out_of_a_mean():
    assert mean_defined([1.0, None, 4.0]) == 2.5
    assert mean_defined([None]) is None
    assert mean_defined([]) is None


def test_the_model_with_the_highest_mean_score_is_kept_with_it(tmp_path: Path):
    best = BestModel(tmp_path)
    assert best.load() is None
    best.offer(model(1), [0.25, None], number=1)
    best.offer(model(2), [0.25], number=2)  # as good: the earlier one stays
    assert kept(best) == (1, 0.25, 1.0)
    best.offer(model(3), [0.25, 0.75], number=3)
    assert kept(BestModel(tmp_path)) == (3, 0.5, 3.0)
    assert [file.name for file in tmp_path.iterdir()] == ["best.state"]


def test_an_undefined_score_replaces_none_that_is_defined(tmp_path: Path):
    best = BestModel(tmp_path)
    best.offer(model(1), [], number=1)
    best.offer(model(2), [None], number=2)
    assert kept(best) == (2, None, 2.0)
    best.offer(model(3), [-5.0], number=3)
    best.offer(model(4), [], number=4)
    assert kept(best) == (3, -5.0, 3.0)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_model_with_its_score(tmp_path: Path, monkeypatch, call: str):
    best = BestModel(tmp_path)
    best.offer(model(1), [0.5], number=1)

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, full)
        with pytest.raises(StorageError, match="is full"):
            best.offer(model(2), [0.75], number=2)
    assert kept(best) == (1, 0.5, 1.0)
    best.offer(model(3), [0.6], number=3)
    assert kept(best) == (3, 0.6, 3.0)
