"""Accounts of adaptations and pictures that sites send, checked before they are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from collegium.core.tensors import Tensors
from collegium.core.text import printable, short
from collegium.errors import ProtocolError
from collegium.evaluation.report.overlays import PICTURES, RANKS

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
Numbers = Annotated[list[FiniteFloat], Field(max_length=10_000)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]


class _Routes(TypedDict):
    """Routing coefficients, by layer and source; see `AdaptationRecord.coefficients`."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    layers: list[Name]
    sources: list[Name]
    values: list[Numbers]
    deviations: NotRequired[list[Numbers]]
    variation: NotRequired[Numbers]
    variation_deviation: NotRequired[Numbers]


class _Steps(TypedDict):
    """Scores by step; see `collegium.adaptation.outside.adapt_and_score`."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    metric: Name
    unit: Annotated[str, Field(max_length=20)]
    steps: list[Count]
    mean: list[FiniteFloat | None]
    deviation: list[Annotated[FiniteFloat, Field(ge=0)] | None]
    cases: list[Count]
    seconds: list[Annotated[FiniteFloat, Field(ge=0)]]


Losses = Annotated[list[dict[Name, FiniteFloat]], Field(max_length=1_000_000)]


class _Account(TypedDict):
    """The content of ``account.json``; the second half stays at a site that withholds scores."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    adapter: dict[str, Any]
    algorithm: str
    seed: int
    site: str
    cases: Count
    seconds: Annotated[FiniteFloat, Field(ge=0)]
    sources: NotRequired[list[Name]]
    steps: NotRequired[Count]
    losses: NotRequired[Losses]
    loss_deviations: NotRequired[Losses]
    by_step: NotRequired[_Steps]
    chosen: NotRequired[Count | None]
    over: NotRequired[Literal["step", "pass", "batch", "case"]]
    coefficients: NotRequired[_Routes | None]
    notes: NotRequired[Annotated[list[str], Field(max_length=100)]]


_ACCOUNT = TypeAdapter(_Account)


def checked_account(found: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a site tells of an adaptation, checked; what the server knows is its own word.

    Args:
        found: what the site sent, not trusted.
        known: adapter, algorithm, seed and site, as the server asked for them.

    Raises:
        ProtocolError: it is no account of an adaptation.
    """
    try:
        account: dict[str, Any] = dict(_ACCOUNT.validate_python({**found, **known}))
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise ProtocolError(
            f"its account of the adaptation cannot be used ({printable(place, 100)})"
        ) from error
    routes = account.get("coefficients")
    if routes is not None:
        rows = [*routes["values"], *routes.get("deviations", [])]
        fits = all(len(row) == len(routes["sources"]) for row in rows)
        names = ("values", "deviations", "variation", "variation_deviation")
        lengths = {len(routes[name]) for name in names if name in routes}
        if not fits or lengths != {len(routes["layers"])}:
            raise ProtocolError("its account of the adaptation cannot be used (coefficients)")
    steps = account.get("by_step", {})
    if len({len(column) for column in steps.values() if isinstance(column, list)}) > 1:
        raise ProtocolError("its account of the adaptation cannot be used (by_step)")
    if "notes" in account:
        account["notes"] = [printable(note, 500) for note in account["notes"]]
    return account


class _Picture(TypedDict):
    """An entry of the index of pictures."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    site: str
    model: Literal["global", "personal"]
    metric: Name
    case: Annotated[str, Field(pattern=r"^test-c\d{3,9}$")]
    rank: str
    value: FiniteFloat | None
    file: str
    layers: NotRequired[dict[Name, str]]


_INDEX = TypeAdapter(Annotated[list[_Picture], Field(max_length=1000)])


def checked_pictures(
    found: Mapping[str, Any], site: str
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return the index of a site's pictures, and the pictures by file name.

    Args:
        found: what the site sent, not trusted.
        site: its name, with which the names of its files begin.

    Raises:
        ProtocolError: these are no pictures of test cases, or of another site.
    """
    try:
        entries = _INDEX.validate_python(found.get("index"))
    except ValidationError as error:
        raise ProtocolError("its answer holds no pictures") from error
    index: list[dict[str, Any]] = [dict(entry) for entry in entries]
    files = found.get("files", {})
    if not isinstance(files, Tensors) and files != {}:
        raise ProtocolError("its answer holds no pictures")
    kinds = "|".join(kind.removeprefix(".") for kind in PICTURES)
    name_of_own = re.compile(
        rf"{re.escape(site)}-(?:global|personal)-test-c\d{{3,9}}(?:-[a-z]{{1,20}})?\.(?:{kinds})"
    )
    for name, picture in files.items():
        if not name_of_own.fullmatch(name):
            raise ProtocolError(f"{short(name)} cannot name one of its pictures")
        if str(picture.dtype) != "torch.uint8" or picture.ndim != 1:
            raise ProtocolError("its answer holds no pictures")
    for entry in index:
        named = {entry["file"], *entry.get("layers", {}).values()}
        if entry["site"] != site or entry["rank"] not in RANKS or not named <= files.keys():
            raise ProtocolError("its index of pictures names others than those that it sent")
    return index, {name: picture.numpy().tobytes() for name, picture in files.items()}
