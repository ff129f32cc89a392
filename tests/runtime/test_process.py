import os
import platform
import subprocess
import sys

import pytest
import torch

from collegium.runtime.process import (
    ALLOCATOR,
    VISIBLE,
    environment_of_workers,
    prepare,
    share_of,
    shared_gpus,
)


def test_prepare_sets_what_bits_depend_on():
    code = (
        "import torch; from collegium.runtime.process import prepare; prepare(2)\n"
        "tiny = torch.tensor([1e-39])\n"
        "print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),\n"
        "      float(tiny * 1), torch.backends.cudnn.benchmark,\n"
        "      torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["2", "True", "0.0", "False", "False", "False"]


def test_prepare_may_be_called_again():
    before = torch.get_num_threads()
    prepare(1)
    prepare(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_environment_of_workers_ends_with_the_block(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    with environment_of_workers(3):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert {name: os.environ[name] for name in ALLOCATOR} == ALLOCATOR
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert not set(ALLOCATOR) & set(os.environ)


@pytest.mark.parametrize(
    ("gpus", "slots", "shares"),
    [
        ("", 2, [[], []]),
        ("0", 3, [["0"], ["0"], ["0"]]),
        ("0 1", 3, [["0"], ["1"], ["0"]]),
        ("2 5 7", 2, [["2", "7"], ["5"]]),
        ("0 1 2 3", 4, [["0"], ["1"], ["2"], ["3"]]),
    ],
)
def test_every_process_has_a_gpu_of_its_own_while_there_are_enough(gpus, slots, shares):
    assert [share_of(gpus.split(), slot, slots) for slot in range(slots)] == shares


def test_only_cuda_without_a_number_is_shared_out(monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert shared_gpus("cuda") == ["0", "1", "2"]
    assert shared_gpus("cuda:1") == shared_gpus("cpu") == []
    monkeypatch.setenv(VISIBLE, "6,GPU-1a2b")
    assert shared_gpus("cuda") == ["6", "GPU-1a2b"]


def test_workers_see_the_gpus_that_they_are_given(monkeypatch):
    monkeypatch.setenv(VISIBLE, "4,5")
    with environment_of_workers(1, ["5"]):
        assert os.environ[VISIBLE] == "5"
    with environment_of_workers(1):
        assert os.environ[VISIBLE] == "4,5"
    assert os.environ[VISIBLE] == "4,5"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_kept_unless_the_allocator_was_set_by_whoever_started_the_process():
    code = (
        "import torch; from collegium.runtime.process import prepare; prepare()\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "tensor = torch.ones(50_000_000)\n"
        "full = resident(); del tensor\n"
        "print(full - resident())"
    )

    def returned(**settings: str) -> int:
        environment = {k: v for k, v in os.environ.items() if k not in ALLOCATOR} | settings
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, check=True, timeout=60, env=environment,
        )  # fmt: skip
        return int(done.stdout)

    assert returned() < 1e6
    assert returned(MALLOC_MMAP_THRESHOLD_="65536") > 199e6
