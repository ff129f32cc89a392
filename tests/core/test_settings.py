"""Settings are checked when they are made, and a refusal is one sentence for each mistake."""

import dataclasses
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Interval, MaxLen, MinLen
from pydantic import Field

from collegium.core.setting_problems import Problem, described, leaf_types, literal_words
from collegium.core.settings import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Share,
    UnitInterval,
    argument_problems,
    from_mapping,
    rule,
    settings,
    validated,
)
from collegium.errors import ConfigError


@settings
class Window:
    """Settings inside settings."""

    size: PositiveInt = 4
    stride: PositiveInt = 2

    def __post_init__(self) -> None:
        if self.stride > self.size:
            raise ConfigError(f"stride {self.stride} is larger than size {self.size}")


@settings
class Everything:
    """A field of every kind."""

    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    fraction: Fraction = 0.0
    unit: UnitInterval = 1.0
    share: Share = 1.0
    count: PositiveInt = 1
    natural: NonNegativeInt = 0
    plain: float = 0.0
    text: str = "a"
    flag: bool = False
    word: Literal["shape", "entropy"] = "shape"
    order: Literal[1, 2, "inf"] = 1
    sizes: tuple[PositiveInt, ...] | PositiveInt | None = None
    range: tuple[float, float] = (0.0, 1.0)
    words: tuple[Literal["shape", "entropy"], ...] = ()
    pairs: tuple[tuple[int, ...], ...] = ()
    several: Annotated[tuple[PositiveInt, ...], MinLen(2), MaxLen(3)] = (1, 2)
    even: Annotated[int, rule(lambda number: number % 2 == 0, "an even number")] = 0
    field: Annotated[int, Field(ge=3)] = 3
    interval: Annotated[float, Interval(ge=0, lt=2)] = 0.0
    labels: dict[int, int] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    window: Window = Window()
    windows: tuple[Window, ...] = ()
    named: dict[str, Window] = dataclasses.field(default_factory=dict)


