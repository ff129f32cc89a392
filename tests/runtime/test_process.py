import os
import platform
import subprocess
import sys

import pytest
import torch

from collegium.runtime.process import ALLOCATOR, environment_of_workers, prepare


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
