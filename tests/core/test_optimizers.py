import subprocess
import sys
from typing import Any

import pytest
import torch

from collegium.core.optimizers import unmarked


def trained(kind: Any, settings: dict[str, Any]) -> torch.Tensor:
    """The parameters after a few steps towards a minimum at 1."""
    rng = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, generator=rng)) for size in (50, (3, 4))]
    optimizer = kind(parameters, lr=0.1, **settings)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        torch.stack([((p - 1) ** 4).sum() for p in parameters]).sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("Adam", {}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.1, "foreach": False}),
        ("AdamW", {"weight_decay": 0.1}),
    ],
)
def test_the_steps_are_those_of_torch(name: str, settings: dict[str, Any]):
    expected = trained(getattr(torch.optim, name), settings)
    assert torch.equal(trained(unmarked(getattr(torch.optim, name)), settings), expected)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_step_does_not_import_the_compiler(name: str):
    code = (
        "import sys, torch\n"
        "from collegium.core.optimizers import unmarked\n"
        "weight = torch.nn.Parameter(torch.ones(2))\n"
        f"optimizer = unmarked(torch.optim.{name})([weight], lr=0.1)\n"
        "optimizer.zero_grad()\n"
        "weight.sum().backward()\n"
        "optimizer.step()\n"
        "print(bool(weight.lt(1).all()), 'torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]
