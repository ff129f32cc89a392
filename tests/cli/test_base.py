import getpass
import os

import pytest

from collegium.cli.base import _name_user, read_numbers
from collegium.errors import ConfigError


def test_numbers_stand_with_commas_between_them() -> None:
    assert read_numbers("1, 2.5,4,", float, "ratios", "1,2,4,7") == (1.0, 2.5, 4.0)
    assert read_numbers("3, 4,", int, "sizes", "34,35") == (3, 4)
    assert read_numbers(" ", int, "rounds", "1,5,20") == ()


def test_what_is_no_number_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"the ratios are '1;2'; write numbers with .* 1,2,4,7"):
        read_numbers("1;2", float, "ratios", "1,2,4,7")
    with pytest.raises(ConfigError, match=r"the sizes are '3,4\.5'; write whole numbers"):
        read_numbers("3,4.5", int, "sizes", "34,35")


def test_a_user_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("USER", raising=False)
    monkeypatch.setattr(getpass, "getuser", nameless)
    _name_user()
    assert os.environ["USER"] == f"user-{os.getuid()}"


def test_a_user_with_a_name_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "mueller")
    _name_user()
    assert os.environ["USER"] == "mueller"