REFUSED = [
    ("positive", 0, "should be above 0, not 0"),
    ("positive", "3", "should be a number, not '3'"),
    ("positive", True, "should be a number, not True"),
    ("positive", math.nan, "should be finite and above 0, not nan"),
    ("positive", math.inf, "should be finite and above 0, not inf"),
    ("non_negative", -1e-9, "should be at least 0, not -1e-09"),
    ("fraction", 1, "should be at least 0 and below 1, not 1"),
    ("unit", 1.5, "should be at least 0 and at most 1, not 1.5"),
    ("share", 0.0, "should be above 0 and at most 1, not 0.0"),
    ("count", 0, "should be at least 1, not 0"),
    ("count", 2.0, "should be a whole number, not 2.0"),
    ("count", True, "should be a whole number, not True"),
    ("natural", -1, "should be at least 0, not -1"),
    ("plain", math.nan, "should be a finite number, not nan"),
    ("plain", None, "should be a number, not nothing"),
    ("text", 3, "should be text, not 3"),
    ("flag", 1, "should be true or false, not 1"),
    ("word", "shap", "should be 'shape' or 'entropy', not 'shap'; did you mean 'shape'?"),
    ("word", 3, "should be 'shape' or 'entropy', not 3"),
    ("order", 3, "should be 1, 2 or 'inf', not 3"),
    ("order", True, "should be 1, 2 or 'inf', not True"),
    ("order", 1.0, "should be 1, 2 or 'inf', not 1.0"),
    ("sizes", 0, "should be at least 1, not 0"),
    ("sizes", [1, 0], "each should be at least 1, not [1, 0]"),
    ("sizes", "2", "should be a list of whole numbers or a whole number or null, not '2'"),
    ("range", [1.0], "should be a list of 2 numbers, not [1.0]"),
    ("range", [1.0, 2.0, 3.0], "should be a list of 2 numbers, not [1.0, 2.0, 3.0]"),
    (
        "words",
        ["shape", "entropi"],
        "should be a list of 'shape' or 'entropy', not ['shape', 'entropi']; "
        "did you mean 'entropy'?",
    ),
    ("pairs", [[1, "2"]], "should be a list of lists of whole numbers, not [[1, '2']]"),
    ("several", [1], "should be at least 2 long and at most 3 long, not [1]"),
    ("several", [1, 0], "each should be at least 1, not [1, 0]"),
    ("even", 3, "should be an even number, not 3"),
    ("field", 2, "should be at least 3, not 2"),
    ("interval", 2, "should be at least 0 and below 2, not 2"),
    ("labels", {"a": 1}, "should hold keys and values, not {'a': 1}"),
    ("options", [1], "should hold keys and values, not [1]"),
    ("window", 3, "should hold keys and values, not 3"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_a_wrong_value_is_one_sentence_from_python_and_from_a_mapping(name, value, words):
    assert from_mapping(Everything, {name: value}) == (None, [Problem((name,), words)])
    in_python = words.replace("hold keys and values, not 3", "be of the class Window, not 3")
    with pytest.raises(ConfigError) as caught:
        Everything(**{name: value})
    assert str(caught.value) == f"Everything.{name}: {in_python}"


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("positive", 1, 1.0),
        ("sizes", [1, 2], (1, 2)),
        ("sizes", 3, 3),
        ("range", [0, 1], (0.0, 1.0)),
        ("pairs", [[1], [2, 3]], ((1,), (2, 3))),
        ("words", ["shape"], ("shape",)),
        ("order", "inf", "inf"),
        ("even", 4, 4),
        ("options", {"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    ],
)
def test_a_right_value_is_kept_and_lists_fill_tuples(name, value, kept):
    for made in (Everything(**{name: value}), from_mapping(Everything, {name: value})[0]):
        assert getattr(made, name) == kept
        assert type(getattr(made, name)) is type(kept)


def test_settings_inside_settings_name_the_whole_path():
    data = {
        "window": {"size": 0},
        "windows": [{}, {"size": 1}, {"sise": 3}],
        "named": {"a": {"stride": "x"}},
    }
    assert from_mapping(Everything, data)[1] == [
        Problem(("window", "size"), "should be at least 1, not 0"),
        Problem(("windows", 1), "stride 2 is larger than size 1"),
        Problem(("windows", 2, "sise"), "unknown field; did you mean 'size'?"),
        Problem(("named", "a", "stride"), "should be a whole number, not 'x'"),
    ]
    made, problems = from_mapping(Everything, {"windows": [{"size": 9}], "named": {"a": {}}})
    assert not problems
    assert made == Everything(windows=(Window(9),), named={"a": Window()})


def test_keys_of_a_mapping_may_be_texts_as_in_json():
    assert from_mapping(Everything, {"labels": {"255": 1}})[0] == Everything(labels={255: 1})


def test_what_is_no_mapping_is_one_problem():
    assert from_mapping(Window, 3) == (
        None,
        [Problem((), "should hold keys and values, not 3")],
    )


def test_rules_about_several_fields_are_reported_with_the_class():
    with pytest.raises(ConfigError, match=r"^Window: stride 3 is larger than size 2$"):
        Window(2, 3)
    with pytest.raises(ConfigError, match=r"^Window: stride 2 is larger than size 1$"):
        dataclasses.replace(Window(), size=1)


def test_every_mistake_is_named_and_arguments_by_position_have_names():
    with pytest.raises(ConfigError) as caught:
        Window(0, stride="2", pad=1)  # type: ignore[call-arg, arg-type]
    assert str(caught.value) == (
        "Window.size: should be at least 1, not 0; and Window.stride: should be a whole number, "
        "not '2'; and Window.pad: unknown field; there is size, stride"
    )


def test_a_missing_field_says_what_to_add():
    @settings
    class Needy:
        lam: NonNegative
        sizes: tuple[int, ...]

    with pytest.raises(ConfigError) as caught:
        Needy()  # type: ignore[call-arg]
    assert str(caught.value) == (
        "Needy.lam: missing; add a number; and Needy.sizes: missing; add a list of whole numbers"
    )
    assert from_mapping(Needy, {"lamb": 1}, title="needy")[1][-1] == Problem(
        ("lamb",), "unknown field for needy; did you mean 'lam'?"
    )


def test_they_are_frozen_dataclasses_like_any_other():
    made = Everything(sizes=[3], windows=(Window(5),))  # type: ignore[arg-type]
    assert [f.name for f in dataclasses.fields(Window)] == ["size", "stride"]
    assert dataclasses.asdict(made)["windows"] == ({"size": 5, "stride": 2},)
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(Window()) == hash(Window(4, 2))
    assert repr(Window()) == "Window(size=4, stride=2)"
    assert vars(Window()) == {"size": 4, "stride": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.flag = True  # type: ignore[misc]


def test_a_subclass_checks_the_fields_of_its_bases():
    @settings
    class Wide(Window):
        depth: NonNegativeInt = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.depth > self.size:
                raise ConfigError("too deep")

    assert Wide(6, 3, depth=2).size == 6
    for options, words in (
        ({"size": 0}, r"^Wide\.size: should be at least 1"),
        ({"depth": -1}, r"^Wide\.depth: should be at least 0"),
        ({"stride": 9}, "^Wide: stride 9 is larger"),
        ({"depth": 9}, "^Wide: too deep"),
    ):
        with pytest.raises(ConfigError, match=words):
            Wide(**options)


def test_a_field_that_cannot_be_checked_is_refused_with_the_class():
    class Opaque:
        """No annotation that anything is known about."""

    with pytest.raises(ConfigError, match="Odd has a field that cannot be checked"):

        @settings
        class Odd:
            value: Opaque

    @settings
    class Unresolved:
        value: "Nowhere" = 1  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="Unresolved has a field that cannot be checked"):
        Unresolved()


@dataclasses.dataclass(frozen=True)
class Undecorated:
    """What a user may write without the decorator."""

    lam: float = 0.5
    sizes: tuple[int, ...] = (1,)
    wide: Annotated[int, Ge(2)] = 2

    def __post_init__(self) -> None:
        if self.lam > 2:
            raise ConfigError("lam is above 2")
        if self.lam > 1:
            raise ValueError("lam is above 1")
        if self.lam < 0:
            raise TypeError("lam is below 0")


def test_a_mapping_is_checked_for_a_dataclass_without_the_decorator_too():
    assert from_mapping(Undecorated, {"lam": 1, "sizes": [2]})[0] == Undecorated(1.0, (2,))
    data = {"lam": "1", "sizes": [1.5], "wide": 1, "wid": 3}
    assert [problem.text for problem in from_mapping(Undecorated, data)[1]] == [
        "should be a number, not '1'", "should be a list of whole numbers, not [1.5]",
        "should be at least 2, not 1", "unknown field; did you mean 'wide'?",
    ]  # fmt: skip
    for lam, words in ((3, "lam is above 2"), (1.5, "lam is above 1"), (-1, "lam is below 0")):
        assert from_mapping(Undecorated, {"lam": lam}) == (None, [Problem((), words)])


@validated
def network(
    size: PositiveInt,
    *,
    channels: Annotated[Sequence[PositiveInt], MinLen(1)] = (1,),
    norm: Literal["batch", "none"] = "batch",
) -> object:
    """A function whose arguments are checked."""
    return channels


class Layer:
    """A class whose arguments are checked."""

    @validated
    def __init__(self, width: PositiveInt, *, dropout: Fraction = 0.0) -> None:
        self.width = width


def test_a_functions_arguments_are_checked_and_reach_it_as_they_were():
    channels = [3, 4]
    assert network(1, channels=channels) is channels
    assert Layer(3).width == 3
    call: Callable[[], object]
    wrong: Any = network
    layer: Any = Layer
    for call, words in (
        (lambda: network(0), r"^network\.size: should be at least 1, not 0$"),
        (lambda: network(1, channels=[0]), r"^network\.channels: each should be at least 1, not"),
        (lambda: network(1, channels=[]), r"^network\.channels: should be at least 1 long, not"),
        (lambda: wrong(1, norm="bach"), r"^network\.norm: .* did you mean 'batch'\?$"),
        (lambda: wrong(), r"^network\.size: missing; add a whole number$"),
        (lambda: wrong(1, norms=1), r"^network\.norms: unknown field; did you mean 'norm'\?$"),
        (lambda: layer("3"), r"^Layer\.width: should be a whole number, not '3'$"),
        (lambda: Layer(3, dropout=1), r"^Layer\.dropout: should be at least 0 and below 1, not 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_some_arguments_can_be_checked_without_a_call():
    assert argument_problems(network, {"channels": [2]}) == []
    assert argument_problems(Layer, {"dropout": 2}) == [
        Problem(("dropout",), "should be at least 0 and below 1, not 2")
    ]
    assert argument_problems(network, {"sise": 2}, title="net") == [
        Problem(("sise",), "unknown field for net; did you mean 'size'?")
    ]
    assert argument_problems(len, {"anything": 1}) == []


def test_an_annotation_of_the_result_need_not_exist():
    @validated
    def double(size: PositiveInt) -> "Nowhere":  # type: ignore[name-defined]  # noqa: F821
        return 2 * size

    assert double(2) == 4
    with pytest.raises(ConfigError, match=r"^double\.size: should be at least 1, not 0$"):
        double(0)


def test_annotations_are_described_in_words():
    assert described(int | str | None) == "a whole number or text or null"
    assert described(Annotated[tuple[Positive | None, ...], Ge(0)]) == "a list of numbers or null"
    assert described(Literal["a"]) == "'a'"
    assert described(tuple[Window, ...]) == "a list"
    assert {*leaf_types(tuple[Positive, ...] | Literal["a", 1] | None)} == {
        float, ..., Literal["a", 1], type(None),
    }  # fmt: skip
    assert literal_words(tuple[Literal["a", 1], ...] | None) == ["a"]


def test_the_package_and_the_command_line_start_without_pydantic():
    code = "import sys, collegium, collegium.cli; print('pydantic' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
