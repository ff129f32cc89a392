"""The compiled loops against numpy, for any number of threads."""

import numpy as np
import pytest
import torch

from collegium import kernels


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
    vectors = [rng.standard_normal(1001).astype(np.float32) for _ in range(count)]
    weights = [0.3, 7.0, 1 / 3, 1e-3][:count]
    start = rng.standard_normal(1001)
    expected = np.zeros(1001) if fresh else start.copy()
    for vector, weight in zip(vectors, weights, strict=True):
        expected += vector.astype(np.float64) * weight
    total = torch.from_numpy(start.copy())
    operands = [(torch.from_numpy(v), w) for v, w in zip(vectors, weights, strict=True)]
    kernels.add_weighted(total, operands, fresh=fresh)
    assert total.numpy().tobytes() == expected.tobytes()


@pytest.mark.usefixtures("_threads")
def test_division_rounds_once_to_float32():
    total = np.random.default_rng(5).standard_normal(1001)
    result = torch.empty(1001)
    kernels.divide(torch.from_numpy(total), 3.7, result)
    assert result.numpy().tobytes() == (total / 3.7).astype(np.float32).tobytes()
