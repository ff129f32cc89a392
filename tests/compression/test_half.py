import numpy as np
import pytest
import torch

from collegium.compression._frame import HEADER_BYTES
from collegium.compression.half import Half
from collegium.core.tensors import Tensors


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-7, 1, 70_000, 1e30])
def test_float16_is_as_precise_for_numbers_of_any_size(scale: float):
    numbers = torch.randn(5000, generator=rng()) * scale
    found = Half().encode(Tensors({"a": numbers}), rng(), {}).decoded["a"]
    error = (found - numbers).abs() / numbers.abs()
    assert error.max() <= 2**-11


def test_numbers_that_float16_has_are_not_changed():
    numbers = torch.tensor([1.5, -0.25, 2.0**-20, 0.0, 65504])
    assert torch.equal(Half().encode(Tensors({"a": numbers}), rng(), {}).decoded["a"], numbers)


def test_each_tensor_has_a_scale_of_its_own(update: Tensors):
    mixed = {name: tensor * 10.0 ** (9 * i - 30) for i, (name, tensor) in enumerate(update.items())}
    found = Half().encode(Tensors(mixed), rng(), {}).decoded
    for name, tensor in mixed.items():
        np.testing.assert_allclose(
            found[name], tensor, rtol=2**-11, atol=float(tensor.abs().max()) * 2**-28
            if tensor.numel() else 0,
        )  # fmt: skip


def test_bfloat16_rounds_as_torch_does(update: Tensors):
    found = Half(format="bfloat16").encode(update, rng(), {}).decoded
    for name, tensor in update.items():
        assert torch.equal(found[name], tensor.bfloat16().float())


def test_two_bytes_are_sent_for_every_number(update: Tensors):
    scales = 2 * len(update)
    assert (
        len(Half().encode(update, rng(), {}).data) == HEADER_BYTES + 1 + scales + 2 * update.numel()
    )
    small = Half(format="bfloat16").encode(update, rng(), {}).data
    assert len(small) == HEADER_BYTES + 1 + 2 * update.numel()
