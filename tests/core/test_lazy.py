import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from collegium.core import lazy


def test_the_names_are_those_of_torch():
    assert lazy.torch.Tensor is torch.Tensor
    assert lazy.torch.cuda is torch.cuda
    assert lazy.nn.Module is nn.Module
    assert lazy.functional.relu is functional.relu


def test_a_name_that_torch_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'torch' has no attribute 'no_such_name'"):
        getattr(lazy.torch, "no_such_name")  # noqa: B009


def test_torch_is_imported_at_the_first_use_of_a_name():
    code = (
        "import sys; from collegium.core.lazy import nn\n"
        "before = 'torch' in sys.modules\n"
        "nn.Linear\n"
        "print(before, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
