"""Settings that are checked wherever they are made, in Python or from a file.

    @settings
    class Ditto(FedAvg):
        lam: NonNegative = 0.1

The annotations are the only list of what a setting may be: `Ditto(lam=-5)` raises the `ConfigError`
``Ditto.lam: should be at least 0, not -5``, and `from_mapping` finds the same in a file.
"""

import functools
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from typing import Annotated, Any, TypeVar, dataclass_transform

import annotated_types as bounds
import pydantic
from pydantic import dataclasses as pydantic_dataclasses
from pydantic_core import PydanticKnownError, core_schema

from collegium.core.setting_problems import Problem, fields_of, problems_of
from collegium.errors import ConfigError

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

Positive = Annotated[float, bounds.Gt(0)]
"""A number above 0."""

NonNegative = Annotated[float, bounds.Ge(0)]
"""A number from 0 on."""

Fraction = Annotated[float, bounds.Ge(0), bounds.Lt(1)]
"""A number in [0, 1)."""

UnitInterval = Annotated[float, bounds.Ge(0), bounds.Le(1)]
"""A number in [0, 1]."""

OpenUnitInterval = Annotated[float, bounds.Gt(0), bounds.Lt(1)]
"""A number in (0, 1)."""

Share = Annotated[float, bounds.Gt(0), bounds.Le(1)]
"""A number in (0, 1]."""

PositiveInt = Annotated[int, bounds.Ge(1)]
"""A whole number from 1 on."""

NonNegativeInt = Annotated[int, bounds.Ge(0)]
"""A whole number from 0 on."""

CONFIG = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""No conversion hides a mistake: "3" and True are no numbers, and neither is NaN."""

_CHECK = "__collegium_check__"


def rule(holds: Callable[[Any], bool], words: str) -> pydantic.AfterValidator:
    """Return what an annotation holds for a range that has no name.

    Args:
        holds: Whether a value of the annotated type is allowed.
        words: What is allowed, such as "an even number".
    """

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"should be {words}")
        return value

    return pydantic.AfterValidator(check)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked by their annotations.

    Types are meant strictly, but a list may fill a tuple and a whole number a float. Rules about
    several fields stand in ``__post_init__``, which raises a `ConfigError`.

    Raises:
        ConfigError: By the decorator, if a field has a type that cannot be checked; by the
            constructor of the class, with one sentence for every problem.
    """
    if "__post_init__" in vars(kind):
        kind.__post_init__ = _as_value_error(kind.__post_init__)  # type: ignore[attr-defined]
    kind.__get_pydantic_core_schema__ = classmethod(_schema)  # type: ignore[attr-defined]
    try:
        made: Any = pydantic_dataclasses.dataclass(frozen=True, config=CONFIG)(kind)
    except pydantic.PydanticUserError as error:
        raise ConfigError(_uncheckable(kind, error)) from error
    made.__init__ = _checked_init(made)
    return typing.cast(type[T], made)


def validated(function: Function) -> Function:
    """Check the arguments of a function by its annotations, as `settings` checks fields.

    The function gets its arguments as they were given. Of a class, decorate ``__init__``.

    Raises:
        ConfigError: By the function, with one sentence for every problem.
    """

    @functools.wraps(function)
    def nothing(*args: Any, **kwargs: Any) -> None:
        """Take the arguments of the function."""

    hints = function.__annotations__.items()
    nothing.__annotations__ = {name: hint for name, hint in hints if name != "return"}
    check = pydantic.validate_call(config=CONFIG)(nothing)
    owner = _name(function).removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            check(*args, **kwargs)
        except pydantic.ValidationError as error:
            names = list(inspect.signature(function).parameters)
            raise _refused(owner, error, _arguments(nothing), names, args, kwargs) from None
        return function(*args, **kwargs)

    setattr(checked, _CHECK, check)
    return typing.cast(Function, checked)


def argument_problems(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, title: str = ""
) -> list[Problem]:
    """Return what is wrong with some of the arguments of a function.

    Args:
        function: A function or class that `validated` checks; about others nothing is known.
        arguments: Some of them by name; that others are missing is no problem.
        title: What messages about an unknown argument call the function.
    """
    owner = [None] if isinstance(function, type) else []
    target = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    check = getattr(target, _CHECK, None)
    if check is None:
        return []
    try:
        check(*owner, **arguments)
    except pydantic.ValidationError as error:
        wrong = [e for e in error.errors() if not e["type"].startswith("missing_")]
        return problems_of(wrong, _arguments(check.raw_function), arguments, title)
    return []


