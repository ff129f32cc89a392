"""The rules about what an algorithm states of itself; they are quick, since nothing trains."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from collegium.core.algorithm import TASKS, Algorithm, check_needs
from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient
from collegium.core.userfile import describe_mistake
from collegium.errors import CollegiumError, ConfigError
from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.federation import check_task
from collegium.testing.kinds import KINDS
from collegium.testing.toy import toy_federation

NAMES = ("A", "B", "C")
"""The toy's sites."""

STEPS = ("setup", "round", "finish", "round_at_home", "extend")
"""The methods that decide on the global model, beside the handlers."""


class ConformanceError(AssertionError):
    """An algorithm breaks a rule; the text says which and how."""


def require(condition: bool, text: str) -> None:
    """Raise a `ConformanceError` unless a rule is kept.

    Args:
        condition: whether it is.
        text: what is wrong.
    """
    if not condition:
        raise ConformanceError(text)


class Statements:
    """The checks of what a class states; each is a method whose docstring states the rule.

    Args:
        algorithm: the algorithm to check.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def check_declarations(self) -> None:
        """A class that changes the training of its base declares `neutral`; `tasks` are known."""
        lineage, neutral = type(self.algorithm).__mro__, type(self.algorithm).neutral
        owner = next(kind for kind in lineage if "neutral" in vars(kind))
        for kind in lineage[: lineage.index(owner)] if neutral is not None else ():
            changed = [n for n, value in vars(kind).items() if n in STEPS or _is_handler(value)]
            require(
                not changed,
                f"{kind.__name__} changes {', '.join(changed)} and inherits neutral = "
                f"{dict(neutral or {})} from {owner.__name__}: declare in {kind.__name__} the "
                f"hyper-parameters at which its global model is FedAvg's, or neutral = None",
            )
        unknown = sorted((self.algorithm.tasks or frozenset()) - {*TASKS})
        require(not unknown, f"tasks names {', '.join(unknown)}; there is {', '.join(TASKS)}")

    def check_kinds_of_data(self) -> None:
        """It is made for a kind of data at least, and refuses others in words before it runs."""
        refusals = kinds_of(self.algorithm)
        if all(refusals.values()):
            raise ConfigError(
                f"it refuses all kinds of data; the last one: {refusals.popitem()[1]}"
            )

    def check_hyperparameters(self) -> None:
        """The instance is frozen, survives being written down, and every field is described."""
        name, params = ALGORITHMS.describe(self.algorithm)
        again = ALGORITHMS.load(name)(**json.loads(json.dumps(params)))
        require(
            again.hyperparameters() == self.algorithm.hyperparameters(),
            f"{name} does not survive being written down",
        )
        described = " ".join(
            inspect.getdoc(c) or "" for c in type(self.algorithm).__mro__ if c is not object
        )
        missing = [
            f.name for f in fields(self.algorithm) if not re.search(rf"\b{f.name}:", described)
        ]
        require(not missing, f"no line of the class docstring describes {', '.join(missing)}")

    def check_settings(self) -> None:
        """Hyper-parameters are checked: another type, another word or NaN is refused in words."""
        kind = type(self.algorithm)
        hints = get_type_hints(kind, include_extras=True)
        for name in (f.name for f in fields(kind) if f.init):
            for value in _nonsense(hints[name]):
                try:
                    replace(self.algorithm, **{name: value})
                except ConfigError:
                    continue
                raise ConformanceError(
                    f"{name} may be {value!r}: decorate the class with @settings, and give the "
                    f"field a type and a range"
                )

    def check_documentation(self) -> None:
        """The class says what it is, and its module names the source."""
        own = inspect.getdoc(type(self.algorithm)) or ""
        module = inspect.getdoc(inspect.getmodule(type(self.algorithm))) or ""
        require(len(own) > 40, "the class has no docstring that says what it is")
        require(len(module) > 20, "the module has no docstring that names the source")


def kinds_of(algorithm: Algorithm) -> dict[str, str]:
    """Return for every kind of data why an algorithm refuses it; empty for those it is made for."""
    refusals = {}
    for name, kind in KINDS.items():
        try:
            check_task(algorithm, kind.task_name)
            with ambient(0, "conformance"):
                parts = find_parts(toy_federation(kind=kind).builder(algorithm)())
            check_needs(algorithm, NAMES, parts)
        except ConfigError as error:
            refusals[name] = str(error)
        except Exception as error:
            raise ConformanceError(f"with {name}: {mistake_of(error)}") from error
        else:
            refusals[name] = ""
    return refusals


def mistake_of(error: Exception) -> str:
    """Return what is wrong with the algorithm in one sentence; raise any other error again."""
    text = describe_mistake(error)
    if text is None and not isinstance(error, CollegiumError | ConformanceError):
        raise error
    return text or str(error)


def _nonsense(hint: Any) -> Iterator[Any]:
    """Yield values that a field with an annotation should refuse."""
    yield object()
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        yield "neither of these"
    if hint is float:
        yield math.nan


def _is_handler(value: Any) -> bool:
    return bool(getattr(value, "__collegium_handler__", False))
