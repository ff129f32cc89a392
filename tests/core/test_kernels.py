"""The compiled loops against numpy, for any number of threads and any cut through the vectors."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from collegium.core import kernels


@pytest.fixture(params=[1, 3])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("fresh", [True, False])
def test_weighted_sums_equal_numpy_to_the_last_bit(count, fresh):
    rng = np.random.default_rng(count)
    weights = [0.3, 7.0, 1 / 3, 1e-3][:count]
    sums, expected = [], []
    for length in (1, 1001, 37, 0, 400):
        vectors = [rng.standard_normal(length).astype(np.float32) for _ in weights]
        start = rng.standard_normal(length)
        total = np.zeros(length) if fresh else start.copy()
        for vector, weight in zip(vectors, weights, strict=True):
            total += vector.astype(np.float64) * weight
        expected.append(total)
        operands = [torch.from_numpy(vector) for vector in vectors]
        sums.append((torch.from_numpy(start.copy()), operands, fresh))
    kernels.add_weighted(sums, weights)
    for (found, _, _), total in zip(sums, expected, strict=True):
        assert found.numpy().tobytes() == total.tobytes()


@pytest.mark.usefixtures("_threads")
def test_division_rounds_once_to_float32():
    rng = np.random.default_rng(5)
    totals = [rng.standard_normal(length) for length in (1001, 3)]
    results = kernels.divide([torch.from_numpy(total) for total in totals], 3.7)
    for result, total in zip(results, totals, strict=True):
        assert result.numpy().tobytes() == (total / 3.7).astype(np.float32).tobytes()


LOOP = """
import sys, time
import numpy as np
from numba.core.caching import IndexDataCacheFile
from collegium.core import kernels

@kernels.compiled
def double(values):
    return 2 * values[0]

def slowly(self, *, read=IndexDataCacheFile._load_index):
    known = read(self)
    time.sleep(0.4)  # the other process comes here, too, before anything is written
    return known

kinds = sys.argv[1:]
if len(kinds) == 1:
    IndexDataCacheFile._load_index = slowly
    print("ready", flush=True)
    sys.stdin.readline()
print(*[double(np.array([1.5], kind)) for kind in kinds], sum(double.stats.cache_hits.values()))
"""


def test_processes_that_compile_for_different_types_at_once_keep_both(tmp_path, monkeypatch):
    script, kinds = tmp_path / "loop.py", ("float32", "int64")
    script.write_text(LOOP)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))

    def start(*kinds):
        command = [sys.executable, script, *kinds]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    started = [start(kind) for kind in kinds]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
    assert [process.communicate(timeout=120)[0] for process in started] == ["3.0 0\n", "2 0\n"]
    with start(*kinds) as process:
        assert process.stdout.read() == "3.0 2 2\n"  # both are loaded, none is compiled again
