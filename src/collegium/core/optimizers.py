"""torch's optimisers without its compiler.

torch marks some methods of its optimisers as not to be compiled. Such a mark imports the compiler
when the method is first called, which takes as long as the import of torch itself.
"""

from __future__ import annotations

from functools import cache
from inspect import unwrap
from typing import TYPE_CHECKING, Any, TypeVar

from collegium.core.lazy import torch

if TYPE_CHECKING:
    Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def unmarked(kind: type[Kind]) -> type[Kind]:
    """Return a class of optimisers whose methods are those that torch's marks wrap.

    The steps are the same bit by bit, and must not be compiled or differentiated.
    """
    made: type[Kind] = _unmarked(kind)  # type: ignore[arg-type]  # mypy takes no class as hashable
    return made


@cache
def _unmarked(kind: Any) -> Any:
    methods = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    methods["step"] = torch.no_grad()(unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)
