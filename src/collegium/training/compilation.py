"""Networks compiled by `torch.compile` for local training, and whether this machine can.

One graph serves all sites, methods and seeds with one network and one shape of batches. torch keeps
it on disk for other processes and later runs, in the folder that ``TORCHINDUCTOR_CACHE_DIR`` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from collegium.core.files import lock
from collegium.core.lazy import nn, torch
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

GRAPHS = 64
"""The most graphs that are compiled for one network in a process, for as many shapes of batches."""


class CompiledNetwork:
    """A network whose forward and backward passes are compiled, once for every shape of batches.

    On a CUDA device the compiled passes are recorded as CUDA graphs, which launch their many small
    kernels at once.

    Args:
        module: the network, on its device; its weights and its mode may change later.
    """

    def __init__(self, module: nn.Module) -> None:
        from torch._dynamo import config

        # the default falls back to the network as it is: bits would depend on what ran before
        config.recompile_limit, config.fail_on_recompile_limit_hit = GRAPHS, True
        self._graphs = any(own.device.type == "cuda" for own in module.parameters())
        mode = "reduce-overhead" if self._graphs else None
        self._forward = torch.compile(module, dynamic=False, mode=mode)
        self._seen: set[torch.Size] = set()

    def __call__(self, images: Tensor) -> Tensor:
        """Return the network's output.

        Args:
            images: (B, C, *spatial).
        """
        if self._graphs:  # what the last step returned may be overwritten
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        output: Tensor = self._forward(images)
        return output

    @contextmanager
    def compiling(self, images: Tensor) -> Iterator[None]:
        """Keep other processes out of the first step with a shape, so that they find its graph.

        Args:
            images: (B, C, *spatial).

        Raises:
            ConfigError: the network cannot be compiled.
        """
        if images.shape in self._seen:
            yield
            return
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        try:
            with lock(Path(cache_dir()), wait=True):
                yield
        except (TorchDynamoException, InductorError) as error:
            raise ConfigError(
                f"the network cannot be compiled ({type(error).__name__}); set training.compile "
                f"to off and choose another output folder"
            ) from error
        self._seen.add(images.shape)


def compiler_problem(device: str) -> str:
    """Return why networks cannot be compiled on this machine; empty if a compiler was found.

    Args:
        device: where to compute, as torch writes it.
    """
    if torch.device(device).type != "cpu":
        return "" if find_spec("triton") else "the package triton is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler such as g++"
    return ""