def refusal(owner: str, problems: Iterable[Problem]) -> ConfigError:
    """Return the error that names all problems with the settings of one owner.

    Args:
        owner: The class, function or network.
        problems: What is wrong.
    """
    sentences = (f"{'.'.join(map(str, (owner, *path)))}: {text}" for path, text in problems)
    return ConfigError("; and ".join(sentences))


def from_mapping(kind: type[T], data: Any, *, title: str = "") -> tuple[T | None, list[Problem]]:
    """Make settings of what a YAML or JSON file holds.

    Args:
        kind: A class that `settings` decorates, or another frozen dataclass; it may hold further
            ones.
        data: A mapping of mappings, lists, texts and numbers. All keys may be texts, as in JSON.
        title: What messages about an unknown field call `kind`.

    Returns:
        The settings, or None; and what is wrong with the data.
    """
    if "__pydantic_config__" not in vars(kind):
        kind.__pydantic_config__ = CONFIG  # type: ignore[attr-defined]
    text = json.dumps(data, default=str)
    try:
        return pydantic.TypeAdapter(kind).validate_json(text), []
    except pydantic.ValidationError as error:
        return None, problems_of(error.errors(), fields_of(kind), json.loads(text), title)
    except (pydantic.PydanticUserError, NameError) as error:
        return None, [Problem((), _uncheckable(kind, error))]
    except (ConfigError, TypeError) as error:  # a dataclass without the decorator raises them
        return None, [Problem((), str(error))]


def _checked_init(kind: type) -> Callable[..., None]:
    """Return the constructor of a pydantic dataclass with errors of ours."""
    construct: Callable[..., None] = vars(kind)["__init__"]

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  (it becomes that)
        try:
            construct(self, *args, **kwargs)
        except pydantic.ValidationError as error:
            names = [f.name for f in fields(kind) if f.init and not f.kw_only]
            raise _refused(_name(kind), error, fields_of(kind), names, args, kwargs) from None
        except pydantic.PydanticUserError as error:  # an annotation names what there is not
            raise ConfigError(_uncheckable(kind, error)) from error

    return __init__


def _refused(
    owner: str,
    error: pydantic.ValidationError,
    known: Mapping[str, Any],
    names: list[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> ConfigError:
    """Return the error about arguments, those given by position under their names."""
    found = error.errors()
    for one in found:
        first, *others = one["loc"] or (None,)
        if isinstance(first, int) and first < len(names):
            one["loc"] = (names[first], *others)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return refusal(owner, problems_of(found, known, given))


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotation of every parameter of a function."""
    hints = typing.get_type_hints(function, include_extras=True)
    names = inspect.signature(function).parameters
    return {name: hints.get(name, Any) for name in names if name != "self"}


def _as_value_error(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a ``__post_init__`` whose errors pydantic collects beside those of single fields."""

    @functools.wraps(check)
    def __post_init__(self: Any) -> None:  # noqa: N807  (it becomes that)
        try:
            check(self)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return __post_init__


def _name(thing: type | Callable[..., Any]) -> str:
    """Return the name that messages use, without that of a function around it."""
    return thing.__qualname__.rpartition("<locals>.")[2]


def _uncheckable(kind: type, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"{_name(kind)} has a field that cannot be checked ({reason}); change its type"


def _schema(kind: type, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
    """Return pydantic's schema of a class with our exceptions."""
    return _adapted(handler(source))


def _adapted(schema: Any) -> Any:
    """Return a schema in which a list may fill a tuple, and a `Literal` number is that number."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_adapted, schema))
    if not isinstance(schema, dict):
        return schema
    plain = {"cls", "default", "expected", "metadata", "serialization"}
    made = {key: item if key in plain else _adapted(item) for key, item in schema.items()}
    if made.get("type") == "literal":
        exact = functools.partial(_exactly, made["expected"])
        return core_schema.no_info_plain_validator_function(exact)
    if made.get("type") == "tuple":
        python = core_schema.no_info_before_validator_function(
            lambda value: tuple(value) if isinstance(value, list) else value, made
        )
        return core_schema.json_or_python_schema(made, python)
    return made


def _exactly(expected: list[Any], value: Any) -> Any:
    """Refuse True for 1, which are equal."""
    if any(type(value) is type(one) and value == one for one in expected):
        return value
    raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, expected))})
