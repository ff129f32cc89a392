from pathlib import Path

import pytest

from collegium.core.userfile import (
    client_mistake,
    describe_mistake,
    import_file,
    mark_as_users,
    on_one_machine,
)
from collegium.errors import ConfigError

CODE = '''\
"""A user's file."""


def direct():
    return {}["x"]


def calls(function):
    return function()


def refuses():
    from collegium.errors import ConfigError
    raise ConfigError("lam is too large; lower it")


def tells():
    raise ValueError("two\\n  lines")
'''


@pytest.fixture
def mine(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    return import_file(file)


def caught(function, *arguments) -> Exception:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def fails() -> None:
    raise TypeError("wrong")


def test_mistake_names_kind_text_file_and_line(mine):
    assert describe_mistake(caught(mine.direct)) == (
        f"KeyError: 'x' ({mine.__file__}, line 5, in direct); correct the code there"
    )


def test_error_below_a_users_code_names_the_call(mine):
    text = describe_mistake(caught(mine.calls, fails))
    assert text is not None
    assert text.startswith(
        f"TypeError: wrong (in what is called by {mine.__file__}, line 9, in calls); "
    )
    assert "--debug" in text


def test_deepest_line_of_a_users_code_is_named(mine):
    text = describe_mistake(caught(mine.calls, lambda: mine.calls(mine.direct)))
    assert text is not None
    assert "line 5, in direct" in text


def test_text_of_several_lines_becomes_one(mine):
    assert str(describe_mistake(caught(mine.tells))).startswith("ValueError: two lines (")


def test_error_outside_a_users_code_and_a_sentence_are_no_mistakes(mine):
    assert describe_mistake(caught(fails)) is None
    assert describe_mistake(caught(mine.refuses)) is None


def test_module_that_is_named_by_a_user_counts_as_a_file(mine):
    import textwrap

    error = caught(textwrap.dedent, 3)
    assert describe_mistake(error) is None
    try:
        mark_as_users(textwrap)
        assert "textwrap.py, line" in str(describe_mistake(error))
    finally:
        del vars(textwrap)["__collegium_user__"]


def test_mistake_leaves_a_client_on_one_machine_only(mine):
    error = caught(mine.direct)
    assert client_mistake(error) is error
    with on_one_machine():
        reported = client_mistake(error)
    assert isinstance(reported, ConfigError)
    assert str(reported) == describe_mistake(error)
    assert client_mistake(error) is error


def test_file_that_does_not_load_names_its_line(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text('"""Mine."""\n\nx = 1 / 0\n')
    with pytest.raises(ConfigError, match=r"broken\.py does not load: ZeroDivisionError: .*line 3"):
        import_file(file)
