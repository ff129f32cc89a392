"""torch, which is imported when one of its names is first used.

Its import takes more than a second, and neither reading an experiment file nor listing algorithms
or writing tables computes anything with it. A module that uses torch inside its functions alone
takes `torch`, `nn` and `functional` from here, and names in annotations from torch itself below
``if TYPE_CHECKING:``. A module that needs torch to be imported at all, such as one that derives a
class from `nn.Module`, imports torch, and is itself imported where it is used.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn import functional

__all__ = ["functional", "nn", "torch"]


class _LazyModule(ModuleType):
    """A module that is imported when one of its names is first used."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)  # the next use finds it without a call
        return value


if not TYPE_CHECKING:
    torch, nn, functional = map(_LazyModule, ("torch", "torch.nn", "torch.nn.functional"))
